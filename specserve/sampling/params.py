"""What a caller may ask of a generation, and what is made of it for one request."""

import secrets
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from specserve.errors import RequestError
from specserve.models.defaults import (
    GenerationDefaults,
    MinP,
    Temperature,
    TopK,
    TopP,
    check_temperature,
)

T = TypeVar("T")
MAX_SEED = 2**53  # exclusive: a JavaScript client can hold it exactly
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """None leaves a value to the model's generation_config, or else to the field's comment."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None  # the rest of the context
    temperature: Temperature | None = None  # 1; 0 is argmax
    top_k: TopK | None = None  # 0, off
    top_p: TopP | None = None  # 1, off
    min_p: MinP | None = None  # 0, off
    seed: Annotated[int, Meta(ge=0, lt=MAX_SEED)] | None = None  # drawn, and reported
    stop: StopString | Annotated[tuple[StopString, ...], Meta(max_length=16)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=1024)] = ()
    ignore_eos: bool = False


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters with nothing left open; the engine is handed no others."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()


def resolve(
    params: SamplingParams, defaults: GenerationDefaults, room: int, vocab_size: int
) -> Sampling:
    """Check the parameters and fill in what was left open; `room` is the rest of the context."""
    try:
        # By way of a dict: an instance of the very type would be believed unread.
        given = msgspec.convert(msgspec.structs.asdict(params), SamplingParams)
        temperature = pick(given.temperature, defaults.temperature)
        check_temperature(temperature)
    except ValueError as e:  # msgspec's ValidationError is one
        raise RequestError(f"sampling parameters: {e}") from e
    for token in given.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"sampling parameters: stop_token_ids has {token}; ids lie in [0, {vocab_size})"
            )
    eos = () if given.ignore_eos else defaults.eos_token_ids
    return Sampling(
        max_tokens=min(pick(given.max_tokens, room), room),
        temperature=temperature,
        top_k=pick(given.top_k, defaults.top_k),
        top_p=pick(given.top_p, defaults.top_p),
        min_p=pick(given.min_p, defaults.min_p),
        seed=pick(given.seed, secrets.randbelow(MAX_SEED)),
        stop=(given.stop,) if isinstance(given.stop, str) else given.stop,
        stop_ids=frozenset(eos) | frozenset(given.stop_token_ids),
    )


def pick(given: T | None, default: T) -> T:
    return default if given is None else given
