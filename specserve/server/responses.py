"""POST /v1/responses: a chat in the format of OpenAI's Responses API, without storage."""

import secrets
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from specserve.errors import RequestError
from specserve.exchange.sampling_params import NumTop, SamplingParams
from specserve.server.body import FRONTENDS, NO_OP, REFUSED, Body, BodyKind, Effort, read
from specserve.server.chat import (
    Conversation,
    begin,
    fit_strict,
    fit_to_template,
    read_message,
    read_options,
)
from specserve.server.completion import ChoiceDelta, LiveCompletion, ServedModel, Service, arrival
from specserve.server.formatter import statistics, usage_of
from specserve.server.logprobs import Namer, ScoredTokens, chat_logprobs, sealed
from specserve.server.protocol import (
    AnyOutput,
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    ErrorEvent,
    FailedEnd,
    IncompleteDetails,
    IncompleteEnd,
    InProgress,
    InputDetails,
    ItemAdded,
    ItemDone,
    OutputCall,
    OutputDetails,
    OutputMessage,
    OutputReasoning,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningSettings,
    ReasoningText,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    TextDelta,
    TextDone,
)
from specserve.server.refusal import error_body
from specserve.server.response_input import AnyItem, AnyTool, read_flat_tools, read_input
from specserve.server.stream import COMMENT, event, respond
from specserve.server.tools import ToolsAsked
from specserve.text.answer.events import CallArguments, CallBegin, Content, Event, Reasoning
from specserve.text.answer.formats import AnswerReader, PlainParser
from specserve.text.grammars.structured_outputs import StructuredOutputsParams

LOGPROBS = "message.output_text.logprobs"
STORED = "the server does not store responses; send the whole conversation as input"
IN_CHATS = "only /v1/chat/completions supports it; send the conversation there"
Metadata = dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]]
E = TypeVar("E", bound=ResponseEvent)


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The format of the text.

    schema          a JSON schema, for type json_schema
    strict          true closes all objects of the schema
    name            ignored
    description     ignored
    """

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.schema is not None):
            raise ValueError("schema: required for the type json_schema, and only there")

    @property
    def asked(self) -> StructuredOutputsParams | None:
        if self.type == "text":
            return None
        if self.schema is None:
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=self.schema, strict=bool(self.strict))

    @property
    def echoed(self) -> dict[str, Any]:
        """The format as responses repeat it."""
        given = msgspec.structs.asdict(self)
        return {name: value for name, value in given.items() if value is not None}


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the text. `verbosity` is ignored."""

    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of reasoning. `summary` is ignored: responses contain the reasoning itself."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(Body, frozen=True, kw_only=True):
    """A conversation, and settings of the response.

    input           a text, or a list of items: messages, calls and their results, reasoning
    instructions    a system message before the input
    max_output_tokens  maximum output tokens, including reasoning; unset: the model's
                    max_new_tokens, else the rest of the context
    include         "message.output_text.logprobs" returns the logprob of each token;
                    "reasoning.encrypted_content" is ignored, because reasoning is not encrypted
    top_logprobs    number of most likely tokens per position; needs the logprobs of include
    text            format: the format of the text
    reasoning       effort: the amount of reasoning
    chat_template_kwargs  variables for the chat template
    tools           functions that the model can call
    tool_choice     "none", "auto", "required" or {"type": "function", "name": ...}
    parallel_tool_calls  false: at most one call
    include_reasoning  false removes reasoning from the response
    continue_final_message  the response continues the last message, which is an assistant's
    metadata        up to 16 texts by name, which the response repeats
    user            repeated by the response
    safety_identifier  repeated by the response
    """

    no_op: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NO_OP,
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt_cache_options": (),
        "store": (False,),
        "truncation": ("disabled",),
    }
    passed: ClassVar[set[str]] = FRONTENDS | {"client_metadata"}  # coding agents send it
    refused: ClassVar[Mapping[str, str]] = REFUSED | {
        "best_of": "a response has one choice",
        "conversation": STORED,
        "logprobs": f'send include = ["{LOGPROBS}"]',
        "max_completion_tokens": "send max_output_tokens",
        "max_tokens": "send max_output_tokens",
        "messages": "send input, or send messages to /v1/chat/completions",
        "n": "a response has one choice",
        "use_beam_search": "a response has one choice",
        "previous_response_id": STORED,
        "prompt": "the server does not store prompts; send input",
        "prompt_logprobs": IN_CHATS,
        "reasoning_effort": "send reasoning.effort",
        "response_format": "send text.format",
        "return_speculation_details": IN_CHATS,
        "return_token_ids": IN_CHATS,
        "return_tokens_as_token_ids": IN_CHATS,
    }

    input: str | Annotated[tuple[AnyItem, ...], Meta(extra_json_schema={"minItems": 1})] = ()
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    include: tuple[Literal["message.output_text.logprobs", "reasoning.encrypted_content"], ...] = ()
    top_logprobs: NumTop | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    chat_template_kwargs: dict[str, Any] | None = None
    tools: tuple[AnyTool, ...] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    continue_final_message: bool = False
    metadata: Annotated[Metadata, Meta(max_length=16)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    messages: tuple[dict[str, Any], ...] = ()  # from `input` and `instructions`

    @property
    def effort(self) -> tuple[str, str | None]:
        return "reasoning.effort", self.reasoning.effort

    @property
    def params(self) -> SamplingParams:
        num_top = (self.top_logprobs or 0) if LOGPROBS in self.include else None
        most = self.max_output_tokens
        return msgspec.structs.replace(super().params, logprobs=num_top, max_tokens=most)

    @property
    def form(self) -> StructuredOutputsParams | None:
        asked = self.text.format.asked
        return super().form if asked is None else asked

    @property
    def form_field(self) -> str:
        return super().form_field if self.text.format.asked is None else "text.format"

    def conversation(self, tools: ToolsAsked) -> Conversation:
        how = None, self.continue_final_message
        options = read_options(*how, self.chat_template_kwargs or {}, tools)
        # The template writes the special tokens.
        return Conversation(self.messages, options, tools, False, self.include_reasoning)


class OpenItem:
    """The last item of the output, while text is added. `item` has no text yet."""

    def __init__(self, index: int, item: AnyOutput) -> None:
        self.index, self.item = index, item
        self.texts, self.logprobs = list[str](), list[Any]()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def place(self) -> dict[str, Any]:
        """The fields of events that locate its text."""
        within = {} if isinstance(self.item, OutputCall) else {"content_index": 0}
        return {"item_id": self.item.id, "output_index": self.index} | within

    @property
    def part(self) -> OutputText | ReasoningText | None:
        """The part with its text; None for a call, whose text is its arguments."""
        match self.item:
            case OutputMessage():
                return OutputText(self.text, [], self.logprobs)
            case OutputReasoning():
                return ReasoningText(self.text)
        return None

    def finished(self, status: str) -> AnyOutput:
        part = self.part
        text = {"arguments": self.text} if part is None else {"content": [part]}
        return msgspec.structs.replace(self.item, status=status, **text)


class ResponseFormatter:
    """A `Formatter` for OpenAI's response object and the events that build it."""

    keep_alive = COMMENT

    def __init__(
        self,
        served: ServedModel,
        asked: ResponsesBody,
        completion: LiveCompletion,
        reader: AnswerReader | None,
    ) -> None:
        self.served, self.completion = served, completion
        self.parser = PlainParser() if reader is None else reader.parser()
        self.has_reasoning = reader is not None and reader.has_reasoning
        [self.generation] = completion.generations
        self.num_top = asked.params.num_top
        self.is_long = self.num_top is not None
        self.namer = Namer(self.generation.stream.tokenizer, self.num_top or 0, has_ids=False)
        self.output = list[AnyOutput]()  # finished items
        self.open: OpenItem | None = None
        self.num_chars = 0  # of the text so far
        self.num_scored = 0  # tokens whose logprobs are sent or dropped
        self.unsent = list[Any]()  # logprobs for the next text
        self.number = 0  # number of events so far
        self.head = self.echo(asked)
        completion.response_id = self.head["id"]

    def echo(self, asked: ResponsesBody) -> dict[str, Any]:
        """Return the fields that are known before the first token."""
        sampling, verbosity = self.generation.sampling, asked.text.verbosity or "medium"
        return {
            "id": identifier("resp"),
            "created_at": int(time.time()),
            "model": self.served.model,
            "system_fingerprint": self.served.fingerprint,
            "background": False,
            "conversation": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": ReasoningSettings(asked.reasoning.effort, summary=None),
            "safety_identifier": asked.safety_identifier,
            "seed": sampling.seed,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": asked.text.format.echoed, "verbosity": verbosity},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": asked.user,
        }

    def response(self, status: str, **changes: Any) -> ResponseObject:
        unset = dict.fromkeys(("error", "incomplete_details", "usage", "stop_reason"))
        state = {"status": status, "output": [*self.output]}
        return ResponseObject(**self.head | unset | state | changes)

    def event(self, kind: type[E], **fields: Any) -> E:
        self.number += 1
        return kind(sequence_number=self.number - 1, **fields)

    def num_logprobs(self, deltas: Sequence[ChoiceDelta]) -> int:
        if self.num_top is None:
            return 0
        return sum(len(d.token_ids) for d in deltas) * (1 + self.num_top)

    def beginning(self) -> list[bytes]:
        state = self.response("in_progress")
        return encoded(self.event(kind, response=state) for kind in (Created, InProgress))

    def step(self, deltas: Sequence[ChoiceDelta]) -> list[bytes]:
        return encoded(each for delta in deltas for each in self.events(delta))

    def idle(self, choice: int) -> bytes:
        if self.open is None:  # no item has begun
            return COMMENT
        return b"".join(encoded([self.delta(self.open, "", [])]))

    def ending(self, error: Exception | None) -> list[bytes]:
        return encoded(self.last_events() if error is None else self.failing(error))

    def events(self, delta: ChoiceDelta) -> Iterator[ResponseEvent]:
        for text in self.cut(delta.text):
            yield from self.events_of(self.parser.push(text))
        if delta.is_last:
            self.score(len(self.generation.token_ids))
            yield from self.events_of(self.parser.finish())

    def cut(self, text: str) -> Iterator[str]:
        """Yield a step's text; with logprobs, split at the starts of tokens."""
        before, end = self.num_chars, self.num_chars + len(text)
        starts = self.generation.starts if self.num_top is not None else []
        while self.num_chars < end:
            number = bisect_right(starts, self.num_chars)
            self.score(number)
            begin = self.num_chars
            self.num_chars = min(end, starts[number]) if number < len(starts) else end
            yield text[begin - before : self.num_chars - before]

    def score(self, number: int) -> None:
        """Queue the logprobs of the first `number` tokens for the next text of a message."""
        if self.num_top is not None:
            its, new = self.generation, slice(self.num_scored, number)
            scored = ScoredTokens(its.token_ids[new], its.logprobs[new], its.starts[new])
            self.unsent += sealed(chat_logprobs(scored, self.namer))
            self.num_scored = max(self.num_scored, number)

    def events_of(self, pieces: Sequence[Event]) -> Iterator[ResponseEvent]:
        if pieces and not any(isinstance(piece, Content) for piece in pieces):
            self.unsent = []  # only messages have logprobs
        for piece in pieces:
            match piece:
                case Content(text):
                    if self.open is None or not isinstance(self.open.item, OutputMessage):
                        yield from self.begin(OutputMessage, "msg", role="assistant", content=[])
                    yield from self.add(text)
                case Reasoning(text):
                    if self.open is None or not isinstance(self.open.item, OutputReasoning):
                        yield from self.begin(OutputReasoning, "rs", content=[], summary=[])
                    yield from self.add(text)
                case CallBegin(_, id, name):
                    yield from self.begin(OutputCall, "fc", call_id=id, name=name, arguments="")
                case CallArguments(_, text):
                    yield from self.add(text)

    def begin(self, kind: type[AnyOutput], prefix: str, **fields: Any) -> Iterator[ResponseEvent]:
        """End the last item, and begin a new one."""
        yield from self.close("completed")
        item = kind(id=identifier(prefix), status="in_progress", **fields)
        self.open = its = OpenItem(len(self.output), item)
        yield self.event(ItemAdded, output_index=its.index, item=item)
        if (part := its.part) is not None:
            yield self.event(PartAdded, **its.place, part=part)

    def add(self, text: str) -> Iterator[ResponseEvent]:
        its = self.open
        assert its is not None, "text is added to an item that has begun"
        its.texts.append(text)
        logprobs = list[Any]()
        if isinstance(its.item, OutputMessage):
            logprobs, self.unsent = self.unsent, []
            its.logprobs += logprobs
        yield self.delta(its, text, logprobs)

    def delta(self, its: OpenItem, text: str, logprobs: list[Any]) -> ResponseEvent:
        match its.item:
            case OutputMessage():
                return self.event(TextDelta, **its.place, delta=text, logprobs=logprobs)
            case OutputReasoning():
                return self.event(ReasoningDelta, **its.place, delta=text)
        return self.event(ArgumentsDelta, **its.place, delta=text)

    def close(self, status: str) -> Iterator[ResponseEvent]:
        its, self.open = self.open, None
        if its is None:
            return
        match its.item:
            case OutputMessage():
                its.logprobs += self.unsent  # logprobs of tokens without text
                self.unsent, its_own = [], its.logprobs
                yield self.event(TextDone, **its.place, text=its.text, logprobs=its_own)
            case OutputReasoning():
                yield self.event(ReasoningDone, **its.place, text=its.text)
            case OutputCall():
                yield self.event(ArgumentsDone, **its.place, arguments=its.text)
        if (part := its.part) is not None:
            yield self.event(PartDone, **its.place, part=part)
        item = its.finished(status)
        self.output.append(item)
        yield self.event(ItemDone, output_index=its.index, item=item)

    def last_events(self) -> Iterator[ResponseEvent]:
        """Yield the events after the last text."""
        if self.open is None and not self.output:  # a response without text
            yield from self.events_of([Content("")])
        is_cut = self.generation.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self.close(status)
        reason = IncompleteDetails("max_output_tokens") if is_cut else None
        known = {"usage": self.usage(), "stop_reason": self.generation.stop_reason}
        known |= statistics(self.completion, self.served)
        state = self.response(status, incomplete_details=reason, **known)
        yield self.event(IncompleteEnd if is_cut else Completed, response=state)

    def failing(self, error: Exception) -> Iterator[ResponseEvent]:
        """Yield the events of a failed response. Clients raise the second one."""
        its = error_body(error).error
        failed = self.response("failed", error=ResponseError("server_error", its.message))
        yield self.event(FailedEnd, response=failed)
        named = {"code": its.code, "message": its.message, "param": its.param}
        yield self.event(ErrorEvent, **named, error=its)

    def whole(self) -> msgspec.Struct:
        its = self.generation
        everything = ChoiceDelta(0, its.text, 0, its.token_ids, is_last=True)
        *_, last = *self.events(everything), *self.last_events()
        assert isinstance(last, IncompleteEnd | Completed)
        return last.response

    def usage(self) -> ResponseUsage:
        """Return the usage. Tokens of reasoning include its markers."""
        counts, num_reasoning = usage_of(self.completion), 0
        if self.has_reasoning:
            num_reasoning = bisect_left(self.generation.starts, self.parser.num_reasoning)
        cached = counts.prompt_tokens_details.cached_tokens
        return ResponseUsage(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=InputDetails(cached, cache_write_tokens=0),
            output_tokens=counts.completion_tokens,
            output_tokens_details=OutputDetails(num_reasoning),
            total_tokens=counts.total_tokens,
        )


def encoded(events: Iterable[ResponseEvent]) -> list[bytes]:
    return [event(each, str(each.__struct_config__.tag)) for each in events]


def identifier(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


async def responses(request: Request) -> Response:
    service: Service = request.app.state.service
    arrived = arrival(request)
    service.check_open()
    asked, tools = await service.prompts.parse(await service.bodies.read(request), RESPONSES)
    asked = await fit_to_template(service, asked, asked.chat_template_kwargs)
    asked, tools = fit_strict(service, asked, tools)
    try:
        async with service.timed(arrived, asked.timeout_ms) as arrived:
            completion, reader = await begin(request, asked, asked.conversation(tools), arrived)
    except RequestError as e:
        e.param = "input" if e.param == "messages" else e.param
        raise
    served = service.served_to(completion.arrived)
    formatter = ResponseFormatter(served, asked, completion, reader)
    return await respond(request, completion, formatter, asked)


def read_responses(raw: bytes) -> tuple[ResponsesBody, ToolsAsked]:
    body = read(raw, ResponsesBody)
    if body.top_logprobs and LOGPROBS not in body.include:
        raise RequestError(
            f'top_logprobs: needs logprobs. Add "{LOGPROBS}" to include', "top_logprobs"
        )
    tools = body.tools, body.tool_choice, body.parallel_tool_calls
    given = read_input(body.input, body.instructions)
    messages = tuple(read_message(message, "input") for message in given)
    return msgspec.structs.replace(body, messages=messages), read_flat_tools(*tools)


RESPONSES = BodyKind("responses", read_responses, tuple[ResponsesBody, ToolsAsked])
