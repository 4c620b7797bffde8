"""The fields of Gemma 3n and Gemma 4 in a GGUF file's metadata and tensors."""

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

from specserve.models.gguf.header import Array, Header, Tensor

PER_LAYER_TABLE = "per_layer_token_embd.weight"
LAUREL = "blk.0.laurel_l.weight"
WITH_KV = 20  # layers of Gemma 3n with KV, if the file lacks attention.shared_kv_layers
STILL = 1e18  # RoPE factors above it mean that a pair of dimensions does not rotate


def gemma3n(header: Header, values: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "laurel_rank": height(header, LAUREL),
        "vocab_size_per_layer_input": height(header, PER_LAYER_TABLE),
    }
    if "attention.shared_kv_layers" not in values:
        fields["num_kv_shared_layers"] = max(0, num_layers - WITH_KV)
    scales = values.get("activation_sparsity_scale")
    if scales is not None:
        each = by_layer(values, "activation_sparsity_scale", num_layers)
        # The metadata have the quantiles of the shares.
        fields["activation_sparsity_pattern"] = [NormalDist().cdf(scale) for scale in each]
    widths = values["feed_forward_length"]
    if isinstance(widths, Array):
        fields["intermediate_size"] = by_layer(values, "feed_forward_length", num_layers)
    return fields


def height(header: Header, name: str) -> int:
    """The rows of a tensor that the config depends on."""
    if name not in header.tensors:
        raise ValueError(f"the tensor {name} is missing")
    return header.tensors[name].shape[0]


def by_layer(values: Mapping[str, Any], key: str, num_layers: int) -> list[Any]:
    """The numbers of a key, one per layer."""
    value = values.get(key)
    if not isinstance(value, Array) or not value.is_numeric:
        return [value] * num_layers
    numbers = value.numbers()
    if len(numbers) < num_layers:
        raise ValueError(f"{key} has {len(numbers)} entries, not {num_layers}, one per layer")
    return numbers[:num_layers]


def gemma4(
    header: Header,
    values: Mapping[str, Any],
    num_layers: int,
    has_window: list[bool],
    factors: Callable[[Tensor], list[float]],
) -> dict[str, Any]:
    """Layers without a window may have other heads, keys as values, and RoPE of other dimensions;
    `factors` reads the RoPE factors of a tensor.
    """
    size, local_size = (head_width(values, end) for end in ("", "_swa"))
    for key, want in (
        ("attention.value_length", size),
        ("attention.value_length_swa", local_size),
        ("rope.dimension_count", size),
        ("rope.dimension_count_swa", local_size),
    ):
        if values.get(key, want) != want:
            raise ValueError(f"{key} = {values[key]!r} is not supported, only {want!r}")
    if values.get("rope.scaling.type", "none") != "none":
        raise ValueError(f"rope.scaling.type = {values['rope.scaling.type']!r} is not supported")
    counts = by_layer(values, "attention.head_count_kv", num_layers)
    told = {}
    for i, (count, windowed) in enumerate(zip(counts, has_window, strict=True)):
        if not windowed:
            told[str(i)] = {"num_key_value_heads": count, "head_dim": size}
    local = {count for count, windowed in zip(counts, has_window, strict=True) if windowed}
    if len(local) > 1:
        raise ValueError(f"attention.head_count_kv = {counts} is not supported")
    shared = values.get("attention.shared_kv_layers", 0)
    base, factor = widths(values, num_layers, shared)
    experts = values.get("expert_count", 0)
    fields = {
        "attention_k_eq_v": has_equal_values(header, has_window, shared),
        "enable_moe_block": bool(experts),
        "head_dim": local_size,
        "intermediate_size": base,
        "num_key_value_heads": local.pop() if local else counts[0],
        "per_layer_config": told or None,
        "rope_parameters": rope_of_both(header, values, size, factors),
        "use_double_wide_mlp": factor == 2,
    }
    if values.get("embedding_length_per_layer_input"):
        fields["vocab_size_per_layer_input"] = height(header, PER_LAYER_TABLE)
    return fields


def head_width(values: Mapping[str, Any], kind: str) -> int:
    key = f"attention.key_length{kind}"
    if not isinstance(size := values.get(key), int):
        raise ValueError(f"{key} is missing or not a whole number")
    return size


def widths(values: Mapping[str, Any], num_layers: int, num_shared: int) -> tuple[Any, int]:
    """The width of the MLP, and its factor in layers that share KV."""
    each = by_layer(values, "feed_forward_length", num_layers)
    base, last = each[0], each[-1]
    factor = 2 if num_shared and last == 2 * base else 1
    own = num_layers - num_shared
    if each != [base] * own + [factor * base] * num_shared:
        raise ValueError(f"feed_forward_length = {each} is not supported")
    return base, factor


def has_equal_values(header: Header, has_window: list[bool], num_shared: int) -> bool:
    """Whether values of layers without a window are their keys: there are no maps to values."""
    own = [i for i in range(len(has_window) - num_shared) if not has_window[i]]
    return bool(own) and not any(f"blk.{i}.attn_v.weight" in header.tensors for i in own)


def rope_of_both(
    header: Header,
    values: Mapping[str, Any],
    size: Any,
    factors: Callable[[Tensor], list[float]],
) -> dict[str, Any]:
    """RoPE of both kinds of layers. In layers without a window, only the first pairs rotate: the
    factors of the others are huge.
    """
    name = "rope_freqs.weight"
    if name not in header.tensors:
        raise ValueError(f"the tensor {name} is missing")
    each = factors(header.tensors[name])
    moving = sum(factor == 1.0 for factor in each)
    if 2 * len(each) != size or not all(factor >= STILL for factor in each[moving:]):  # NaN, too
        raise ValueError(f"{name} = {each!r:.80} does not fit heads of size {size}")
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": moving / len(each),
            "rope_theta": values.get("rope.freq_base", 10_000.0),
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": values.get("rope.freq_base_swa", 10_000.0),
        },
    }
