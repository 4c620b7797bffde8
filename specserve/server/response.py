"""Responses: a completion as server-sent events or as one JSON object, and other JSON."""

import asyncio
import logging
import secrets
import time
from bisect import bisect_left
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specserve.api.outputs import Generation, best
from specserve.exchange.messages import StepDetails
from specserve.logs import request_id
from specserve.server.body import Body, FormattedBody
from specserve.server.connection import CONNECTION, Connection
from specserve.server.flush import COMMENT, flush_of, padded
from specserve.server.live_completion import ENDS, ChoiceDelta, LiveCompletion, Steps
from specserve.server.logprobs import Namer, Told, prompt_form, prompt_starts, sealed
from specserve.server.refusal import error_body, error_response
from specserve.server.service import ServedModel, Service
from specserve.text.answer.events import Answer, AnswerParser, CallBegin, Content, Event, answer_of
from specserve.text.answer.formats import AnswerReader

T = TypeVar("T")
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # else nginx buffers events
]
DONE = b"data: [DONE]\n\n"
MANY = 1 << 9  # logprobs, beyond which writing them takes a good part of a millisecond
# Line ends to Python's splitlines(), by which some clients split a stream.
LINE_ENDS = {c.encode(): f"\\u{ord(c):04x}".encode() for c in "\u2028\u2029\u0085"}

log = logging.getLogger("specserve")


class RouteSchema(NamedTuple):
    """What differs between the JSON of the two completion routes."""

    prefix: str  # of ids
    chunk: str  # names of objects
    whole: str
    piece: Callable[[Event, bool], dict[str, Any]]  # and whether it is the first of its choice
    all: Callable[[Answer], dict[str, Any]]
    logprobs: Callable[[Told, Namer], dict[str, Any]]
    choices_have_prompts: bool  # their ids and logprobs; else the answer has its one prompt's


class Ids(NamedTuple):
    """Fields by token ids, of a choice and of the answer that it is in."""

    choice: dict[str, Any]
    answer: dict[str, Any]


class CompletionWriter:
    """Writes a completion in the JSON of its route, as chunks or whole."""

    def __init__(
        self,
        schema: RouteSchema,
        served: ServedModel,
        asked: FormattedBody,
        completion: LiveCompletion,
        echoed: Sequence[str] = (),
        reader: AnswerReader | None = None,
    ) -> None:
        self.schema, self.served, self.completion = schema, served, completion
        self.reader = None if reader is None or reader.is_plain else reader
        self.parsers: dict[int, tuple[AnswerParser, Generation]] = {}  # by choice
        self.calling: set[int] = set()  # choices with a tool call
        options = asked.stream_options
        self.has_usage = bool(options and options.include_usage)
        self.has_running_usage = bool(options and options.continuous_usage_stats)
        self.has_ids = asked.return_token_ids
        self.num_prompt_top = asked.prompt_logprobs
        self.echoed, self.params = echoed, asked.params  # of each prompt, its text
        self.tokenizer = completion.firsts[0].stream.tokenizer
        self.namer = self.make_namer(asked.return_tokens_as_token_ids)
        is_told = self.namer is not None or self.num_prompt_top is not None
        self.tells_steps = self.has_ids or is_told  # a chunk of each, whether it has text or not
        self.echoed_forms: dict[int, dict[str, Any]] = {}  # of prompts, for all their choices
        self.prompt_forms: dict[int, list[Any]] = {}
        self.begun: set[int] = set()
        self.around: dict[int, tuple[bytes, bytes]] = {}  # by choice: the text of a plain event
        self.is_plain = not (self.reader or self.tells_steps or self.has_running_usage)
        self.num_ended = self.num_told = 0  # choices; tokens
        self.head: dict[str, Any] = {
            "id": f"{schema.prefix}-{secrets.token_hex(12)}",
            "object": schema.chunk,
            "created": int(time.time()),
            "model": served.model,
            "system_fingerprint": served.fingerprint,
        }
        completion.response_id = self.head["id"]

    def chunks(self, delta: ChoiceDelta) -> Iterator[dict[str, Any]]:
        """The chunks of one choice's step, one for each event that its text turns into; none if it
        adds no text that can be sent yet.

        The first step always has one, as clients take that for the first token, even where the
        text of this token is still held back; and so has every step that is told in detail, or
        whose ids or logprobs are.
        """
        self.num_told += len(delta.token_ids)
        is_first = delta.choice not in self.begun
        events = self.events(delta, is_first)
        if events or delta.details or self.tells_steps or (is_first and not delta.is_last):
            has_prompt = is_first if self.schema.choices_have_prompts else not self.begun
            generation = self.completion.generations[delta.choice]
            ids = self.ids(delta.choice, delta.token_ids, has_prompt)
            first, *rest = events or [Content("")]
            choice = self.choice(delta.choice, first)
            if self.namer is not None:
                these = slice(delta.begin, delta.begin + len(delta.token_ids))
                form = self.form(self.namer, delta.choice, generation, these, is_first)
                choice["logprobs"] = form
            choice |= self.details(delta.details)
            yield self.chunk(choice | ids.choice) | ids.answer
            for event in rest:
                yield self.chunk(self.choice(delta.choice, event))
        if delta.is_last:
            generation = self.completion.generations[delta.choice]
            self.num_ended += 1
            choice = self.choice(delta.choice, Content(""), self.reason(delta.choice, generation))
            chunk = self.chunk(choice | ending(generation))
            is_final = self.num_ended == len(self.completion.generations) and not self.has_usage
            yield chunk | self.statistics() if is_final else chunk

    def events(self, delta: ChoiceDelta, is_first: bool) -> list[Event]:
        """What a step's text turns into."""
        if self.reader is None:
            text = self.echo(delta.choice) + delta.text if is_first else delta.text
            return [Content(text)] if text else []
        parser = self.parser(delta.choice, self.completion.generations[delta.choice])
        events = parser.push(delta.text) if delta.text else []
        if delta.is_last:
            events += parser.finish()
        if any(isinstance(event, CallBegin) for event in events):
            self.calling.add(delta.choice)
        return events

    def parser(self, index: int, generation: Generation) -> AnswerParser:
        assert self.reader is not None, "plain text is not parsed"
        if index not in self.parsers:
            self.parsers[index] = self.reader.parser(), generation
        return self.parsers[index][0]

    def answer(self, index: int, generation: Generation) -> Answer:
        """A choice as a whole."""
        if self.reader is None:
            return Answer(self.echo(index) + generation.text)
        parser = self.parser(index, generation)
        answer = answer_of([*parser.push(generation.text), *parser.finish()])
        if answer.calls:
            self.calling.add(index)
        return answer

    def reason(self, index: int, generation: Generation) -> str | None:
        """Why a choice ended; "stop", too, where the caller named the function to call."""
        reason, reader = generation.finish_reason, self.reader
        is_named = reader is None or reader.wanted.is_named
        return (
            "tool_calls" if reason == "stop" and index in self.calling and not is_named else reason
        )

    def usage(self) -> dict[str, Any]:
        usage = self.completion.usage()
        if self.reader is None or not self.reader.has_reasoning:
            return usage
        counts = [bisect_left(g.starts, p.num_reasoning) for p, g in self.parsers.values()]
        details = usage.get("completion_tokens_details", {}) | {"reasoning_tokens": sum(counts)}
        return usage | {"completion_tokens_details": details}

    def running_counts(self) -> dict[str, int]:
        """Of the usage, what is counted up to a chunk: more tokens may have come than are told."""
        prompt = sum(len(g.prompt) for g in self.completion.firsts)
        return {"completion_tokens": self.num_told, "total_tokens": prompt + self.num_told}

    def choice(self, index: int, event: Event, reason: str | None = None) -> dict[str, Any]:
        piece = self.schema.piece(event, index not in self.begun)
        self.begun.add(index)
        return {"index": index, **piece, "logprobs": None, "finish_reason": reason}

    def make_namer(self, has_ids: bool) -> Namer | None:
        """None where nobody asked for logprobs."""
        if self.params.num_top is None:
            return None
        return Namer(self.tokenizer, self.params.num_top, has_ids)

    def echo(self, index: int) -> str:
        """The text that a choice begins with."""
        return self.echoed[index // self.params.n] if self.echoed else ""

    @property
    def is_long(self) -> bool:
        return self.namer is not None or self.num_prompt_top is not None

    def num_logprobs(self, deltas: Sequence[ChoiceDelta]) -> int:
        if self.namer is None and self.num_prompt_top is None:
            return 0
        firsts = {d.choice for d in deltas} - self.begun
        prompts = sum(len(self.first(c).prompt_logprobs) for c in firsts)
        new = sum(len(d.token_ids) for d in deltas) if self.namer is not None else 0
        top = max(self.params.num_top or 0, self.params.prompt_logprobs or 0)
        return (prompts + new) * (1 + top)

    def form(
        self, namer: Namer, index: int, generation: Generation, these: slice, is_first: bool
    ) -> dict[str, Any]:
        """The logprobs of some of a choice's tokens, with those of its prompt before the first, if
        it is echoed.
        """
        text = self.echo(index)
        told = Told(
            generation.token_ids[these],
            generation.logprobs[these],
            [len(text) + start for start in generation.starts[these]],
        )
        own: dict[str, Any] = sealed(self.schema.logprobs(told, namer))
        if not (self.echoed and is_first):
            return own
        return {name: [*of, *own[name]] for name, of in self.echoed_form(namer, index).items()}

    def echoed_form(self, namer: Namer, index: int) -> dict[str, Any]:
        first = self.first(index)
        if first.id not in self.echoed_forms:
            starts = prompt_starts(first.prompt, self.echo(index), self.tokenizer)
            told = Told(first.prompt, [None, *first.prompt_logprobs], starts)
            self.echoed_forms[first.id] = sealed(self.schema.logprobs(told, namer))
        return self.echoed_forms[first.id]

    def details(self, steps: Sequence[StepDetails]) -> dict[str, Any]:
        """Where tokens came from; nothing where the request did not ask for it."""
        if not steps:
            return {}
        return {"speculation": {"sources": self.served.known_sources, "steps": steps}}

    def first(self, index: int) -> Generation:
        """The first choice that has the prompt of a choice: it alone is told its logprobs."""
        return self.completion.firsts[index // self.params.n]

    def ids(self, index: int, new: list[int], has_prompt: bool) -> "Ids":
        """The ids of a choice and, once, those and the logprobs of its prompt; nothing where nobody
        asked for them.
        """
        ids: dict[str, Any] = {"token_ids": new} if self.has_ids else {}
        prompt = self.of_prompt(self.first(index)) if has_prompt else {}
        return Ids(prompt | ids, {}) if self.schema.choices_have_prompts else Ids(ids, prompt)

    def of_prompt(self, first: Generation) -> dict[str, Any]:
        prompt = first.prompt
        told: dict[str, Any] = {"prompt_token_ids": list(prompt)} if self.has_ids else {}
        if self.num_prompt_top is not None:
            if first.id not in self.prompt_forms:
                known = prompt, first.prompt_logprobs
                form = prompt_form(*known, self.num_prompt_top, self.tokenizer)
                self.prompt_forms |= {first.id: sealed(form)}
            told["prompt_logprobs"] = self.prompt_forms[first.id]
        return told

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self.head | {"choices": [choice]}
        if self.has_running_usage:
            chunk["usage"] = self.usage() | self.running_counts()
        elif self.has_usage:
            chunk["usage"] = None
        return chunk

    def beginning(self) -> list[bytes]:
        return []

    def step(self, deltas: Sequence[ChoiceDelta]) -> list[bytes]:
        return [event for delta in deltas for event in self.events_of(delta)]

    def events_of(self, delta: ChoiceDelta) -> list[bytes]:
        """The events of one choice's step. Most add only text, and differ in nothing else."""
        if (
            self.is_plain
            and delta.choice in self.begun
            and delta.text
            and not (delta.is_last or delta.details)
        ):
            before, after = self.around.get(delta.choice) or self.find_around(delta.choice)
            return [before + json_text(delta.text) + after]
        return [event(chunk) for chunk in self.chunks(delta)]

    def find_around(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in an event of a choice that has begun."""
        mark = secrets.token_hex(16)
        whole = event(self.chunk(self.choice(index, Content(mark))))
        before, after = whole.split(b'"%b"' % mark.encode())
        self.around[index] = before, after
        return before, after

    def idle(self, choice: int) -> bytes:
        none = self.schema.piece(Content(""), False)
        told = {"index": choice, **none, "logprobs": None, "finish_reason": None}
        return event(self.chunk(told))

    def ending(self, error: Exception | None) -> list[bytes]:
        """[DONE], after an error or, if it was requested, the usage chunk."""
        if error is not None:
            return [event(error_body(error)), DONE]
        if not self.has_usage:
            return [DONE]
        count = {"choices": [], "usage": self.usage()}
        return [event(self.head | count | self.statistics()), DONE]

    def whole(self) -> dict[str, Any]:
        choices = [self.whole_choice(i, g) for i, g in enumerate(self.given())]
        usage = self.usage()
        whole = {"object": self.schema.whole, "choices": choices, "usage": usage}
        ids = self.ids(0, [], has_prompt=not self.schema.choices_have_prompts)
        return self.head | whole | ids.answer | self.statistics()

    def given(self) -> list[Generation]:
        """All choices, or the best of each prompt."""
        all, params = self.completion.generations, self.params
        if not params.is_ranked:
            return all
        each = (all[i : i + params.num_choices] for i in range(0, len(all), params.num_choices))
        return [choice for choices in each for choice in best(choices, params.n)]

    def whole_choice(self, index: int, generation: Generation) -> dict[str, Any]:
        logprobs, answer = None, self.answer(index, generation)
        if self.namer is not None:
            logprobs = self.form(self.namer, index, generation, slice(None), is_first=True)
        return {
            "index": index,
            **self.schema.all(answer),
            "logprobs": logprobs,
            "finish_reason": self.reason(index, generation),
            **ending(generation),
            **self.details(generation.details),
            **self.ids(index, generation.token_ids, self.schema.choices_have_prompts).choice,
        }

    def statistics(self) -> dict[str, Any]:
        completion, served = self.completion, self.served
        return {
            "metrics": completion.statistics(
                served.drafter, served.max_nodes, served.row_invariant
            ),
            "timings": completion.timings(),
        }


def ending(generation: Generation) -> dict[str, Any]:
    """What is told of a choice at its end, beside OpenAI's fields."""
    return {"stop_reason": generation.stop_reason, "seed": generation.sampling.seed}


class Writer(Protocol):
    """Writes an answer as server-sent events or whole."""

    @property
    def is_long(self) -> bool:
        """Whether it takes so long to write all of it that streams would have to wait."""
        ...

    def whole(self) -> dict[str, Any]: ...

    def num_logprobs(self, deltas: Sequence[ChoiceDelta]) -> int:
        """How many are written for these steps."""
        ...

    def beginning(self) -> list[bytes]:
        """Events before the first token."""
        ...

    def step(self, deltas: Sequence[ChoiceDelta]) -> list[bytes]: ...

    def idle(self, choice: int) -> bytes:
        """An event that adds nothing to a choice."""
        ...

    def ending(self, error: Exception | None) -> list[bytes]:
        """The last events, after all text or an error."""
        ...


class EventStream(Response):
    """Streams a completion's events. They say how it ends, with an error if it failed."""

    def __init__(
        self,
        completion: LiveCompletion,
        writer: Writer,
        service: Service,
        asked: Body,
    ) -> None:
        self.completion, self.writer, self.service = completion, writer, service
        self.more = asked.headers
        limits = service.limits
        self.is_by_step = limits.stream_flush == "event"
        self.flush = (
            Steps(completion, limits.comment_seconds)
            if self.is_by_step
            else flush_of(limits, completion)
        )
        wish = asked.stream_options and asked.stream_options.include_obfuscation
        self.is_padded = self.flush.is_padded if wish is None else wish
        self.unsent: list[bytes] = []  # events that `write_now` has made
        self.failure: Exception | None = None  # of `write_now`
        self.connection: Connection | None = None  # that goes on with this
        self.is_begun = self.is_ended = False
        self.is_busy = False  # a task writes what has come

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        more = [(name.lower().encode(), value.encode()) for name, value in self.more.items()]
        start = {"type": "http.response.start", "status": 200, "headers": [*HEADERS, *more]}
        if CONNECTION in scope:
            await self.hand_over(scope, send(start))
            return
        async with watched(self.completion, receive):  # the server is another one
            await send(start)
            async for piece in self.pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def hand_over(self, scope: Scope, sending: Awaitable[None]) -> None:
        """Have the connection go on with this once the head is sent."""
        try:
            await sending
        except BaseException:
            self.completion.release()
            raise
        self.connection = scope[CONNECTION]
        if self.sleeps:
            self.completion.call(self.write_now, self.service.limits.comment_seconds)
        self.start(self.connection)
        self.connection.take_over(self.completion.leave, scope[ENDS])

    @property
    def sleeps(self) -> bool:
        """Whether there is no task while nothing comes."""
        return self.connection is not None and self.is_by_step

    def write_now(self) -> None:
        """Write what has come, or a comment as nothing has, without a task, if that can be done."""
        assert self.connection is not None, "nothing is written before the head"
        completion, deltas = self.completion, self.completion.deltas
        if self.is_busy:
            return
        if completion.is_over or self.writer.num_logprobs(deltas) > MANY:
            self.start(self.connection)
            return
        completion.deltas = []
        try:
            events = self.writer.step(deltas) if deltas else [COMMENT]
        except Exception as e:  # raised again by `pieces`
            self.failure, events = e, []
        if self.failure or (events and not self.connection.write_events(self.joined(events))):
            self.unsent = events
            self.start(self.connection)

    def start(self, connection: Connection) -> None:
        self.is_busy = True
        connection.start(self.go_on(connection))

    async def go_on(self, connection: Connection) -> None:
        """Write what has come, in a task; and the end, if that has."""
        request_id.set(self.completion.caller.request_id)
        try:
            async for piece in self.pieces():
                await connection.send_events(piece)
        except BaseException:
            connection.cut()
            self.is_ended = True
            raise
        finally:
            self.is_busy = False
            if self.is_ended:
                self.completion.take = None  # it refers to this
                self.completion.release()
                connection.end_events()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Events as bytes, to the end or, if it sleeps, as far as they have come; all that are
        ready at a time go out in one write.
        """
        completion = self.completion
        try:
            if not self.is_begun:
                self.is_begun = True
                if begin := self.writer.beginning():
                    yield self.joined(begin)
            while True:
                if self.failure is not None:
                    raise self.failure
                events, self.unsent = self.unsent, []
                if self.sleeps and not (events or completion.deltas or completion.is_over):
                    return
                deltas = completion.taken() if events else await self.flush.wait()
                # While these are written, more may come.
                is_over = completion.is_over and not self.flush.is_behind
                is_long = self.writer.num_logprobs(deltas) > MANY
                write = self.flush.write
                events += await self.service.write(is_long, write, self.writer, deltas)
                if is_over:
                    break
                if events or not deltas:
                    yield self.joined(events or [COMMENT])
            events += self.writer.ending(completion.error)
        except Exception as e:  # a stream must not end without an error event
            log.exception("a completion could not be streamed")
            events = self.writer.ending(e)
        self.is_ended = True
        yield self.joined(events)

    def joined(self, events: Sequence[bytes]) -> bytes:
        return b"".join(map(padded, events) if self.is_padded else events)


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    payload = escaped(msgspec.json.encode(data))
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, payload)


def json_text(text: str) -> bytes:
    payload = msgspec.json.encode(text)
    return payload if text.isascii() else escaped(payload)


def escaped(payload: bytes) -> bytes:
    """JSON without the line ends that JSON may hold."""
    for end, escape in LINE_ENDS.items():
        payload = payload.replace(end, escape)
    return payload


async def respond(
    request: Request,
    schema: RouteSchema,
    asked: FormattedBody,
    completion: LiveCompletion,
    echoed: Sequence[str] = (),
    reader: AnswerReader | None = None,
) -> Response:
    """The response to a queued completion: a stream, or one JSON object."""
    service: Service = request.app.state.service
    served = service.served_to(completion.arrived)
    writer = CompletionWriter(schema, served, asked, completion, echoed, reader)
    if asked.stream:
        return EventStream(completion, writer, service, asked)
    return await answer_whole(request, completion, writer, asked.headers)


async def answer_whole(
    request: Request, completion: LiveCompletion, writer: Writer, headers: Mapping[str, str]
) -> Response:
    """One JSON object, once all of it is there."""
    service: Service = request.app.state.service
    async with watched(completion, request.receive):
        while not completion.is_over:
            await completion.wait()
    if completion.has_left:
        return Response(status_code=499)  # the client has disconnected
    if completion.error is not None:
        return error_response(completion.error)
    answer = await service.write(writer.is_long, lambda: json_response(writer.whole()))
    answer.headers.update(headers)
    return answer


@asynccontextmanager
async def watched(completion: LiveCompletion, receive: Receive) -> AsyncIterator[None]:
    """Abort the completion if the client disconnects during the block; then release it."""
    watcher = asyncio.create_task(watch(completion, receive))
    try:
        yield
    finally:
        watcher.cancel()
        completion.release()


async def watch(completion: LiveCompletion, receive: Receive) -> None:
    await disconnected(receive)
    completion.leave()


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns; ClientDisconnect, with the work cancelled, if the client leaves."""
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


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, status, headers=headers, media_type="application/json")
