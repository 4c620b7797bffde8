"""One connection, within bounds that uvicorn does not set: bytes of headers, seconds, how many."""

import logging
from asyncio import BaseTransport, TimerHandle
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.config import ServerConfig
from specserve.errors import Overloaded, RequestError
from specserve.server.refusal import (
    HeadersTooLarge,
    NoTunnel,
    TimedOut,
    error_body,
    error_headers,
)
from specserve.server.uvicorn_interface import HttpToolsProtocol, RequestResponseCycle

GRACE = 5.0  # seconds beyond those of the application, which can say what was too slow
SPARE = 128  # connections beyond the limit that are told so; more are cut

log = logging.getLogger("specserve")


class Connection(HttpToolsProtocol):
    """uvicorn's protocol within limits, and one request at a time."""

    limits: ServerConfig
    timer: TimerHandle | None = None  # while the rest of a request is waited for
    stalled: TimerHandle | None = None  # while the client does not take what it is sent
    is_in_headers = True
    is_input_closed = False  # what comes is read past, but for the end
    num_pending = 0  # bytes of anything but a body, since they began to come

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > self.limits.max_connections + SPARE:
            self.transport.abort()
        else:
            self.expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self.expect_nothing()
        self.resume_writing()
        super().connection_lost(exc)

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        if self.is_input_closed:
            return
        self._unset_keepalive_if_required()
        if self.timer is None:
            self.expect_headers()
        self.num_pending += len(data)
        self.feed(data)
        if self.num_pending > self.limits.max_header_bytes and not self.is_input_closed:
            self.refuse(too_large(self.limits))

    def feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self.read_without_upgrade(data[upgrade.args[0] :])
        except HttpParserError:
            if not self.is_input_closed:
                self.refuse(RequestError("no valid HTTP"))

    def read_without_upgrade(self, rest: bytes) -> None:
        """Read a request again without its wish for another protocol: the parser leaves the body
        to that protocol, and there is none here.

        Of all requests in a piece of data this reads the first one at most, and once: after that
        it is being answered, or the input is closed.
        """
        if self.is_input_closed:
            return
        if self.is_answering:
            self.close_input()
        elif self.parser.get_method() == b"CONNECT":
            log.warning("refused CONNECT from %s: this server is no proxy", self.client)
            self.refuse(NoTunnel("this server is no proxy: send requests to it itself"))
        else:
            head = self.plain_head()
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self.feed(head + rest)

    def plain_head(self) -> bytes:
        """The request line and the headers, without the wish for another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_headers:  # a trailer is none: it might claim what a header has to say
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.is_input_closed or self.parser.should_upgrade():
            return
        self.expect_nothing()
        self.is_in_headers = False
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self.is_answering:
            self.close_input()
        elif size > self.limits.max_header_bytes:
            self.refuse(too_large(self.limits))
        elif len(self.connections) > self.limits.max_connections:
            self.refuse(
                Overloaded(f"{self.limits.max_connections} connections are open: ask later")
            )
        else:
            self.timer = self.loop.call_later(self.limits.body_seconds + GRACE, self.cut)
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.num_pending = 0
        if not self.is_input_closed:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.is_input_closed or self.parser.should_upgrade():
            return
        self.expect_nothing()
        self.is_in_headers, self.num_pending = True, 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, partial(self.run_app, cycle, app))

    async def run_app(
        self, cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Event streams say no `Connection: close`, even to a client that asked for it: one that
        has read that takes a cut for the end of a stream.
        """

        async def send_open(message: Message) -> None:
            if not is_begin_of_events(message):
                await send(message)
                return
            is_kept, cycle.keep_alive = cycle.keep_alive, True
            await send(message)
            cycle.keep_alive = is_kept and not self.is_input_closed

        await app(scope, receive, send_open)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.is_in_headers and self.expect_100_continue and not self.cycle.body:
            self.transport.close()  # the body was not asked for: what comes next may be none

    def close_input(self) -> None:
        """The request that is being answered is the last one."""
        self.is_input_closed, self.cycle.keep_alive = True, False

    def expect_headers(self) -> None:
        self.timer = self.loop.call_later(self.limits.header_seconds, self.on_slow_headers)

    def expect_nothing(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def on_slow_headers(self) -> None:
        self.timer = None
        if not self.is_answering:  # else it was a stray line end
            self.refuse(TimedOut(f"no headers came within {self.limits.header_seconds:g} s"))

    def pause_writing(self) -> None:
        self.stalled = self.loop.call_later(self.limits.stall_seconds, self.cut)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self.stalled is not None:
            self.stalled.cancel()
            self.stalled = None
        super().resume_writing()

    def cut(self) -> None:
        """End it, unsent bytes and all."""
        self.transport.abort()

    def refuse(self, error: RequestError | Overloaded) -> None:
        """An answer without the application, and the end of the connection."""
        self.is_input_closed = True
        if self.is_answering and self.cycle.response_started:
            self.cut()  # there is no place for a second answer inside of the first
            return
        body = msgspec.json.encode(error_body(error))
        status = HTTPStatus(error.status)
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **error_headers(error),
        }
        lines = [f"HTTP/1.1 {status} {status.phrase}", *map(": ".join, headers.items()), "", ""]
        self.transport.write("\r\n".join(lines).encode() + body)
        self.transport.close()


def is_begin_of_events(message: Message) -> bool:
    """Whether a stream of server-sent events begins with this ASGI message."""
    return message["type"] == "http.response.start" and any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in message.get("headers", ())
    )


def bounded(limits: ServerConfig) -> type[Connection]:
    """A class, as uvicorn wants to make the objects itself."""
    return type("Bounded", (Connection,), {"limits": limits})


def too_large(limits: ServerConfig) -> HeadersTooLarge:
    return HeadersTooLarge(f"the headers are larger than {limits.max_header_bytes} bytes")
