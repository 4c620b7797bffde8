"""A chat client for OpenAI-compatible servers."""

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from ssl import SSLCertVerificationError
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from specserve.api.watch import Colored
from specserve.cli.chat import AnswerStatistics
from specserve.errors import ConfigError, RequestError, SpecserveError
from specserve.exchange.messages import StepDetails
from specserve.models.folder import Scaled
from specserve.text.template_messages import Message

CUT = "the connection closed before the response was complete"
T = TypeVar("T")


class NoAnswer(SpecserveError):
    """The server cannot be reached, or did not complete its response."""


class Failure(msgspec.Struct, frozen=True):
    message: str
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: Failure


class Card(msgspec.Struct, frozen=True):
    id: str
    # Only specserve sends these. `scaled`: demo models, padded to the compute of other models.
    drafter: str | None = None
    max_nodes: int | None = None
    scaled: list[Scaled] = []
    sources: list[str] = []  # draft sources
    chat_defaults: dict[str, float | int] = {}  # parameters, if the model's files name none


class Cards(msgspec.Struct, frozen=True):
    data: list[Card]


class ChunkDetails(msgspec.Struct, frozen=True):
    steps: list[StepDetails] = []


class ChunkDelta(msgspec.Struct, frozen=True):
    content: str | None = None


class ServerChoice(msgspec.Struct, frozen=True):
    delta: ChunkDelta
    finish_reason: str | None = None
    speculation: ChunkDetails | None = None  # only specserve sends it, if the request asks for it


class ChunkUsage(msgspec.Struct, frozen=True):
    completion_tokens: int


class ChunkSpeculation(msgspec.Struct, frozen=True):
    num_draft_tokens: int
    mean_acceptance_length: float | None
    drafter: str | None = None  # only specserve sends it


class ChunkMetrics(msgspec.Struct, frozen=True):
    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    speculative_decoding: ChunkSpeculation | None = None


class ServerChunk(msgspec.Struct, frozen=True):
    """The fields of an event that a chat needs."""

    choices: list[ServerChoice] = []
    usage: ChunkUsage | None = None
    metrics: ChunkMetrics | None = None
    error: Failure | None = None


class Remote:
    """An OpenAI-compatible server. Every request contains all `fields` that are not None."""

    def __init__(
        self,
        url: str,
        key: str | None,
        fields: Mapping[str, Any],
        colored: Colored | None = None,
        has_defaults: bool = False,
    ) -> None:
        """`has_defaults`: fields that are not given have the server's defaults for chats."""
        self.colored = colored
        self.url, self.split = url, read_url(url)
        self.path = self.split.path.rstrip("/").removesuffix("/v1") + "/v1"
        self.headers = {"Content-Type": "application/json"}
        if key is not None:
            self.headers["Authorization"] = f"Bearer {key}"
        self.card = self.pick(fields.get("model"))
        self.name = self.card.id
        given = {k: v for k, v in fields.items() if v is not None}
        defaults = self.card.chat_defaults if has_defaults else {}
        self.fields = {**defaults, **given, "model": self.card.id}
        self.fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if colored is not None:
            self.fields["return_speculation_details"] = True

    def set(self, name: str, value: Any) -> None:
        self.fields[name] = value

    def choose(self, model: str) -> None:
        self.card = self.pick(model)
        self.name = self.fields["model"] = self.card.id

    def pick(self, model: str | None) -> Card:
        """The model to request: `model`, or the server's first if it is None."""
        try:
            with self.request("GET", "/models") as response:
                cards = {card.id: card for card in decode(response.read(), Cards).data}
        except SpecserveError as e:
            raise ConfigError(str(e)) from e
        if model is None and cards:
            return next(iter(cards.values()))
        if model in cards:
            return cards[model]
        raise ConfigError(
            f"--model {model} is unknown to {self.url}. Its models are {', '.join(cards)}"
        )

    def stream_answer(self, messages: Sequence[Message]) -> Generator[str, None, AnswerStatistics]:
        # json, unlike msgspec, accepts surrogates, which stand for undecodable input
        body = json.dumps({**self.fields, "messages": messages}).encode()
        with self.request("POST", "/chat/completions", body) as response:
            return (yield from read_answer(events(response), self.noted))

    def noted(self, steps: Sequence[StepDetails]) -> None:
        if any(len(step.ends) != len(step.sources) for step in steps):
            raise NoAnswer("the server's step details do not have specserve's format")
        if self.colored is not None:
            self.colored.add_steps(steps)

    @contextmanager
    def request(self, method: str, path: str, body: bytes | None = None) -> Iterator[HTTPResponse]:
        """Send one request on a new connection, which closes at the end of the block."""
        with closing(self.connection()) as connection:
            try:
                connection.connect()
                # A long prompt takes time, and some servers send no comments meanwhile.
                connection.sock.settimeout(300.0)
                connection.request(method, self.path + path, body, self.headers)
                response = connection.getresponse()
            except SSLCertVerificationError as e:
                raise NoAnswer(
                    f"the certificate of {self.url} is not trusted ({e.verify_message}). To trust "
                    "its authority, set the environment variable SSL_CERT_FILE to a file with the "
                    "authority's certificate"
                ) from e
            except (OSError, HTTPException, UnicodeError) as e:  # UnicodeError: a bad host name
                raise NoAnswer(
                    f"cannot connect to {self.url} ({e}). Start a server with `specserve serve`, "
                    "or correct --url"
                ) from e
            try:
                if response.status != 200:
                    raise refusal(response)
                yield response
            except (OSError, HTTPException) as e:
                raise NoAnswer(CUT) from e

    def connection(self) -> HTTPConnection:
        kind = HTTPSConnection if self.split.scheme == "https" else HTTPConnection
        port = self.split.port or kind.default_port
        return kind(self.split.hostname or "", port, timeout=10.0)


def read_url(url: str) -> SplitResult:
    try:
        split = urlsplit(url)
        is_known = split.scheme in ("http", "https") and bool(split.hostname) and split.port != 0
    except ValueError:
        is_known = False
    is_plain = url.isascii() and url.isprintable() and not set(url) & set(" @?#")
    if not is_known or not is_plain:
        raise ConfigError(
            f"--url {url} is invalid. Write http://HOST:PORT, e.g. http://127.0.0.1:8000"
        )
    return split


def refusal(response: HTTPResponse) -> SpecserveError:
    """The error for a response whose status is not 200."""
    raw, status = response.read(), f"HTTP {response.status} {response.reason}"
    try:
        failure = msgspec.json.decode(raw, type=ErrorBody).error
    except msgspec.MsgspecError:
        failure = Failure(f"{status}: the URL may not be an OpenAI-compatible server")
    if response.status == 401:
        return RequestError(f"{failure.message} (pass the key with --api-key-file FILE)")
    if not 400 <= response.status < 500:
        return NoAnswer(failure.message)
    error = RequestError(failure.message)
    error.code = failure.code
    return error


def events(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of server-sent events; comments and other fields are skipped."""
    data: list[bytes] = []
    for line in lines:
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" ").rstrip(b"\r\n"))
        elif not line.strip() and data:
            yield b"\n".join(data)
            data = []


def read_answer(
    events: Iterable[bytes], note: Callable[[Sequence[StepDetails]], None]
) -> Generator[str, None, AnswerStatistics]:
    """Yield the text of chunks, and pass their steps to `note`. Raises NoAnswer unless the stream
    ends with a finish reason and [DONE].
    """
    last, reason = ServerChunk(), None
    for data in events:
        if data == b"[DONE]":
            break
        last = decode(data, ServerChunk)
        if last.error is not None:
            raise NoAnswer(last.error.message)
        for choice in last.choices:
            reason = choice.finish_reason or reason
            note(() if choice.speculation is None else choice.speculation.steps)
            yield choice.delta.content or ""
    else:
        raise NoAnswer(CUT)
    if reason is None:
        raise NoAnswer("the server ended the response without a finish reason")
    return statistics_of(last, reason)


def statistics_of(chunk: ServerChunk, reason: str) -> AnswerStatistics:
    """The statistics in the last chunk."""
    num_tokens = None if chunk.usage is None else chunk.usage.completion_tokens
    if (metrics := chunk.metrics) is None:
        return AnswerStatistics(reason, num_tokens)
    ttft, rest = metrics.time_to_first_token_ms, metrics.generation_time_ms
    total = None if ttft is None or rest is None else ttft + rest
    if (speculation := metrics.speculative_decoding) is None:
        return AnswerStatistics(reason, num_tokens, ttft, total, drafter="none")
    length = speculation.mean_acceptance_length if speculation.num_draft_tokens else None
    return AnswerStatistics(reason, num_tokens, ttft, total, length, speculation.drafter)


def decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as e:
        raise NoAnswer(f"the server is not OpenAI-compatible: {e}") from e
