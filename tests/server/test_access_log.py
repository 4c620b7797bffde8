"""The lines on stderr of requests that have ended."""

import fcntl
import os
import re
import select
import threading

import pytest

from specserve import process
from specserve.server.app import AccessLog
from specserve.server.completion import EndedRequest
from tests.server.asking import CHAT, COMPLETIONS, chat_body, is_running, saying, started, streaming
from tests.server.server_process import ServerProcess, eventually

ID = re.compile(r" \[[!-~]+\]$")
TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.M)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "stderr"


@pytest.fixture(scope="module")
def server(paced, log):
    with log.open("w") as stderr, paced(stderr=stderr, **{"server.access_log": "true"}) as server:
        yield server


@pytest.fixture
def lines(server, log):
    """Waits for a line more of the log; its lines since the test began, without times and ids."""
    begin = log.stat().st_size

    def read():
        said = log.read_bytes()[begin:].decode().splitlines()
        lines = [ID.sub("", TIME.sub("", line)) for line in said if TIME.match(line)]
        return [re.sub(r"\d+ ms", "N ms", line) for line in lines]

    def wait(number=1):
        eventually(lambda: len(read()) >= number)
        return read()

    return wait


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_one_line(server, lines, stream):
    body = saying(4, num_prompt=3, n=2)
    if stream:
        server.stream(COMPLETIONS, body)
    else:
        server.post(COMPLETIONS, body)
    words = "3 prompt tokens, 8 completed, TTFT N ms, length"
    assert lines() == [f"POST {COMPLETIONS} 200 N ms, {words}"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_the_line_has_the_id_of_its_request(server, lines, log, path, stream):
    body = saying(4) if path == COMPLETIONS else chat_body(max_tokens=4)
    answer = server.post(path, body | {"stream": stream}, headers={"X-Request-Id": "mine-8"})
    assert answer.status == 200
    lines()
    assert log.read_text().splitlines()[-1].endswith("[mine-8]")


def test_a_text_that_stops_says_so(server, lines):
    text = server.post(COMPLETIONS, saying(8, temperature=0)).body["choices"][0]["text"]
    server.post(COMPLETIONS, saying(8, temperature=0, stop=[text[-1]]))
    assert [line.rpartition(", ")[2] for line in lines(2)] == ["length", "stop"]


def test_a_client_that_left_is_warned_about(server, lines):
    with streaming(server, saying(500, ms=20)):
        pass
    [line] = lines()
    assert line.startswith(f"POST {COMPLETIONS} 200 N ms, 1 prompt tokens, ")
    assert line.endswith(" completed, TTFT N ms, client left")
    with started(server, saying(500, ms=20)):
        eventually(lambda: is_running(server))
    assert lines(2)[1].startswith(f"POST {COMPLETIONS} 499 N ms, ")


def test_what_is_polled_is_a_line_only_where_it_failed(server, lines):
    polled = "/health", "/health/live", "/ping", "/metrics", "/v1/speculation", "/", "/dashboard"
    for path in polled:
        assert server.get(path).status == 200
    server.post("/metrics", {})
    server.get("/v1/models")
    assert lines(2) == ["POST /metrics 405 N ms", "GET /v1/models 200 N ms"]


def test_clients_that_wait_for_the_model_are_one_line_each_way(caplog):
    """Refused requests of a server that loads, and those of the same server later."""
    loading = [True]
    log = AccessLog(["/health"], False, lambda: loading[0])
    caplog.set_level("INFO")

    def ask(path, status, number=50):
        for _ in range(number):
            log(EndedRequest({"method": "GET", "path": path}, [], 0.0, "", status))
        lines = [" ".join(r.getMessage().split()[1:3]) for r in caplog.records]
        caplog.clear()
        return lines

    assert ask("/health", 503) == ["/health 503"]
    assert ask(COMPLETIONS, 503) == [f"{COMPLETIONS} 503"]
    assert ask("/health", 503) == []
    assert ask("/metrics", 401, 2) == ["/metrics 401"] * 2
    loading[0] = False
    assert ask("/health", 200) == []
    assert ask("/health", 503, 2) == ["/health 503"] * 2


def test_no_text_key_or_query_is_written(server, lines, log):
    server.get("/v1/models?key=SECRET", headers={"Authorization": "Bearer SECRET"})
    server.post(CHAT, chat_body(messages=[{"role": "user", "content": "SECRET"}]))
    lines(2)
    assert "SECRET" not in log.read_text()


@pytest.mark.parametrize("log_format", ["text", pytest.param("json", marks=pytest.mark.slow)])
def test_the_number_of_a_requests_key_is_warned_about_refusals_too(paced, tmp_path, log_format):
    keys, file = tmp_path / "keys", tmp_path / "stderr"
    keys.write_text("# whose\nSECRET-1\n\nSECRET-2\n")
    settings = {"api_key_file": str(keys), "log_format": log_format, "access_log": "true"}
    settings = {f"server.{k}": v for k, v in settings.items()} | {
        "server.max_tokens_per_minute_per_key": 8
    }
    with file.open("w") as stderr, paced(stderr=stderr, **settings) as server:
        statuses = []
        for key in "SECRET-1", "SECRET-2", "SECRET-2", "SECRET-3":
            headers = {"Authorization": f"Bearer {key}"}
            statuses.append(server.post(COMPLETIONS, saying(8), headers=headers).status)
        server.signal()
        assert server.exit_code() == 0
    assert statuses == [200, 200, 429, 401]
    said = [line for line in file.read_text().splitlines() if f"POST {COMPLETIONS}" in line]
    shown = [
        re.search(r'"key": (\d+)' if log_format == "json" else r" ms, key (\d+)", line)
        for line in said
    ]
    assert [number and number[1] for number in shown] == ["1", "2", "2", None]
    assert "SECRET" not in file.read_text()


def test_a_path_cannot_move_the_cursor_or_forge_a_line(server, lines):
    server.get("/%1b[2J%0a2026-01-01%E2%80%AE")
    server.get("/" + 300 * "a")
    forged, long = lines(2)
    assert forged == "GET /%1B%5B2J%0A2026-01-01%E2%80%AE 404 N ms"
    assert long == f"GET /{199 * 'a'} 404 N ms"


def test_the_last_lines_are_written_before_the_server_has_ended(folder, tmp_path):
    file = tmp_path / "stderr"
    settings = {"server.access_log": "true"}
    with file.open("w") as stderr, ServerProcess(folder, stderr=stderr, **settings) as server:
        for _ in range(50):
            server.get("/version")
        server.signal()
        assert server.exit_code() == 0
    assert file.read_text().count("GET /version 200 ") == 50


def test_without_the_setting_there_is_none(folder, tmp_path):
    file, settings = tmp_path / "stderr", {"server.access_log": "false"}
    with file.open("w") as stderr, ServerProcess(folder, stderr=stderr, **settings) as server:
        server.get("/version")
        server.signal()
        server.exit_code()
    timed = [line for line in file.read_text().splitlines() if TIME.search(line)]
    of_start_and_end = "its weights need", "end tokens: ", "shutting down: "
    assert all(any(words in line for words in of_start_and_end) for line in timed)


def test_a_log_that_nobody_reads_holds_up_neither_requests_nor_the_end(folder):
    """A pipe of 4 KiB is full after some 80 lines, and nobody reads on once the server is up."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    settings = {"server.access_log": "true"}
    reading = threading.Event()
    reader = threading.Thread(target=read_until, args=(ours, reading))
    reader.start()
    with ServerProcess(folder, stderr=theirs, **settings) as server:
        os.close(theirs)
        reading.set()
        reader.join()
        for _ in range(300):
            assert server.get("/version").status == 200
        with server.connect() as client:  # it is logged in the event loop
            client.sendall(b"CONNECT host:1 HTTP/1.1\r\n\r\n")
            assert client.recv(1000)
        assert server.get("/health").status == 200
        server.signal()
        assert server.exit_code() == 0
    os.close(ours)


def read_until(pipe, is_enough):
    while not is_enough.is_set():
        if select.select([pipe], [], [], 0.05)[0]:
            os.read(pipe, 1 << 16)


def test_what_does_not_fit_into_the_queue_is_dropped(monkeypatch):
    ours, theirs = os.pipe()
    monkeypatch.setattr(process.QueuedFile, "MOST", 3)
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    file = process.QueuedFile(theirs)
    for number in range(20):
        assert file.write(b"%4096d" % number) == 4096
    said = b""
    while len(said) < 3 * 4096 or file.num_left:
        if select.select([ours], [], [], 0.05)[0]:  # what has been read may be counted a bit later
            said += os.read(ours, 1 << 16)
    file.write(b"the last")
    file.finish()
    said += os.read(ours, 1 << 16)
    assert len(said) < 20 * 4096 and said.endswith(b"the last")
