"""HTTP connections with limits that uvicorn lacks: bytes of headers, timeouts, their number."""

import logging
import re
import secrets
from asyncio import BaseTransport, Event, TimerHandle, Transport
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from http import HTTPStatus
from time import perf_counter
from typing import Any, ClassVar
from urllib.parse import quote, unquote

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.config import ServerConfig
from specserve.errors import Overloaded, RequestError
from specserve.logs import ACCESS, request_id
from specserve.process import empty_free_lists
from specserve.server.completion import ENDS, LiveCompletion
from specserve.server.refusal import (
    StatusError,
    error_body,
    error_headers,
)
from specserve.server.uvicorn_interface import FlowControl, HttpToolsProtocol, RequestResponseCycle

SPARE = 128  # connections beyond the limit that get a 503; further ones are aborted
CHUNKS = "1.1"  # the first version of HTTP that has them
CONNECTION = "specserve.connection"  # key of the ASGI scope: a `Connection` that takes streams over
LARGE = 1 << 18  # bytes of a body that may have become so many objects that memory is given back

HEADER = b"x-request-id"  # by which an answer and its log lines are found
TAKEN = re.compile(rb"[!-~]([ -~]{0,126}[!-~])?")  # 1 to 128 characters, no space at the ends

log, access_log = logging.getLogger("specserve"), logging.getLogger(ACCESS)


class Streaming(RequestResponseCycle):
    """Takes the place of uvicorn's cycle once the head of an event stream is sent. It has only what
    the protocol looks at: most connections hold one for long.
    """

    body, response_started, message_event = bytearray(), True, Event()

    def __init__(self, keep_alive: bool, chunked: bool) -> None:
        self.keep_alive, self.response_complete, self.disconnected = keep_alive, False, False
        self.chunked_encoding = chunked  # else the stream ends where the connection does


class Flow(FlowControl):
    """uvicorn's flow control, whose event is made where somebody waits for it."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self.read_paused, self.write_paused = transport, False, False

    @cached_property
    def _is_writable_event(self) -> Event:  # type: ignore[override]
        event = Event()
        if not self.write_paused:
            event.set()
        return event


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits, and without pipelining."""

    # With uvicorn's attributes they are too many for the small kind of an instance's dict, by 1 KB.
    __slots__ = (
        "begun",
        "completion",
        "ends",
        "is_in_headers",
        "is_input_closed",
        "num_body",
        "num_pending",
        "stalled",
        "timer",
    )

    limits: ServerConfig
    # A connection answers one request at a time, and an empty deque takes 0.7 KB.
    no_pipeline: ClassVar[deque[Any]] = deque(maxlen=0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pipeline = self.no_pipeline
        self.timer: TimerHandle | None = None  # set while the rest of a request is awaited
        self.stalled: TimerHandle | None = None  # set while the client does not read its response
        self.is_in_headers = True
        self.is_input_closed = False  # further data is ignored
        self.num_pending = 0  # bytes received since the last piece of a body or end of a request
        self.num_body = 0  # bytes of the request's body
        self.resume = 0.0  # seconds, perf_counter: when the request's first bytes came
        self.completion: LiveCompletion | None = None  # while it streams one
        self.ends: Sequence[Callable[[], None]] = ()  # called when that has ended, the last first

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow = Flow(transport)  # type: ignore[arg-type]
        if len(self.connections) > self.limits.max_connections + SPARE:
            self.transport.abort()
        else:
            self.expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self.expect_nothing()
        self.resume_writing()
        if self.stalled is not None:
            self.stalled.cancel()
            self.stalled = None
        super().connection_lost(exc)
        if self.completion is not None:
            self.completion.leave()

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        if self.is_input_closed:
            return
        self._unset_keepalive_if_required()
        if self.parser is None:
            self.parser = self.new_parser()
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
        """Parse a request again without its Upgrade header: the parser leaves the body of an
        upgrade to the other protocol, and this server speaks none.

        Happens at most once per piece of data, for the first request in it: afterwards that
        request is being answered, or the input is closed.
        """
        if self.is_input_closed:
            return
        if self.is_answering:
            self.close_input()
        elif self.parser.get_method() == b"CONNECT":
            log.warning("refused CONNECT from %s: this server is no proxy", self.client)
            self.refuse(StatusError(405, "this server is no proxy: send requests to it itself"))
        else:
            head = self.plain_head()
            self.parser = self.new_parser()
            self.feed(head + rest)

    def new_parser(self) -> HttpRequestParser:
        parser = HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return parser

    def plain_head(self) -> bytes:
        """The request line and the headers, without Upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_headers:  # trailers are dropped: they could replace headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.is_input_closed or self.parser.should_upgrade():
            return
        self.expect_nothing()
        self.is_in_headers = False
        lines = (len(name) + len(value) + len(": \r\n") for name, value in self.headers)
        size = len(self.url) + sum(lines)
        if self.is_answering:
            self.close_input()
        elif size > self.limits.max_header_bytes:
            self.refuse(too_large(self.limits))
        elif len(self.connections) > self.limits.max_connections:
            self.refuse(
                Overloaded(f"{self.limits.max_connections} connections are open: ask later")
            )
        else:
            self.num_body = 0
            # 5 s more than the application has, whose error says what was too slow.
            self.timer = self.loop.call_later(self.limits.body_seconds + 5.0, self.cut)
            is_old = self.parser.get_http_version() < CHUNKS
            self.expect_100_continue = self.expect_100_continue and not is_old
            super().on_headers_complete()
            if is_old:  # uvicorn closes such a connection, even if the client wants to keep it
                self.cycle.keep_alive = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.num_pending = 0
        self.num_body += len(body)
        if not self.is_input_closed:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.is_input_closed or self.parser.should_upgrade():
            return
        self.expect_nothing()
        self.is_in_headers, self.num_pending = True, 0
        super().on_message_complete()
        self.url, self.headers = b"", []  # they are in the scope, and not the next request's

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, partial(self.run_app, cycle, app))

    async def run_app(
        self, cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send event streams without `Connection: close`, even if the client asked for it: with
        that header a client takes a broken connection for the end of the stream. Every answer has
        the id of its request. HTTP/1.0 gets no chunks, and a header if its connection is kept.
        """

        is_old = scope["http_version"] < CHUNKS
        id = id_of(scope["headers"])
        request_id.set(id)  # until this task ends, which is the request's own

        async def send_open(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start:
                message["headers"] = [*message.get("headers", ()), (HEADER, id.encode())]
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            if not (is_start and kind.startswith(b"text/event-stream")):
                if is_old and is_start and cycle.keep_alive:
                    message["headers"].append((b"connection", b"keep-alive"))
                await send(message)
                return
            is_kept, cycle.keep_alive = cycle.keep_alive and not is_old, True
            if is_old:
                cycle.chunked_encoding = False
            await send(message)
            cycle.keep_alive = is_kept and not self.is_input_closed

        scope[CONNECTION], scope[ENDS] = self, list[Callable[[], None]]()
        try:
            await app(scope, receive, send_open)
        finally:
            if self.completion is None:
                for end in reversed(scope[ENDS]):
                    end()
        if self.num_body > LARGE:
            empty_free_lists()

    def take_over(self, completion: LiveCompletion, ends: Sequence[Callable[[], None]]) -> None:
        """Become the sink of an event stream whose head is sent. The application is to return: its
        task and the frames of its layers take memory for as long as they wait, and time of each
        piece.
        """
        self.cycle.response_complete = True  # for uvicorn
        self.cycle = Streaming(self.cycle.keep_alive, self.cycle.chunked_encoding is True)
        self.completion, self.ends = completion, ends
        if self.is_in_headers and not self.num_pending:  # nothing has come of another request
            self.scope, self.parser = None, None  # type: ignore[assignment]
        if self.transport.is_closing():
            completion.leave()

    @property
    def is_writable(self) -> bool:
        """Whether the client reads. What is written for one that has left is dropped."""
        return self.stalled is None or self.transport.is_closing()

    def push(self, events: bytes) -> None:
        """Send a part of the stream."""
        if not self.transport.is_closing():
            is_chunked = self.cycle.chunked_encoding
            self.transport.write(b"%x\r\n%b\r\n" % (len(events), events) if is_chunked else events)

    def end(self) -> None:
        """End the stream."""
        self.cycle.response_complete, self.completion = True, None
        if not self.transport.is_closing():
            if self.cycle.chunked_encoding:
                self.transport.write(b"0\r\n\r\n")
            if not self.cycle.keep_alive:
                self.transport.close()
            self.on_response_complete()
        ends, self.ends = self.ends, ()
        for end in reversed(ends):
            end()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.is_in_headers and self.expect_100_continue and not self.cycle.body:
            # No 100 Continue was sent: the next bytes may be the body or another request.
            self.transport.close()
        self.watch_last_bytes()

    def close_input(self) -> None:
        """Make the request that is being answered the last one of this connection."""
        self.is_input_closed, self.cycle.keep_alive = True, False

    def expect_headers(self) -> None:
        self.resume = perf_counter()
        self.timer = self.loop.call_later(self.limits.header_seconds, self.on_slow_headers)

    def expect_nothing(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def on_slow_headers(self) -> None:
        self.timer = None
        if not self.is_answering:  # else a stray line end started the timer
            message = f"no headers came within {self.limits.header_seconds:g} s"
            self.refuse(StatusError(408, message, "request_timeout"))

    def pause_writing(self) -> None:
        self.stalled = self.loop.call_later(self.limits.stall_seconds, self.cut)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self.stalled is not None:
            self.stalled.cancel()
            self.stalled = None
        super().resume_writing()
        self.watch_last_bytes()
        if self.completion is not None:
            self.completion.wake()

    def watch_last_bytes(self) -> None:
        """Cut a client that does not read them: a transport that is closed waits for it."""
        is_waiting = self.transport.is_closing() and self.transport.get_write_buffer_size() > 0
        if is_waiting and self.stalled is None:
            self.stalled = self.loop.call_later(self.limits.stall_seconds, self.cut)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.watch_last_bytes()

    def cut(self) -> None:
        """Close the connection at once; unsent bytes are lost."""
        self.transport.abort()

    def refuse(self, error: RequestError | Overloaded) -> None:
        """Send an error without calling the application, then close the connection."""
        self.is_input_closed = True
        if self.is_answering and self.cycle.response_started:
            self.cut()  # an error response cannot be sent inside of another response
            return
        body, id = msgspec.json.encode(error_body(error)), id_of(self.headers or ())
        status = HTTPStatus(error.status)
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            "X-Request-Id": id,
            **error_headers(error),
        }
        lines = [f"HTTP/1.1 {status} {status.phrase}", *map(": ".join, headers.items()), "", ""]
        self.transport.write("\r\n".join(lines).encode() + body)
        self.transport.close()
        if self.limits.access_log:
            self.log(error.status, id)

    def log(self, status: int, id: str) -> None:
        """The line of a request that the application has not seen, with what is known of it."""
        url = getattr(self, "url", b"")
        given = unquote(url.partition(b"?")[0].decode("latin-1"))
        path = canonical(given) if given else "-"
        method = self.parser.get_method().decode() if url else "-"
        log_request(method, path, status, perf_counter() - self.resume, {}, id)


def canonical(path: str) -> str:
    """Without empty segments, and without a slash at the end."""
    return re.sub("/+", "/", path).rstrip("/") or "/"


def bounded(limits: ServerConfig) -> type[Connection]:
    """A `Connection` class with these limits: uvicorn creates the instances itself."""
    return type("Bounded", (Connection,), {"limits": limits})


def too_large(limits: ServerConfig) -> StatusError:
    message = f"the headers are larger than {limits.max_header_bytes} bytes"
    return StatusError(431, message, "headers_too_large")


def id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's own, if it can be shown anywhere; else a new one."""
    given = next((value for name, value in headers if name == HEADER), b"")
    return given.decode() if TAKEN.fullmatch(given) else f"req-{secrets.token_hex(16)}"


def log_request(
    method: str,
    path: str,
    status: int,
    seconds: float,
    fields: dict[str, Any],
    request_id: str = "",
) -> None:
    """A line of the access log; without `request_id`, with that of the current task.

    It has no query, which may hold a secret. It is quoted, as a path may move the cursor. Optional
    are the number of the API key and, of a completion, tokens, milliseconds and the end.
    """
    path, ms = quote(path[:200], safe="/:"), 1e3 * seconds
    words = [f"{method} {path} {status} {ms:.0f} ms"]
    if "key" in fields:
        words.append(f"key {fields['key']}")
    if "prompt_tokens" in fields:
        counts = fields["prompt_tokens"], fields["completion_tokens"]
        words.append("{} prompt tokens, {} completed".format(*counts))
        words += [f"TTFT {fields['ttft_ms']:.0f} ms"] if "ttft_ms" in fields else []
        words.append("client left" if fields["client_left"] else fields["finish_reason"])
    known = {"method": method, "path": path, "status": status, "duration_ms": round(ms, 1)}
    extra = {"fields": known | fields, "request_id": request_id}
    access_log.info("%s", ", ".join(words), extra=extra)
