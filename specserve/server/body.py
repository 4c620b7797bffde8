"""Reads request bodies within limits of size and time, and checks their fields."""

import asyncio
import difflib
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta
from starlette.requests import Request

from specserve.config import Milliseconds, ServerConfig
from specserve.errors import Overloaded, RequestError
from specserve.exchange.fair_queue import has_room, owner
from specserve.exchange.sampling_params import (
    OTHER_NAMES,
    Limit,
    SamplingParams,
    reason_and_path,
)
from specserve.server.refusal import StatusError, cut
from specserve.text.grammars.structured_outputs import FIELD, StructuredOutputsParams, grammar_of

ELSEWHERE = {  # unknown fields, often sent by mistake -> where their content belongs
    "extra_body": "Send its fields at the top level: it is an argument of the openai client",
    **{name: f"Send {FIELD}.{name}" for name in ("choice", "grammar", "regex")},
    "json_schema": "Send response_format.json_schema",
    "response_format.schema": "Send response_format.json_schema.schema, next to a name",
}

# OpenAI's fields without a meaning in specserve: accepted with any value, and ignored.
HARMLESS = {
    *("metadata", "prompt_cache_retention", "safety_identifier"),
    *("service_tier", "user", "verbosity"),
}

# Fields of chat frontends for their own servers: ignored, and listed in a response header.
FRONTENDS = {
    *(
        "background_tasks",
        "cache_control",
        "chat_id",
        "conversation_id",
        "features",
        "filter_ids",
        "id",
    ),
    *("message_id", "model_item", "parent_id", "parent_message_id", "session_id", "thread_id"),
    "variables",
}

# Fields of other servers that are not implemented -> their values without effect. Other values are
# refused.
NO_OP: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "documents": (),
    "echo": (False,),
    "include_reasoning": (True,),
    "logprob_token_ids": (),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),
    "request_id": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "store": (True, False),  # specserve stores no responses
    "stream_interval": (1,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_logprobs": (0,),
    "web_search_options": (),
}

# Fields that every route refuses unless they are null -> the remedy.
REFUSED = {
    "function_call": "it is deprecated; send tool_choice and tools",
    "functions": "they are deprecated; send tools",
    "chat_template": "the server uses the model's template; render yours and call /v1/completions",
    **{
        f"guided_{kind}": f"send structured_outputs with {kind}"
        for kind in ("choice", "grammar", "json", "regex")
    },
    "prompt_embeds": "send text or token ids",
}

# Numbers for which other servers accept -1 as unset.
UNSET = dict.fromkeys(("max_completion_tokens", "max_output_tokens", "max_tokens"), -1)

# Fields of messages, parts, calls and tools that clients send for other servers.
OF_ANY = {"cache_control", "providerMetadata", "providerOptions", "provider_options"}
OF_MESSAGES = OF_ANY | {
    *("annotations", "channel", "citations", "created", "createdAt", "created_at", "done"),
    *("end_turn", "executed_tools", "extra_content", "id", "index", "info", "messageId"),
    *("message_id", "metadata", "model", "parentId", "partial", "prefix", "reasoning_details"),
    *("reasoning_items", "reasoning_opaque", "reasoning_signature", "recipient", "refusal"),
    *("response_metadata", "search_results", "signature", "sources", "status"),
    *("thinking_blocks", "thought_signature", "timestamp", "ts", "type", "updatedAt", "usage"),
    *("usage_metadata", "weight"),
}
OF_PARTS = OF_ANY | {
    *("annotations", "citations", "id", "index", "logprobs", "signature", "thought_signature")
}
OF_CALLS = OF_ANY | {
    *("extra_content", "provider_specific_fields", "signature", "thought_signature")
}
OF_TOOLS = OF_ANY | {"defer_loading", "eager_input_streaming"}

IGNORED = {  # path of objects in a body -> ignored fields
    "messages": OF_MESSAGES,
    "messages.content": OF_PARTS,
    "messages.tool_calls": OF_CALLS,
    "messages.tool_calls.function": OF_CALLS,
    "tools": OF_TOOLS,
    "tools.function": OF_TOOLS,
    "input": OF_MESSAGES - {"id", "status", "type"},
    "input.content": OF_PARTS,
    "input.output": OF_PARTS,
    "input.summary": OF_PARTS,
}

SMALL = 1 << 16  # bytes per body that are not counted; max_connections limits their sum

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
LARGE = 1 << 15  # bytes; reading a larger body takes some milliseconds
MANY = 100  # items; reading a body with more takes some milliseconds

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

R = TypeVar("R")
T = TypeVar("T", bound="Body")
S = TypeVar("S", bound=msgspec.Struct)

REMEDIES = {  # field -> hint in errors about its value
    "logit_bias": "send an object of up to 1024 token ids -> -100 to 100",
    "max_tokens": "omit it to use the rest of the context",
    "logprobs": "send 0 to 20 most likely tokens; in a chat, true or false",
    "n": "send 1 to 128 choices",
    "prediction": 'send a text, or {"type": "content", "content": "..."} with text parts',
    "prompt_logprobs": "send 0 to 20 most likely tokens",
    "repetition_penalty": "1 is off",
    "seed": "send a signed 64-bit integer, or omit it for a random seed",
    "timeout_ms": "send milliseconds, 0.001 or more",
    "top_k": "0 is off",
    "top_logprobs": "send 0 to 20 most likely tokens",
    "top_p": "1 is off",
}


class BodyKind(NamedTuple, Generic[R]):
    """The reader of a route's bodies. Its results are sent between processes as JSON."""

    name: str
    read: Callable[[bytes], R]
    result: Any  # the type that `read` returns


def is_short(raw: bytes) -> bool:
    """Whether the body is small enough to read in the event loop."""
    return len(raw) <= LARGE and num_brackets(raw) <= MANY


def check_items(raw: bytes, most: int) -> None:
    """RequestError for a body with more objects and lists than `most`.

    Reading takes time for each of them. Decoding takes about ten times as long as counting.
    """
    if num_brackets(raw) <= most:
        return
    if (found := num_brackets(STRING.sub(b"", raw))) > most:
        raise RequestError(
            f"the body has {found} objects and lists. At most {most} are allowed "
            "(server.max_body_items), so send fewer messages, parts or tools"
        )


def num_brackets(raw: bytes) -> int:
    """Count the objects and lists of a body, and the brackets in its texts."""
    return raw.count(b"{") + raw.count(b"[")


class PaddingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class StreamOptions(PaddingOptions, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schema of the text. `strict` closes all objects; `name` and `description` are ignored."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The format of the text. A structural tag has `format`, or `structures` and `triggers`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: required for the type json_schema, and only there")
        if self.json_schema is not None and self.json_schema.schema is None:
            raise ValueError("json_schema.schema: missing")
        if self.tag and self.type != "structural_tag":
            raise ValueError(f"{next(iter(self.tag))}: only for the type structural_tag")

    @property
    def tag(self) -> dict[str, Any]:
        """The fields of a structural tag, without its type."""
        names = "format", "structures", "triggers"
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def asked(self) -> StructuredOutputsParams | None:
        match self.type:
            case "text":
                return None
            case "json_object":
                return StructuredOutputsParams(json_object=True)
            case "structural_tag":
                return StructuredOutputsParams(structural_tag={"type": self.type, **self.tag})
        assert self.json_schema is not None
        is_strict = bool(self.json_schema.strict)
        return StructuredOutputsParams(json=self.json_schema.schema, strict=is_strict)


class Body(SamplingParams, frozen=True, kw_only=True):
    """The fields of all generating routes.

    model           name of the served model or of an adapter
    max_completion_tokens  another name of max_tokens
    return_token_ids  return the ids of the response's tokens and of the prompt's tokens
    return_tokens_as_token_ids  write the tokens of logprobs as ids
    timeout_ms      milliseconds from arrival after which the request ends with an error
    reasoning_effort  amount of reasoning, if the chat template reads it or can switch it off
    max_thinking_tokens  another name of thinking_token_budget
    prompt_cache_key  name of the conversation, for /v1/cache/save and routers
    stream          return server-sent events
    stream_options  include_obfuscation: pad events, so that their sizes reveal little
    """

    no_op: ClassVar[Mapping[str, tuple[Any, ...]]] = NO_OP
    refused: ClassVar[Mapping[str, str]] = REFUSED
    passed: ClassVar[set[str]] = FRONTENDS  # ignored, and listed in a response header
    ignored: ClassVar[Mapping[str, set[str]]] = IGNORED
    budget_field: ClassVar[str] = "thinking_token_budget"  # path of the limit of reasoning

    model: str | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None  # another name of max_tokens
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    timeout_ms: Milliseconds | None = None
    reasoning_effort: Effort | None = None
    max_thinking_tokens: Limit | None = None  # another name of thinking_token_budget
    prompt_cache_key: str | None = None
    stream: bool = False
    stream_options: PaddingOptions | None = None
    read_past: tuple[str, ...] = ()  # ignored fields of the request; clients cannot send this

    @property
    def headers(self) -> dict[str, str]:
        """Response headers: a warning about ignored fields."""
        return warning(self.read_past)

    @property
    def effort(self) -> tuple[str, str | None]:
        """The path of the field for the reasoning effort, and its value."""
        return "reasoning_effort", self.reasoning_effort

    @property
    def thinks(self) -> bool | None:
        """Whether the template should let the model reason; None: as it does by default."""
        _, effort = self.effort
        return None if effort is None else effort != "none"

    @property
    def params(self) -> SamplingParams:
        names = SamplingParams.__struct_fields__
        given = {name: getattr(self, name) for name in names}
        return SamplingParams(**given | {"structured_outputs": self.form})

    @property
    def form(self) -> StructuredOutputsParams | None:
        """The required format of the text, from any of the fields for it."""
        return self.structured_outputs

    @property
    def form_field(self) -> str:
        return FIELD if self.structured_outputs is None else self.structured_outputs.field


class FormattedBody(Body, frozen=True, kw_only=True):
    """The fields of a body with OpenAI's response_format.

    response_format  format of the text: text, json_object, json_schema or structural_tag
    stream_options  include_usage: a last chunk has the usage; continuous_usage_stats: every chunk
                    has it; include_obfuscation: pad events, so that their sizes reveal little
    """

    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @property
    def form(self) -> StructuredOutputsParams | None:
        asked = None if self.response_format is None else self.response_format.asked
        return self.structured_outputs if asked is None else asked

    @property
    def form_field(self) -> str:
        if self.response_format is None or self.response_format.asked is None:
            return super().form_field
        has_schema = self.response_format.json_schema is not None
        return f"response_format{'.json_schema.schema' if has_schema else ''}"


def warning(read_past: Sequence[str]) -> dict[str, str]:
    """Return the header that lists ignored fields."""
    names = ", ".join(read_past)
    return {"Warning": f'299 specserve "ignored: {names}"'} if names else {}


class BodyReader:
    """Reads bodies within limits of size and time.

    The sum of all incomplete bodies is limited, too (`server.max_incoming_bytes`), because
    thousands of connections can send bodies at the same time.
    """

    def __init__(self, limits: ServerConfig, reject: Callable[[str], None]) -> None:
        self.limits, self.reject = limits, reject
        # Bytes of incomplete bodies without the first SMALL of each: in total, and by owner.
        self.num_incoming, self.incoming = 0, Counter[Hashable]()

    async def read(self, request: Request) -> bytes:
        """Return the complete body. Refuse it as soon as it exceeds a limit."""
        limits = self.limits
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limits.max_body_bytes:
            raise too_large(limits.max_body_bytes)
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for chunk in request.stream():
                    self.extend(body, chunk)
        except TimeoutError as e:
            message = f"the body did not arrive within {limits.body_seconds:g} s. Send it faster"
            raise StatusError(408, message, "request_timeout") from e
        finally:
            self.count(-counted(body))
        return bytes(body)

    def count(self, more: int) -> None:
        self.num_incoming += more
        self.incoming[owner.get()] += more
        if not self.incoming[owner.get()]:
            del self.incoming[owner.get()]

    def extend(self, body: bytearray, chunk: bytes) -> None:
        """Append a chunk. Refuse it if the body, or the sum of incomplete bodies, is too large."""
        limits, before = self.limits, counted(body)
        body += chunk
        self.count(counted(body) - before)
        if len(body) > limits.max_body_bytes:
            raise too_large(limits.max_body_bytes)
        most = max(limits.max_incoming_bytes, limits.max_body_bytes)  # a single body always fits
        own = self.incoming[owner.get()]
        if counted(body) and not has_room(0, own, self.num_incoming, most):
            self.reject("incoming_bytes")
            raise Overloaded("too many large bodies are being received. Retry later")


def counted(body: bytearray) -> int:
    """Return the bytes of a body that count against `server.max_incoming_bytes`."""
    return max(0, len(body) - SMALL)


def too_large(most: int) -> StatusError:
    message = f"the body is larger than {most} bytes (server.max_body_bytes). Send less"
    return StatusError(413, message, "request_too_large")


def decode_object(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise RequestError(f"the body is not valid JSON: {cut(str(e))}") from e
    except RecursionError as e:
        raise RequestError("the body is nested too deeply") from e
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object. Send an object")
    return body


def read(raw: bytes, kind: type[T]) -> T:
    """Decode and check the body of a completion request."""
    given, known = decode_object(raw), own_fields(kind)
    inside = drop_ignored(given, kind.ignored)
    for key in UNSET.keys() & given.keys() & known.keys():
        given[key] = None if is_same(given[key], UNSET[key]) else given[key]
    for key, value in given.items():
        if key not in known and key not in HARMLESS and key not in kind.passed:
            check_no_op(key, value, kind)
    body = from_fields({k: v for k, v in given.items() if k in known}, kind)
    for names in (
        ("max_completion_tokens", "max_tokens"),
        ("max_thinking_tokens", "thinking_token_budget"),
    ):
        body = merged(body, *names)
    if past := [*(key for key in given if key in kind.passed and key not in known), *inside]:
        body = msgspec.structs.replace(body, read_past=tuple(past))
    check_form(body)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: only for streams. Set stream = true", "stream_options")
    if body.is_ranked and body.stream:
        name = "use_beam_search" if body.params.use_beam_search else "best_of"
        raise RequestError(
            f"{name}: not supported for streams, which begin before the best choices are known. "
            f"Omit {name} or stream",
            name,
        )
    if body.return_tokens_as_token_ids and body.params.num_top is None:
        name = "return_tokens_as_token_ids"
        raise RequestError(f"{name}: only for logprobs. Request logprobs, too", name)
    return body


def drop_ignored(
    body: dict[str, Any], ignored: Mapping[str, set[str]] = IGNORED
) -> tuple[str, ...]:
    """Remove ignored fields, and return the sorted paths of fields that had a value."""
    continue_last(body)
    found = dict[str, None]()
    for path, names in ignored.items():
        for each in objects_at(body, path.split(".")):
            for name in names & each.keys():
                if each.pop(name) not in (None, False, "", [], {}):
                    found[f"{path}.{name}"] = None
    return tuple(sorted(found))


def continue_last(body: dict[str, Any]) -> None:
    """Set continue_final_message if the last message has another server's field for it."""
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        # Fields of DeepSeek, Mistral, Moonshot and Alibaba.
        asked = [name for name in ("partial", "prefix") if last.get(name) is True]
        for name in asked:
            del last[name]
        if asked:
            body["continue_final_message"] = True


def objects_at(value: Any, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects at a path, including the items of lists on the path."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict) and keys:
            yield from objects_at(each.get(keys[0]), keys[1:])
        elif isinstance(each, dict):
            yield each


def check_form(body: Body) -> None:
    """RequestError for an invalid format of the text, or for two formats."""
    if body.form is None:
        return
    if body.form is not body.structured_outputs and body.structured_outputs is not None:
        field = body.form_field.removesuffix(".json_schema.schema")
        raise RequestError(
            f"{field} and structured_outputs both set the format of the text. Send one", field
        )
    grammar_of(body.form, body.form_field if body.structured_outputs is None else None)


def merged(body: T, other: str, name: str) -> T:
    """Move a field's value from its other name; refuse two different values."""
    value, own = getattr(body, other), getattr(body, name)
    if value is None:
        return body
    if own not in (None, value):
        raise RequestError(
            f"{other} = {value} and {name} = {own} have the same meaning. Send one", other
        )
    return msgspec.structs.replace(body, **{name: value})


def read_fields(raw: bytes, kind: type[S]) -> S:
    """Decode a body. RequestError for a field that `kind` lacks."""
    return checked_fields(decode_object(raw), kind)


def checked_fields(given: dict[str, Any], kind: type[S]) -> S:
    for key in given:
        if key not in fields(kind):
            refuse_unknown(key, [*fields(kind)])
    return from_fields(given, kind)


def from_fields(given: dict[str, Any], kind: type[S], path: str = "") -> S:
    """Convert fields one by one, so that an error names its field. null means unset."""
    known = fields(kind)
    return kind(**{k: convert(v, known[k], path + k) for k, v in given.items() if v is not None})


@cache
def own_fields(kind: type[Body]) -> dict[str, Any]:
    """Return the fields that clients can send, with their types."""
    shut = {"read_past", *kind.refused}
    return {name: its for name, its in fields(kind).items() if name not in shut}


@cache
def fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__}


def nested(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct type among a field's types, if there is one."""
    for part in (kind, *get_args(kind)):
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            return part
    return None


def convert(value: Any, kind: Any, path: str) -> Any:
    struct = nested(kind)
    if struct is not None and isinstance(value, dict):
        for key in value:
            if key not in fields(struct):
                refuse_unknown(key, [*fields(struct)], f"{path}.")
        value = {k: v for k, v in value.items() if v is not None}
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except (ValueError, RecursionError) as e:  # msgspec's ValidationError is a ValueError
        reason, inner = reason_and_path(e)
        param = path + inner
        whole, leaf = re.split(r"[.\[]", param)[0], param.rpartition(".")[2]
        choices = choices_of(kind, inner) if reason.startswith("Invalid enum") else ""
        remedy = REMEDIES.get(leaf, REMEDIES.get(whole, ""))
        hint = "; ".join(filter(None, [choices, remedy]))
        raise RequestError(f"{param}: {cut(reason)}{f'; {hint}' if hint else ''}", param) from e


def choices_of(kind: Any, path: str) -> str:
    """Return the allowed values of an enum field, in words. `path` leads from `kind` to it."""
    for name in re.findall(r"\.(\w+)", path):
        struct = nested(kind)
        if struct is None or name not in fields(struct):
            return ""
        kind = fields(struct)[name]
    parts = kind, *get_args(kind)
    values = ["true", "false"] if bool in parts else []
    literals = [part for part in parts if get_origin(part) is Literal]
    values += [str(value) for part in literals for value in get_args(part)]
    return f"send one of {', '.join(values)}" if values else ""


def check_no_op(key: str, value: Any, kind: type[Body]) -> None:
    if key in kind.refused and value is not None:
        raise RequestError(f"{key} is refused: {kind.refused[key]}", key)
    if key not in kind.no_op and key not in kind.refused:
        refuse_unknown(key, [*own_fields(kind), *kind.no_op, *HARMLESS, *kind.passed])
    if value is not None and not any(is_same(value, off) for off in kind.no_op[key]):
        off = " or ".join(msgspec.json.encode(v).decode() for v in (*kind.no_op[key], None))
        if key == "top_logprobs" and type(value) is int and 0 < value <= 20:
            raise RequestError(f"{key} is a field of chats. Send logprobs = {value}", key)
        raise RequestError(f"{key} is not supported. Omit it, or send {off}", key)


def passed_over(kind: type[Body]) -> dict[str, Any]:
    """Return JSON schemas of the values that ignored and refused fields can have."""
    schemas: dict[str, Any] = {
        **{name: {"description": "ignored"} for name in HARMLESS | kind.passed},
        **{name: {"enum": [*values, None]} for name, values in kind.no_op.items()},
        **{name: {"enum": [None], "description": why} for name, why in kind.refused.items()},
    }
    return {name: schemas[name] for name in sorted(schemas) if name not in own_fields(kind)}


def is_same(value: Any, off: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    return bool(value == off) and isinstance(value, bool) == isinstance(off, bool)


def refuse_unknown(key: str, known: list[str], path: str = "") -> None:
    near = [name for name in [OTHER_NAMES.get(key)] if name in known]
    near = near or difflib.get_close_matches(key[:64], known, n=1, cutoff=0.75)
    hint = f". Did you mean {near[0]}?" if near else f". {ELSEWHERE.get(path + key, 'Omit it')}"
    error = RequestError(f"unknown field {cut(path + key)!r}{hint}", cut(path + key))
    error.code = "unknown_parameter"
    raise error
