"""POST /v1/chat/completions: messages, rendered by the model's chat template."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from specserve.errors import RequestError
from specserve.exchange.sampling_params import NumTop, SamplingParams
from specserve.server.body import (
    REFUSED,
    Body,
    BodyKind,
    FormattedBody,
    convert,
    fields,
    is_same,
    read,
    refuse_unknown,
)
from specserve.server.live_completion import Arrival, LiveCompletion, arrival
from specserve.server.logprobs import chat_form
from specserve.server.refusal import cut
from specserve.server.response import RouteSchema, respond, while_connected
from specserve.server.service import Service, blaming
from specserve.server.tools import NO_TOOLS, ToolsAsked, check_keys, read_calls, read_tools
from specserve.text.answer.events import Answer, CallArguments, CallBegin, Content, Event, Reasoning
from specserve.text.answer.formats import AnswerReader, Wanted
from specserve.text.chat_template import ChatOptions
from specserve.text.grammars.compiled import GrammarError
from specserve.text.grammars.structured_outputs import StructuredOutputsParams, json_form
from specserve.text.grammars.tools import CallGrammar, special_tokens

# Fields of answers, which clients send back in messages -> the values without effect: only they
# are accepted.
NO_OP: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "images": ([],),
}


B = TypeVar("B", bound=Body)
EFFORT = "reasoning_effort"  # as templates name it
THINKING = "thinking"  # type of a part, and the name of its text
MAX_DEPTH = 32  # of values for a template
JSON_KINDS = "json", "json_object"  # of forms that may stand beside tools, or after reasoning


SOME = Meta(extra_json_schema={"minItems": 1})
AnyMessage = Annotated[
    dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/Message"})
]


class ChatBody(FormattedBody, frozen=True, kw_only=True):
    """A chat.

    messages        the conversation so far
    add_special_tokens  the tokenizer adds its own to what the template writes
    add_generation_prompt  the template writes the answer's beginning; unset: unless a message is
                    continued
    continue_final_message  the answer continues the last message, an assistant's
    chat_template_kwargs  values of names that the chat template reads
    logprobs        tell each token's logprob
    top_logprobs    with logprobs: and those of so many likeliest tokens
    tools           functions that the model may call
    tool_choice     "none", "auto", "required" or a function of the tools
    parallel_tool_calls  false: one call at most
    include_reasoning  false: the answer has no reasoning
    """

    refused: ClassVar[Mapping[str, str]] = REFUSED | {
        "prompt": "a chat has messages; send a prompt to /v1/completions"
    }

    messages: Annotated[tuple[AnyMessage, ...], SOME] = ()
    add_special_tokens: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True

    @property
    def params(self) -> SamplingParams:
        num_top = (self.top_logprobs or 0) if self.logprobs else None
        return msgspec.structs.replace(super().params, logprobs=num_top)

    def options(self, tools: ToolsAsked) -> ChatOptions:
        kwargs = self.chat_template_kwargs or {}
        return read_options(self.add_generation_prompt, self.continue_final_message, kwargs, tools)


class Conversation(Protocol):
    """What an answer is asked for by, whatever the route's body looks like."""

    @property
    def model(self) -> str | None: ...

    @property
    def messages(self) -> Sequence[dict[str, Any]]: ...

    def options(self, tools: ToolsAsked) -> ChatOptions: ...

    @property
    def form(self) -> StructuredOutputsParams | None: ...

    @property
    def form_field(self) -> str: ...

    @property
    def include_reasoning(self) -> bool: ...

    @property
    def add_special_tokens(self) -> bool: ...

    @property
    def params(self) -> SamplingParams: ...


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a message. `name` is ignored but for a tool's, as by most templates; so are
    `parsed` and `provider_specific_fields`, in which clients repeat what they were answered.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    parsed: Any = None
    provider_specific_fields: Any = None


def piece(event: Event, is_first: bool) -> dict[str, Any]:
    """The role comes with the first token, not before: clients take its chunk for that token."""
    role = {"role": "assistant", "content": None} if is_first else {}
    match event:
        case Content(text):
            return {"delta": role | {"content": text} if text or is_first else {}}
        case Reasoning(text):
            return {"delta": role | told_reasoning(text)}
        case CallBegin(index, id, name):
            return {"delta": role | {"tool_calls": [{"index": index} | call_of(id, name, "")]}}
        case CallArguments(index, text):
            call = {"index": index, "function": {"arguments": text}}
            return {"delta": role | {"tool_calls": [call]}}


def message(answer: Answer) -> dict[str, Any]:
    has_only_calls = answer.calls and not answer.content
    told = {"role": "assistant", "content": None if has_only_calls else answer.content}
    told["refusal"] = None
    if answer.reasoning:
        told |= told_reasoning(answer.reasoning)
    if answer.calls:
        calls = [call_of(call.id, call.name, call.arguments) for call in answer.calls]
        return {"message": told | {"tool_calls": calls}}
    return {"message": told}


def told_reasoning(text: str) -> dict[str, str]:
    """Under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def call_of(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


SCHEMA = RouteSchema(
    "chatcmpl",
    "chat.completion.chunk",
    "chat.completion",
    piece,
    message,
    chat_form,
    choices_have_prompts=False,
)


async def chat(request: Request) -> Response:
    service: Service = request.app.state.service
    arrived = arrival(request)
    service.check_open()
    asked, tools = await service.parse(await service.bodies.read(request), CHAT)
    asked = await fit_to_template(service, asked, asked.chat_template_kwargs, tools)
    async with service.timed(arrived, asked.timeout_ms) as arrived:
        completion, reader = await begin(request, asked, tools, arrived)
    return await respond(request, SCHEMA, asked, completion, reader=reader)


async def fit_to_template(
    service: Service, asked: B, kwargs: dict[str, Any] | None, tools: ToolsAsked
) -> B:
    """The body whose template gets the effort as one of its names. An effort or tools that the
    template does not read are among the fields without effect.
    """
    template, (name, effort) = service.input_processor.tokenizer.chat_template, asked.effort
    if effort is None and not tools.tools:
        return asked
    given, past, in_thread = kwargs or {}, list[str](), service.in_thread
    is_free = template is not None and effort is not None and EFFORT not in given
    if template is not None and is_free and await in_thread(template.reads, EFFORT):
        asked = msgspec.structs.replace(asked, chat_template_kwargs={**given, EFFORT: effort})
    elif effort not in (None, "none"):
        past.append(name)
    if template is not None and tools.tools and not await in_thread(template.reads_tools):
        past.append("tools")
    return msgspec.structs.replace(asked, read_past=(*asked.read_past, *past))


async def begin(
    request: Request, asked: Conversation, tools: ToolsAsked, arrived: Arrival
) -> tuple[LiveCompletion, AnswerReader | None]:
    """Queue the answer of a conversation; errors of its text name `messages`. Without a reader all
    of the text is content.
    """
    service: Service = request.app.state.service
    arrived = arrived._replace(adapter=service.check_model(asked.model))
    checking = service.check_asked(asked.params, 1, "messages", asked.form_field)
    await while_connected(request, checking)
    if tools.tools:
        check_readable(service, tools)
        check_form(service, asked, tools)
    kept = service.input_processor.num_kept(asked.params)
    rendering = render(service, asked, tools, kept)
    text, prompt = await while_connected(request, rendering)
    with blaming("messages"):
        service.input_processor.check_length(prompt)
    formats, params = service.served.formats, asked.params
    if not tools.tools and formats.reasoning == "none":
        return await service.ask([prompt], params, arrived, "messages"), None
    reader = AnswerReader(formats, wanted(asked, tools), text)
    form = asked.form if tools.tools or reader.reasoning == "think" else None
    if form is not None and not tools.tools and form.kinds[0] not in JSON_KINDS:
        # All of the text obeys the form, which has no room for reasoning.
        return await service.ask([prompt], params, arrived, "messages"), None
    grammar = await service.in_thread(lambda: call_grammar(service, tools, reader, form))
    if form is not None:  # that grammar has it
        params = msgspec.structs.replace(params, structured_outputs=None)
    if grammar:  # `ask` checks it again, and finds what is known by then
        checking = service.check_grammar(grammar, "tools", params.cache_salt)
        await while_connected(request, checking)
    return await service.ask([prompt], params, arrived, "messages", grammar, reader), reader


async def render(
    service: Service, asked: Conversation, tools: ToolsAsked, kept: int | None
) -> tuple[str, list[int]]:
    """The conversation as text, and its tokens or the last `kept` of them."""
    text = await service.render(asked.messages, asked.options(tools))
    return text, await service.tokenize(text, "messages", asked.add_special_tokens, kept)


def wanted(asked: Conversation, tools: ToolsAsked) -> Wanted:
    most = None if tools.is_parallel else 1
    return Wanted(tools.tools, tools.is_enforced, tools.is_named, asked.include_reasoning, most)


def check_readable(service: Service, asked: ToolsAsked) -> None:
    """Refuse tools where calls would not be found in the text, or could not be enforced in it."""
    formats = service.served.formats
    if asked.is_enforced:
        return
    if formats.tools == "none":
        raise RequestError(
            "tools: it is not known how this model writes calls: its operator can set "
            'server.tool_parser; or send tool_choice = "required", or a function to call',
            "tools",
        )
    if asked.strict and formats.enforced != formats.tools:
        raise RequestError(
            "tools: the calls of this model can be read, but not be held to a schema among other "
            'text: leave out strict, or send tool_choice = "required", or a function to call',
            "tools",
        )


def check_form(service: Service, asked: Conversation, tools: ToolsAsked) -> None:
    """Refuse a form of the text beside tools where a text could not be told from a call, or has to
    be one.
    """
    if asked.form is None:
        return
    formats = service.served.formats
    if tools.is_enforced:
        why = 'the text has to be a call: send one of them, or tool_choice = "auto"'
    elif formats.tools not in ("hermes", "mistral"):
        why = 'texts and calls of this model look alike: send one of them, or tool_choice = "none"'
    elif asked.form.kinds[0] not in JSON_KINDS:
        why = "beside tools it is a JSON schema or json_object: send one of these, or no tools"
    else:
        return
    raise RequestError(f"{asked.form_field} and tools: {why}", "tools")


def call_grammar(
    service: Service,
    asked: ToolsAsked,
    reader: AnswerReader,
    form: StructuredOutputsParams | None = None,
) -> str:
    """The grammar of calls that have to be made, of those of strict tools, or of a text that is
    of a form or, if there are tools, calls; empty where none is needed. Before each of them there
    may be reasoning.
    """
    if not asked.is_enforced and not asked.strict and form is None:
        return ""
    formats = service.served.formats
    special = special_tokens(service.input_processor.tokenizer, formats)
    thinks = reader.reasoning == "think"
    is_inside = thinks and reader.is_inside
    calls = CallGrammar(formats, asked.callable, special, thinks, is_inside, asked.strict)
    try:
        if form is not None and not asked.tools:
            return calls.form_alone(json_form(form))
        if form is not None:
            return calls.or_form(json_form(form), asked.is_parallel)
        if asked.is_enforced:
            return calls.enforced(asked.is_parallel and not asked.is_named)
        return calls.triggered()
    except GrammarError as e:
        raise RequestError(f"tools: {e}", "tools") from e


async def encode(
    service: Service,
    messages: Sequence[dict[str, Any]],
    options: ChatOptions,
    add_special_tokens: bool,
    kept: int | None = None,
) -> list[int]:
    """The conversation's tokens, or the last `kept` of them."""
    text = await service.render(messages, options)
    return await service.tokenize(text, "messages", add_special_tokens, kept)


def read_chat(raw: bytes) -> tuple[ChatBody, ToolsAsked]:
    body = read(raw, ChatBody)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs: only with logprobs; set logprobs to true", "top_logprobs")
    tools = NO_TOOLS
    if body.tools is not None or body.tool_choice is not None:
        tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    return msgspec.structs.replace(body, messages=tuple(read_messages(body.messages))), tools


CHAT = BodyKind("chat", read_chat, tuple[ChatBody, ToolsAsked])


def read_options(
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    kwargs: dict[str, Any],
    asked: ToolsAsked,
) -> ChatOptions:
    check_depth(kwargs, MAX_DEPTH)
    tools = [*asked.tools] or None
    return ChatOptions(add_generation_prompt, continue_final_message, kwargs, tools)


def check_depth(value: Any, most: int) -> None:
    if not most:
        raise RequestError(
            f"chat_template_kwargs: nested more than {MAX_DEPTH} deep", "chat_template_kwargs"
        )
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, most - 1)


def read_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise RequestError("messages: give at least one", "messages")
    return [read_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def read_message(given: dict[str, Any], path: str) -> dict[str, Any]:
    known = fields(Message)
    kept = {key: value for key, value in given.items() if value is not None}
    values = {k: convert(v, known[k], f"{path}.{k}") for k, v in kept.items() if k in known}
    for key, value in kept.items():
        if key not in known:
            check_no_op(key, value, path)
    if "role" not in values:
        raise RequestError(f"{path}.role: every message has one", f"{path}.role")
    check_role(values, path)
    if "content" not in values and values["role"] != "assistant":
        raise RequestError(
            f"{path}.content: missing; give a string or text parts", f"{path}.content"
        )
    return for_template(Message(**values), path)


def check_role(values: dict[str, Any], path: str) -> None:
    """Refuse fields of calls in messages that have none."""
    role = values["role"]
    if role == "tool" and "tool_call_id" not in values:
        raise RequestError(
            f"{path}.tool_call_id: missing; send the id of the call that this is the result of",
            f"{path}.tool_call_id",
        )
    for key, its in {"tool_call_id": "tool", "tool_calls": "assistant"}.items():
        if values.get(key) and role != its:
            raise RequestError(
                f"{path}.{key}: only messages of the role {its} have it: leave it out",
                f"{path}.{key}",
            )


def for_template(message: Message, path: str) -> dict[str, Any]:
    content, thoughts = message.content, list[str]()
    if isinstance(content, list):
        texts = list[str]()
        for i, part in enumerate(content):
            is_thought = message.role == "assistant" and part.get("type") == THINKING
            read = read_thought if is_thought else read_part
            (thoughts if is_thought else texts).append(read(part, f"{path}.content[{i}]"))
        content = "\n".join(texts)
    # Templates skip unknown roles, and OpenAI's developer role stands for system.
    role = "system" if message.role == "developer" else message.role
    nothing = None if message.tool_calls else ""
    fields: dict[str, Any] = {"role": role, "content": content or nothing}
    if reasoning := message.reasoning_content or message.reasoning or "\n".join(thoughts):
        fields["reasoning_content"] = reasoning
    if message.tool_calls:
        fields["tool_calls"] = read_calls(message.tool_calls, f"{path}.tool_calls")
    if message.role == "tool":
        named = {"name": message.name} if message.name else {}
        return fields | {"tool_call_id": message.tool_call_id} | named
    return fields


def read_thought(part: dict[str, Any], path: str) -> str:
    """The reasoning of an earlier answer, as a text or as text parts."""
    check_keys(part, ["type", THINKING, "closed"], f"{path}.")
    where = f"{path}.{THINKING}"
    thought = convert(part.get(THINKING), str | list[dict[str, Any]], where)
    if isinstance(thought, str):
        return thought
    return "\n".join(read_part(each, f"{where}[{i}]") for i, each in enumerate(thought))


def read_part(part: dict[str, Any], path: str) -> str:
    kind = part.get("type")
    if kind != "text":
        raise RequestError(
            f"{path}.type: only text is read, not {cut(str(kind))!r}", f"{path}.type"
        )
    check_keys(part, ["type", "text"], f"{path}.")
    return str(convert(part.get("text"), str, f"{path}.text"))


def check_no_op(key: str, value: Any, path: str) -> None:
    if key not in NO_OP:
        refuse_unknown(key, [*fields(Message), *NO_OP], f"{path}.")
    if not any(is_same(value, off) for off in NO_OP[key]):
        raise RequestError(f"{path}.{key} is not supported yet: leave it out", f"{path}.{key}")
