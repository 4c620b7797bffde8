"""HTTP connections with limits that uvicorn lacks: size of headers, timeouts, open connections."""

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

SPARE = 128  # connections above the limit that get a 503; further ones are aborted
CHUNKS = "1.1"  # first version of HTTP with chunked encoding
CONNECTION = "specserve.connection"  # key of the ASGI scope: the `Connection`, to take over streams
LARGE = 1 << 18  # bytes of a body after which free lists of objects are emptied

HEADER = b"x-request-id"  # identifies a response and its log lines
TAKEN = re.compile(rb"[!-~]([ -~]{0,126}[!-~])?")  # ids of clients: 1 to 128 characters

log, access_log = logging.getLogger("specserve"), logging.getLogger(ACCESS)


class Streaming(RequestResponseCycle):
    """Replaces uvicorn's cycle once the head of an event stream is sent.

    It only has the attributes that the protocol reads, because most connections store one for long.
    """

    body, response_started, message_event = bytearray(), True, Event()

    def __init__(self, keep_alive: bool, chunked: bool) -> None:
        self.keep_alive, self.response_complete, self.disconnected = keep_alive, False, False
        self.chunked_encoding = chunked  # if false, the end of the connection ends the stream


class Flow(FlowControl):
    """uvicorn's flow control, which creates its event on first use."""

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

    # Slots save 1 KB: with uvicorn's attributes, these do not fit the small form of a dict.
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
    # Shared, because an empty deque takes 0.7 KB: a connection handles one request at a time.
    no_pipeline: ClassVar[deque[Any]] = deque(maxlen=0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pipeline = self.no_pipeline
        self.timer: TimerHandle | None = None  # set while the rest of a request is expected
        self.stalled: TimerHandle | None = None  # set while the client does not read its response
        self.is_in_headers = True
        self.is_input_closed = False  # further data is ignored
        self.num_pending = 0  # bytes received since the last piece of a body or end of a request
        self.num_body = 0  # bytes of the request's body
        self.received_at = 0.0  # seconds, perf_counter: arrival of the request's first bytes
        self.completion: LiveCompletion | None = None  # set while the connection streams it
        self.ends: Sequence[Callable[[], None]] = ()  # called after the stream, the last one first

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
                self.refuse(RequestError("the request is not valid HTTP"))

    def read_without_upgrade(self, rest: bytes) -> None:
        """Parse a request again without its Upgrade header.

        The parser does not parse the body of an upgrade, and this server supports no upgrade. This
        happens at most once per piece of data, for its first request. Afterwards that request is
        being handled, or the input is closed.
        """
        if self.is_input_closed:
            return
        if self.is_answering:
            self.close_input()
        elif self.parser.get_method() == b"CONNECT":
            log.warning("refused CONNECT from %s: this server is not a proxy", self.client)
            self.refuse(StatusError(405, "this server is not a proxy. Send requests directly"))
        else:
            head = self.plain_head()
            self.parser = self.new_parser()
            self.feed(head + rest)

    def new_parser(self) -> HttpRequestParser:
        parser = HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
        return parser

    def plain_head(self) -> bytes:
        """Return the request line and the headers, without Upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_headers:  # drops trailers, which could replace headers
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
                Overloaded(f"{self.limits.max_connections} connections are open. Retry later")
            )
        else:
            self.num_body = 0
            # 5 s more than the application's limit, which has a better error message.
            self.timer = self.loop.call_later(self.limits.body_seconds + 5.0, self.cut)
            is_old = self.parser.get_http_version() < CHUNKS
            self.expect_100_continue = self.expect_100_continue and not is_old
            super().on_headers_complete()
            if is_old:  # uvicorn would close it, even if the client wants to keep it
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
        self.url, self.headers = b"", []  # the scope has them; the next request gets new ones

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, partial(self.run_app, cycle, app))

    async def run_app(
        self, cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Run the application, and adapt the headers of its responses.

        Event streams have no `Connection: close`, even on request: with it, clients mistake a
        broken connection for the end of the stream. Every response has the id of its request.
        HTTP/1.0 gets no chunks, and `Connection: keep-alive` if the connection is kept.
        """

        is_old = scope["http_version"] < CHUNKS
        id = id_of(scope["headers"])
        request_id.set(id)  # for this task, which only handles this request

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
        """Become the sink of an event stream whose head is sent.

        The application then returns. Otherwise its task and the frames of its layers would use
        memory until the end, and time for each piece.
        """
        self.cycle.response_complete = True  # for uvicorn
        self.cycle = Streaming(self.cycle.keep_alive, self.cycle.chunked_encoding is True)
        self.completion, self.ends = completion, ends
        if self.is_in_headers and not self.num_pending:  # no bytes of a next request yet
            self.scope, self.parser = None, None  # type: ignore[assignment]
        if self.transport.is_closing():
            completion.leave()

    @property
    def is_writable(self) -> bool:
        """Whether the client reads. Data for a client that has left is dropped."""
        return self.stalled is None or self.transport.is_closing()

    def push(self, events: bytes) -> None:
        """Send events of the stream."""
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
        """Make the current request the last one of this connection."""
        self.is_input_closed, self.cycle.keep_alive = True, False

    def expect_headers(self) -> None:
        self.received_at = perf_counter()
        self.timer = self.loop.call_later(self.limits.header_seconds, self.on_slow_headers)

    def expect_nothing(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def on_slow_headers(self) -> None:
        self.timer = None
        if not self.is_answering:  # else a stray line end started the timer
            message = f"the headers did not arrive within {self.limits.header_seconds:g} s"
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
        """Cut a client that does not read the last bytes; a closing transport would wait for it."""
        is_waiting = self.transport.is_closing() and self.transport.get_write_buffer_size() > 0
        if is_waiting and self.stalled is None:
            self.stalled = self.loop.call_later(self.limits.stall_seconds, self.cut)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.watch_last_bytes()

    def cut(self) -> None:
        """Close the connection at once, and drop unsent bytes."""
        self.transport.abort()

    def refuse(self, error: RequestError | Overloaded) -> None:
        """Send an error without calling the application, then close the connection."""
        self.is_input_closed = True
        if self.is_answering and self.cycle.response_started:
            self.cut()  # an error cannot be sent within another response
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
        """Log a request that the application did not get."""
        url = getattr(self, "url", b"")
        given = unquote(url.partition(b"?")[0].decode("latin-1"))
        path = canonical(given) if given else "-"
        method = self.parser.get_method().decode() if url else "-"
        log_request(method, path, status, perf_counter() - self.received_at, {}, id)


def canonical(path: str) -> str:
    """Return a path without empty segments, and without a slash at the end."""
    return re.sub("/+", "/", path).rstrip("/") or "/"


def bounded(limits: ServerConfig) -> type[Connection]:
    """Return a `Connection` class with these limits, of which uvicorn creates instances."""
    return type("Bounded", (Connection,), {"limits": limits})


def too_large(limits: ServerConfig) -> StatusError:
    message = f"the headers are larger than {limits.max_header_bytes} bytes. Send less"
    return StatusError(431, message, "headers_too_large")


def id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's request id if it is printable and short; else a new one."""
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
    """Write a line of the access log. `request_id` defaults to the id of the current task.

    The line has no query, which can contain a secret. The path is quoted, because it can contain
    control characters. Fields of API keys and completions are optional.
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
