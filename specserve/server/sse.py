"""An answer as server-sent events, or whole; and the watch for a client that leaves."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specserve.server.answer import Answer, Said
from specserve.server.http import EXTENSION, Hold
from specserve.server.protocol import error_body, error_response

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]
DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
# Line ends to Python's splitlines(), on which some clients cut a stream.
LINE_ENDS = {c.encode(): f"\\u{ord(c):04x}".encode() for c in "\u2028\u2029\u0085"}

log = logging.getLogger("specserve")


class Shape(Protocol):
    """How a route puts an answer into JSON."""

    def chunks(self, said: Said) -> Iterator[dict[str, Any]]:
        """A step of one choice; none where it adds nothing that could be shown."""
        ...

    def last_chunk(self) -> dict[str, Any] | None:
        """What follows when all choices have ended."""
        ...

    def whole(self) -> dict[str, Any]: ...


def event(data: dict[str, Any]) -> bytes:
    payload = msgspec.json.encode(data)
    for end, escape in LINE_ENDS.items():
        payload = payload.replace(end, escape)
    return b"data: %b\n\n" % payload


class EventStream(Response):
    """Ends in one of two ways: all chunks and [DONE], or an error event and [DONE]."""

    def __init__(self, answer: Answer, shape: Shape, comment_seconds: float) -> None:
        self.answer, self.shape, self.comment_seconds = answer, shape, comment_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hold: Hold = scope["extensions"][EXTENSION]
        async with watched(self.answer, receive):
            with hold.without_close():
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            async for piece in self.pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def pieces(self) -> AsyncIterator[bytes]:
        """All that there is to send at a time, so that it goes out in one write."""
        answer = self.answer
        try:
            while True:
                said = await answer.wait(self.comment_seconds)
                events = [event(chunk) for s in said for chunk in self.shape.chunks(s)]
                if answer.is_over:
                    break
                if events or not said:
                    yield b"".join(events) or COMMENT
            if answer.error is not None:
                events.append(event(error_body(answer.error)))
            elif (last := self.shape.last_chunk()) is not None:
                events.append(event(last))
        except Exception as e:  # a stream must not end without a word
            log.exception("an answer could not be streamed")
            events = [event(error_body(e))]
        yield b"".join([*events, DONE])


async def whole(answer: Answer, shape: Shape, receive: Receive) -> Response:
    """The answer in one piece, once it is complete."""
    async with watched(answer, receive):
        while not answer.is_over:
            await answer.wait()
    if answer.has_left:
        return Response(status_code=499)  # nobody reads it
    if answer.error is not None:
        return error_response(answer.error)
    return Response(msgspec.json.encode(shape.whole()), media_type="application/json")


@asynccontextmanager
async def watched(answer: Answer, receive: Receive) -> AsyncIterator[None]:
    """While the answer is given, notice at once when its client leaves; then let go of it."""
    watcher = asyncio.create_task(watch(answer, receive))
    try:
        yield
    finally:
        watcher.cancel()
        answer.release()


async def watch(answer: Answer, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.leave()
