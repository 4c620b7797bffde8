"""Requests for another protocol: CONNECT is refused, and the wish of any other is passed over."""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from specserve.server.connection import Connection
from specserve.server.stream import HEADERS
from tests.server.asking import COMPLETIONS, head, saying, streaming
from tests.server.test_connections import is_cut, reply

CONNECTS = {
    "plain": b"CONNECT host:1 HTTP/1.1\r\n\r\n",
    "with headers": b"CONNECT host:1 HTTP/1.1\r\nHost: host\r\nUser-Agent: x\r\n\r\n",
    "an older version": b"CONNECT host:1 HTTP/1.0\r\n\r\n",
    "a path": b"CONNECT /health HTTP/1.1\r\n\r\n",
    "a url": b"CONNECT http://host/x HTTP/1.1\r\n\r\n",
    "a body": b"CONNECT host:1 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
    "chunks": b"CONNECT host:1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an upgrade": b"CONNECT host:1 HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    "what to tunnel": b"CONNECT host:1 HTTP/1.1\r\n\r\n\x16\x03\x01\x02\x00",
    "another connect": b"CONNECT host:1 HTTP/1.1\r\n\r\n" * 3,
    "empty lines before": b"\r\n\r\nCONNECT host:1 HTTP/1.1\r\n\r\n",
    "bare line feeds": b"CONNECT host:1 HTTP/1.1\n\n",
    "a letter in lower case": b"cONNECT host:1 HTTP/1.1\r\n\r\n",
    "no target": b"CONNECT HTTP/1.1\r\n\r\n",
    "HTTP/2's first words": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}
NO_HTTP = {"bare line feeds", "a letter in lower case", "HTTP/2's first words"}


def in_one(data):
    return [data]


def by_bytes(data):
    return [data[i : i + 1] for i in range(len(data))]


def before_the_end(data):
    return [data[:-1], data[-1:]]


@pytest.mark.parametrize("split", [in_one, by_bytes, before_the_end])
@pytest.mark.parametrize("what", CONNECTS)
def test_a_tunnel_is_refused_in_the_shape_of_all_refusals(strict, what, split):
    with strict.connect() as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before its end
            for piece in split(CONNECTS[what]):
                client.sendall(piece)
        refusal = reply(client)
        assert refusal.status == (400 if what in NO_HTTP else 405)
        assert refusal.body["error"].keys() == {"message", "type", "param", "code"}
        assert refusal.headers["connection"] == "close" and is_cut(client)
        assert (refusal.headers["allow"] is not None) == (refusal.status == 405)


def cpu_seconds(server):
    """What the HTTP process has used so far; it counts hundredths."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


LONG_TARGET = b"CONNECT %b:1 HTTP/1.1\r\n\r\n" % (b"h" * 1900)
MANY_HEADERS = b"CONNECT host:1 HTTP/1.1\r\n" + b"X: y\r\n" * 300 + b"\r\n"
AFTER_EACH_OTHER = head("Connection: Upgrade", "Upgrade: h2c", "Content-Length: 0") * 60
AFTER_A_REFUSAL = head("X: " + "x" * 2000) + AFTER_EACH_OTHER * 30
COSTLY = {
    "a target": LONG_TARGET,
    "headers": MANY_HEADERS,
    "upgrades": AFTER_EACH_OTHER,
    "upgrades after a refusal": AFTER_A_REFUSAL,
}


@pytest.mark.timed
@pytest.mark.parametrize("data", COSTLY.values(), ids=COSTLY)
def test_50_of_them_cost_little_while_a_stream_goes_on(strict, data):
    with streaming(strict, saying(500, ms=10)) as events:
        start = cpu_seconds(strict)
        for _ in range(50):
            with strict.connect() as client:
                with contextlib.suppress(ConnectionError):  # refused before its end
                    client.sendall(data)
                assert reply(client).status >= 400
        next(events)
        assert cpu_seconds(strict) - start < 1  # 20 ms each; the recursion took 200 and more
    strict.wait_until_idle()


def test_a_refused_tunnel_writes_one_line_to_the_log(paced):
    with paced() as server:
        with server.connect() as client:
            client.sendall(CONNECTS["plain"])
            assert reply(client).status == 405
        server.signal()
        server.exit_code()
        (line,) = server.process.stderr.read().splitlines()[-2:-1]
        assert line[len("2026-11-23 13:08:35 ") :].startswith("refused CONNECT from ('127.0.0.1', ")


ASKED = json.dumps(saying(2)).encode()
PLAIN = head(f"Content-Length: {len(ASKED)}") + ASKED
WISHES = {
    "upgrade": ["Connection: Upgrade", "Upgrade: websocket"],
    "several names": ["Connection: keep-alive, Upgrade", "Upgrade: h2c, websocket"],
    "several headers": ["Connection: Upgrade", "Upgrade: a", "Upgrade: b", "Connection: x"],
    "odd case": ["cOnNeCtIoN: uPgRaDe", "uPgRaDe: H2C"],
    "after the body's length": ["X: y", "Upgrade: x/1.0", "Connection:upgrade"],
    "to close": ["Connection: close, Upgrade", "Upgrade: x"],
    "only the wish": ["Upgrade: x"],
    "only the connection": ["Connection: Upgrade"],
}


@pytest.mark.parametrize("split", [in_one, by_bytes, before_the_end])
@pytest.mark.parametrize("what", WISHES)
def test_a_request_is_answered_as_without_its_wish(strict, what, split):
    asked = head(f"Content-Length: {len(ASKED)}", *WISHES[what]) + ASKED
    with strict.connect() as client:
        for piece in split(asked):
            client.sendall(piece)
        answer = reply(client)
        assert answer.status == 200 and answer.body["usage"]["completion_tokens"] == 2
        if what == "to close":
            assert answer.headers["connection"] == "close" and is_cut(client)
        else:
            client.sendall(asked)
            assert reply(client).status == 200


WISHING = head(f"Content-Length: {len(ASKED)}", *WISHES["upgrade"]) + ASKED
CLOSING = head(f"Content-Length: {len(ASKED)}", *WISHES["to close"]) + ASKED
BEHIND = {
    "the same, after one that was to be the last": (CLOSING, WISHING),
    "the same": (WISHING, WISHING * 200),
    "tunnels": (WISHING, CONNECTS["plain"] * 200),
    "a plain one and no HTTP": (PLAIN, PLAIN + b"no HTTP at all"),
}


@pytest.mark.parametrize(("first", "others"), BEHIND.values(), ids=BEHIND)
def test_of_requests_sent_after_each_other_the_first_alone_is_answered(strict, first, others):
    with strict.connect() as client:
        client.sendall(first + others)
        answer = reply(client)
        assert answer.status == 200 and answer.headers["connection"] == "close"
        assert is_cut(client)


def test_a_second_request_ends_the_connection_though_it_comes_as_a_stream_begins():
    connection = SimpleNamespace(is_input_closed=False, num_body=0, completion=None)
    cycle = SimpleNamespace(keep_alive=True)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "headers": HEADERS})

    async def send(message):
        assert cycle.keep_alive  # else a header would say that the connection closes
        # Meanwhile, as it waits for the client to read:
        connection.is_input_closed, cycle.keep_alive = True, False

    scope = {"headers": [], "http_version": "1.1"}
    asyncio.run(Connection.run_app(connection, cycle, app, scope, None, send))
    assert not cycle.keep_alive


def test_a_wish_in_a_trailer_is_no_wish(strict):
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(ASKED), ASKED)
    trailer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with strict.connect() as client:
        client.sendall(head("Transfer-Encoding: chunked") + chunks + trailer)
        assert reply(client).status == 200


@pytest.mark.timed
def test_a_request_that_wants_more_than_it_may_is_refused_all_the_same(strict):
    wish = "Connection: Upgrade\r\nUpgrade: h2c"
    with strict.connect() as client:
        client.sendall(head(wish, "X: " + "x" * 3000))
        assert reply(client).status == 431
    start = time.monotonic()
    with strict.connect() as client:
        client.sendall(f"GET /health HTTP/1.1\r\nHost: a\r\n{wish}\r\n".encode())
        assert reply(client).status == 408
    assert time.monotonic() - start < 5
    assert strict.post(COMPLETIONS, saying(1)).status == 200
