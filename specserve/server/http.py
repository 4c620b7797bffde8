"""One connection, within bounds that uvicorn does not set: bytes of headers, seconds, how many."""

from asyncio import BaseTransport, TimerHandle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
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
    """What a response may do to the connection that it goes out on."""

    def __init__(self, connection: HttpToolsProtocol) -> None:
        self.transport, self.cycle = connection.transport, connection.cycle

    def cut(self) -> None:
        """End it, unsent bytes and all."""
        self.transport.abort()

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


def bounded(limits: ServerConfig) -> type[HttpToolsProtocol]:
    """uvicorn's protocol within `limits`."""

    class Connection(HttpToolsProtocol):
        timer: TimerHandle | None = None  # while the rest of a request is waited for
        is_in_headers = True
        is_refused = False
        cycles: Sequence[RequestResponseCycle] = ()  # pipelined ones wait for the first
        num_pending = 0  # bytes since the headers began

        def connection_made(self, transport: BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            if len(self.connections) > limits.max_connections + SPARE:
                self.transport.abort()
            else:
                self.expect_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self.expect_nothing()
            for cycle in self.cycles:  # uvicorn tells the last one only
                cycle.disconnected = True
                cycle.message_event.set()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.timer is None:
                self.expect_headers()
            self.num_pending += len(data)
            super().data_received(data)
            if self.is_in_headers and self.num_pending > limits.max_header_bytes:
                self.refuse(too_large(limits))

        def on_headers_complete(self) -> None:
            self.expect_nothing()
            self.is_in_headers = False
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > limits.max_header_bytes:
                self.refuse(too_large(limits))
            elif len(self.connections) > limits.max_connections:
                self.refuse(Overloaded(f"{limits.max_connections} connections are open: ask later"))
            if not self.is_refused:
                self.timer = self.loop.call_later(limits.body_seconds + GRACE, self.cut)
                super().on_headers_complete()
                open_ones = [cycle for cycle in self.cycles if not cycle.response_complete]
                self.cycles = [*open_ones, self.cycle]
                self.scope["extensions"] = {EXTENSION: Hold(self)}  # type: ignore[dict-item]

        def on_body(self, body: bytes) -> None:
            if not self.is_refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self.expect_nothing()
            self.is_in_headers, self.num_pending = True, 0
            if not self.is_refused:
                super().on_message_complete()

        def expect_headers(self) -> None:
            self.timer = self.loop.call_later(limits.header_seconds, self.on_slow_headers)

        def expect_nothing(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

        def on_slow_headers(self) -> None:
            self.timer = None
            if self.cycle is None or self.cycle.response_complete:  # else it was a stray line end
                self.refuse(TimedOut(f"no headers came within {limits.header_seconds:g} s"))

        def cut(self) -> None:
            self.transport.abort()

        def send_400_response(self, msg: str) -> None:
            self.refuse(RequestError(msg))

        def refuse(self, error: RequestError | Overloaded) -> None:
            """An answer without the application, and the end of the connection."""
            self.is_refused = True
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

    return Connection


def too_large(limits: ServerConfig) -> HeadersTooLarge:
    return HeadersTooLarge(f"the headers are larger than {limits.max_header_bytes} bytes")
