"""POST /v1/messages and /v1/messages/count_tokens: a chat in the format of Anthropic's API."""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from specserve.errors import RequestError
from specserve.exchange.sampling_params import SamplingParams, StopString
from specserve.server.body import FRONTENDS, NO_OP, OF_ANY, REFUSED, Body, BodyKind, Effort, read
from specserve.server.chat import (
    SOME,
    Conversation,
    begin,
    fit_strict,
    fit_to_template,
    read_options,
    render,
)
from specserve.server.completion import ChoiceDelta, LiveCompletion, ServedModel, Service, arrival
from specserve.server.formatter import statistics
from specserve.server.message_input import (
    AnyBlock,
    AnyMessageTool,
    InputMessage,
    ToolChoice,
    read_conversation,
    read_message_tools,
)
from specserve.server.protocol import (
    BlockDelta,
    BlockStart,
    BlockStop,
    BlockTextDelta,
    InputJsonDelta,
    MessageBlock,
    MessageChange,
    MessageEnd,
    MessageError,
    MessageEvent,
    MessageObject,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignatureDelta,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ThinkingDelta,
    TokenCount,
    ToolUseBlock,
)
from specserve.server.refusal import THREAD, json_response, message_error
from specserve.server.stream import event, respond, while_connected
from specserve.server.tools import ToolsAsked
from specserve.text.answer.events import CallBegin, Content, Event, Reasoning
from specserve.text.answer.formats import AnswerReader, PlainParser
from specserve.text.grammars.structured_outputs import StructuredOutputsParams

SIGNATURE = "specserve"  # of reasoning: some clients drop reasoning without a signature
OTHERS_ONLY = "it is a field of OpenAI's API"
AnyInputMessage = Annotated[
    dict[str, Any],
    Meta(extra_json_schema={"$ref": f"#/components/schemas/{InputMessage.__name__}"}),
]


class Thinking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reasoning: enabled with a budget, adaptive or disabled.

    budget_tokens   maximum tokens of reasoning; the server then ends it
    display         omitted removes reasoning from the response
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    def __post_init__(self) -> None:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError("budget_tokens: required for the type enabled, and only there")


class JsonFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema of the text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the output.

    effort          the amount of reasoning, if the chat template reads it
    format          the format of the text
    """

    effort: Effort | None = None
    format: JsonFormat | None = None


class MessagesBody(Body, frozen=True, kw_only=True):
    """A conversation in Anthropic's format. `cache_control` has no effect: every prefix is cached.

    messages        messages of users and assistants; a last message of an assistant is continued
    system          the system text, or text blocks
    stop_sequences  texts that end the response
    tools           tools that the model can call
    tool_choice     the choice of a tool
    thinking        reasoning, and its budget
    output_config   effort and format
    chat_template_kwargs  variables for the chat template
    """

    no_op: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NO_OP,
        "container": (),
        "mcp_servers": ([],),
    }
    # Coding agents send these. Without them the model reads the whole conversation.
    passed: ClassVar[set[str]] = FRONTENDS | {
        *("billing_policy", "compaction", "context_management", "diagnostics", "fallbacks"),
        *("inference_geo", "speed", "user_profile_id"),
    }
    refused: ClassVar[Mapping[str, str]] = REFUSED | {
        "best_of": "a message has one choice",
        "input": "send messages",
        "logprobs": f"{OTHERS_ONLY}; send the conversation to /v1/chat/completions",
        "max_completion_tokens": "send max_tokens",
        "n": "a message has one choice",
        "prompt": "send messages",
        "prompt_logprobs": f"{OTHERS_ONLY}; send the conversation to /v1/chat/completions",
        "reasoning_effort": "send output_config.effort",
        "response_format": "send output_config.format",
        "return_speculation_details": "only /v1/chat/completions supports it",
        "return_token_ids": "only /v1/chat/completions supports it",
        "return_tokens_as_token_ids": "only /v1/chat/completions supports it",
        "max_thinking_tokens": "send thinking.budget_tokens",
        "stop": "send stop_sequences",
        "thinking_token_budget": "send thinking.budget_tokens",
        THREAD: "the server does not store conversations; send all messages",
        "use_beam_search": "a message has one choice",
    }
    ignored: ClassVar[Mapping[str, set[str]]] = {
        "system": OF_ANY | {"citations"},
        "messages.content": OF_ANY | {"caller", "citations", "toolset_name"},
        "messages.content.content": OF_ANY | {"citations"},
        "tools": OF_ANY
        | {"allowed_callers", "defer_loading", "eager_input_streaming", "input_examples"},
    }

    budget_field: ClassVar[str] = "thinking.budget_tokens"

    messages: Annotated[tuple[AnyInputMessage, ...], SOME] = ()
    system: str | tuple[AnyBlock, ...] = ""
    stop_sequences: Annotated[tuple[StopString, ...], Meta(max_length=1024)] = ()
    tools: tuple[AnyMessageTool, ...] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def effort(self) -> tuple[str, str | None]:
        return "output_config.effort", self.output_config.effort

    @property
    def thinks(self) -> bool | None:
        return super().thinks if self.thinking is None else self.thinking.type != "disabled"

    @property
    def params(self) -> SamplingParams:
        return msgspec.structs.replace(super().params, stop=self.stop_sequences)

    @property
    def form(self) -> StructuredOutputsParams | None:
        its = self.output_config.format
        return super().form if its is None else StructuredOutputsParams(json=its.schema)

    @property
    def form_field(self) -> str:
        return super().form_field if self.output_config.format is None else "output_config.format"

    def conversation(self, tools: ToolsAsked) -> Conversation:
        continues = self.messages[-1]["role"] == "assistant"
        options = read_options(None, continues, self.chat_template_kwargs or {}, tools)
        is_shown = self.thinking is None or self.thinking.display != "omitted"
        return Conversation(self.messages, options, tools, include_reasoning=is_shown)


class OpenBlock(NamedTuple):
    """The last block of the content, while text is added."""

    block: MessageBlock  # without text
    texts: list[str]

    @property
    def finished(self) -> MessageBlock:
        text = "".join(self.texts)
        match self.block:
            case TextBlock():
                return TextBlock(text)
            case ThinkingBlock():
                return ThinkingBlock(text, SIGNATURE)
            case ToolUseBlock(id, name):
                given = dict[str, Any]()
                with suppress(msgspec.MsgspecError, RecursionError):  # max_tokens may cut it
                    given = msgspec.json.decode(text, type=dict[str, Any])
                return ToolUseBlock(id, name, given)

    def delta(self, text: str) -> BlockTextDelta | ThinkingDelta | InputJsonDelta:
        match self.block:
            case TextBlock():
                return BlockTextDelta(text)
            case ThinkingBlock():
                return ThinkingDelta(text)
        return InputJsonDelta(text)


class MessageFormatter:
    """A `Formatter` for Anthropic's message and the events that build it."""

    is_long = False

    def __init__(
        self, served: ServedModel, completion: LiveCompletion, reader: AnswerReader | None
    ) -> None:
        self.served, self.completion = served, completion
        self.parser = PlainParser() if reader is None else reader.parser()
        [self.generation] = completion.generations
        self.content = list[MessageBlock]()  # finished blocks
        self.open: OpenBlock | None = None
        self.has_started = False
        self.id = completion.response_id = f"msg_{secrets.token_hex(12)}"
        self.keep_alive = b"".join(encoded([Ping()]))

    def num_logprobs(self, deltas: Sequence[ChoiceDelta]) -> int:
        return 0

    def beginning(self) -> list[bytes]:
        return []  # the first event has the number of cached tokens, which is not known yet

    def step(self, deltas: Sequence[ChoiceDelta]) -> list[bytes]:
        return encoded(each for delta in deltas for each in self.events(delta))

    def idle(self, choice: int) -> bytes:
        return self.keep_alive

    def ending(self, error: Exception | None) -> list[bytes]:
        return encoded(self.last_events() if error is None else [message_error(error)])

    def events(self, delta: ChoiceDelta) -> Iterator[MessageEvent]:
        if not self.has_started:
            self.has_started = True
            yield MessageStart(message=self.message(None))
        pieces = self.parser.push(delta.text) if delta.text else []
        if delta.is_last:
            pieces += self.parser.finish()
        for piece in pieces:
            yield from self.events_of(piece)

    def events_of(self, piece: Event) -> Iterator[MessageEvent]:
        match piece:
            case CallBegin(_, id, name):
                yield from self.begin(ToolUseBlock(id, name, {}))
                return
            case Content() if self.open is None or not isinstance(self.open.block, TextBlock):
                yield from self.begin(TextBlock(""))
            case Reasoning() if self.open is None or not isinstance(self.open.block, ThinkingBlock):
                yield from self.begin(ThinkingBlock("", ""))
        assert self.open is not None, "text is added to a block that has begun"
        self.open.texts.append(piece.text)
        yield BlockDelta(index=len(self.content), delta=self.open.delta(piece.text))

    def begin(self, block: MessageBlock) -> Iterator[MessageEvent]:
        """End the last block, and begin a new one."""
        yield from self.close()
        self.open = OpenBlock(block, [])
        yield BlockStart(index=len(self.content), content_block=block)

    def close(self) -> Iterator[MessageEvent]:
        its, self.open = self.open, None
        if its is None:
            return
        index = len(self.content)
        if isinstance(its.block, ThinkingBlock):
            yield BlockDelta(index=index, delta=SignatureDelta(SIGNATURE))
        self.content.append(its.finished)
        yield BlockStop(index=index)

    def last_events(self) -> Iterator[MessageEvent]:
        yield from self.close()
        told = statistics(self.completion, self.served)
        yield MessageChange(delta=self.end, usage=self.usage, **told)
        yield MessageStop()

    @property
    def end(self) -> MessageEnd:
        its = self.generation
        if isinstance(its.stop_reason, str):
            return MessageEnd("stop_sequence", its.stop_reason)
        has_called = any(isinstance(block, ToolUseBlock) for block in self.content)
        reason: StopReason = "tool_use" if has_called else "end_turn"
        return MessageEnd("max_tokens" if its.finish_reason == "length" else reason, None)

    @property
    def usage(self) -> MessageUsage:
        cached = self.generation.num_cached
        computed = self.completion.num_prompt_tokens - cached
        return MessageUsage(computed, 0, cached, self.completion.num_tokens)

    def message(self, end: MessageEnd | None, **more: Any) -> MessageObject:
        return MessageObject(
            id=self.id,
            role="assistant",
            model=self.served.model,
            content=self.content,
            stop_reason=None if end is None else end.stop_reason,
            stop_sequence=None if end is None else end.stop_sequence,
            usage=self.usage,
            seed=self.generation.sampling.seed,
            system_fingerprint=self.served.fingerprint,
            **more,
        )

    def whole(self) -> msgspec.Struct:
        its = self.generation
        everything = ChoiceDelta(0, its.text, 0, its.token_ids, is_last=True)
        for _ in (*self.events(everything), *self.close()):
            pass  # each block is appended to the content
        return self.message(self.end, **statistics(self.completion, self.served))


def encoded(events: Iterable[MessageEvent | MessageError]) -> list[bytes]:
    return [event(each, str(each.__struct_config__.tag)) for each in events]


async def messages(request: Request) -> Response:
    service: Service = request.app.state.service
    arrived = arrival(request)
    service.check_open()
    asked, tools = await service.prompts.parse(await service.bodies.read(request), MESSAGES)
    asked = await fit_to_template(service, asked, asked.chat_template_kwargs)
    asked, tools = fit_strict(service, asked, tools)
    async with service.timed(arrived, asked.timeout_ms) as arrived:
        completion, reader = await begin(request, asked, asked.conversation(tools), arrived)
    served = service.served_to(completion.arrived)
    formatter = MessageFormatter(served, completion, reader)
    return await respond(request, completion, formatter, asked)


async def count_tokens(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_loaded()
    asked, tools = await service.prompts.parse(await service.bodies.read(request), MESSAGES)
    service.check_model(asked.model)
    asked = await fit_to_template(service, asked, asked.chat_template_kwargs)
    _, ids = await while_connected(request, render(service, asked.conversation(tools)))
    return json_response(TokenCount(len(ids)), headers=asked.headers)


def read_messages_body(raw: bytes) -> tuple[MessagesBody, ToolsAsked]:
    body = read(raw, MessagesBody)
    conversation = tuple(read_conversation(body.system, body.messages))
    tools = read_message_tools(body.tools, body.tool_choice)
    if conversation[-1].get("tool_calls"):
        raise RequestError(
            "messages: the last message has calls without results. Send a tool_result for each",
            "messages",
        )
    budget = None if body.thinking is None else body.thinking.budget_tokens
    changes = {"messages": conversation, "system": "", "thinking_token_budget": budget}
    return msgspec.structs.replace(body, **changes), tools


MESSAGES = BodyKind("messages", read_messages_body, tuple[MessagesBody, ToolsAsked])
