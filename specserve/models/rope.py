"""Parses RoPE (rotary embedding) parameters of config.json, in the current and the old form."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

SUPPORTED = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
ORIGINAL = "original_max_position_embeddings"
FACTORS = "factors"  # one factor per frequency: only in GGUF files, instead of llama3's parameters
NTK_ALPHA = "ntk_alpha"  # Hunyuan's type: a larger theta
QUERY_BETA = "llama_4_scaling_beta"
LEAST, MOST = 1e-6, 1e18  # range of all parameters, so that frequencies are finite in float32


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The type of RoPE and its parameters; `rotary.frequencies` has the formulas."""

    kind: str  # one of SUPPORTED, or FACTORS
    theta: float
    factor: float = 1.0  # linear, llama3, yarn, proportional: stretches positions
    original_length: int = 0  # llama3, yarn, longrope: context length before stretching
    low_freq_factor: float = 0.0  # llama3
    high_freq_factor: float = 0.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn, longrope: multiplies all cosines and sines
    factors: tuple[float, ...] = ()  # FACTORS, longrope: divide the frequencies
    long_factors: tuple[float, ...] = ()  # longrope: for contexts beyond original_length
    query_beta: float = 0.0  # growth of queries at positions from original_length on
    proportion: float = 1.0  # proportional: share of the frequencies that are not 0
    share: float = 1.0  # share of a head's dimensions that rotate, the first ones

    def rotating(self, head_dim: int) -> int:
        """The number of dimensions of a head that rotate."""
        return int(head_dim * self.share)

    def turning_pairs(self, head_dim: int) -> int:
        """The number of pairs with a frequency above 0, the first ones."""
        return int(self.proportion * head_dim // 2)

    def of_context(self, length: int) -> "RopeParameters":
        """The parameters for a context of `length` tokens. All texts use the same factors, because
        KV must not depend on the final length of a text.
        """
        if self.kind != "longrope" or length <= self.original_length:
            return self
        return msgspec.structs.replace(self, factors=self.long_factors)


class QueryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Llama 4's factor of queries in layers without RoPE: 1 + scale ln(1 + floor((p + 1) / length))
    at position p.
    """

    scale: float
    length: int  # tokens


def parse(
    fields: Mapping[str, Any],
    max_positions: int,
    head_dim: int,
    may_rotate_a_share: bool,
    other_names: Mapping[str, str],
) -> RopeParameters:
    """The RoPE parameters of a config.json. Raises ValueError if they are not supported.

    They are in `rope_parameters`, or in `rope_scaling` and `rope_theta`, the old form. The old form
    wins if both exist, as in transformers. `other_names` are a family's names of types.
    """
    kind, rope = table(fields, max_positions, other_names)
    if kind == NTK_ALPHA:
        kind, rope = "default", with_alpha(rope, head_dim)
    refuse_unsupported(kind, rope, may_rotate_a_share)
    found = of_kind(kind, rope, max_positions)
    if rope.get(QUERY_BETA):
        beta, original = number(rope, QUERY_BETA), length(rope)
        found = msgspec.structs.replace(found, query_beta=beta, original_length=original)
    if may_rotate_a_share and kind != "proportional":
        found = msgspec.structs.replace(found, share=number(rope, "partial_rotary_factor", 1.0))
    check_dimensions(found, head_dim)
    return found


def longest_text(
    fields: Mapping[str, Any], max_positions: int, other_names: Mapping[str, str]
) -> int:
    """The context length of a config.json, in tokens. For YaRN, it is the original length times the
    factor, as in vLLM, because Qwen's recipe does not change max_position_embeddings.
    """
    kind, rope = table(fields, max_positions, other_names)
    if kind != "yarn" or not rope.get("factor"):
        return max_positions
    return int(length(rope) * number(rope, "factor"))


def table(
    fields: Mapping[str, Any], max_positions: int, other_names: Mapping[str, str]
) -> tuple[str, dict[str, Any]]:
    """The type of RoPE in a config.json, and its parameters."""
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters = {rope!r} is not an object")
    outer = {key: fields[key] for key in ("rope_theta", "partial_rotary_factor") if key in fields}
    inner = {key: fields[key] for key in (ORIGINAL,) if key in fields}
    rope = {ORIGINAL: max_positions} | outer | rope | inner
    named = rope.get("rope_type", rope.get("type", "default"))
    return other_names.get(str(named), str(named)), rope


def of_kind(kind: str, rope: Mapping[str, Any], max_positions: int) -> RopeParameters:
    theta = number(rope, "rope_theta")
    if kind == "default":
        return RopeParameters(kind=kind, theta=theta)
    if kind == "linear":
        return RopeParameters(kind=kind, theta=theta, factor=number(rope, "factor"))
    if kind == "proportional":
        factor = number(rope, "factor", 1.0)
        proportion = number(rope, "partial_rotary_factor", 1.0)
        return RopeParameters(kind=kind, theta=theta, factor=factor, proportion=proportion)
    if kind == FACTORS:
        return RopeParameters(kind=kind, theta=theta, factors=numbers(rope, "factors"))
    if kind == "longrope":
        return longrope(rope, theta, max_positions)
    return llama3(rope, theta) if kind == "llama3" else yarn(rope, theta, max_positions)


def with_alpha(rope: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Hunyuan's parameters, in which alpha increases theta."""
    grown = number(rope, "alpha") ** (head_dim / max(1, head_dim - 2))
    return {**rope, "rope_theta": number(rope, "rope_theta") * grown}


def check_dimensions(rope: RopeParameters, head_dim: int) -> None:
    """Raise ValueError unless pairs of dimensions rotate, and all factors exist."""
    if not 1 <= rope.turning_pairs(head_dim) <= head_dim // 2:
        raise ValueError(
            f"partial_rotary_factor = {rope.proportion:g} for head size {head_dim} is not "
            "supported: at least one pair of dimensions, and at most all, must rotate"
        )
    size = rope.rotating(head_dim)
    if rope.share > 1 or size < 2 or size % 2:
        raise ValueError(
            f"partial_rotary_factor = {rope.share:g} for head size {head_dim} is not supported: an "
            "even number of dimensions, at most all, must rotate"
        )
    for factors in (rope.factors, rope.long_factors):
        if rope.kind == "longrope" and len(factors) != size // 2:
            raise ValueError(
                f"rope_parameters: short_factor and long_factor need {size // 2} numbers each, one "
                f"per rotating pair of dimensions, but one has {len(factors)}"
            )


def refuse_unsupported(kind: str, rope: Mapping[str, Any], may_rotate_a_share: bool) -> None:
    if kind == "dynamic":
        raise ValueError(
            f"rope type {kind!r} is not supported, because KV would depend on the lengths in the "
            f"batch. Supported types: {', '.join(SUPPORTED)}"
        )
    if kind not in (*SUPPORTED, FACTORS):
        raise ValueError(f"rope type {kind!r} is not supported, only {', '.join(SUPPORTED)}")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            "rope_parameters by layer type are supported only for full_attention and "
            "sliding_attention"
        )
    partial = rope.get("partial_rotary_factor")
    may_rotate_a_share |= kind == "proportional"
    if partial is not None and partial != 1.0 and not may_rotate_a_share:
        raise ValueError(f"partial_rotary_factor = {partial} is not supported, only 1.0")


def llama3(rope: Mapping[str, Any], theta: float) -> RopeParameters:
    """Llama 3's scaling: apply_scaling in models/llama3/model.py of
    https://github.com/meta-llama/llama-models.
    """
    low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
    return RopeParameters(
        kind="llama3",
        theta=theta,
        factor=number(rope, "factor"),
        original_length=length(rope),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def yarn(rope: Mapping[str, Any], theta: float, max_positions: int) -> RopeParameters:
    """YaRN (Peng et al. 2309.00071), with DeepSeek's mscale if the config has it."""
    if theta == 1:
        raise ValueError("rope_theta = 1 is not possible with yarn: all frequencies are equal")
    original = length(rope)
    ratio = max_positions / original
    factor = ratio if given(rope, "factor") is None else number(rope, "factor")
    return RopeParameters(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_length=original,
        beta_fast=number(rope, "beta_fast", default=32.0),
        beta_slow=number(rope, "beta_slow", default=1.0),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=attention_factor(rope, factor),
    )


def longrope(rope: Mapping[str, Any], theta: float, max_positions: int) -> RopeParameters:
    """LongRoPE (Ding et al. 2402.13753), in the form of Phi-3."""
    original = length(rope)
    if original < 2:
        raise ValueError(f"original_max_position_embeddings = {original} must be at least 2")
    ratio = max_positions / original
    factor = ratio if rope.get("factor") is None else number(rope, "factor")
    grown = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    told = rope.get("attention_factor")
    return RopeParameters(
        kind="longrope",
        theta=theta,
        factor=factor,
        original_length=original,
        attention_factor=grown if told is None else number(rope, "attention_factor"),
        factors=numbers(rope, "short_factor"),
        long_factors=numbers(rope, "long_factor"),
    )


def attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """The factor of queries and keys in YaRN (section 3.4): 0.1 ln(factor) + 1, so that attention
    scores grow by its square.
    """
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        scale, all_dims = number(rope, "mscale"), number(rope, "mscale_all_dim")
        return temperature(factor, scale) / temperature(factor, all_dims)
    return temperature(factor)


def temperature(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def given(rope: Mapping[str, Any], key: str) -> Any:
    if key not in rope:
        raise ValueError(f"rope_parameters = {dict(rope)}: {key} is missing")
    return rope[key]


def number(rope: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number that gives finite frequencies. If `default` is set, it replaces null and 0."""
    if default is not None and not rope.get(key):
        return default
    value = given(rope, key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not LEAST <= value <= MOST:
        raise ValueError(
            f"rope_parameters: {key} = {value!r} must be a number from {LEAST:g} to {MOST:g}, so "
            "that frequencies are finite"
        )
    return float(value)


def numbers(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = given(rope, key)
    if not isinstance(values, list):
        raise ValueError(f"rope_parameters: {key} = {values!r} is not a list")
    return tuple(number({key: value}, key) for value in values)


def length(rope: Mapping[str, Any]) -> int:
    return int(number(rope, ORIGINAL))
