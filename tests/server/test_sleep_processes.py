"""Sleep of the processes of a server: their memory, their deaths, and signals."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpoints import tiny_checkpoint
from tests.server.asking import COMPLETIONS, streamed, whole
from tests.server.server_process import ServerProcess, eventually
from tests.server.test_sleep import ADMIN, AWAKE, BEAMS, ENDLESS, LONG, refused, slept, woken


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return tiny_checkpoint(folder, seed=1, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "admin-keys"
    file.write_text("admin\n")
    return file


@pytest.fixture(scope="module")
def process(keys, tmp_path_factory):
    """The demo in processes, with a pool that requests can fill."""
    log = tmp_path_factory.mktemp("log") / "stderr"
    with (
        log.open("w") as stderr,
        ServerProcess(None, f"--admin-key-file={keys}", stderr=stderr) as server,
    ):
        server.headers, server.log = ADMIN, log
        yield server


def resident(server):
    """Bytes in the memory of the engine and the fork server; a shared page counts once."""
    pids = [*server.children("specserve.engine.fork_server"), *server.engines()]
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    lines = [line.split() for text in rollups for line in text.splitlines()]
    return sum(int(line[1]) * 1024 for line in lines if line[0] == "Pss:")


def test_weights_and_kv_leave_the_memory_of_all_processes(process):
    text = whole(process, COMPLETIONS, LONG)
    awake = resident(process)
    slept(process)
    kept = resident(process)
    slept(process, "?level=2")
    weights = 25 << 20  # bytes of the target model
    eventually(lambda: kept - resident(process) > weights)
    assert awake > kept
    woken(process)
    assert whole(process, COMPLETIONS, LONG) == text


def test_an_engine_that_dies_in_its_sleep_is_replaced_at_the_wake_up(process):
    want = streamed(process, COMPLETIONS, LONG)
    restarts = process.metric("specserve_engine_restarts_total")
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(streamed, process, COMPLETIONS, LONG)
        eventually(lambda: process.metric("vllm:num_requests_running") == 1)
        slept(process, "?level=2&mode=keep")
        os.kill(process.engine_pid, signal.SIGKILL)
        eventually(lambda: not process.engines())
        eventually(lambda: "exited in its sleep" in process.log.read_text())
        assert process.get("/health/live").body == {"status": "sleeping"}
        assert process.get("/v1/speculation").status == 503
        assert process.ask("POST", "/v1/cache/reset").status == 200
        refused(process)
        assert slept(process, "?level=2&mode=keep")["is_sleeping"]
        assert not process.engines()
        assert woken(process) == AWAKE
        assert answer.result() == want
    assert process.metric("specserve_engine_restarts_total") == restarts + 1


def test_an_engine_that_dies_after_a_sleep_continues_its_requests(process):
    want, best = streamed(process, COMPLETIONS, LONG), whole(process, COMPLETIONS, BEAMS)
    slept(process, "?level=2")
    woken(process)
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(streamed, process, COMPLETIONS, LONG)
        beams = threads.submit(whole, process, COMPLETIONS, BEAMS)
        eventually(lambda: process.metric("vllm:num_requests_running") == 1)
        os.kill(process.engine_pid, signal.SIGKILL)
        assert (answer.result(), beams.result()) == (want, best)


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_signal_ends_a_server_that_sleeps(folder, keys, is_dead):
    with ServerProcess(folder, f"--admin-key-file={keys}") as server:
        server.headers = ADMIN
        with server.open_stream(COMPLETIONS, ENDLESS) as events:
            next(events)
            slept(server, "?level=2&mode=keep")
            if is_dead:
                os.kill(server.engine_pid, signal.SIGKILL)
                eventually(lambda: not server.engines())
            server.signal()
            last = [event for event in events if event != "[DONE]"][-1]
        assert last["error"]["code"] == "server_is_ending"
        assert server.exit_code() == 0
