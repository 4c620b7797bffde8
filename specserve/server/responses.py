"""POST /v1/responses: a chat in the form of OpenAI's newer route; nothing is stored."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from specserve.errors import RequestError
from specserve.exchange.sampling_params import NumTop, SamplingParams
from specserve.server.body import NO_OP, REFUSED, Body, BodyKind, Effort, read
from specserve.server.chat import begin, fit_to_template, read_message, read_options
from specserve.server.live_completion import arrival
from specserve.server.response import EventStream, answer_whole
from specserve.server.response_events import ResponseWriter
from specserve.server.response_items import AnyItem, read_input
from specserve.server.response_tools import AnyTool, read_flat_tools
from specserve.server.service import Service
from specserve.server.tools import ToolsAsked
from specserve.text.chat_template import ChatOptions
from specserve.text.grammars.structured_outputs import StructuredOutputsParams

LOGPROBS = "message.output_text.logprobs"
STORED = "responses are not stored: send the whole conversation as input"
IN_CHATS = "send the conversation to /v1/chat/completions, where it is supported"
Metadata = dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]]


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer.

    schema          a JSON schema, of type json_schema
    strict          true: all objects of the schema are closed
    name            has no effect, nor has description
    """

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.schema is not None):
            raise ValueError("schema: only with the type json_schema, which needs it")

    @property
    def asked(self) -> StructuredOutputsParams | None:
        if self.type == "text":
            return None
        if self.schema is None:
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=self.schema, strict=bool(self.strict))

    @property
    def told(self) -> dict[str, Any]:
        """As answers repeat it."""
        given = msgspec.structs.asdict(self)
        return {name: value for name, value in given.items() if value is not None}


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """verbosity is read past."""

    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """summary is read past: the reasoning itself is told."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(Body, frozen=True, kw_only=True):
    """A conversation, and how it is to be answered.

    input           a text, or a list of items: messages, calls and what they returned, reasoning
    instructions    a system message before it
    max_output_tokens  most tokens of the answer, reasoning included; unset: the model's
                    max_new_tokens, else the rest of the context
    include         "message.output_text.logprobs" tells each token's logprob;
                    "reasoning.encrypted_content" is read past, as reasoning is told openly
    top_logprobs    with these logprobs: and those of so many likeliest tokens
    text            format: the form of the answer
    reasoning       how much the model is to think
    chat_template_kwargs  values of names that the chat template reads
    tools           functions that the model may call
    tool_choice     "none", "auto", "required" or {"type": "function", "name": ...}
    parallel_tool_calls  false: one call at most
    include_reasoning  false: the answer has no items of reasoning
    metadata        up to 16 texts by name, which the answer repeats
    user            repeated by the answer, as are safety_identifier and prompt_cache_key
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
    refused: ClassVar[Mapping[str, str]] = REFUSED | {
        "best_of": "a response is one answer",
        "conversation": STORED,
        "logprobs": f'they are told where include has "{LOGPROBS}"',
        "max_completion_tokens": "it is max_output_tokens here",
        "max_tokens": "it is max_output_tokens here",
        "messages": "a response has input; send messages to /v1/chat/completions",
        "n": "a response is one answer",
        "previous_response_id": STORED,
        "prompt": "prompts are not stored; send input",
        "prompt_logprobs": IN_CHATS,
        "reasoning_effort": "it is reasoning.effort here",
        "response_format": "it is text.format here",
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
    metadata: Annotated[Metadata, Meta(max_length=16)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    messages: tuple[dict[str, Any], ...] = ()  # what `input` and `instructions` become
    add_special_tokens: ClassVar[bool] = False  # the template writes its own

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

    def options(self, tools: ToolsAsked) -> ChatOptions:
        return read_options(None, False, self.chat_template_kwargs or {}, tools)


async def responses(request: Request) -> Response:
    service: Service = request.app.state.service
    arrived = arrival(request)
    service.check_open()
    asked, tools = await service.parse(await service.bodies.read(request), RESPONSES)
    asked = await fit_to_template(service, asked, asked.chat_template_kwargs, tools)
    try:
        async with service.timed(arrived, asked.timeout_ms) as arrived:
            completion, reader = await begin(request, asked, tools, arrived)
    except RequestError as e:
        e.param = "input" if e.param == "messages" else e.param
        raise
    writer = ResponseWriter(service.served_to(completion.arrived), asked, completion, reader)
    if asked.stream:
        return EventStream(completion, writer, service, asked)
    return await answer_whole(request, completion, writer, asked.headers)


def read_responses(raw: bytes) -> tuple[ResponsesBody, ToolsAsked]:
    body = read(raw, ResponsesBody)
    if body.top_logprobs and LOGPROBS not in body.include:
        raise RequestError(
            f'top_logprobs: only with logprobs; let include have "{LOGPROBS}"', "top_logprobs"
        )
    said = read_input(body.input, body.instructions)
    messages = tuple(read_message(message, "input") for message in said)
    return msgspec.structs.replace(body, messages=messages), read_flat_tools(body)


RESPONSES = BodyKind("responses", read_responses, tuple[ResponsesBody, ToolsAsked])
