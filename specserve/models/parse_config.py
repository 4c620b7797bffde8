"""Parses the config.json of a decoder."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from specserve.errors import ConfigError
from specserve.models import rope
from specserve.models.config_fields import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_SIZE,
    either,
    factors,
    flag,
    layer_sizes,
    number,
    optional_number,
    positive,
)
from specserve.models.decoder_config import DecoderConfig, KVHeads
from specserve.models.expert_fields import parse_mixture
from specserve.models.families import FAMILIES, UNSUPPORTED
from specserve.models.family import ConfigKeys, Family
from specserve.models.folder import read_json
from specserve.models.layer_fields import (
    layer_kinds,
    named_to_rotate,
    per_layer_sizes,
    streams,
    windows,
)
from specserve.models.multimodal import text_fields, text_type
from specserve.models.multimodal_families import MULTIMODAL
from specserve.models.quantized import config as quantized
from specserve.models.quantized.config import Quantization
from specserve.models.recurrent import (
    MAX_STATE_DIM,
    MAX_TAPS,
    RECURRENT_KINDS,
    GatedDelta,
    Mamba2,
    ShortConv,
    gated_delta_kinds,
    mamba_fields,
    olmo_hybrid_fields,
    recurrent_layers,
    short_conv_fields,
)
from specserve.models.rope import QueryGrowth, RopeParameters

# Fields with the number of MTP layers: of DeepSeek, GLM and MiMo, and of Qwen.
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
ARCHITECTURES = (*FAMILIES, *MULTIMODAL)
# Architectures without a head for text; their layers are those of the family's ...ForCausalLM.
HEADLESS = re.compile(r"(\w+?)(ForSequenceClassification|Model)")
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # -> names of ops
UNGATED = ACTIVATIONS | {"relu2": "relu2", "xielu": "xielu"}  # in MLPs without a gate
NEGATIVE = "linear_allow_neg_eigval"
NO_LIMIT = (math.inf, {"__float__": "Infinity"})  # of time steps, in time_step_limit


class Unsupported(ValueError):
    """A feature that the native code lacks, and that transformers' modules may support."""


T = TypeVar("T")


def load_config(folder: Path) -> DecoderConfig:
    """The decoder that a folder's config.json describes."""
    return read_config(folder, parse)


def read_config(folder: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """Parse a folder's config.json with `parse`; its ValueError becomes a ConfigError."""
    path = folder / "config.json"
    try:
        return parse(read_json(path))
    except ValueError as e:
        raise ConfigError(
            f"{path}: {e}. Use another checkpoint, or correct the file if it is wrong"
        ) from e


def names_family(written: Mapping[str, Any]) -> bool:
    """Whether a config.json names a known architecture, or none at all."""
    named = written.get("architectures")
    return not named or causal_name(named) in (*ARCHITECTURES, *UNSUPPORTED)


def causal_name(named: Any) -> str | None:
    """The family's name for the first of a config.json's `architectures`."""
    first = named[0] if isinstance(named, list) and named else None
    if not isinstance(first, str):
        return None
    headless = HEADLESS.fullmatch(first)
    return first if headless is None else f"{headless[1]}ForCausalLM"


def num_labels(fields: Mapping[str, Any]) -> int:
    """The outputs of a sequence classifier; 0 for other models."""
    named = fields.get("architectures")
    if not str(named[0] if isinstance(named, list) and named else "").endswith("Classification"):
        return 0
    names = fields.get("id2label")
    count = len(names) if isinstance(names, Mapping) else fields.get("num_labels", 2)
    return positive({"num_labels": count}, "num_labels")


def parse(written: dict[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes. Raises ValueError for unsupported models."""
    architecture, family = find_family(written)
    is_multimodal = architecture in MULTIMODAL
    written = text_fields(written) if is_multimodal else written
    fields, keys = {**family.defaults, **written}, family.keys
    if family.recurrent == "short_conv":
        check_short_conv(fields)
        fields = short_conv_fields(fields)
    if family.recurrent == "gated_delta" and fields["layer_types"] is None:
        fields["layer_types"] = gated_delta_kinds(fields, family.ends_attending)
    if family.has_split_inputs:
        fields = olmo_hybrid_fields(fields, written)
    if family.recurrent == "mamba":
        fields = mamba_fields(fields)
    mixers = fields["layer_types"] if family.recurrent == "mamba" else []
    has_head = architecture in written["architectures"]
    # "vision": only tokens of images attend to later ones.
    if (seen_later := fields.get("use_bidirectional_attention")) not in (None, False, "vision"):
        named = "true" if seen_later is True else repr(seen_later)
        raise ValueError(
            f"use_bidirectional_attention = {named} is not supported: attention must be causal"
        )
    if fields.get("clip_qkv") is not None:
        raise Unsupported(f"clip_qkv = {fields['clip_qkv']!r} is not supported, only null")
    for name in family.refused:
        if flag(fields, name):
            raise Unsupported(f"{name} = true is not supported, only false")
    heads, kv_heads, head_dim = head_shape(fields)
    if family.rotates_a_share and fields.get("rotary_dim") is not None:
        fields["partial_rotary_factor"] = positive(fields, "rotary_dim") / head_dim
    inner_sizes = layer_sizes(fields, "intermediate_size") if family.has_streams else ()
    if inner_sizes:
        fields["intermediate_size"] = max(inner_sizes)
    max_positions, rotates = positive(fields, "max_position_embeddings"), named_to_rotate(fields)
    is_recurrent = recurrent_layers(fields, family.recurrent) if family.recurrent != "none" else ()
    if is_recurrent:
        others = {*fields["layer_types"]} - {"mlp", "moe"}
        if others <= {*RECURRENT_KINDS[family.recurrent]} and "hybrid" not in mixers:
            raise ValueError("layer_types: a model needs at least one layer with attention")
        attends = [
            "full_attention" if x or k in ("mlp", "moe") else k
            for x, k in zip(is_recurrent, fields["layer_types"], strict=True)
        ]
        fields["layer_types"] = attends
    seen = windows(fields, family, rotates)
    if family.rotated == "windowed" or (family.rotated != "named" and fields["sliding_window"]):
        rotates = tuple(window is not None for window in seen)

    kinds = layer_kinds(fields, family, seen, heads, KVHeads(kv_heads, head_dim))
    of_global = kinds.get("global_heads") or KVHeads(kv_heads, head_dim)

    def rope_of(told: Mapping[str, Any], size: int) -> RopeParameters:
        shares, names = family.rotates_a_share, family.rope_names
        return rope.parse(told, max_positions, size, shares, names)

    return DecoderConfig(
        architecture=architecture,
        is_multimodal=is_multimodal,
        num_layers=len(rotates),
        hidden_size=positive(fields, "hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=positive(fields, keys.inner),
        vocab_size=positive(fields, "vocab_size"),
        max_positions=rope.longest_text(global_rope(fields), max_positions, family.rope_names),
        norm_eps=norm_eps(fields, keys.norm_eps),
        activation=activation(fields, keys.activation, family),
        score_scale=(family.score_scale or score_scale(fields, keys, head_dim))
        * query_factor(fields, keys),
        score_cap=optional_number(fields, keys.score_cap),
        embedding_scale=embedding_scale(fields, family),
        residual_scale=optional_number(fields, keys.residual_scale) or 1.0,
        logit_scale=logit_scale(fields, keys),
        logit_cap=optional_number(fields, keys.logit_cap),
        tied=flag(fields, "tie_word_embeddings") or not has_head,
        qkv_bias=either(family.qkv_bias, fields, keys.qkv_bias),
        out_bias=either(family.out_bias, fields, keys.out_bias),
        mlp_bias=either(family.mlp_bias, fields, keys.mlp_bias),
        qk_norm=family.qk_norm if keys.qk_norm is None or flag(fields, keys.qk_norm) else "none",
        family=family,
        windows=seen,
        rope=rotates,
        rope_parameters=rope_of(global_rope(fields), of_global.size),
        local_rope_parameters=rope_of(local_rope(fields, keys) or global_rope(fields), head_dim),
        query_growth=query_growth(fields) if family.grows_queries else None,
        quantization=parse_quantization(written, family),
        mixture=parse_mixture(fields, family, len(rotates)),
        num_mtp_layers=num_mtp_layers(written),
        has_head=has_head,
        num_labels=num_labels(written),
        recurrent=parse_recurrent(fields, family) if any(is_recurrent) else None,
        recurrent_layers=is_recurrent if any(is_recurrent) else (),
        attention_layers=tuple(kind in ("full_attention", "hybrid") for kind in mixers),
        mlp_layers=tuple(kind in ("mlp", "moe") for kind in mixers) if family.is_split else (),
        attention_factor=attention_factor(fields, keys),
        mlp_factors=factors(fields, keys.mlp_scales, 2) or (1.0, 1.0),
        inner_sizes=inner_sizes,
        **(per_layer_sizes(fields, family) if family.has_per_layer_inputs else {}),
        **(streams(fields, len(rotates)) if family.has_streams else {}),
        **kinds,
    )


def parse_recurrent(fields: Mapping[str, Any], family: Family) -> ShortConv | GatedDelta | Mamba2:
    if family.recurrent == "mamba":
        return parse_mamba(fields, family)
    is_conv = family.recurrent == "short_conv"
    name = "conv_L_cache" if is_conv else "linear_conv_kernel_dim"
    taps = positive(fields, name)
    if not 2 <= taps <= MAX_TAPS:
        raise ValueError(f"{name} = {taps} is not supported, only 2 to {MAX_TAPS}")
    if is_conv:
        width = positive(fields, "hidden_size")
        return ShortConv(width=width, taps=taps, has_bias=flag(fields, "conv_bias"))
    if fields[family.keys.activation] != "silu":  # of the convolution, too
        raise ValueError(
            f"{family.keys.activation} = {fields[family.keys.activation]!r} is not supported with "
            "linear_attention, only 'silu'"
        )
    heads, num_k_heads = (
        positive(fields, f"linear_num_{kind}_heads", MAX_SIZE) for kind in ("value", "key")
    )
    if heads % num_k_heads:
        raise ValueError(
            f"linear_num_value_heads = {heads} is not a multiple of "
            f"linear_num_key_heads = {num_k_heads}"
        )
    return GatedDelta(
        num_k_heads=num_k_heads,
        num_v_heads=heads,
        k_dim=positive(fields, "linear_key_head_dim", MAX_STATE_DIM),
        v_dim=positive(fields, "linear_value_head_dim", MAX_STATE_DIM),
        taps=taps,
        is_interleaved=family.has_joined_inputs,
        is_split=family.has_split_inputs,
        beta_factor=2.0 if flag({NEGATIVE: False, **fields}, NEGATIVE) else 1.0,
        norm_eps=family.recurrent_norm_eps,
    )


def parse_mamba(fields: Mapping[str, Any], family: Family) -> Mamba2:
    taps, heads = positive(fields, "mamba_d_conv"), positive(fields, "mamba_n_heads")
    if not 2 <= taps <= MAX_TAPS:
        raise ValueError(f"mamba_d_conv = {taps} is not supported, only 2 to {MAX_TAPS}")
    groups = positive(fields, "mamba_n_groups")
    if heads % groups:
        raise ValueError(f"mamba_n_heads = {heads} is not a multiple of mamba_n_groups = {groups}")
    if fields.get("mamba_hidden_act", "silu") != "silu":
        raise ValueError(
            f"mamba_hidden_act = {fields['mamba_hidden_act']!r} is not supported, only 'silu'"
        )
    limit = fields.get("time_step_limit")
    is_pair = isinstance(limit, list | tuple) and len(limit) == 2
    if limit is not None and (not is_pair or limit[0] or limit[1] not in NO_LIMIT):
        raise ValueError(f"time_step_limit = {limit!r} is not supported, only [0, Infinity]")
    of_inputs = factors(fields, "ssm_multipliers", 5) or (1.0,) * 5
    scale = optional_number(fields, "ssm_in_multiplier") if "ssm_in_multiplier" in fields else None
    z, x, b, c, dt = (factor * (scale or 1.0) for factor in of_inputs)
    has_out = "ssm_out_multiplier" in fields
    return Mamba2(
        num_heads=heads,
        head_dim=positive(fields, "mamba_d_head", MAX_STATE_DIM),
        state_dim=positive(fields, "mamba_d_state", MAX_STATE_DIM),
        num_groups=groups,
        taps=taps,
        conv_bias=flag(fields, "mamba_conv_bias"),
        has_bias=flag(fields, "mamba_proj_bias"),
        has_norm=flag(fields, "mamba_rms_norm"),
        gates_first=not flag(fields, "mamba_norm_before_gate"),
        factors=(z, x, b, c, dt),
        out_factor=(optional_number(fields, "ssm_out_multiplier") if has_out else None) or 1.0,
    )


def query_factor(fields: Mapping[str, Any], keys: ConfigKeys) -> float:
    """The factor of scores that comes from factors of attention's input and of keys."""
    scale = optional_number(fields, keys.attention_in_scale) or 1.0
    return scale * scale * (optional_number(fields, keys.key_scale) or 1.0)


def attention_factor(fields: Mapping[str, Any], keys: ConfigKeys) -> float:
    """The factor of attention's output. The factor of its input also multiplies the values."""
    names = keys.attention_in_scale, keys.attention_out_scale
    return math.prod(optional_number(fields, name) or 1.0 for name in names)


def num_mtp_layers(fields: Mapping[str, Any]) -> int:
    for key in MTP_LAYERS:
        if fields.get(key):
            return positive(fields, key, MAX_LAYERS)
    return 0


def parse_quantization(written: Mapping[str, Any], family: Family) -> Quantization | None:
    found = quantized.parse(written)
    is_gpt_oss = family.experts is not None and family.experts.has_biases
    if found is not None and found.method == "mxfp4" and not is_gpt_oss:
        raise ValueError("quantization_config.quant_method = 'mxfp4' is supported only for gpt-oss")
    return found


def find_family(fields: Mapping[str, Any]) -> tuple[str, Family]:
    """The architecture, and the family of the model or of its text model."""
    named, supported = fields.get("architectures"), ", ".join(ARCHITECTURES)
    if not named:
        raise ValueError(f"architectures is missing or empty. Supported architectures: {supported}")
    name = causal_name(named)
    if name in UNSUPPORTED:
        raise ValueError(f"{name} is not supported: {UNSUPPORTED[name]}")
    if name in FAMILIES:
        return name, FAMILIES[name]
    if name in MULTIMODAL:
        texts = MULTIMODAL[name].texts
        return name, texts[text_type(fields, [*texts])]
    raise ValueError(
        f"architectures = {named!r} is not supported. Supported architectures: {supported}"
    )


def head_shape(fields: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, KV heads, head size."""
    heads = positive(fields, "num_attention_heads")
    has_own = fields["num_key_value_heads"] is not None
    kv_heads = positive(fields, "num_key_value_heads") if has_own else heads
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
        )
    head_dim = fields["head_dim"]
    if head_dim is not None:
        head_dim = positive(fields, "head_dim")
    elif (hidden := positive(fields, "hidden_size")) % heads:
        raise ValueError(
            f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}"
        )
    else:
        head_dim = hidden // heads
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim = {head_dim} is not supported: it must be even for RoPE")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim = {head_dim} exceeds the maximum {MAX_HEAD_DIM}")
    return heads, kv_heads, head_dim


def norm_eps(fields: Mapping[str, Any], key: str) -> float:
    eps = fields[key]
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps <= 1:
        raise ValueError(f"{key} = {eps!r} must be a number above 0, at most 1")
    return float(eps)


def activation(fields: Mapping[str, Any], key: str, family: Family) -> str:
    named, known = fields[key], ACTIVATIONS if family.ungated is None else UNGATED
    if not isinstance(named, str) or named not in known:
        raise Unsupported(f"{key} = {named!r} is not supported, only {', '.join(known)}")
    return known[named]


def score_scale(fields: Mapping[str, Any], keys: ConfigKeys, head_dim: int) -> float:
    if keys.score_scale is not None:
        return number(fields, keys.score_scale)
    root = math.sqrt(number(fields, keys.query_scalar) if keys.query_scalar else head_dim)
    return 1.0 / root


def embedding_scale(fields: Mapping[str, Any], family: Family) -> float:
    if family.scales_by_width:
        return math.sqrt(positive(fields, "hidden_size"))
    return optional_number(fields, family.keys.embedding_scale) or 1.0


def logit_scale(fields: Mapping[str, Any], keys: ConfigKeys) -> float:
    if keys.logit_divisor is not None:
        return 1.0 / number(fields, keys.logit_divisor)
    return optional_number(fields, keys.logit_scale) or 1.0


def global_rope(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields, with `rope_parameters` for layers without a sliding window."""
    told = fields.get("rope_parameters")
    if not isinstance(told, dict) or "full_attention" not in told:
        return fields
    return {**fields, "rope_parameters": told["full_attention"]}


def local_rope(fields: Mapping[str, Any], keys: ConfigKeys) -> Mapping[str, Any] | None:
    """The fields, with `rope_parameters` for layers with a window; None: the same as global."""
    told = fields.get("rope_parameters")
    if isinstance(told, dict) and "sliding_attention" in told:
        return {**fields, "rope_scaling": None, "rope_parameters": told["sliding_attention"]}
    if keys.local_theta is None:
        return None
    theta = {"rope_theta": fields[keys.local_theta]}
    return {**fields, "rope_scaling": None, "rope_parameters": theta}


def query_growth(fields: Mapping[str, Any]) -> QueryGrowth | None:
    name = "attn_temperature_tuning"
    if not isinstance(fields[name], int):  # published as a number, too
        raise ValueError(f"{name} = {fields[name]!r} must be true or false")
    if not fields[name]:
        return None
    return QueryGrowth(scale=number(fields, "attn_scale"), length=positive(fields, "floor_scale"))


def check_short_conv(fields: Mapping[str, Any]) -> None:
    """ValueError for fields of LFM2 that the sizes of its layers are derived from."""
    width = "intermediate_size" if fields.get("block_ff_dim") is None else "block_ff_dim"
    for name in (width, "block_multiple_of"):
        positive(fields, name)
    factor = fields["block_ffn_dim_multiplier"]
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if factor is not None and not (is_number and 0 < factor < MAX_SIZE):
        raise ValueError(f"block_ffn_dim_multiplier = {factor!r:.50} must be a number above 0")
