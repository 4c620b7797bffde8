"""Clients that leave, stall or swarm, signals, and deaths: what stays, what goes, what is said."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from itertools import pairwise
from pathlib import Path
from select import select
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import APIError, OpenAI

from specserve.engine.frames import HEADER, MAX_BYTES, VERSION, Frames, pack
from specserve.server.serve import ENGINE_DIED
from tests.server.house import ServerProcess, eventually

COMPLETIONS = "/v1/completions"
LONG_NAME = "m" * 4000  # every event carries it: few of them fill the buffers of a connection
STRICT = {
    "scheduler.max_running": 1,
    "scheduler.prefill_chunk": 1,
    "server.max_connections": 300,
    "server.max_header_bytes": 2000,
    "server.header_seconds": 0.8,
    "server.body_seconds": 0.8,
    "server.stall_seconds": 0.5,
    "server.comment_seconds": 0.1,
    "server.max_queued_requests": 4,
    "server.max_queued_tokens": 600,
}


@pytest.fixture(scope="module")
def strict(paced):
    with paced(**STRICT, **{"server.served_model_name": LONG_NAME}) as server:
        yield server
        assert server.process.poll() is None, "a client has ended the server"


def saying(num_tokens, ms=0, num_prompt=1, **fields):
    """A request of so many tokens, each of which takes so many milliseconds."""
    body = {"prompt": [1] * num_prompt, "max_tokens": num_tokens, "ignore_eos": True}
    return body | ({"seed": ms} if ms else {}) | fields


@contextlib.contextmanager
def begun(server, body):
    """A connection on which a request has been sent; its answer is not awaited."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
    with contextlib.closing(connection):
        connection.request("POST", COMPLETIONS, json.dumps(body).encode())
        yield connection


def answer_of(connection):
    response = connection.getresponse()
    return SimpleNamespace(status=response.status, body=json.loads(response.read()))


@contextlib.contextmanager
def streaming(server, body):
    """A stream that has begun: its first token is here."""
    with server.open_stream(COMPLETIONS, body) as events:
        next(events)
        yield events


def extra(*args, **kw):
    """The same for the openai client, which has no names for some fields."""
    body = saying(*args, **kw)
    return {"prompt": body.pop("prompt"), "extra_body": body}


def check_overloaded(response, status=503):
    error = response.body["error"]
    assert response.status == status
    assert error["type"] == "service_unavailable" and error["code"] == "server_is_overloaded"
    assert int(response.headers["Retry-After"]) >= 1


# Clients that leave


def is_running(server):
    return server.metric("vllm:num_requests_running") == 1


def is_waiting(server, number=1):
    return server.metric("vllm:num_requests_waiting") == number


def test_a_client_may_leave_before_its_body_is_complete(strict):
    with strict.connect() as client:
        client.sendall(head("Content-Length: 1000") + b'{"prompt": "a')
    strict.wait_until_idle()
    assert strict.post(COMPLETIONS, saying(2)).status == 200


def test_a_client_may_leave_while_it_waits_in_the_queue(strict):
    with streaming(strict, saying(500, ms=20)) as events:
        with begun(strict, saying(500, ms=20)):
            eventually(lambda: is_waiting(strict))
        eventually(lambda: is_waiting(strict, 0), seconds=2)
        next(events)  # the other one goes on
    strict.wait_until_idle()


def test_a_client_may_leave_while_its_prompt_is_computed(strict):
    with begun(strict, saying(100, ms=100, num_prompt=400)):
        eventually(lambda: strict.held_blocks() > 0)
    strict.wait_until_idle()


def test_a_client_may_leave_a_stream(strict):
    with streaming(strict, saying(500, ms=20)) as events:
        next(events)
    strict.wait_until_idle()


def test_a_client_may_leave_while_its_whole_answer_is_made(strict):
    with begun(strict, saying(500, ms=20)):
        eventually(lambda: is_running(strict))
    strict.wait_until_idle()


def test_of_64_clients_half_may_leave_at_any_moment_and_nothing_is_left(server):
    rounds = []
    for number in range(3):
        swarm(server, random.Random(number))
        server.wait_until_idle()
        rounds.append([resident_bytes(pid) for pid in (server.process.pid, server.engine_pid)])
    api, engine = (after - before for before, after in zip(rounds[0], rounds[2], strict=True))
    assert api < 8 << 20
    assert engine < 128 << 20  # malloc's heap settles after some hundred steps, 100 MiB higher


def swarm(server, chance):
    """64 streams at once; every second one is left after some of its events."""
    patience = [chance.randrange(1, 40) if n % 2 else None for n in range(64)]

    def ask(num_events):
        with server.open_stream(COMPLETIONS, saying(60)) as events:
            seen = [event for event, _ in zip(events, range(num_events or 1000), strict=False)]
        return num_events is not None or seen[-1] == "[DONE]"

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(ask, patience))


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# Slow, greedy and too many clients


def head(*headers):
    return "\r\n".join([f"POST {COMPLETIONS} HTTP/1.1", "Host: a", *headers, "", ""]).encode()


def reply(client):
    """What the server says on a bare connection."""
    client.settimeout(5)
    response = HTTPResponse(client)
    response.begin()
    return SimpleNamespace(
        status=response.status, headers=response.headers, body=json.loads(response.read())
    )


def test_200_slow_clients_keep_nobody_waiting_and_are_cut(strict):
    half_body = head("Content-Length: 100") + b'{"prompt": '
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(strict.connect()) for _ in range(200)]
        tricklers = clients[::3]
        for client in clients[1::3]:
            client.sendall(half_body)
        for letter in b"POST":  # and then no more of it
            for client in tricklers:
                client.sendall(bytes([letter]))
            start = time.monotonic()
            assert strict.post(COMPLETIONS, saying(2)).status == 200
            assert time.monotonic() - start < 0.7
            time.sleep(0.1)
        replies = [reply(client) for client in clients]
    assert {(r.status, r.body["error"]["code"]) for r in replies} == {(408, "request_timeout")}
    strict.wait_until_idle()


@pytest.mark.parametrize(
    "start, piece",
    [(b"GET / HTTP/1.1\r\nX: ", b"x"), (head("Transfer-Encoding: chunked"), b"1\r\n \r\n")],
    ids=["header", "body"],
)
def test_what_trickles_on_is_cut_all_the_same(strict, start, piece):
    with strict.connect() as client:
        client.sendall(start)
        for _ in range(100):
            if select([client], [], [], 0.05)[0]:  # the server has said something
                break
            client.sendall(piece)
        assert reply(client).status == 408


@pytest.mark.parametrize("ending", [b"", b"\r\n\r\n"])
def test_headers_without_end_or_measure_are_refused(strict, ending):
    with strict.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * 2000 + ending)
        refusal = reply(client)
    assert refusal.status == 431 and refusal.body["error"]["code"] == "headers_too_large"
    assert strict.get("/health").status == 200


def test_what_is_no_http_is_refused_in_the_same_shape(strict):
    with strict.connect() as client:
        client.sendall(b"\x16\x03\x01\x02\x00\x01\x00 what TLS begins with\r\n\r\n")
        refusal = reply(client)
    assert refusal.status == 400
    assert refusal.body["error"].keys() == {"message", "type", "param", "code"}


def test_a_connection_too_many_is_told_so_and_one_far_beyond_is_cut(strict):
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(strict.connect())
        check_overloaded(strict.get("/health"))
        for _ in range(128):
            stack.enter_context(strict.connect())
        with strict.connect() as client:
            assert is_cut(client)
    eventually(lambda: strict.get("/health").status == 200)


def is_cut(client):
    client.settimeout(5)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_client_that_reads_nothing_is_cut_and_its_blocks_come_back(strict):
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.connect(("127.0.0.1", strict.port))
        body = json.dumps(saying(500, prompt=[[1]] * 4, stream=True)).encode()
        client.sendall(head(f"Content-Length: {len(body)}") + body)
        eventually(lambda: is_running(strict))
        strict.wait_until_idle(seconds=10)
        assert not received(client).endswith(b"0\r\n\r\n")


def received(client):
    """All that still comes, up to the end of the connection."""
    client.settimeout(5)
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(1 << 20):
            data = data[-100:] + piece
    return data


# Queues


def test_more_requests_than_may_wait_are_refused_and_those_that_wait_are_answered(strict):
    with contextlib.ExitStack() as stack:
        with streaming(strict, saying(500, ms=20)):
            waiting = [stack.enter_context(begun(strict, saying(3))) for _ in range(4)]
            eventually(lambda: is_waiting(strict, 4))
            check_overloaded(strict.post(COMPLETIONS, saying(3)))
        answers = [answer_of(connection) for connection in waiting]
    assert [a.status for a in answers] == [200] * 4
    assert {a.body["usage"]["completion_tokens"] for a in answers} == {3}


def test_more_prompt_tokens_than_may_wait_are_refused_and_a_short_prompt_is_not(strict):
    with contextlib.ExitStack() as stack:
        with streaming(strict, saying(500, ms=20)):
            long = stack.enter_context(begun(strict, saying(3, num_prompt=500)))
            eventually(lambda: is_waiting(strict))
            check_overloaded(strict.post(COMPLETIONS, saying(3, num_prompt=101)))
            short = stack.enter_context(begun(strict, saying(3, num_prompt=100)))
            eventually(lambda: is_waiting(strict, 2))
        assert answer_of(long).status == answer_of(short).status == 200
    strict.wait_until_idle()


def test_what_could_never_wait_is_no_reason_to_ask_again(strict):
    for prompts in ([[1]] * 5, [[1] * 250] * 3):
        response = strict.post(COMPLETIONS, saying(2, prompt=prompts))
        assert response.status == 400 and "may wait" in response.body["error"]["message"]


def test_a_stream_that_waits_is_kept_alive_by_comments(strict):
    with streaming(strict, saying(500, ms=20)), begun(strict, saying(2, stream=True)) as client:
        response = client.getresponse()
        lines = [response.readline() for _ in range(4)]
    assert response.status == 200 and lines == [b": waiting\n", b"\n"] * 2


def test_a_client_may_leave_with_a_second_request_already_sent(strict):
    body = json.dumps(saying(100, ms=20)).encode()
    request = head(f"Content-Length: {len(body)}") + body
    with strict.connect() as client:
        client.sendall(request + request)
        eventually(lambda: is_running(strict))
    strict.wait_until_idle(seconds=1)


# Signals


def test_sigterm_lets_answers_end_in_time_and_breaks_off_the_others(paced):
    with (
        paced(**{"server.drain_seconds": 1.5}) as server,
        begun(server, saying(500, ms=20)) as whole,
        streaming(server, saying(500, ms=20)) as long,
        streaming(server, saying(25, ms=20)) as short,
    ):
        eventually(lambda: server.metric("vllm:num_requests_running") == 3)
        server.signal(signal.SIGTERM)
        eventually(lambda: server.get("/health/ready").status == 503)
        assert server.get("/health/live").status == 200
        refusal = server.post(COMPLETIONS, saying(2))
        check_overloaded(refusal)
        assert refusal.headers["x-should-retry"] == "false"
        assert ended_well(list(short))
        assert broken_off(list(long))["code"] == "server_is_overloaded"
        assert answer_of(whole).status == 503
        assert server.exit_code() == 0


def test_a_second_signal_ends_the_server_at_once(paced):
    with paced() as server, streaming(server, saying(500, ms=20)) as events:
        engine = server.engine_pid
        server.signal(signal.SIGINT)
        eventually(lambda: server.get("/health/ready").status == 503)
        assert server.process.poll() is None
        server.signal(signal.SIGTERM)
        assert broken_off(list(events))["code"] == "server_is_overloaded"
        assert server.exit_code(3) == 128 + signal.SIGTERM
        eventually(lambda: is_gone(engine), seconds=1)


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


# Deaths


def test_when_the_engine_dies_every_answer_ends_with_an_error_and_the_server_with_70(paced):
    with (
        paced() as server,
        streaming(server, saying(500, ms=20)) as first,
        streaming(server, saying(500, ms=20)) as second,
        OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        begun(server, saying(500, ms=20)) as whole,
    ):
        [model] = client.models.list().data
        third = client.completions.create(model=model.id, stream=True, **extra(500, ms=20))
        eventually(lambda: server.metric("vllm:num_requests_running") == 4)
        os.kill(server.engine_pid, signal.SIGKILL)
        with pytest.raises(APIError, match="engine process has ended"):
            list(third)
        for events in (first, second):
            assert broken_off(list(events))["type"] == "server_error"
        failed = answer_of(whole)
        assert failed.status == 500 and failed.body["error"]["type"] == "server_error"
        assert is_refused(server)
        assert server.exit_code() == ENGINE_DIED == 70
        assert "error: the engine process has ended" in server.process.communicate()[1]


def is_refused(server):
    """By an answer, or, a moment later, by nobody."""
    try:
        return server.post(COMPLETIONS, saying(2)).status == 503
    except ConnectionError:
        return True


def test_when_the_api_process_dies_the_engine_goes_in_the_middle_of_a_step(paced):
    with paced() as server, streaming(server, saying(500, ms=9000, num_prompt=2)):
        engine = server.engine_pid
        server.signal(signal.SIGKILL)
        eventually(lambda: is_gone(engine), seconds=1)


@contextlib.contextmanager
def loading(folder, *args, **settings):
    """A server whose engine process is there, and not ready yet; and that process's id."""
    server = ServerProcess(folder, *args, **settings)
    try:
        eventually(lambda: children(server.process.pid))
        yield server, children(server.process.pid)[0]
    finally:
        server.process.kill()
        server.process.communicate()


def children(pid):
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_when_the_engine_dies_while_it_loads_the_server_says_so_and_ends(folder):
    with loading(folder) as (server, engine):
        os.kill(engine, signal.SIGKILL)
        assert server.exit_code(20) == ENGINE_DIED
        _, errors = server.process.communicate()
    assert "error: the engine process ended while it was loading" in errors
    assert "Traceback" not in errors


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
    assert errors.splitlines()[-1].startswith("error: ") and "Traceback" not in errors


def test_a_port_in_use_is_said_before_anything_is_loaded(folder, tmp_path):
    broken = broken_model(folder, tmp_path)  # which nobody finds out
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


# Between the processes


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


@given(st.lists(st.binary(max_size=50), max_size=5), st.lists(st.integers(0, 300)))
def test_however_bytes_are_split_the_same_frames_come_out(messages, cuts):
    data = b"".join(map(pack, messages))
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    frames = Frames()
    pieces = [data[a:b] for a, b in pairwise(edges)]
    assert [frame for piece in pieces for frame in frames.feed(piece)] == messages


def test_a_frame_of_another_version_is_no_frame():
    with pytest.raises(RuntimeError, match=f"version {VERSION + 1}"):
        list(Frames().feed(HEADER.pack(VERSION + 1, 0)))


def test_a_frame_is_refused_by_the_length_it_announces():
    with pytest.raises(RuntimeError, match="bytes"):
        list(Frames().feed(HEADER.pack(VERSION, MAX_BYTES + 1)))
    assert list(Frames().feed(HEADER.pack(VERSION, MAX_BYTES))) == []


def test_frames_before_a_bad_one_still_come_out():
    frames = Frames().feed(pack(b"one") + HEADER.pack(VERSION + 1, 0))
    assert next(frames) == b"one"
    with pytest.raises(RuntimeError):
        next(frames)
