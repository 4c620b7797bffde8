"""POST /v1/chat/completions: generates from messages, with the model's chat template."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

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
    decode_object,
    fields,
    is_same,
    read_object,
    refuse_unknown,
)
from specserve.server.completion import Arrival, LiveCompletion, Service, arrival
from specserve.server.formatter import CompletionFormatter, RouteSchema
from specserve.server.logprobs import chat_logprobs, sealed
from specserve.server.old_fields import (
    FUNCTION_CALL,
    FUNCTIONS,
    REPLACED,
    as_function,
    replace_functions,
    with_function,
    with_function_delta,
)
from specserve.server.prompt import blaming
from specserve.server.protocol import (
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChoice,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatLogprobs,
    FunctionCall,
    FunctionDelta,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
)
from specserve.server.refusal import cut
from specserve.server.stream import respond, while_connected
from specserve.server.tools import (
    NO_TOOLS,
    ToolsAsked,
    check_depth,
    check_keys,
    read_calls,
    read_tools,
)
from specserve.text.answer.events import Answer, CallArguments, CallBegin, Content, Event, Reasoning
from specserve.text.answer.formats import AnswerReader, Wanted
from specserve.text.chat_template import ChatOptions
from specserve.text.grammars.compiled import GrammarError
from specserve.text.grammars.structured_outputs import StructuredOutputsParams, json_form
from specserve.text.grammars.tools import CallGrammar, special_tokens

# Fields of responses that clients send back in messages -> their values without effect. The server
# refuses other values.
NO_OP: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "images": ([],),
}


B = TypeVar("B", bound=Body)
EFFORT = "reasoning_effort"  # its name in templates
THINKS = "enable_thinking"  # the variable of Qwen's templates
SWITCHES = THINKS, "thinking"  # names of variables that turn reasoning on or off
# The efforts of gpt-oss, whose template accepts any text.
CHANNEL_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
THINKING = "thinking"  # the type of a part, and the field with its text
JSON_KINDS = "json", "json_object"  # formats that can be combined with tools or reasoning


SOME = Meta(extra_json_schema={"minItems": 1})
AnyMessage = Annotated[
    dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/ChatMessage"})
]


class Conversation(NamedTuple):
    """A conversation to continue, independent of the route's body."""

    messages: Sequence[dict[str, Any]]
    options: ChatOptions
    tools: ToolsAsked
    add_special_tokens: bool = False
    include_reasoning: bool = True


class ChatBody(FormattedBody, frozen=True, kw_only=True):
    """A chat.

    messages        the conversation so far
    add_special_tokens  the tokenizer adds special tokens to the template's text
    add_generation_prompt  the template starts the response; unset: true, unless
                    continue_final_message is set
    continue_final_message  the response continues the last message, which is an assistant's
    chat_template_kwargs  variables for the chat template
    logprobs        return the logprob of each token
    top_logprobs    number of most likely tokens per position; needs logprobs
    tools           functions that the model can call
    tool_choice     "none", "auto", "required" or a function of the tools
    parallel_tool_calls  false: at most one call
    include_reasoning  false removes reasoning from the response
    enable_thinking  the same as this variable of chat_template_kwargs
    """

    refused: ClassVar[Mapping[str, str]] = {
        **{name: why for name, why in REFUSED.items() if name not in REPLACED},
        "prompt": "a chat has messages; send a prompt to /v1/completions",
    }
    old: ClassVar[Mapping[str, str]] = REPLACED

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
    enable_thinking: bool | None = None

    @property
    def params(self) -> SamplingParams:
        num_top = (self.top_logprobs or 0) if self.logprobs else None
        return msgspec.structs.replace(super().params, logprobs=num_top)

    def conversation(self, tools: ToolsAsked) -> Conversation:
        how = self.add_generation_prompt, self.continue_final_message
        options = read_options(*how, self.chat_template_kwargs or {}, tools)
        more = self.add_special_tokens, self.include_reasoning
        return Conversation(self.messages, options, tools, *more)


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message.

    `name` is ignored except for tools, as in most templates. `parsed` and
    `provider_specific_fields`, which clients copy from responses, are ignored, too.
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


def chunk_choice(event: Event, is_first: bool, **fields: Any) -> ChatChunkChoice:
    """Return the chunk of an event. The role comes with the first token, because clients measure
    TTFT by its chunk.
    """
    delta = MessageDelta(role="assistant", content=None) if is_first else MessageDelta()
    match event:
        case Content(text):
            if text or is_first:
                delta.content = text
        case Reasoning(text):
            delta.reasoning_content = delta.reasoning = text  # clients read either name
        case CallBegin(index, id, name):
            function = FunctionDelta(name, "")
            delta.tool_calls = [ToolCallDelta(index, id, "function", function)]
        case CallArguments(index, text):
            function = FunctionDelta(arguments=text)
            delta.tool_calls = [ToolCallDelta(index, function=function)]
    return ChatChunkChoice(delta=delta, **fields)


def whole_choice(answer: Answer, **fields: Any) -> ChatCompletionChoice:
    has_only_calls = answer.calls and not answer.content
    content = None if has_only_calls else answer.content
    message = ChatCompletionMessage("assistant", content, refusal=None)
    if answer.reasoning:
        message.reasoning_content = message.reasoning = answer.reasoning
    if answer.calls:
        each = answer.calls
        calls = [ToolCall(c.id, "function", FunctionCall(c.name, c.arguments)) for c in each]
        message.tool_calls = calls
    return ChatCompletionChoice(message=message, **fields)


SCHEMA = RouteSchema(
    "chatcmpl",
    ChatCompletionChunk,
    ChatCompletion,
    chunk_choice,
    whole_choice,
    lambda scored, namer: ChatLogprobs(sealed(chat_logprobs(scored, namer)), refusal=None),
    choices_have_prompts=False,
)
FUNCTION_SCHEMA = SCHEMA._replace(  # for requests with OpenAI's deprecated functions
    chunk_choice=lambda event, is_first, **fields: with_function_delta(
        chunk_choice(event, is_first, **as_function(fields))
    ),
    choice=lambda answer, **fields: with_function(whole_choice(answer, **as_function(fields))),
)


async def chat(request: Request) -> Response:
    service: Service = request.app.state.service
    arrived = arrival(request)
    service.check_open()
    asked, tools = await service.prompts.parse(await service.bodies.read(request), CHAT)
    asked = await fit_thinking(service, asked, "chat_template_kwargs.enable_thinking")
    asked = await fit_to_template(service, asked, asked.chat_template_kwargs)
    asked, tools = fit_strict(service, asked, tools)
    async with service.timed(arrived, asked.timeout_ms) as arrived:
        completion, reader = await begin(request, asked, asked.conversation(tools), arrived)
    served = service.served_to(completion.arrived)
    schema = FUNCTION_SCHEMA if FUNCTIONS in asked.replaced else SCHEMA
    formatter = CompletionFormatter(schema, served, asked, completion, reader=reader)
    return await respond(request, completion, formatter, asked)


async def fit_thinking(service: Service, asked: ChatBody, field: str) -> ChatBody:
    """Return the body with the variable `enable_thinking` under the names that the template reads.

    Without such a name, it is reported as an ignored field, because many clients always send it.
    """
    template, kwargs = service.prompts.processor.tokenizer.chat_template, asked.chat_template_kwargs
    if template is None or not kwargs or THINKS not in kwargs:
        return asked
    in_thread = service.prompts.in_thread
    read = await in_thread(lambda: [each for each in SWITCHES if template.reads(each)])
    if THINKS in read:
        return asked
    rest = {name: value for name, value in kwargs.items() if name != THINKS}
    rest = dict.fromkeys(read, kwargs[THINKS]) | rest
    past = asked.read_past if read else (*asked.read_past, field)
    return msgspec.structs.replace(asked, chat_template_kwargs=rest, read_past=past)


async def fit_to_template(service: Service, asked: B, kwargs: dict[str, Any] | None) -> B:
    """Return the body with the reasoning effort as variables of the template.

    An effort that the template does not read, a budget of a response without reasoning, and the
    name of another model are reported as ignored fields.
    """
    template, (name, effort) = service.prompts.processor.tokenizer.chat_template, asked.effort
    in_thread, past = service.prompts.in_thread, [*service.ignored_fields(asked.model)]
    wanted = dict[str, Any]()
    if effort is not None:
        levels = CHANNEL_EFFORTS if service.served.formats.has_channels else {}
        wanted[EFFORT] = levels.get(effort, effort)
    if asked.thinks is not None:
        wanted |= dict.fromkeys(SWITCHES, asked.thinks)
    if template is not None and wanted:
        read = await in_thread(lambda: [each for each in wanted if template.reads(each)])
        new = {each: wanted[each] for each in read if each not in (kwargs or {})}
        if new:
            asked = msgspec.structs.replace(asked, chat_template_kwargs={**(kwargs or {}), **new})
            effort = None
    if effort not in (None, "none"):
        past.append(name)
    # A format that is no JSON is that of the whole text.
    is_whole = asked.form is not None and asked.form.kinds[0] not in JSON_KINDS
    has_none = is_whole or service.served.formats.reasoning == "none"
    if has_none and asked.thinking_token_budget is not None:
        past.append(asked.budget_field)
        asked = msgspec.structs.replace(asked, thinking_token_budget=None)
    return msgspec.structs.replace(asked, read_past=(*asked.read_past, *past)) if past else asked


def fit_strict(service: Service, asked: B, tools: ToolsAsked) -> tuple[B, ToolsAsked]:
    """Return the tools without `strict`, and report it as an ignored field, if no grammar can
    enforce a schema for calls of this model within other text. Many clients always send it.
    """
    formats = service.served.formats
    if not tools.strict or tools.is_enforced or formats.tools == "none":
        return asked, tools
    if formats.enforced == formats.tools and not formats.family:
        return asked, tools
    asked = msgspec.structs.replace(asked, read_past=(*asked.read_past, "tools.strict"))
    return asked, msgspec.structs.replace(tools, strict=frozenset())


async def begin(
    request: Request, asked: Body, conversation: Conversation, arrived: Arrival
) -> tuple[LiveCompletion, AnswerReader | None]:
    """Queue a conversation, and return the parser of its response; None: all text is content.

    Errors of the text name `messages`.
    """
    service: Service = request.app.state.service
    tools = conversation.tools
    adapter, session = service.check_model(asked.model), asked.prompt_cache_key or ""
    arrived = arrived._replace(adapter=adapter, session=session)
    params = asked.params
    checking = service.check_params(params, 1, "messages", asked.form_field)
    sampling = await while_connected(request, checking)
    if tools.tools:
        check_readable(service, tools)
        check_form(service, asked, tools)
    kept = service.prompts.processor.num_kept(params)
    text, prompt = await while_connected(request, render(service, conversation, kept))
    with blaming("messages"):
        service.prompts.processor.check_length(prompt)
    sampling = await service.prompts.with_history(sampling, conversation.messages, text, prompt)
    formats = service.served.formats
    if not tools.tools and formats.reasoning == "none":
        return await service.admit([prompt], params, sampling, arrived, "messages"), None
    most = None if tools.is_parallel else 1
    enforced = tools.is_enforced, tools.is_named
    wanted = Wanted(tools.tools, *enforced, conversation.include_reasoning, most)
    reader = AnswerReader(formats, wanted, text)
    form = asked.form if tools.tools or reader.thinks else None
    has_kind = form is not None and form.kinds[0] in JSON_KINDS
    if asked.form is not None and not tools.tools and not has_kind:
        # The whole text has the format, which cannot contain reasoning.
        return await service.admit([prompt], params, sampling, arrived, "messages"), None
    grammar = await service.prompts.in_thread(lambda: call_grammar(service, tools, reader, form))
    if form is not None:  # the grammar of the calls includes the format
        sampling = msgspec.structs.replace(sampling, grammar="")
    if grammar:  # `admit` checks again, and then finds the cached result
        compiling = service.prompts.check_grammar(grammar, "tools", params.cache_salt)
        await while_connected(request, compiling)
    admitting = service.admit([prompt], params, sampling, arrived, "messages", grammar, reader)
    return await admitting, reader


async def render(
    service: Service, conversation: Conversation, kept: int | None = None
) -> tuple[str, list[int]]:
    """Return the conversation as text, and its tokens or the last `kept` of them."""
    prompts, special = service.prompts, conversation.add_special_tokens
    formats, options = service.served.formats, conversation.options
    if options.tools:
        how = {"call": formats.call, "are_tools_text": formats.tools == "generic"}
        options = msgspec.structs.replace(options, **how)
    text = await prompts.render(conversation.messages, options)
    return text, await prompts.tokenize(text, "messages", special, kept)


def check_readable(service: Service, asked: ToolsAsked) -> None:
    """Refuse tools if calls could not be parsed from the text, or not be enforced in it."""
    formats = service.served.formats
    if asked.is_enforced:
        return
    if formats.tools == "none":
        raise RequestError(
            "tools: the server has no tool parser. Force a call with tool_choice; its operator "
            "can set server.tool_parser",
            "tools",
        )


def check_form(service: Service, asked: Body, tools: ToolsAsked) -> None:
    """Refuse a format of the text together with tools, if text and calls look alike, or if the
    response has to be a call.
    """
    if asked.form is None:
        return
    formats = service.served.formats
    if tools.is_enforced:
        why = "the response must be a call. Send one of them, or the tool_choice auto"
    elif formats.tools not in ("generic", "hermes", "mistral"):
        why = "text and calls of this model look alike. Send one of them, or the tool_choice none"
    elif asked.form.kinds[0] not in JSON_KINDS:
        why = "tools only allow a JSON schema or json_object. Send one of these, or omit tools"
    else:
        return
    raise RequestError(f"{asked.form_field} and tools: {why}", "tools")


def call_grammar(
    service: Service,
    asked: ToolsAsked,
    reader: AnswerReader,
    form: StructuredOutputsParams | None = None,
) -> str:
    """Return the grammar of the response; empty if none is needed.

    It enforces calls, their form in the generic format, arguments of strict tools, or a format of
    the text (with tools: the format or calls). Reasoning can precede each of them.
    """
    formats = service.served.formats
    # A model that learns the format from the prompt alone needs help to keep to it.
    is_guided = formats.tools == "generic" and bool(asked.tools)
    if not asked.is_enforced and not asked.strict and not is_guided and form is None:
        return ""
    special = special_tokens(service.prompts.processor.tokenizer, formats)
    thinks = reader.thinks
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


def read_chat(raw: bytes) -> tuple[ChatBody, ToolsAsked]:
    given = decode_object(raw)
    has_old = FUNCTIONS in given or FUNCTION_CALL in given
    body = read_object(given, ChatBody, replace_functions(given) if has_old else ())
    if body.enable_thinking is not None:
        thinks = {THINKS: body.enable_thinking} | (body.chat_template_kwargs or {})
        body = msgspec.structs.replace(body, chat_template_kwargs=thinks)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs: needs logprobs. Set logprobs = true", "top_logprobs")
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
    if kwargs:
        check_depth(kwargs, 32, "chat_template_kwargs")
    tools = [*asked.tools] or None
    return ChatOptions(add_generation_prompt, continue_final_message, kwargs, tools)


def read_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise RequestError("messages: empty. Send at least one message", "messages")
    return [read_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def read_message(given: dict[str, Any], path: str) -> dict[str, Any]:
    known = fields(ChatMessage)
    kept = {key: value for key, value in given.items() if value is not None}
    values = {k: convert(v, known[k], f"{path}.{k}") for k, v in kept.items() if k in known}
    for key, value in kept.items():
        if key not in known:
            check_no_op(key, value, path)
    if "role" not in values:
        raise RequestError(f"{path}.role: missing. Send the role of the message", f"{path}.role")
    check_role(values, path)
    if "content" not in values and values["role"] != "assistant":
        raise RequestError(
            f"{path}.content: missing. Send a string or text parts", f"{path}.content"
        )
    return for_template(ChatMessage(**values), path)


def check_role(values: dict[str, Any], path: str) -> None:
    """Refuse a missing call id of a result, and fields of calls in messages of other roles."""
    role = values["role"]
    if role == "tool" and "tool_call_id" not in values:
        raise RequestError(
            f"{path}.tool_call_id: missing. Send the id of the call with this result",
            f"{path}.tool_call_id",
        )
    for key, its in {"tool_call_id": "tool", "tool_calls": "assistant"}.items():
        if values.get(key) and role != its:
            raise RequestError(
                f"{path}.{key}: only for messages of the role {its}. Omit it",
                f"{path}.{key}",
            )


def for_template(message: ChatMessage, path: str) -> dict[str, Any]:
    content, thoughts = message.content, list[str]()
    if isinstance(content, list):
        texts = list[str]()
        for i, part in enumerate(content):
            is_thought = message.role == "assistant" and part.get("type") == THINKING
            read = read_thought if is_thought else read_part
            (thoughts if is_thought else texts).append(read(part, f"{path}.content[{i}]"))
        content = "\n".join(texts)
    # Templates skip unknown roles; OpenAI's role developer means system.
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
    """Return the reasoning of an earlier response, from a text or text parts."""
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
            f"{path}.type: {cut(str(kind))!r} is not supported: models read only text. Send text",
            f"{path}.type",
        )
    check_keys(part, ["type", "text"], f"{path}.")
    return str(convert(part.get("text"), str, f"{path}.text"))


def check_no_op(key: str, value: Any, path: str) -> None:
    if key not in NO_OP:
        refuse_unknown(key, [*fields(ChatMessage), *NO_OP], f"{path}.")
    if not any(is_same(value, off) for off in NO_OP[key]):
        raise RequestError(f"{path}.{key} is not supported. Omit it", f"{path}.{key}")
