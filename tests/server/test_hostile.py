"""Thousands of hostile requests beside streams: each is refused at once, and no stream notices."""

import asyncio
import contextlib
import json
import shutil
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest

from tests.server.asking import COMPLETIONS, MESSAGES
from tests.server.hostile import CHAT, HEAVY, MILD, Request, bare, drawn, media, post
from tests.server.server_process import ServerProcess
from tests.server.test_bodies import SETTINGS, TEMPLATE

RATE = 100  # requests a second
TIMEOUTS = {"server.body_seconds": 0.5, "server.header_seconds": 0.5}
HARMLESS = [
    bare("health", b"GET /health/ready HTTP/1.1\r\nHost: a\r\n\r\n", 200),
    post("an empty prompt", COMPLETIONS, {"prompt": ""}),
]
GOOD = [  # they end in the middle of the context
    (COMPLETIONS, {"prompt": "the cat", "temperature": 0, "ignore_eos": True}),
    (COMPLETIONS, {"prompt": "def read", "temperature": 1, "seed": 1, "ignore_eos": True}),
    (CHAT, {"messages": MESSAGES[1:2], "temperature": 0.7, "seed": 2, "ignore_eos": True}),
    (CHAT, {"messages": MESSAGES[3:], "seed": 3, "n": 2, "frequency_penalty": 0.5}),
]


class Reply(NamedTuple):
    request: Request
    status: int  # 0: cut without an answer
    seconds: float
    body: bytes


class Stream(threading.Thread):
    """A client that asks for the same stream again and again, and times its events."""

    def __init__(self, server, path, body, is_over):
        super().__init__()
        self.server, self.path, self.body, self.is_over = server, path, body, is_over
        self.gaps, self.answers = [], []

    def run(self):
        while not self.is_over.is_set():
            self.answers.append(self.ask())

    def ask(self):
        """Each choice's text and the reason of its end."""
        texts, times = defaultdict(str), []
        with self.server.open_stream(self.path, self.body) as events:
            for event in events:
                times.append(time.perf_counter())
                for choice in event["choices"] if event != "[DONE]" else ():
                    text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    texts[choice["index"]] += text
        self.gaps += [b - a for a, b in pairwise(times[:-1])]  # the last one is [DONE]
        return dict(texts)


@contextlib.contextmanager
def streams(server):
    is_over = threading.Event()
    running = [Stream(server, *asked, is_over) for asked in GOOD]
    for stream in running:
        stream.start()
    try:
        yield running
    finally:
        is_over.set()
        for stream in running:
            stream.join()


async def reply(port: int, request: Request) -> Reply:
    """The answer to a request on a connection of its own."""
    started, status, body = time.perf_counter(), 0, b""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        started = time.perf_counter()
        try:
            writer.write(request.raw)
            async with asyncio.timeout(20):
                head = await reader.readuntil(b"\r\n\r\n")
                status = int(head.split()[1])
                size = head.lower().partition(b"content-length:")[2].split()
                is_bodiless = request.raw.startswith(b"HEAD ") or not size
                body = b"" if is_bodiless else await reader.readexactly(int(size[0]))
        finally:
            writer.close()
    return Reply(request, status, time.perf_counter() - started, body)


async def sent(port: int, requests: Sequence[Request], rate: float) -> list[Reply]:
    """Open loop: each is sent when it is due, however many others are not answered."""
    started, tasks = time.perf_counter(), []
    for i, request in enumerate(requests):
        await asyncio.sleep(started + i / rate - time.perf_counter())
        tasks.append(asyncio.create_task(reply(port, request)))
    return await asyncio.gather(*tasks)


def beside_streams(server, requests, rate) -> tuple[list[Reply], list[Stream]]:
    with streams(server) as running:
        replies = asyncio.run(sent(server.port, requests, rate))
    return replies, running


@pytest.fixture(scope="module")
def attacked(folder, tmp_path_factory):
    """A server, the processes that it has, and what streams say that nothing disturbs."""
    model = shutil.copytree(folder, tmp_path_factory.mktemp("attacked") / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with ServerProcess(model, "--served-model-name=tiny", **SETTINGS | TIMEOUTS) as server:
        undisturbed = [Stream(server, *asked, None).ask() for asked in GOOD]
        # With a form, so that the processes that check forms are there, too.
        server.post(COMPLETIONS, {"prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}})
        engine = server.engine_pid
        yield server, undisturbed
        assert server.process.poll() is None, "a request has ended the server"
        assert server.engine_pid == engine, "a request has ended the engine"
        assert server.metric("specserve_engine_restarts_total") == 0
        server.wait_until_idle()


@pytest.fixture
def listener():
    """A server of media, which nobody is to ask."""
    with socket.create_server(("127.0.0.1", 0)) as there:
        there.settimeout(0.2)
        yield f"http://127.0.0.1:{there.getsockname()[1]}"
        with pytest.raises(TimeoutError):
            there.accept()


def check(replies, running, undisturbed):
    """Every request has a right answer within a second; the streams' texts are their own."""
    for request, status, seconds, body in replies:
        assert status in request.statuses, (request.kind, status, request.raw[:2000], body[:500])
        assert seconds < 1, (request.kind, status, seconds, request.raw[:2000])
        if status >= 400 and b"HEAD" not in request.raw[:4]:
            assert json.loads(body)["error"]["message"], request
    for stream, whole in zip(running, undisturbed, strict=True):
        assert stream.answers and all(answer == whole for answer in stream.answers)


def told(replies):
    """How many of each kind were answered how: what was taken is never passed over in silence."""
    kinds = Counter((r.request.kind, r.status) for r in replies)
    return "\n".join(f"{kind}, {status}: {n}" for (kind, status), n in sorted(kinds.items()))


def p99(gaps):
    return sorted(gaps)[int(0.99 * len(gaps))]


TAKEN = {"a number of its type", "a mutant", "a schema", "a grammar"}  # of which some are right


@pytest.mark.timed
@pytest.mark.parametrize("size", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hostile_requests_are_refused_at_once_and_streams_go_on(attacked, listener, size, capsys):
    """In turn with harmless requests at the same rate, whose streams are the measure: the 99th
    percentile of the times between events is at most 1.5 times theirs.

    Requests that take CPU by right, as a process checks their forms, are those of the next test.
    """
    server, undisturbed = attacked
    requests = drawn(size, size, [*MILD, media(listener)])
    replies, gaps = [], {"harmless": [], "hostile": []}
    block = max(150, size // 20)
    for part in (requests[i : i + block] for i in range(0, size, block)):
        for kind, asked in ("harmless", HARMLESS * (len(part) // 2)), ("hostile", part):
            answers, running = beside_streams(server, asked, RATE)
            check(answers, running, undisturbed)
            gaps[kind] += [gap for stream in running for gap in stream.gaps]
            replies += answers if kind == "hostile" else []
    late = {kind: p99(each) for kind, each in gaps.items()}
    with capsys.disabled():
        print(f"\n{told(replies)}\nITL p99: {late}")
    assert {r.request.kind for r in replies if r.status == 200} <= TAKEN
    assert late["hostile"] <= 1.5 * late["harmless"]


@pytest.mark.timed
@pytest.mark.parametrize("size", [16, pytest.param(600, marks=pytest.mark.slow)])
def test_hostile_forms_are_answered_at_once_and_change_no_text(attacked, size, capsys):
    """Mutants of schemas and the bombs of tests/grammars, one after the other: checking one takes
    up to 0.8 s of a core by right, so the streams' pace is not held to a bound here.
    """
    server, undisturbed = attacked
    requests = drawn(size, size, HEAVY)
    with streams(server) as running:
        replies = [asyncio.run(reply(server.port, request)) for request in requests]
    check(replies, running, undisturbed)
    with capsys.disabled():
        print(f"\n{told(replies)}")
    assert sum(r.status == 503 for r in replies) <= size // 10
