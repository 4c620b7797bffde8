"""The application needs nothing of the server that runs it beyond ASGI."""

import asyncio
import json
import threading
from types import SimpleNamespace

from specserve.exchange.client import EngineClient
from specserve.server import formatter
from specserve.server.app import make_app
from specserve.server.completion import ServedModel, Service
from tests.server.asking import COMPLETIONS, completion_body
from tests.server.in_process import config_of, engine_thread


def scope_of(path):
    """No more than ASGI demands of a server."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"connection", b"close")],
    }


async def call(config, spawned, input_processor, **asked):
    """The messages with which the application answers, over an engine of its own."""
    engine = EngineClient(spawned)
    service = Service(config, engine)
    await engine.connect()
    ready = await engine.ready
    max_nodes = config.max_nodes
    served = ServedModel(service.name, "fp", ready.drafter, max_nodes, [], ready.kv_dtype)
    service.open(input_processor, served, ready)
    sent, stays = [], asyncio.Event()

    async def receive():
        if receive.messages:
            return receive.messages.pop()
        await stays.wait()

    async def send(message):
        sent.append(SimpleNamespace(**message))

    body = completion_body(stream=True) | asked
    receive.messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
    await make_app(service)(scope_of(COMPLETIONS), receive, send)
    engine.close()
    return sent


def test_any_server_streams_the_application(folder, llm):
    config = config_of(folder)
    with engine_thread(config) as spawned:
        start, *bodies, end = asyncio.run(call(config, spawned, llm.input_processor))
    assert (start.type, start.status) == ("http.response.start", 200)
    assert (b"content-type", b"text/event-stream; charset=utf-8") in start.headers
    assert all(b.type == "http.response.body" and b.more_body for b in bodies)
    # A fast engine may have several tokens, or all, ready for one event.
    events = b"".join(b.body for b in bodies).split(b"\n\n")
    assert len(events) > 2 and events[-2:] == [b"data: [DONE]", b""]
    assert (end.type, end.body) == ("http.response.body", b"")


def test_logprobs_are_written_next_to_the_event_loop(folder, llm, monkeypatch):
    threads = []
    known = formatter.sealed
    monkeypatch.setattr(
        formatter, "sealed", lambda form: threads.append(threading.get_ident()) or known(form)
    )
    config, asked = config_of(folder), {"prompt": [5] * 100, "prompt_logprobs": 20}
    for is_stream in (True, False):
        with engine_thread(config) as spawned:
            more = asked | {"stream": is_stream}
            start, *_ = asyncio.run(call(config, spawned, llm.input_processor, **more))
        assert start.status == 200
    assert len(threads) == 2 and threading.get_ident() not in threads
