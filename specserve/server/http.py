"""One connection, within bounds that uvicorn does not set: bytes of headers, seconds, how many."""

from asyncio import BaseTransport, TimerHandle
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from specserve.config import ServerConfig
from specserve.errors import Overloaded, RequestError
from specserve.server.protocol import TimedOut, error_body

GRACE = 5.0  # seconds beyond those of the application, which can say what was too slow
EXTENSION = "specserve"  # of the scope: a Hold
SPARE = 128  # connections beyond the limit that are told so; more are cut


class HeadersTooLarge(RequestError):
    status, code = 431, "headers_too_large"


class Hold:
    """What a response may ask of the connection that it goes out on."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle

    @contextmanager
    def without_close(self) -> Iterator[None]:
        """Headers sent in here say no `Connection: close`, even to a client that asked for it.

        A client that has read it takes a cut for the end of a stream.
        """
        is_kept = self.cycle.keep_alive
        self.cycle.keep_alive = True
        try:
            yield
        finally:
            self.cycle.keep_alive = is_kept


class Connection(HttpToolsProtocol):
    """uvicorn's protocol within limits, and one request at a time."""

    limits: ServerConfig
    timer: TimerHandle | None = None  # while the rest of a request is waited for
    stalled: TimerHandle | None = None  # while the client does not take what it is sent
    is_in_headers = True
    is_deaf = False  # what comes is read past, but for the end
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
        if self.is_deaf:
            return
        self._unset_keepalive_if_required()
        if self.timer is None:
            self.expect_headers()
        self.num_pending += len(data)
        self.feed(data)
        if self.num_pending > self.limits.max_header_bytes and not self.is_deaf:
            self.refuse(too_large(self.limits))

    def feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            # The parser leaves the body to another protocol. There is none here: read the
            # same request again, without the wish for one.
            head = self.plain_head()
            self.parser = HttpRequestParser(self)
            self.feed(head + data[upgrade.args[0] :])
        except HttpParserError:
            self.refuse(RequestError("no valid HTTP"))

    def plain_head(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        kept = (h for h in self.headers if h[0] not in (b"connection", b"upgrade"))
        lines += [b"%b: %b" % header for header in kept]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_headers:  # a trailer is none: it might claim what a header has to say
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.is_deaf or self.parser.should_upgrade():
            return
        self.expect_nothing()
        self.is_in_headers = False
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self.is_answering:
            self.is_deaf, self.cycle.keep_alive = True, False
        elif size > self.limits.max_header_bytes:
            self.refuse(too_large(self.limits))
        elif len(self.connections) > self.limits.max_connections:
            self.refuse(
                Overloaded(f"{self.limits.max_connections} connections are open: ask later")
            )
        else:
            self.timer = self.loop.call_later(self.limits.body_seconds + GRACE, self.cut)
            super().on_headers_complete()
            self.scope["extensions"] = {EXTENSION: Hold(self.cycle)}  # type: ignore[dict-item]

    def on_body(self, body: bytes) -> None:
        self.num_pending = 0
        if not self.is_deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.is_deaf or self.parser.should_upgrade():
            return
        self.expect_nothing()
        self.is_in_headers, self.num_pending = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.is_in_headers and self.expect_100_continue and not self.cycle.body:
            self.transport.close()  # the body was not asked for: what comes next may be none

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
        self.is_deaf = True
        if self.is_answering and self.cycle.response_started:
            self.cut()  # there is no place for a second answer inside of the first
            return
        body = msgspec.json.encode(error_body(error))
        head = [
            STATUS_LINE[error.status].rstrip(),
            b"Content-Type: application/json",
            b"Content-Length: %d" % len(body),
            b"Connection: close",
        ]
        if isinstance(error, Overloaded):
            head.append(b"Retry-After: %d" % (error.retry_after or 1))
        self.transport.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        self.transport.close()


def bounded(limits: ServerConfig) -> type[Connection]:
    """A class, as uvicorn wants to make the objects itself."""
    return type("Bounded", (Connection,), {"limits": limits})


def too_large(limits: ServerConfig) -> HeadersTooLarge:
    return HeadersTooLarge(f"the headers are larger than {limits.max_header_bytes} bytes")
