"""A request's body: reading it within bytes and seconds, and what it may say."""

import asyncio
import difflib
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta
from starlette.requests import Request

from specserve.config import ServerConfig
from specserve.errors import Overloaded, RequestError
from specserve.exchange.sampling_params import SamplingParams
from specserve.server.refusal import TimedOut, TooLarge, cut

# OpenAI's fields that mean nothing here. They are read past, whatever they hold.
HARMLESS = {
    *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("service_tier", "user", "verbosity"),
}

# Fields of peers that nothing here acts on yet -> the values that ask for nothing.
NO_OP: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "logprob_token_ids": (),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "slo": (),
    "spaces_between_special_tokens": (True,),
    "speculation": (),
    "store": (False,),
    "stream_interval": (1,),
    "stream_reasoning": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

# Fields that will never be heard -> what to do instead.
REFUSED = {
    "chat_template": "the template is the model's own; render it yourself and call completions",
    "prompt_embeds": "send text or token ids",
    **dict.fromkeys(
        ("guided_choice", "guided_grammar", "guided_json", "guided_regex"),
        "these names are gone; structured output is asked for by response_format",
    ),
}

SMALL = 1 << 16  # bytes of a body that always have room: connections are limited in number

T = TypeVar("T", bound="Body")
S = TypeVar("S", bound=msgspec.Struct)

REMEDIES = {  # fields whose wrong values mean something elsewhere
    "max_tokens": "leave it out for the rest of the context",
    "n": "1 to 128 choices",
    "role": "it is system, developer, user or assistant",
    "seed": "leave it out, and one is drawn",
    "top_k": "0 is off",
    "top_p": "1 is off",
}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None

    def __post_init__(self) -> None:
        if self.include_obfuscation:
            raise ValueError("include_obfuscation is not supported yet: leave it out")


class Body(SamplingParams, frozen=True, kw_only=True):
    """The fields that both kinds of completion share."""

    model: str | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None  # another name of max_tokens
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def params(self) -> SamplingParams:
        names = SamplingParams.__struct_fields__
        return SamplingParams(**{name: getattr(self, name) for name in names})


class BodyReader:
    """Reads bodies: each within its bytes and seconds, and all within the bytes of
    `server.max_incoming_bytes`, as thousands of connections may send one at a time.
    """

    def __init__(self, limits: ServerConfig, reject: Callable[[str], None]) -> None:
        self.limits, self.reject = limits, reject
        self.num_incoming = 0  # bytes of bodies that are not complete, beyond the SMALL of each

    async def read(self, request: Request) -> bytes:
        """Refused as soon as it is too large, not once it has come."""
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
            raise TimedOut(f"the body did not come within {limits.body_seconds:g} s") from e
        finally:
            self.num_incoming -= counted(body)
        return bytes(body)

    def extend(self, body: bytearray, chunk: bytes) -> None:
        """Take a piece of a body, or refuse what has become too large by itself or with others."""
        limits, before = self.limits, counted(body)
        body += chunk
        self.num_incoming += counted(body) - before
        if len(body) > limits.max_body_bytes:
            raise too_large(limits.max_body_bytes)
        most = max(limits.max_incoming_bytes, limits.max_body_bytes)  # a lone one may always come
        if counted(body) and self.num_incoming > most:
            self.reject("incoming_bytes")
            raise Overloaded("too many large bodies are on their way: send this one later")


def counted(body: bytearray) -> int:
    return max(0, len(body) - SMALL)


def too_large(most: int) -> TooLarge:
    return TooLarge(f"the body is larger than {most} bytes: send less (server.max_body_bytes)")


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
    """The body of a completion."""
    given = decode_object(raw)
    for key, value in given.items():
        if key not in fields(kind) and key not in HARMLESS:
            check_no_op(key, value, kind)
    body = one_limit(from_fields({k: v for k, v in given.items() if k in fields(kind)}, kind))
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: only a stream has any; set stream", "stream_options")
    return body


def one_limit(body: T) -> T:
    """Both names of the limit are heard, as long as they agree."""
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
    """A body that has no other fields than its own."""
    given = decode_object(raw)
    for key in given:
        if key not in fields(kind):
            refuse_unknown(key, [*fields(kind)])
    return from_fields(given, kind)


def from_fields(given: dict[str, Any], kind: type[S]) -> S:
    """One by one, so that a refusal can name its field. null is unset."""
    known = fields(kind)
    return kind(**{k: convert(v, known[k], k) for k, v in given.items() if v is not None})


@cache
def fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__}


def convert(value: Any, kind: Any, path: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (ValueError, RecursionError) as e:  # msgspec's ValidationError is a ValueError
        reason, _, inner = str(e).partition(" - at `$")
        param = path + inner.rstrip("`")
        hint = REMEDIES.get(param.rpartition(".")[2])
        raise RequestError(f"{param}: {cut(reason)}{f'; {hint}' if hint else ''}", param) from e


def check_no_op(key: str, value: Any, kind: type[Body]) -> None:
    if key in REFUSED and value is not None:
        raise RequestError(f"{key} is refused: {REFUSED[key]}", key)
    if key not in NO_OP and key not in REFUSED:
        refuse_unknown(key, [*fields(kind), *NO_OP, *HARMLESS])
    if value is not None and not any(is_same(value, off) for off in NO_OP[key]):
        off = " or ".join(msgspec.json.encode(v).decode() for v in (*NO_OP[key], None))
        raise RequestError(f"{key} is not supported yet: leave it out, or send {off}", key)


def is_same(value: Any, off: Any) -> bool:
    """Equal as JSON is: true is not 1."""
    return bool(value == off) and isinstance(value, bool) == isinstance(off, bool)


def refuse_unknown(key: str, known: list[str], path: str = "") -> None:
    near = difflib.get_close_matches(key[:64], known, n=1, cutoff=0.75)
    hint = f": did you mean {near[0]}?" if near else "; leave it out"
    error = RequestError(f"unknown field {cut(path + key)!r}{hint}", cut(path + key))
    error.code = "unknown_parameter"
    raise error
