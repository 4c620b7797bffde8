"""The fields of recurrent layers in a GGUF file's metadata, and the order of their heads."""

from collections.abc import Mapping
from typing import Any

import msgspec

from specserve.models.decoder_config import DecoderConfig
from specserve.models.gguf.header import Array, Header
from specserve.models.recurrent import GatedDelta

INTERVAL = 4  # every n-th layer has attention, if a file of Qwen does not list its layers


def has_tensor(header: Header, ending: str) -> bool:
    """Whether any layer has a tensor of this name."""
    return any(name.endswith(f".{ending}") for name in header.tensors)


def nemotron_h(values: Mapping[str, Any]) -> dict[str, Any]:
    """The kinds of layers, and the size of heads. The metadata have 0 as the width of the MLP and
    as the number of KV heads of layers without them.
    """
    counts, widths = values.get("attention.head_count_kv"), values["feed_forward_length"]
    if not isinstance(counts, Array) or not isinstance(widths, Array):
        raise ValueError("attention.head_count_kv and feed_forward_length must be lists")
    each = [int(number) for number in widths.numbers()]
    if len(different := set(each) - {0}) != 1:
        raise ValueError(f"feed_forward_length = {each} is not supported")
    kinds = [
        "full_attention" if kv else "mlp" if inner else "linear_attention"
        for kv, inner in zip(counts.numbers(), each, strict=True)
    ]
    return {
        "intermediate_size": different.pop(),
        "layer_types": kinds,
        "mamba_head_dim": head_width(values),
    }


def head_width(values: Mapping[str, Any]) -> int:
    heads, width = values.get("ssm.time_step_rank"), values.get("ssm.inner_size")
    if not isinstance(heads, int) or not isinstance(width, int) or not heads or width % heads:
        raise ValueError(f"ssm.inner_size = {width!r} is not a multiple of the {heads!r} heads")
    return width // heads


def mamba(header: Header, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Mamba-2 in Granite 4 H, Bamba and Falcon H1. Converters write no biases of its
    maps. If there is a norm, it comes after the gate.
    """
    has_norm, hidden = has_tensor(header, "ssm_norm.weight"), values["embedding_length"]
    fields: dict[str, Any] = {
        "mamba_conv_bias": has_tensor(header, "ssm_conv1d.bias"),
        "mamba_d_conv": values.get("ssm.conv_kernel"),
        "mamba_d_head": head_width(values),
        "mamba_d_state": values.get("ssm.state_size"),
        "mamba_n_groups": values.get("ssm.group_count"),
        "mamba_n_heads": values["ssm.time_step_rank"],
        "mamba_proj_bias": False,
        "mamba_rms_norm": has_norm,
    }
    if isinstance(hidden, int) and hidden:
        fields["mamba_expand"] = values["ssm.inner_size"] / hidden
    if has_norm:
        fields["mamba_norm_before_gate"] = False
    return fields


def granite_hybrid(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Granite 4 H and Bamba: layers without KV heads have Mamba-2."""
    counts, number = values.get("attention.head_count_kv"), values.get("expert_count", 0)
    if not isinstance(counts, Array) or not counts.is_numeric:
        raise ValueError("attention.head_count_kv must be a list with a number for each layer")
    kinds = ["full_attention" if count else "linear_attention" for count in counts.numbers()]
    rotates = values.get("rope.scaling.finetuned", True)
    fields: dict[str, Any] = {
        "layer_types": kinds,
        "num_local_experts": number,
        "position_embedding_type": "rope" if rotates else None,
    }
    if not number:
        fields["shared_intermediate_size"] = values["feed_forward_length"]
    return fields


def gated_delta(values: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The fields of a gated DeltaNet, and the kinds of layers."""
    kinds, every = values.get("attention.recurrent_layers"), values.get("full_attention_interval")
    fields: dict[str, Any] = {
        "linear_conv_kernel_dim": values.get("ssm.conv_kernel"),
        "linear_key_head_dim": values.get("ssm.state_size"),
        "linear_num_key_heads": values.get("ssm.group_count"),
        "linear_num_value_heads": values.get("ssm.time_step_rank"),
        "linear_value_head_dim": head_width(values),
    }
    if isinstance(kinds, Array) and kinds.is_numeric:
        names = {True: "linear_attention", False: "full_attention"}
        each = [names[bool(kind)] for kind in kinds.numbers()[:num_layers]]
        return fields | {"layer_types": each}
    return fields | {"full_attention_interval": INTERVAL if every is None else every}


def as_stored(config: DecoderConfig) -> DecoderConfig:
    """The config of a model whose tensors are as in a file: gate and up of an MLP, and the inputs
    of a gated DeltaNet, have maps of their own.
    """
    replace, family, mixture = msgspec.structs.replace, config.family, config.mixture
    if family.recurrent == "mamba" and family.fuses_gate_up:
        config = replace(config, family=replace(family, fuses_gate_up=False))
        if mixture is not None:
            style = replace(mixture.style, fuses_shared=False)
            config = replace(config, mixture=replace(mixture, style=style))
    if isinstance(config.recurrent, GatedDelta):
        config = replace(config, recurrent=replace(config.recurrent, is_interleaved=False))
    return config


def value_heads(delta: GatedDelta) -> list[int]:
    """Where a file of Qwen 3.5 has each value head: those of one key head are not adjacent."""
    group = delta.num_v_heads // delta.num_k_heads
    return [head % group * delta.num_k_heads + head // group for head in range(delta.num_v_heads)]


def rows_of_heads(heads: list[int], size: int, first: int = 0) -> tuple[int, ...]:
    """The rows of heads of `size` rows each, in the given order, after `first` other rows."""
    rows = [first + head * size + i for head in heads for i in range(size)]
    return (*range(first), *rows)
