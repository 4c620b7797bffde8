"""Signals and killed processes, while loading and under load: messages, exit codes, leftovers."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from openai import APIError, OpenAI

from specserve.config import Config, ServerConfig
from specserve.exchange.spawn import ForkServer
from specserve.process import ENDING
from specserve.server.serve import ENGINE_DIED, Server
from specserve_kernels.cpu.compiler import cache_folder
from tests.server.asking import (
    COMPLETIONS,
    answer_of,
    check_overloaded,
    extra,
    saying,
    started,
    streaming,
)
from tests.server.server_process import ServerProcess, children_of, eventually

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"  # as lines of the log begin


def test_sigterm_lets_answers_end_in_time_and_breaks_off_the_others(paced):
    with (
        paced(**{"server.drain_seconds": 1.5}) as server,
        started(server, saying(500, ms=20)) as whole,
        streaming(server, saying(500, ms=20)) as long,
        streaming(server, saying(25, ms=20)) as short,
    ):
        eventually(lambda: server.metric("vllm:num_requests_running") == 3)
        server.signal(signal.SIGTERM)
        eventually(lambda: server.get("/health/ready").status == 503)
        assert server.get("/health/ready").body == {"status": "shutting down"}
        assert server.get("/health/live").status == 200
        refusal = server.post(COMPLETIONS, saying(2))
        check_overloaded(refusal)
        assert refusal.headers["x-should-retry"] == "false"
        assert ended_well(list(short))
        assert broken_off(list(long))["code"] == "server_is_ending"
        assert answer_of(whole).status == 503
        assert server.exit_code() == 0


def test_what_steps_have_cost_is_kept_when_sigterm_comes(folder, tmp_path):
    cache = tmp_path / "specserve"
    cache.mkdir(mode=0o700)
    for library in cache_folder().glob("kernels-*"):
        (cache / library.name).symlink_to(library)
    with ServerProcess(folder, env={"XDG_CACHE_HOME": str(tmp_path)}) as server:
        list(server.stream(COMPLETIONS, saying(2)))
        for measured_at_start in cache.glob("costs-*"):
            measured_at_start.unlink()
        with streaming(server, saying(200)) as events:
            server.signal(signal.SIGTERM)
            assert ended_well(list(events))
        assert server.exit_code() == 0
    [file] = cache.glob("costs-*")
    assert '"1":' in file.read_text()


def test_a_second_signal_ends_the_server_at_once(paced):
    with paced() as server, streaming(server, saying(500, ms=100)) as events:
        engine = server.engine_pid
        server.signal(signal.SIGINT)
        eventually(lambda: server.get("/health/ready").status == 503)
        assert server.process.poll() is None
        server.signal(signal.SIGTERM)
        assert broken_off(list(events))["code"] == "server_is_ending"
        assert server.exit_code() == 128 + signal.SIGTERM
        eventually(lambda: is_gone(engine), seconds=5)
        said = server.process.communicate()[1]
        assert re.search(
            rf"^{TIME} 1 request has 30 s to finish \(server.drain_seconds\); another", said, re.M
        ), said
        assert "shutting down: 0 requests finished, 1 aborted" in said


OTHERS = signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM


def test_other_signals_begin_a_drain_and_do_not_end_it(paced):
    with paced() as server, streaming(server, saying(40, ms=20)) as events:
        children = [*children_of(server.process.pid), *server.engines()]
        for pid in children:  # as a service manager does
            for number in (*OTHERS, signal.SIGINT):
                os.kill(pid, number)
        for _ in range(10):
            next(events)
        assert not any(map(is_gone, children))
        for number in OTHERS:
            server.signal(number)
        assert ended_well(list(events))
        assert server.exit_code() == 0


@pytest.mark.parametrize("number", OTHERS)
def test_each_signal_that_would_end_a_process_drains(folder, number):
    """In this process, as a server of its own takes seconds to start."""

    async def sent():
        server = Server(SimpleNamespace(limits=ServerConfig(), name="tiny"))
        before = {each: signal.getsignal(each) for each in ENDING}
        try:
            server.handle_other_signals()
            signal.raise_signal(number)
            async with asyncio.timeout(5):
                assert await server.signals.get() == number
            signal.raise_signal(number)
            server.handle_exit(signal.SIGTERM, None)
            async with asyncio.timeout(5):
                assert await server.signals.get() == signal.SIGTERM
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    asyncio.run(sent())


def test_a_signal_that_is_ignored_stays_so(paced):
    with nohup(paced) as server, streaming(server, saying(20, ms=20)) as events:
        server.signal(signal.SIGHUP)
        assert ended_well(list(events))
        assert server.get("/health").status == 200


def nohup(paced):
    """A server that was started with SIGHUP ignored, which it inherits."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        return paced()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_drain_does_not_need_anybody_to_read_what_is_said_of_it(paced):
    with paced() as server, streaming(server, saying(20, ms=50)) as events:
        server.process.stderr.close()
        server.process.stdout.close()
        server.signal()
        assert ended_well(list(events))
        assert server.exit_code() == 0


def ended_well(events):
    return events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"


def broken_off(events):
    """The error that ended a stream before its answer was complete."""
    *answer, error, done = events
    assert done == "[DONE]" and not any(e["choices"][0]["finish_reason"] for e in answer)
    return error["error"]


def is_gone(pid):
    """Ended; an orphan's new parent may be slow to take notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_when_five_engines_die_every_answer_ends_with_an_error_and_the_server_with_70(paced):
    with (
        paced() as server,
        streaming(server, saying(500, ms=20)) as first,
        streaming(server, saying(500, ms=20)) as second,
        OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        started(server, saying(500, ms=20)) as whole,
    ):
        [model] = client.models.list().data
        third = client.completions.create(model=model.id, stream=True, **extra(500, ms=20))
        eventually(lambda: server.metric("vllm:num_requests_running") == 4)
        server.kill_engines()
        with pytest.raises(APIError, match="engine process has ended"):
            list(third)
        for events in (first, second):
            assert broken_off(list(events))["type"] == "server_error"
        failed = answer_of(whole)
        assert failed.status == 500 and failed.body["error"]["type"] == "server_error"
        assert is_refused(server)
        assert server.exit_code() == ENGINE_DIED == 70
        errors = server.process.communicate()[1]
        assert "start-up" in errors and "target threads" in errors  # the table of phases
        assert errors.count("signal 9") == 4 and "4 requests will resume" in errors
        lines = [
            line
            for line in errors.splitlines()
            if re.search("gine process (exited|has ended)", line)
        ]
        assert len(lines) == 5 and all(re.match(TIME, line) for line in lines), lines
        assert " error: the engine process has ended" in lines[-1]


def is_refused(server):
    """A new request gets a 503 or, a moment later, no connection."""
    try:
        return server.post(COMPLETIONS, saying(2)).status == 503
    except ConnectionError:
        return True


def test_when_the_api_process_dies_the_engine_goes_in_the_middle_of_a_step(paced):
    with paced() as server, streaming(server, saying(500, ms=9000, num_prompt=2)):
        engine = server.engine_pid
        server.signal(signal.SIGKILL)
        eventually(lambda: is_gone(engine), seconds=5)


@contextlib.contextmanager
def loading(folder, *args, **settings):
    """A server that loads, and the id of the process that reads the weights."""
    server = ServerProcess(folder, *args, **settings)
    try:
        eventually(lambda: server.children("specserve.engine.fork_server"))
        yield server, server.children("specserve.engine.fork_server")[0]
    finally:
        server.process.kill()
        server.process.communicate()


def test_when_the_engine_dies_while_it_loads_the_server_says_so_and_ends(folder):
    with loading(folder) as (server, engine):
        os.kill(engine, signal.SIGKILL)
        assert server.exit_code(20) == ENGINE_DIED
        _, errors = server.process.communicate()
    assert "error: the engine process ended while it was loading" in errors
    assert "Traceback" not in errors


def test_an_engine_that_died_before_it_heard_anything_is_a_closed_socket(monkeypatch):
    start = subprocess.Popen

    def die(command, **options):
        process = start(["false"], **options)
        process.wait()
        return process

    monkeypatch.setattr(subprocess, "Popen", die)
    process, sock = ForkServer(Config()).start()
    with sock:
        assert process.wait() == 1 and sock.recv(1) == b""
        process.end()


@pytest.mark.slow
def test_when_the_api_process_dies_while_it_loads_the_engine_goes_with_it(folder):
    with loading(folder) as (server, engine):
        server.process.kill()
        eventually(lambda: is_gone(engine), seconds=20)  # once it has imported what it needs


def test_a_model_that_cannot_be_loaded_ends_both_processes(folder, tmp_path):
    broken = broken_model(folder, tmp_path)
    with loading(broken) as (server, engine):
        assert server.exit_code(20) == 1
        assert is_gone(engine)
        _, errors = server.process.communicate()
    [line] = errors.splitlines()
    assert line.startswith("error: ") and "model.safetensors" in line


def test_a_port_in_use_is_said_before_anything_is_loaded(folder, tmp_path):
    broken = broken_model(folder, tmp_path)  # never loaded, so the error is about the port
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = ServerProcess(broken, f"--port={port}")
        _, errors = server.process.communicate(timeout=20)
    assert server.process.returncode == 1
    assert errors.startswith(f"error: cannot listen at 127.0.0.1 port {port}")


def broken_model(folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    os.truncate(broken / "model.safetensors", 1000)
    return broken


def test_only_the_port_of_the_api_listens(server):
    ports = [listening(pid) for pid in (server.process.pid, server.engine_pid)]
    assert ports == [{server.port}, set()]


def listening(pid):
    """The ports, of any address and family, at which a process listens."""
    links = [os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir() if f.is_symlink()]
    sockets = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for table in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    # local address:port, remote, state (0A listens; 07 is a udp socket that is bound), .., inode
    return {
        int(r[1].rpartition(":")[2], 16) for r in rows if r[3] in ("0A", "07") and r[9] in sockets
    }


HUNGRY = """
import torch
from specserve.engine.runner import Runner
from specserve_drafters import Draft
from specserve_drafters.base import Options


class Hungry:
    needs_executor = False
    Options = Options

    def __init__(self, options):
        self.launch = Runner.launch

    def propose(self, items):
        Runner.launch = self.fail if any(i.seed == 404 for i in items) else self.launch
        return [Draft() for _ in items]

    def fail(self, step):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""


def test_a_request_whose_steps_always_run_out_of_memory_is_ended_alone(folder, tmp_path):
    (tmp_path / "hungry.py").write_text(HUNGRY)
    with ServerProcess(
        folder, "--drafter=hungry:Hungry", env={"PYTHONPATH": str(tmp_path)}
    ) as server:
        refusal = server.post(COMPLETIONS, saying(5) | {"seed": 404})
        assert refusal.status == 500 and refusal.body["error"]["code"] == "engine_ended"
        assert refusal.headers["x-should-retry"] == "false"
        assert server.post(COMPLETIONS, saying(5)).status == 200
        assert server.metric("vllm:num_requests_running") == 0
        assert server.metric("specserve_engine_restarts_total") == 3
        server.signal()
        assert server.exit_code() == 0
        assert "lower memory.kv_fraction" in server.process.stderr.read()
