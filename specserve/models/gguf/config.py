"""Converts a GGUF file's metadata to the fields of a config.json."""

import struct
from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from specserve.models.config_fields import MAX_HEAD_DIM, MAX_LAYERS
from specserve.models.families import FAMILIES
from specserve.models.family import Family
from specserve.models.gguf import gemma, recurrent
from specserve.models.gguf.architectures import ARCHITECTURES, Architecture
from specserve.models.gguf.header import Array, Header, Tensor
from specserve.models.gguf.names import (
    EMBEDDING,
    HEAD,
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
)

NAMES = {  # required key, without the architecture's prefix -> field of config.json
    "attention.head_count": "num_attention_heads",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
}
INNER = "feed_forward_length"  # required, too
NORM_EPS = {  # by Family.is_centered
    False: "attention.layer_norm_rms_epsilon",
    True: "attention.layer_norm_epsilon",
}
MTP = "nextn_predict_layers"
YARN = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
REORDERED = "ssm.v_head_reordered"  # of Ollama
SECTIONS = "rope.dimension_sections"  # of M-RoPE
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {  # unsupported keys -> values without effect
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0.0,),
    "expert_count": (0,),
    "expert_gating_func": (0, 1, 3),  # softmax of all experts, or of the active ones
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0,),
    "residual_scale": (0.0,),
    SECTIONS: (),
    REORDERED: (True,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
# Sizes that must equal attention.key_length.
HEAD_SIZES = (
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
)


def read_config(header: Header) -> dict[str, Any]:
    """The fields of a config.json. Raises ValueError for unsupported metadata."""
    name = find_architecture(header)
    architecture, prefix = ARCHITECTURES[name], f"{name}."
    values = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    named = architecture.family
    if values.get("expert_count") and architecture.mixture is not None:
        named = architecture.mixture
    if values.get("attention.sliding_window") and architecture.windowed is not None:
        named = architecture.windowed
    if architecture.unscaled is not None and not any(map(values.get, architecture.keys)):
        named = architecture.unscaled
    family, keys = FAMILIES[named], FAMILIES[named].keys
    refuse_unsupported(name, architecture, family, values)
    if family.experts is not None and "expert_feed_forward_length" in values:
        values.setdefault(INNER, values["expert_feed_forward_length"])  # all layers have experts
    names = NAMES | {NORM_EPS[family.is_centered]: keys.norm_eps, INNER: keys.inner}
    for key in names:
        if key not in values:
            raise ValueError(f"the key {prefix}{key} is missing")
    if EMBEDDING not in header.tensors:
        raise ValueError(f"the tensor {EMBEDDING} is missing")
    fields = {names[key]: values[key] for key in names} | {
        "architectures": [named],
        keys.mlp_bias: "blk.0.ffn_up.bias" in header.tensors,
        keys.out_bias: recurrent.has_tensor(header, "attn_output.bias"),
        keys.qkv_bias: recurrent.has_tensor(header, "attn_q.bias"),
        **kv_heads(family, values),
        "rope_parameters": None,
        "rope_theta": values.get("rope.freq_base", 10_000.0),
        "tie_word_embeddings": HEAD not in header.tensors,
        "vocab_size": header.tensors[EMBEDDING].shape[0],
    }
    fields["num_hidden_layers"] = num_layers(values)
    if keys.qk_norm is not None:
        is_bare, count = family.qk_norm == "bare", values.get("expert_count")
        has_weight = "blk.0.attn_q_norm.weight" in header.tensors
        fields[keys.qk_norm] = count != architecture.bare_except if is_bare else has_weight
    fields |= architecture.fields
    fields |= {field: values[k] for k, field in architecture.keys.items() if k in values}
    seen = chunks(architecture, values) if family.has_chunks else windows(architecture, values)
    if not family.ends_global:
        fields |= head_size(name, family, values)
    fields |= seen
    fields |= experts(family, values) | rope(header, architecture, family, values)
    if architecture.wide_queries is not None:
        fields["query_pre_attn_scalar"] = query_scalar(architecture, fields)
    return fields | of_layers(header, architecture, family, values, fields)


def of_layers(
    header: Header,
    architecture: Architecture,
    family: Family,
    values: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """The fields of families whose layers differ."""
    layers = fields["num_hidden_layers"]
    if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        return {}
    if family.has_streams:
        return gemma.gemma3n(header, values, layers)
    if family.ends_global:
        kinds = fields.get("layer_types") or []
        has_window = [kind == "sliding_attention" for kind in kinds]
        if len(has_window) != layers:
            raise ValueError("attention.sliding_window_pattern must have an entry for each layer")
        return gemma.gemma4(header, values, layers, has_window, partial(rope_factors, ROPE_FACTORS))
    if family.is_split:
        return recurrent.nemotron_h(values)
    if family.recurrent == "mamba":
        found = recurrent.mamba(header, values)
        if architecture.unscaled is None:  # Falcon H1
            return found | {"mamba_d_ssm": values["ssm.inner_size"]}
        return found | recurrent.granite_hybrid(values)
    if family.recurrent == "gated_delta":
        return recurrent.gated_delta(values, layers)
    return {}


def num_layers(values: Mapping[str, Any]) -> Any:
    """The number of layers, without the MTP layers, which are last."""
    layers, drafting = values["block_count"], values.get(MTP, 0)
    if not drafting or not isinstance(layers, int):
        return layers
    if not isinstance(drafting, int) or not 0 < drafting < layers:
        raise ValueError(f"{MTP} = {drafting!r} must be less than block_count = {layers}")
    return layers - drafting


def kv_heads(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """The number of KV heads. With recurrent layers, it is a list with 0 for each of them."""
    count = values.get("attention.head_count_kv")
    if family.recurrent == "none" or not isinstance(count, Array):
        return {"num_key_value_heads": count}
    numbers = [int(number) for number in count.numbers()]
    if len(different := set(numbers) - {0}) != 1:
        raise ValueError(f"attention.head_count_kv = {numbers} is not supported")
    kinds = ["full_attention" if number else "conv" for number in numbers]
    return {"num_key_value_heads": different.pop(), "layer_types": kinds}


def find_architecture(header: Header) -> str:
    named = header.metadata.get("general.architecture")
    if not isinstance(named, str) or named not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ValueError(
            f"GGUF files of architecture {named!r} are not supported, only {supported}; the "
            "model's Hugging Face folder or hub id may work"
        )
    return named


def refuse_unsupported(
    name: str, architecture: Architecture, family: Family, values: Mapping[str, Any]
) -> None:
    allowed = WITHOUT_EFFECT | {"rope.freq_base_swa": (values.get("rope.freq_base", 10_000.0),)}
    read = {*architecture.keys, *architecture.rope_keys}
    if architecture.has_sections:
        read.add(SECTIONS)
    if family.experts is not None:
        read.add("expert_count")
        if family.experts.is_sigmoid or family.experts.weighs_input:
            allowed |= {"expert_gating_func": (0, 2)}
    if family.rope_names:  # LongRoPE
        read.add("rope.scaling.attn_factor")
    for key, neutral in allowed.items():
        if key not in values or key in read:
            continue
        value = values[key]
        each = value.numbers() if isinstance(value, Array) and value.is_numeric else [value]
        if any(x not in neutral for x in each):
            raise ValueError(f"{name}.{key} = {value!r} is not supported")


def head_size(name: str, family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """The size of keys, values and rotated dimensions, which must be equal, unless the family
    rotates a share of a head's dimensions; None: not given.
    """
    size, rotated = values.get("attention.key_length"), values.get("rope.dimension_count")
    sizes = HEAD_SIZES if family.rotates_a_share else (*HEAD_SIZES, "rope.dimension_count")
    for key in sizes:
        other = values.get(key, size)
        size = other if size is None else size
        if other != size:
            raise ValueError(
                f"{name}.{key} = {other!r} is not supported, only the head size {size!r}"
            )
    if not family.rotates_a_share or rotated is None:
        return {"head_dim": size}
    hidden, heads = values["embedding_length"], values["attention.head_count"]
    if size is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        size = hidden // heads
    if not all(isinstance(x, int) and x for x in (size, rotated)):
        raise ValueError(f"{name}.rope.dimension_count = {rotated!r} is not supported")
    return {"head_dim": size, "partial_rotary_factor": rotated / size}


def windows(architecture: Architecture, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields for a sliding window, and the layers that have it."""
    window = values.get("attention.sliding_window", architecture.window)
    layers = num_layers(values)
    if not window or not isinstance(layers, int) or layers > MAX_LAYERS:
        return {"sliding_window": None, "use_sliding_window": False}
    pattern = values.get("attention.sliding_window_pattern", architecture.full_every)
    if isinstance(pattern, Array):
        has_window = pattern.numbers()
    else:
        has_window = [not pattern or (i + 1) % pattern != 0 for i in range(layers)]
    kinds = ["sliding_attention" if has else "full_attention" for has in has_window]
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds}


def chunks(architecture: Architecture, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields for attention in chunks. A window of 0 means full attention in all layers, which
    all have RoPE. Files have no other windows.
    """
    size = values.get("attention.sliding_window", architecture.window)
    every = values.get("attention.sliding_window_pattern", architecture.full_every)
    layers = num_layers(values)
    if size == 0 and isinstance(layers, int) and layers <= MAX_LAYERS:
        return {"no_rope_layers": [1] * layers, "layer_types": ["full_attention"] * layers}
    if (size, every) != (architecture.window, architecture.full_every):
        raise ValueError(
            f"attention.sliding_window = {size!r} with a pattern of {every!r} is not supported, "
            f"only {architecture.window} with {architecture.full_every}, or 0"
        )
    return {"attention_chunk_size": size, "no_rope_layer_interval": every}


def experts(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields for experts. Old files of Qwen lack the widths."""
    style, inner = family.experts, values[INNER]
    if style is None:
        return {}
    number, active = values.get("expert_count", 0), values.get("expert_used_count")
    fields = {style.number_keys[-1]: number, style.active_key: active}
    if "expert_weights_norm" in values:
        fields["norm_topk_prob"] = values["expert_weights_norm"]
    has_sizes = isinstance(inner, int) and isinstance(active, int) and active
    share = inner // active if has_sizes else inner
    width = inner if style.width == family.keys.inner else share
    fields[style.width] = values.get("expert_feed_forward_length", width)
    if style.shared_width and style.shared_width != style.width:
        fields[style.shared_width] = values.get("expert_shared_feed_forward_length", inner)
    return fields


def query_scalar(architecture: Architecture, fields: Mapping[str, Any]) -> Any:
    """Queries are divided by the square root of this number."""
    hidden, heads, size = (
        fields[key] for key in ("hidden_size", "num_attention_heads", "head_dim")
    )
    is_wide = fields["num_hidden_layers"] == architecture.wide_queries
    if (is_wide or size is None) and isinstance(hidden, int) and isinstance(heads, int) and heads:
        return hidden // heads
    return size


def rope(
    header: Header, architecture: Architecture, family: Family, values: Mapping[str, Any]
) -> dict[str, Any]:
    """The field rope_scaling, if there is one."""
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    tensors = header.tensors
    if family.ends_global:
        return {}  # see gemma.py
    if ROPE_FACTORS in tensors:
        if kind != "none":
            raise ValueError(f"{ROPE_FACTORS} with rope.scaling.type = {kind!r} is not supported")
        factors = rope_factors(ROPE_FACTORS, tensors[ROPE_FACTORS])
        return {"rope_scaling": {"rope_type": "factors", "factors": factors}}
    if LONG_FACTORS in tensors and SHORT_FACTORS in tensors and kind in ("none", "longrope"):
        return longrope(header, values)
    if kind == "none":
        return {}
    if kind == "longrope":
        raise ValueError(f"rope type {kind!r} is not supported without {LONG_FACTORS}")
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear", 1.0))
    keys = YARN | dict(architecture.rope_keys)
    others = {name: values[key] for key, name in keys.items() if key in values}
    scaling = {"rope_type": kind, "factor": factor, **others, **architecture.rope}
    return {"rope_scaling": scaling}


def longrope(header: Header, values: Mapping[str, Any]) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": rope_factors(LONG_FACTORS, header.tensors[LONG_FACTORS]),
        "short_factor": rope_factors(SHORT_FACTORS, header.tensors[SHORT_FACTORS]),
    }
    if "rope.scaling.attn_factor" in values:
        scaling["attention_factor"] = values["rope.scaling.attn_factor"]
    fields: dict[str, Any] = {"rope_scaling": scaling}
    if "rope.scaling.original_context_length" in values:
        original = values["rope.scaling.original_context_length"]
        fields["original_max_position_embeddings"] = original
    return fields


def rope_factors(name: str, tensor: Tensor) -> list[float]:
    """The RoPE factors of a file: a number per rotating pair of dimensions. For Llama 3 they are
    the results of its formula, not its parameters.
    """
    if tensor.type.name != "F32" or prod(tensor.shape) > MAX_HEAD_DIM // 2:
        raise ValueError(f"{name} is not a list of F32, one per pair of dimensions")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{prod(tensor.shape)}f", file.read(tensor.size)))
