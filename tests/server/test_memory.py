"""What hostile clients leave behind in the HTTP process: nothing."""

import contextlib
import gc
import http.client
import json
from pathlib import Path

import pytest

from specserve.server.connection import LARGE
from tests.server.asking import COMPLETIONS, head, saying
from tests.server.in_process import server_threads
from tests.server.server_process import ServerProcess, eventually

MIB = 1 << 20
BODY = 4 * MIB  # server.max_body_bytes
STREAM = json.dumps(saying(100, stream=True)).encode()
NUMBERS = json.dumps({"prompt": [123456] * 300_000}).encode()

HOSTILE = {  # what a client sends before it leaves, and how many such clients there are
    "half a header": (b"GET / HTTP/1.1\r\nX: " + b"x" * 60_000, 100),
    "many headers": (b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 9000 + b"\r\n", 50),
    "most of a body": (head(f"Content-Length: {BODY}") + b"x" * (BODY - 1), 40),
    "a long list": (head(f"Content-Length: {len(NUMBERS)}") + NUMBERS, 10),
    "no JSON": (head("Content-Length: 300000") + b"[" * 300_000, 50),
    "a stream not read": (head(f"Content-Length: {len(STREAM)}") + STREAM, 50),
    "what is not read, again and again": (b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 500, 20),
    "no HTTP": (bytes(range(256)) * 200, 100),
    "tunnels": (b"CONNECT host:1 HTTP/1.1\r\n\r\n" * 9, 100),
}


def resident(server):
    """MiB of memory that the HTTP process holds."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def num_sockets(server):
    number = 0
    for link in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in between
            number += link.readlink().name.startswith("socket:")
    return number


def a_round(server, num_sockets_at_rest):
    """All of them, kind by kind; each of a kind holds its connection until all have sent."""
    for data, count in HOSTILE.values():
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(server.connect()) for _ in range(count)]
            for client in clients:
                with contextlib.suppress(ConnectionError):
                    client.sendall(data)
        eventually(lambda: num_sockets(server) <= num_sockets_at_rest, seconds=20)
    server.wait_until_idle()
    assert server.post(COMPLETIONS, saying(2)).status == 200


def test_hostile_clients_leave_no_memory_held_however_often_they_come(folder):
    with ServerProcess(folder) as server:
        # With a form, so that the processes that check forms are there, too.
        server.post(COMPLETIONS, saying(2) | {"structured_outputs": {"choice": ["yes", "no"]}})
        # With large bodies, for the processes that read those.
        for _ in range(3):
            assert server.post(COMPLETIONS, json.loads(NUMBERS)).status == 400
        at_rest, before = num_sockets(server), resident(server)
        a_round(server, at_rest)
        first = resident(server)
        assert first - before < 64  # what is made once included; their bodies alone were 160 MiB
        a_round(server, at_rest)
        assert resident(server) - first < 24


@pytest.fixture
def num_full_collections():
    """A function that counts them; only those that are asked for happen."""
    gc.disable()
    yield lambda: gc.get_stats()[2]["collections"]
    gc.enable()


def test_what_large_bodies_left_is_collected_once_they_are_answered(folder, num_full_collections):
    with server_threads(folder) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        for size, collections in [(LARGE, 0), (LARGE + 1, 1), (LARGE, 0), (4 * LARGE, 1)]:
            before = num_full_collections()
            connection.request("POST", COMPLETIONS, b" " * size)
            assert connection.getresponse().read()
            eventually(lambda n=before + collections: num_full_collections() == n)
        connection.close()
