"""Sends completions as streams of server-sent events, or as whole responses."""

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specserve.exchange.fair_queue import owner
from specserve.server.body import Body
from specserve.server.completion import ENDS, ChoiceDelta, LiveCompletion, Service
from specserve.server.connection import CONNECTION, Connection
from specserve.server.refusal import error_response, json_response

T = TypeVar("T")
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # else nginx buffers events
]
COMMENT = b": waiting\n\n"
MANY = 1 << 9  # logprobs; formatting more takes a large part of a millisecond
SIZE = 256  # bytes; sizes of padded events are multiples
LEAST = 2 * SIZE  # minimum bytes of a padded event; the usual text of an event fits
ROOM = 96  # maximum bytes of text in such an event; further text waits for the next event

log = logging.getLogger("specserve")


class Formatter(Protocol):
    """Formats a completion as server-sent events or as one JSON object."""

    @property
    def is_long(self) -> bool:
        """Whether formatting the whole completion would delay streams."""
        ...

    @property
    def keep_alive(self) -> bytes:
        """The event that is sent after a time without output."""
        ...

    def whole(self) -> msgspec.Struct: ...

    def num_logprobs(self, deltas: Sequence[ChoiceDelta]) -> int:
        """Return the number of logprobs in the events of these deltas."""
        ...

    def beginning(self) -> list[bytes]:
        """Return the events before the first token."""
        ...

    def step(self, deltas: Sequence[ChoiceDelta]) -> list[bytes]: ...

    def idle(self, choice: int) -> bytes:
        """Return an event that adds nothing to a choice."""
        ...

    def ending(self, error: Exception | None) -> list[bytes]:
        """Return the last events, after all text or an error."""
        ...


class EventStream(Response):
    """Streams a completion's events. The last ones report its end or the error.

    Only `write` sends to the connection. The completion calls it after turns of the event loop with
    new output, or a timer calls it. No task waits for output.
    """

    def __init__(
        self, completion: LiveCompletion, formatter: Formatter, service: Service, asked: Body
    ) -> None:
        self.completion, self.formatter, self.service = completion, formatter, service
        self.more, self.owner, limits = asked.headers, owner.get(), service.limits
        self.loop = asyncio.get_running_loop()
        self.by_token = limits.stream_flush == "token"
        self.ticks: Ticks | None = None
        self.format = formatter.step
        if limits.stream_flush == "interval":
            self.ticks = Ticks(len(completion.generations), limits.stream_interval_ms / 1e3)
            self.format = partial(self.ticks.format, formatter)
        option = asked.stream_options and asked.stream_options.include_obfuscation
        self.is_padded = self.ticks is not None if option is None else option
        self.is_busy = False  # a thread formats events
        self.written_at = 0.0  # by the clock of the event loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        more = [(name.lower().encode(), value.encode()) for name, value in self.more.items()]
        start = {"type": "http.response.start", "status": 200, "headers": [*HEADERS, *more]}
        try:
            await send(start)
        except BaseException:
            self.completion.release()
            raise
        if CONNECTION in scope:
            scope[CONNECTION].take_over(self.completion, scope[ENDS])
            self.loop.call_soon(self.begin, scope[CONNECTION])  # after the application returns
            return
        sink = ASGISink(self.completion)
        self.begin(sink)
        try:
            async with watched(self.completion, receive):
                await sink.send_all(send)
        finally:
            self.stop()

    def begin(self, sink: "Connection | ASGISink") -> None:
        self.sink = sink
        if self.ticks is None:
            self.completion.on_output = self.write
            self.timer = self.loop.call_later(self.service.limits.comment_seconds, self.comment)
        else:
            self.timer = self.loop.call_at(self.ticks.next(), self.tick)
        self.send(False, self.formatter.beginning)
        if self.completion.on_output is not None:
            self.write()

    def comment(self) -> None:
        """Write an event that adds nothing after a time without output, and set the timer again.

        Steps do not reset the timer, because they are far more frequent.
        """
        seconds = self.service.limits.comment_seconds
        left = self.written_at + seconds - self.loop.time()
        if left <= 0:
            if self.sink.is_writable and not self.is_busy:
                self.push([self.formatter.keep_alive])
            left = seconds
        self.timer = self.loop.call_later(left, self.comment)

    def tick(self) -> None:
        """Write the events of one interval. A client that reads slowly misses some intervals."""
        assert self.ticks is not None, "only an interval has ticks"
        self.timer = self.loop.call_at(self.ticks.next(), self.tick)
        self.write()

    def write(self) -> None:
        """Write all new output, and the end after it, in one piece."""
        if self.is_busy or not self.sink.is_writable:
            return
        self.written_at, deltas = self.loop.time(), self.take()
        is_over = self.completion.is_over and not (self.ticks and self.ticks.waiting)
        if not self.formatter.is_long or self.formatter.num_logprobs(deltas) <= MANY:
            self.send(is_over, self.format, deltas)
            return
        self.is_busy = True
        work = self.service.writing_threads.submit(self.owner, lambda: self.format(deltas))
        done = asyncio.wrap_future(work)
        done.add_done_callback(lambda done: self.written(done, is_over))

    def take(self) -> list[ChoiceDelta]:
        deltas = self.completion.taken()
        if self.ticks is not None:
            return self.ticks.take(deltas)
        return [part for d in deltas for part in tokens_of(d)] if self.by_token else deltas

    def written(self, done: "asyncio.Future[list[bytes]]", is_over: bool) -> None:
        """Send the events that a thread formatted, and write output that came meanwhile."""
        self.is_busy = False
        if done.cancelled():  # the server is shutting down
            self.sink.cut()
            self.end([])
            return
        self.send(is_over, done.result)
        if self.ticks is None:
            self.completion.wake()

    def send(self, is_over: bool, format: Callable[..., list[bytes]], *deltas: Any) -> None:
        """Send events. An error in formatting becomes the last event: otherwise the stream would
        look complete.
        """
        try:
            events = format(*deltas)
            if is_over:
                events = [*events, *self.formatter.ending(self.completion.error)]
        except Exception as e:
            id = self.completion.caller.request_id
            log.exception("a completion could not be streamed", extra={"request_id": id})
            events, is_over = self.failed(e), True
        if is_over:
            self.end(events)
        else:
            self.push(events)

    def failed(self, error: Exception) -> list[bytes]:
        try:
            return self.formatter.ending(error)
        except BaseException:
            self.sink.cut()
            self.end([])
            raise

    def push(self, events: Sequence[bytes]) -> None:
        if events:
            self.sink.push(b"".join(map(padded, events) if self.is_padded else events))

    def end(self, events: Sequence[bytes]) -> None:
        self.push(events)
        self.stop()
        self.sink.end()

    def stop(self) -> None:
        self.timer.cancel()
        self.completion.on_output = None  # breaks a reference cycle
        self.completion.release()


class ASGISink:
    """The sink of a stream at other ASGI servers, in place of a `Connection`."""

    def __init__(self, completion: LiveCompletion) -> None:
        self.completion, self.parts = completion, asyncio.Queue[bytes]()

    @property
    def is_writable(self) -> bool:
        return self.parts.empty()

    def push(self, events: bytes) -> None:
        self.parts.put_nowait(events)

    def end(self) -> None:
        self.parts.put_nowait(b"")

    cut = end

    async def send_all(self, send: Send) -> None:
        while part := await self.parts.get():
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self.completion.wake()
        await send({"type": "http.response.body", "body": b""})


class Ticks:
    """Sends events at a fixed interval from the start of a stream, also without new output."""

    def __init__(self, num_choices: int, seconds: float) -> None:
        self.seconds, self.open = seconds, dict.fromkeys(range(num_choices))  # choices not ended
        self.begun_at, self.number = asyncio.get_running_loop().time(), 0
        self.waiting = list[ChoiceDelta]()  # tokens for later events

    def next(self) -> float:
        """Return the next time, on the clock of the event loop."""
        passed = (asyncio.get_running_loop().time() - self.begun_at) / self.seconds
        self.number = max(self.number, math.floor(passed)) + 1
        return self.begun_at + self.number * self.seconds

    def take(self, deltas: Sequence[ChoiceDelta]) -> list[ChoiceDelta]:
        """Return the tokens that fit into the next event of each choice. Others wait."""
        self.waiting += [part for delta in deltas for part in tokens_of(delta)]
        taken, self.waiting = with_room(self.waiting)
        return list(merged(taken).values())

    def format(self, formatter: Formatter, deltas: Sequence[ChoiceDelta]) -> list[bytes]:
        """Return an event for each choice that has not ended; empty without new output."""
        come, events = {delta.choice: delta for delta in deltas}, list[bytes]()
        for choice in [*self.open]:
            delta = come.get(choice)
            events += (formatter.step([delta]) if delta else []) or [formatter.idle(choice)]
            if delta is not None and delta.is_last:
                del self.open[choice]
        return events


def tokens_of(delta: ChoiceDelta) -> Iterator[ChoiceDelta]:
    """Split a step into one part per token. The last part has the details of the whole step."""
    if len(delta.token_ids) < 2:
        yield delta
        return
    ends = [0, *delta.ends[: len(delta.token_ids) - 1], len(delta.text)]
    last = len(delta.token_ids) - 1
    for number, token in enumerate(delta.token_ids):
        yield ChoiceDelta(
            delta.choice,
            delta.text[ends[number] : ends[number + 1]],
            delta.begin + number,
            [token],
            delta.is_last and number == last,
            delta.details if number == last else (),
        )


def with_room(tokens: Sequence[ChoiceDelta]) -> tuple[list[ChoiceDelta], list[ChoiceDelta]]:
    """Split tokens: at least one per choice, up to the size of an event; and the rest."""
    taken, rest, held = list[ChoiceDelta](), list[ChoiceDelta](), dict[int, int]()
    for each in tokens:
        size = held.get(each.choice, 0) + len(msgspec.json.encode(each.text)) - 2
        has_room = size <= ROOM or each.choice not in held
        held[each.choice] = size if has_room else ROOM + 1  # later tokens wait, too
        (taken if has_room else rest).append(each)
    return taken, rest


def merged(deltas: Iterable[ChoiceDelta]) -> dict[int, ChoiceDelta]:
    """Merge the deltas of each choice."""
    all = dict[int, ChoiceDelta]()
    for new in deltas:
        old = all.get(new.choice)
        all[new.choice] = (
            new
            if old is None
            else old._replace(
                text=old.text + new.text,
                token_ids=old.token_ids + new.token_ids,
                is_last=new.is_last,
                details=[*old.details, *new.details],
                ends=(),
            )
        )
    return all


def padded(event: bytes) -> bytes:
    """Pad an event (with OpenAI's field `obfuscation`) or a comment.

    The result has at least LEAST bytes, and a multiple of SIZE.
    """
    if event.endswith(b"}\n\n"):
        begin, end = event[:-3] + b',"obfuscation":"', b'"}\n\n'
    elif event.startswith(b":"):
        begin, end = event[:-2], b"\n\n"
    else:
        return event
    size = len(begin) + len(end)
    lacking = LEAST - size if size < LEAST else -size % SIZE
    # Random digits, because compression would shrink constant ones.
    return begin + secrets.token_hex(LEAST // 2)[:lacking].encode() + end


def event(data: Any, name: str | None = None) -> bytes:
    payload = escaped(msgspec.json.encode(data))
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, payload)


def json_text(text: str) -> bytes:
    return escaped(msgspec.json.encode(text))


def escaped(payload: bytes) -> bytes:
    """Escape the line ends of Python's splitlines(), at which some clients split a stream."""
    if payload.isascii():
        return payload
    for end in "\u2028\u2029\u0085":
        payload = payload.replace(end.encode(), f"\\u{ord(end):04x}".encode())
    return payload


async def respond(
    request: Request, completion: LiveCompletion, formatter: Formatter, asked: Body
) -> Response:
    """Return the response of a queued completion: a stream, or one JSON object after its end."""
    service: Service = request.app.state.service
    if asked.stream:
        return EventStream(completion, formatter, service, asked)
    async with watched(completion, request.receive):
        await completion.over()
    if completion.has_left:
        return Response(status_code=499)  # the client has disconnected
    if completion.error is not None:
        return error_response(completion.error, request.url.path)

    def write() -> Response:
        return json_response(formatter.whole(), headers=asked.headers)

    if not formatter.is_long:
        return write()
    return await asyncio.wrap_future(service.writing_threads.submit(owner.get(), write))


@asynccontextmanager
async def watched(completion: LiveCompletion, receive: Receive) -> AsyncIterator[None]:
    """Abort the completion if the client disconnects during the block. Finally, release it."""

    async def watch() -> None:
        await disconnected(receive)
        completion.leave()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        completion.release()


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. ClientDisconnect if the client leaves; this cancels `work`."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
