"""Request bodies: reading them within limits of size and time, and checking their fields."""

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
from specserve.exchange.sampling_params import OTHER_NAMES, SamplingParams, reason_and_path
from specserve.server.refusal import StatusError, cut
from specserve.text.grammars.structured_outputs import FIELD, StructuredOutputsParams, grammar_of

# OpenAI's fields that have no meaning here: accepted with any value, and ignored.
HARMLESS = {
    *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("service_tier", "user", "verbosity"),
}

# What chat frontends send for their own servers: read past, and told in a header of the answer.
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

# Fields of other servers that are not implemented -> the values without effect: only they are
# accepted.
NO_OP: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "documents": (),
    "echo": (False,),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),
    "request_id": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "store": (True, False),  # nothing is stored
    "stream_interval": (1,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "web_search_options": (),
}

# Fields that every route refuses unless they are null -> what to do instead.
REFUSED = {
    "function_call": "it is deprecated: send tool_choice, with tools",
    "functions": "they are deprecated: send them as tools",
    "chat_template": "the template is the model's own; render it yourself and call completions",
    **{
        f"guided_{kind}": f"send structured_outputs with {kind}"
        for kind in ("choice", "grammar", "json", "regex")
    },
    "prompt_embeds": "send text or token ids",
}

# Numbers that other servers write as -1 where they are left out.
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

IGNORED = {  # path of objects in a body -> their fields without effect
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

SMALL = 1 << 16  # bytes of a body that are not counted: the limit on connections bounds their sum

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
LARGE = 1 << 15  # bytes from which reading a body takes a few milliseconds
MANY = 100  # items from which reading a body takes a few milliseconds

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

R = TypeVar("R")
T = TypeVar("T", bound="Body")
S = TypeVar("S", bound=msgspec.Struct)

REMEDIES = {  # hints for fields whose values are often wrong
    "logit_bias": "up to 1024 token ids -> -100 to 100",
    "max_tokens": "leave it out for the rest of the context",
    "logprobs": "up to 20 likeliest tokens; in a chat, true or false",
    "n": "1 to 128 choices",
    "prediction": 'send a text, or {"type": "content", "content": "..."}, whose parts are text',
    "prompt_logprobs": "up to 20 likeliest tokens",
    "repetition_penalty": "1 is off",
    "seed": "it has 64 bits, with a sign; leave it out, and one is drawn",
    "timeout_ms": "milliseconds, 0.001 or more",
    "top_k": "0 is off",
    "top_logprobs": "up to 20 likeliest tokens",
    "top_p": "1 is off",
}


class BodyKind(NamedTuple, Generic[R]):
    """How a route's bodies are read. What `read` returns is sent between processes as JSON."""

    name: str
    read: Callable[[bytes], R]
    result: Any  # the type that `read` returns


def is_short(raw: bytes) -> bool:
    """Whether the event loop may read it."""
    return len(raw) <= LARGE and num_brackets(raw) <= MANY


def check_items(raw: bytes, most: int) -> None:
    """RequestError for a body with more objects and lists than `most`. Reading takes time for each
    of them, and decoding some ten times as long as counting.
    """
    if num_brackets(raw) <= most:
        return
    if (found := num_brackets(STRING.sub(b"", raw))) > most:
        raise RequestError(
            f"the body has {found} objects and lists, and {most} are allowed: send fewer "
            "messages, parts or tools (server.max_body_items)"
        )


def num_brackets(raw: bytes) -> int:
    """The objects and lists of a body, and the brackets in its texts."""
    return raw.count(b"{") + raw.count(b"[")


class PaddingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class StreamOptions(PaddingOptions, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Texts obey the schema. `strict` closes all objects; `name` and `description` do nothing."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A structural tag has `format`, or `structures` and `triggers`, as in vLLM."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: only with the type json_schema, which needs it")
        if self.json_schema is not None and self.json_schema.schema is None:
            raise ValueError("json_schema.schema: missing")
        if self.tag and self.type != "structural_tag":
            raise ValueError(f"{next(iter(self.tag))}: only with the type structural_tag")

    @property
    def tag(self) -> dict[str, Any]:
        """What a structural tag consists of, beside its type."""
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
    """The fields that both completion routes share.

    model           the served model's name
    max_completion_tokens  another name of max_tokens
    return_token_ids  tell the ids of the answer's tokens, and of the prompt's
    return_tokens_as_token_ids  name tokens by their ids where logprobs are told
    timeout_ms      milliseconds from its arrival, after which it ends with an error
    reasoning_effort  how much the model is to think, if its chat template reads that
    stream          answer with server-sent events
    stream_options  include_obfuscation: whether events are padded to sizes that tell little
    """

    no_op: ClassVar[Mapping[str, tuple[Any, ...]]] = NO_OP
    refused: ClassVar[Mapping[str, str]] = REFUSED

    model: str | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None  # another name of max_tokens
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    timeout_ms: Milliseconds | None = None
    reasoning_effort: Effort | None = None
    stream: bool = False
    stream_options: PaddingOptions | None = None
    read_past: tuple[str, ...] = ()  # fields without effect that came; no field of clients

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer: what was read past."""
        return warning(self.read_past)

    @property
    def effort(self) -> tuple[str, str | None]:
        """The field that has it, and its value."""
        return "reasoning_effort", self.reasoning_effort

    @property
    def params(self) -> SamplingParams:
        names = SamplingParams.__struct_fields__
        given = {name: getattr(self, name) for name in names}
        return SamplingParams(**given | {"structured_outputs": self.form})

    @property
    def form(self) -> StructuredOutputsParams | None:
        """That the text has to have, from whichever field has it."""
        return self.structured_outputs

    @property
    def form_field(self) -> str:
        return FIELD if self.structured_outputs is None else self.structured_outputs.field


class FormattedBody(Body, frozen=True, kw_only=True):
    """With a second field for the text's form.

    response_format  its type: text, json_object, json_schema or structural_tag
    stream_options  include_usage: a last chunk has the usage; continuous_usage_stats: every chunk;
                    include_obfuscation: whether events are padded to sizes that tell little
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
    """The header that names fields without effect."""
    told = ", ".join(read_past)
    return {"Warning": f'299 specserve "read past: {told}"'} if told else {}


class BodyReader:
    """Reads bodies within limits of size and time.

    All incomplete bodies together are limited too (`server.max_incoming_bytes`), as thousands of
    connections may send one at the same time.
    """

    def __init__(self, limits: ServerConfig, reject: Callable[[str], None]) -> None:
        self.limits, self.reject = limits, reject
        # Bytes of incomplete bodies, beyond the first SMALL of each: of all, and by owner.
        self.num_incoming, self.incoming = 0, Counter[Hashable]()

    async def read(self, request: Request) -> bytes:
        """The complete body; refused as soon as it exceeds a limit, not once it is complete."""
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
            message = f"the body did not come within {limits.body_seconds:g} s"
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
        """Append a chunk; refuse if the body, or all incomplete bodies together, are too large."""
        limits, before = self.limits, counted(body)
        body += chunk
        self.count(counted(body) - before)
        if len(body) > limits.max_body_bytes:
            raise too_large(limits.max_body_bytes)
        most = max(limits.max_incoming_bytes, limits.max_body_bytes)  # one alone always fits
        own = self.incoming[owner.get()]
        if counted(body) and not has_room(0, own, self.num_incoming, most):
            self.reject("incoming_bytes")
            raise Overloaded("too many large bodies are on their way: send this one later")


def counted(body: bytearray) -> int:
    """Bytes of a body that count against `server.max_incoming_bytes`."""
    return max(0, len(body) - SMALL)


def too_large(most: int) -> StatusError:
    message = f"the body is larger than {most} bytes: send less (server.max_body_bytes)"
    return StatusError(413, message, "request_too_large")


def decode_object(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise RequestError(f"the body is no valid JSON: {cut(str(e))}") from e
    except RecursionError as e:
        raise RequestError("the body is nested too deeply") from e
    if not isinstance(body, dict):
        raise RequestError("the body has to be a JSON object")
    return body


def read(raw: bytes, kind: type[T]) -> T:
    """Decode and check the body of a completion request."""
    given, known = decode_object(raw), own_fields(kind)
    inside = drop_ignored(given)
    for key in UNSET.keys() & given.keys() & known.keys():
        given[key] = None if is_same(given[key], UNSET[key]) else given[key]
    for key, value in given.items():
        if key not in known and key not in HARMLESS and key not in FRONTENDS:
            check_no_op(key, value, kind)
    body = one_limit(from_fields({k: v for k, v in given.items() if k in known}, kind))
    if past := [*(key for key in given if key in FRONTENDS and key not in known), *inside]:
        body = msgspec.structs.replace(body, read_past=tuple(past))
    check_form(body)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: only streams have these; set stream", "stream_options")
    if body.is_ranked and body.stream:
        raise RequestError(
            "best_of: a stream begins before it is known which choices are best; leave out best_of "
            "or stream",
            "best_of",
        )
    if body.return_tokens_as_token_ids and body.params.num_top is None:
        name = "return_tokens_as_token_ids"
        raise RequestError(f"{name}: it is about the tokens of logprobs; ask for these", name)
    return body


def drop_ignored(body: dict[str, Any]) -> tuple[str, ...]:
    """Remove the fields without effect; the paths of those that have a value, each once."""
    continue_last(body)
    found = dict[str, None]()
    for path, names in IGNORED.items():
        for each in objects_at(body, path.split(".")):
            for name in names & each.keys():
                if each.pop(name) not in (None, False, "", [], {}):
                    found[f"{path}.{name}"] = None
    return tuple(sorted(found))


def continue_last(body: dict[str, Any]) -> None:
    """Set continue_final_message if the last message asks for it, by another server's field."""
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        # At DeepSeek, Mistral, Moonshot and Alibaba.
        asked = [name for name in ("partial", "prefix") if last.get(name) is True]
        for name in asked:
            del last[name]
        if asked:
            body["continue_final_message"] = True


def objects_at(value: Any, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The objects at a path, through the lists on the way."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict) and keys:
            yield from objects_at(each.get(keys[0]), keys[1:])
        elif isinstance(each, dict):
            yield each


def check_form(body: Body) -> None:
    """RequestError for structured output that is wrong by itself, or asked for twice."""
    if body.form is None:
        return
    if body.form is not body.structured_outputs and body.structured_outputs is not None:
        field = body.form_field.removesuffix(".json_schema.schema")
        raise RequestError(
            f"{field} and structured_outputs: the text has one form; send one of them", field
        )
    grammar_of(body.form, body.form_field if body.structured_outputs is None else None)


def one_limit(body: T) -> T:
    """Merge max_completion_tokens into max_tokens; refuse them if they differ."""
    limit = body.max_completion_tokens
    if limit is None:
        return body
    if body.max_tokens not in (None, limit):
        raise RequestError(
            f"max_completion_tokens = {limit} and max_tokens = {body.max_tokens}: they mean the "
            "same, send one",
            "max_completion_tokens",
        )
    return msgspec.structs.replace(body, max_tokens=limit)


def read_fields(raw: bytes, kind: type[S]) -> S:
    """Decode a body; a field that `kind` lacks is refused."""
    return checked_fields(decode_object(raw), kind)


def checked_fields(given: dict[str, Any], kind: type[S]) -> S:
    for key in given:
        if key not in fields(kind):
            refuse_unknown(key, [*fields(kind)])
    return from_fields(given, kind)


def from_fields(given: dict[str, Any], kind: type[S], path: str = "") -> S:
    """Convert fields one by one, so that a refusal can name the field. null means unset."""
    known = fields(kind)
    return kind(**{k: convert(v, known[k], path + k) for k, v in given.items() if v is not None})


@cache
def own_fields(kind: type[Body]) -> dict[str, Any]:
    """Those that clients may send and that are not refused."""
    shut = {"read_past", *kind.refused}
    return {name: its for name, its in fields(kind).items() if name not in shut}


@cache
def fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__}


def nested(kind: Any) -> type[msgspec.Struct] | None:
    """The struct that a field may be, if it may be one."""
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
    """The values of a field that has few, in words; `path` leads from `kind` to it."""
    for name in re.findall(r"\.(\w+)", path):
        struct = nested(kind)
        if struct is None or name not in fields(struct):
            return ""
        kind = fields(struct)[name]
    literals = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
    values = [str(value) for part in literals for value in get_args(part)]
    return f"it is one of {', '.join(values)}" if values else ""


def check_no_op(key: str, value: Any, kind: type[Body]) -> None:
    if key in kind.refused and value is not None:
        raise RequestError(f"{key} is refused: {kind.refused[key]}", key)
    if key not in kind.no_op and key not in kind.refused:
        refuse_unknown(key, [*own_fields(kind), *kind.no_op, *HARMLESS, *FRONTENDS])
    if value is not None and not any(is_same(value, off) for off in kind.no_op[key]):
        off = " or ".join(msgspec.json.encode(v).decode() for v in (*kind.no_op[key], None))
        if key == "top_logprobs" and type(value) is int and 0 < value <= 20:
            raise RequestError(f"{key} is of chats: send logprobs: {value}", key)
        raise RequestError(f"{key} is not supported yet: leave it out, or send {off}", key)


def passed_over(kind: type[Body]) -> dict[str, Any]:
    """JSON schemas of the fields that are accepted beside those of `kind`, as far as they are."""
    told: dict[str, Any] = {
        **{
            name: {"description": "read past: it means nothing here"}
            for name in HARMLESS | FRONTENDS
        },
        **{name: {"enum": [*values, None]} for name, values in kind.no_op.items()},
        **{name: {"enum": [None], "description": why} for name, why in kind.refused.items()},
    }
    return {name: told[name] for name in sorted(told) if name not in own_fields(kind)}


def is_same(value: Any, off: Any) -> bool:
    """Whether two JSON values are equal: true is not 1."""
    return bool(value == off) and isinstance(value, bool) == isinstance(off, bool)


def refuse_unknown(key: str, known: list[str], path: str = "") -> None:
    near = [name for name in [OTHER_NAMES.get(key)] if name in known]
    near = near or difflib.get_close_matches(key[:64], known, n=1, cutoff=0.75)
    hint = f": did you mean {near[0]}?" if near else "; leave it out"
    error = RequestError(f"unknown field {cut(path + key)!r}{hint}", cut(path + key))
    error.code = "unknown_parameter"
    raise error
