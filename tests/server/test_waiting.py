"""What a stream holds in the HTTP process while it waits for its first token."""

import asyncio
import contextlib
import http.client
import json

import pytest

from tests.checkpoints import tiny_tokenizer
from tests.server.asking import COMPLETIONS, head, saying
from tests.server.calling import TEMPLATE
from tests.server.scripted import ScriptedEngine, scripted, with_template
from tests.server.server_process import ServerProcess, eventually, payloads
from tests.server.test_connections import is_cut
from tests.server.test_memory import resident

COMMENT, LAST = b": waiting\n\n", b"0\r\n\r\n"
TEXT = "the cat sat on the mat"
ASKED = saying(100, stream=True)
BODY = json.dumps(ASKED).encode()
REQUEST = head(f"Content-Length: {len(BODY)}") + BODY


class Held(ScriptedEngine):
    """Says nothing until it is told to."""

    def __init__(self):
        super().__init__()
        self.held = []

    def say(self, *order):
        self.held.append(order)

    def speak(self):
        held, self.held = self.held, []
        for order in held:
            super().say(*order)


@pytest.fixture
def server():
    tokenizer = with_template(tiny_tokenizer().backend_tokenizer, TEMPLATE)
    settings = {"server.served_model_name": "tiny", "server.comment_seconds": 0.2}
    with scripted(tokenizer, Held, **settings) as server, server.saying(TEXT, 7):
        yield server


def speak(server):
    server.loop.call_soon_threadsafe(server.engine.speak)


def until(client, end):
    """All that comes up to and with what ends so."""
    client.settimeout(10)
    data = b""
    while end not in data:
        piece = client.recv(10_000)
        assert piece, data
        data += piece
    return data


def test_no_task_waits_with_a_stream(server):
    before = len(asyncio.all_tasks(server.loop))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(server.connect()) for _ in range(20)]
        for client in clients:
            client.sendall(REQUEST)
        for client in clients:
            until(client, COMMENT)
        assert len(asyncio.all_tasks(server.loop)) == before
        speak(server)
        for client in clients:
            assert b"data: [DONE]" in until(client, LAST)
    eventually(lambda: len(asyncio.all_tasks(server.loop)) == before)


def test_a_connection_serves_one_stream_after_another(server):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        for _ in range(3):
            connection.request("POST", COMPLETIONS, BODY)
            response = connection.getresponse()
            eventually(lambda: server.engine.held)
            speak(server)
            *events, done = payloads(response)
            assert "".join(e["choices"][0]["text"] for e in events) == TEXT
            assert done == "[DONE]" and not response.read()
            socket = connection.sock
        assert connection.sock is socket


@pytest.mark.parametrize("more", [REQUEST, REQUEST[:30]], ids=["a request", "a part of one"])
def test_what_comes_behind_a_stream_that_waits_does_not_change_it(server, more):
    with server.connect() as client:
        client.sendall(REQUEST)
        until(client, COMMENT)
        client.sendall(more)
        until(client, COMMENT)
        speak(server)
        assert b"data: [DONE]" in until(client, LAST)
        if more == REQUEST:  # it is not answered: pipelining is not supported
            assert is_cut(client)
        else:
            client.sendall(REQUEST[30:])
            until(client, COMMENT)
        assert len(server.engine.added) == (1 if more == REQUEST else 2)


def test_a_client_that_leaves_while_it_waits_is_noticed(server):
    with server.connect() as client:
        client.sendall(REQUEST)
        until(client, COMMENT)
    eventually(lambda: server.engine.finished == {0})


@pytest.mark.slow
def test_a_stream_that_waits_takes_less_than_16_kb(folder):
    settings = {"scheduler.max_running": 1, "server.max_queued_requests": 2000}
    with (
        ServerProcess(folder, **settings, **{"server.comment_seconds": 1}) as server,
        contextlib.ExitStack() as stack,
    ):
        server.stream(COMPLETIONS, saying(20))
        before = resident(server)
        for _ in range(1000):
            client = stack.enter_context(server.connect())
            client.sendall(REQUEST)
        until(client, COMMENT)
        assert resident(server) - before < 16
