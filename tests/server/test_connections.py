"""Limits on clients that are slow, send too much, or are too many."""

import asyncio
import contextlib
import json
import socket
import time
from http.client import HTTPResponse
from pathlib import Path
from select import select
from statistics import median
from types import SimpleNamespace

import pytest

from specserve.config import ServerConfig
from specserve.server.connection import Connection
from tests.server.asking import (
    COMPLETIONS,
    check_overloaded,
    head,
    is_running,
    saying,
)
from tests.server.conftest import LONG_NAME
from tests.server.server_process import eventually


def reply(client):
    """What the server says on a bare connection."""
    client.settimeout(20)
    response = HTTPResponse(client)
    response.begin()
    return SimpleNamespace(
        status=response.status, headers=response.headers, body=json.loads(response.read())
    )


UNREAD = json.dumps(saying(500, ms=1, prompt=[[1]] * 4, stream=True)).encode()
CUT_WITH_408 = "silent", "headers", "a body", "chunks"


@pytest.mark.timed
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


HALF_OPEN = {  # what a client sends at first, and then a byte of it at a time
    "silent": (b"", b""),
    "headers": (b"GET / HTTP/1.1\r\nX: ", b"x"),
    "a body": (head("Content-Length: 10000") + b'{"prompt": "', b"a"),
    "chunks": (head("Transfer-Encoding: chunked") + b"1\r\n \r\n", b"1\r\n \r\n"),
    "a stream that is not read": (head(f"Content-Length: {len(UNREAD)}") + UNREAD, b""),
}
NUMBERS = dict.fromkeys(CUT_WITH_408, 125) | {"a stream that is not read": 2}
ESTABLISHED = "01"  # in /proc/net/tcp
SLOW = 5.0  # seconds that clients may take for headers and bodies, and to read


@pytest.mark.timed
@pytest.mark.slow
def test_500_half_open_clients_are_cut_in_their_time_and_a_good_one_is_served(paced):
    settings = {f"server.{what}_seconds": SLOW for what in ("header", "body", "stall")}
    served = {"server.served_model_name": LONG_NAME, "server.max_connections": 600}
    with paced(**settings, **served) as server, contextlib.ExitStack() as stack:
        text, _ = said_to_a_good_client(server)
        usual = median(said_to_a_good_client(server)[1] for _ in range(3))
        clients = {
            kind: [half_open(server, stack) for _ in range(n)] for kind, n in NUMBERS.items()
        }
        started = time.monotonic()
        for kind, theirs in clients.items():
            for client in theirs:
                client.sendall(HALF_OPEN[kind][0])
        beside = []
        while time.monotonic() - started < SLOW - 2:  # nobody is cut before
            again, seconds = said_to_a_good_client(server)
            assert again == text
            beside.append(seconds)
            assert not select([c for k in CUT_WITH_408 for c in clients[k]], [], [], 0)[0]
            for kind, theirs in clients.items():
                for client in theirs:
                    client.sendall(HALF_OPEN[kind][1])
        assert median(beside) < 1.5 * usual, (beside, usual)
        for kind in CUT_WITH_408:
            assert {reply(client).status for client in clients[kind]} == {408}, kind
        assert time.monotonic() - started < SLOW + 2
        # Clients that read nothing keep theirs open, too: it is the server that cuts them.
        eventually(lambda: num_open(server) == 0, seconds=6 * SLOW)
        server.wait_until_idle()
        assert said_to_a_good_client(server)[0] == text
        server.wait_until_idle()


def num_open(server):
    """Connections that the server has neither closed nor lost."""
    ends = (line.split()[1:4:2] for line in Path("/proc/net/tcp").read_text().splitlines())
    return sum(end == [f"0100007F:{server.port:04X}", ESTABLISHED] for end in ends)


def half_open(server, stack):
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # of a stream it takes little
    client.connect(("127.0.0.1", server.port))
    return client


def said_to_a_good_client(server):
    """A stream's text, and the seconds that it took."""
    started = time.monotonic()
    *events, done = server.stream(COMPLETIONS, saying(40, ms=10))
    assert done == "[DONE]"
    return "".join(e["choices"][0]["text"] for e in events), time.monotonic() - started


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


def test_many_small_headers_count_with_all_their_bytes(strict):
    with strict.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 400 + b"\r\n")
        assert reply(client).status == 431


def test_what_is_no_http_is_refused_in_the_same_shape(strict):
    with strict.connect() as client:
        client.sendall(b"\x16\x03\x01\x02\x00\x01\x00 what TLS begins with\r\n\r\n")
        refusal = reply(client)
    assert refusal.status == 400
    assert refusal.body["error"].keys() == {"message", "type", "param", "code"}


def test_a_connection_too_many_is_reported_so_and_one_far_beyond_is_cut(strict):
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
    client.settimeout(20)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_client_that_reads_nothing_is_cut_and_its_blocks_come_back(strict):
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.connect(("127.0.0.1", strict.port))
        body = json.dumps(saying(500, ms=1, prompt=[[1]] * 4, stream=True)).encode()
        client.sendall(head(f"Content-Length: {len(body)}") + body)
        eventually(lambda: is_running(strict))
        strict.wait_until_idle(seconds=10)
        assert not received(client).endswith(b"0\r\n\r\n")


def received(client):
    """All that still comes, up to the end of the connection."""
    client.settimeout(20)
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(1 << 20):
            data = data[-100:] + piece
    return data


ASKED = json.dumps(saying(2)).encode()
CHUNK = b"%x\r\n%b\r\n0\r\n" % (len(ASKED), ASKED)


@pytest.mark.parametrize("line", [b"x: " + b"y" * 500 + b"\r\n", b"x: y\r\n", b"y" * 500])
def test_a_body_may_not_be_followed_by_trailers_without_end(strict, line):
    status = None  # the server may close the connection before it is read
    for _ in range(3):
        with strict.connect() as client, contextlib.suppress(ConnectionError):
            client.sendall(head("Transfer-Encoding: chunked") + CHUNK)
            with contextlib.suppress(ConnectionError):
                for _ in range(80):
                    client.sendall(line * max(1, 500 // len(line)))
            status = reply(client).status
            if status != 408:  # else a busy machine has not read them in time
                assert status == 431
                return
        strict.wait_until_idle()
    assert status != 408, "the server never reads them in time"


def test_a_trailer_is_no_header(strict):
    with strict.connect() as client:
        client.sendall(head("Transfer-Encoding: chunked") + CHUNK + b"Origin: http://a\r\n\r\n")
        assert reply(client).status == 200


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_wish_for_another_protocol_is_passed_over(strict, protocol, at_once):
    wish = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AA")
    with strict.connect() as client:
        client.sendall(head(f"Content-Length: {len(ASKED)}", *wish) + ASKED * at_once)
        if not at_once:
            time.sleep(0.05)
            client.sendall(ASKED)
        answer = reply(client)
    assert answer.status == 200 and answer.body["usage"]["completion_tokens"] == 2


def test_who_waits_to_be_asked_for_a_body_that_is_too_large_is_cut_with_the_refusal(strict):
    with strict.connect() as client:
        client.sendall(head("Content-Length: 999999999", "Expect: 100-continue"))
        assert reply(client).status == 413
        assert is_cut(client)


def test_any_answer_that_nobody_takes_is_cut(strict):
    whole = len(strict.get("/metrics").body)  # megabytes, as every series carries the long name
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.connect(("127.0.0.1", strict.port))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(1.5)
        client.settimeout(20)
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(1 << 20):
                whole -= len(piece)
    assert whole > 0


def test_many_large_bodies_at_a_time_are_refused_and_small_ones_never(paced_threads):
    limits = {"server.max_body_bytes": 1 << 20, "server.max_incoming_bytes": 4_700_000}
    large = head("Content-Length: 1000000") + b" " * 999_999
    with paced_threads(**limits) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(server.connect()) for _ in range(8)]
        for client in clients:
            client.sendall(large)
        eventually(lambda: len(select(clients, [], [], 0)[0]) == 3)  # they have been answered
        assert server.metric("vllm:admission_rejections_total", reason="incoming_bytes") == 3
        assert server.post(COMPLETIONS, {"prompt": [1] * 20_000}).status == 400  # it is too long
        for client in clients:
            with contextlib.suppress(ConnectionError):
                client.sendall(b"x")
        statuses = sorted(reply(client).status for client in clients)
        assert statuses == [400] * 5 + [503] * 3
        assert server.post(COMPLETIONS, {"prompt": " " * 900_000}).status == 400  # room again


@pytest.mark.parametrize(("unread", "is_cut"), [(1, True), (0, False)])
def test_last_bytes_that_nobody_reads_hold_no_connection(unread, is_cut):
    """A transport that is closed waits until they are read, and calls nobody meanwhile."""

    async def run():
        cuts, buffer = [], [1 << 16]
        connection = Connection.__new__(Connection)
        connection.loop, connection.stalled = asyncio.get_running_loop(), None
        connection.completion = None
        connection.limits = ServerConfig(stall_seconds=0.05)
        connection.flow = SimpleNamespace(pause_writing=list, resume_writing=list)
        connection.transport = SimpleNamespace(
            is_closing=lambda: True,
            get_write_buffer_size=lambda: buffer[0],
            abort=lambda: cuts.append(1),
        )
        connection.pause_writing()
        buffer[0] = unread
        connection.resume_writing()  # as the buffer is small enough by now
        await asyncio.sleep(0.2)
        return bool(cuts)

    assert asyncio.run(run()) is is_cut
