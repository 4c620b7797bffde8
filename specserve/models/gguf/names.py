"""Finds the tensors of a checkpoint in a GGUF file, by llama.cpp's names."""

from collections.abc import Container, Mapping
from typing import NamedTuple

import msgspec

from specserve.models import per_layer_names as per_layer
from specserve.models.decoder_config import DecoderConfig
from specserve.models.gguf.architectures import Architecture
from specserve.models.gguf.recurrent import rows_of_heads, value_heads
from specserve.models.recurrent import GatedDelta, Mamba2
from specserve.models.tensor_shapes import (
    ALPHAS,
    SCALAR,
    SINKS,
    STREAM_SCALE,
    STREAMS,
    tensor_shapes,
)

OUTER = {
    per_layer.NORM: "per_layer_proj_norm",
    per_layer.PROJECTION: "per_layer_model_proj",
    per_layer.TABLE: "per_layer_token_embd",
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
}
IN_LAYER = {
    per_layer.GATE: "inp_gate",
    per_layer.OUT: "proj",
    per_layer.OUT_NORM: "post_norm",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.modality_router": "altup_router",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.router_norm": "altup_router_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.in_proj": "ssm_in",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
IN_MLP = {
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "gate_up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
# Tensors with other names than modules: within a layer of a checkpoint -> of a file
OTHERS = {
    SCALAR: "layer_output_scale.weight",
    SINKS: "attn_sinks.weight",
    STREAM_SCALE: "altup_correct_scale.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
}
TURNED = "self_attn.q_proj.", "self_attn.k_proj."
STACKS = dict(zip(STREAMS, ("altup_proj", "altup_unembd_proj"), strict=True))
LEGACY = "ssm_in"  # one map of all inputs of a gated DeltaNet, in old files of Qwen3-Next
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
# Tensors that belong to the config.
OF_CONFIG = {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}


class TensorPlace(NamedTuple):
    """Where a tensor of a checkpoint is: a whole tensor of the file, one expert of a stack
    [experts, ...], or some rows of an expert.
    """

    name: str
    shape: tuple[int, ...]  # of the file's tensor
    expert: int | None = None
    rows: slice | tuple[int, ...] = slice(None)  # which ones, in the checkpoint's order
    # The order of equal parts of the columns; None: as in the checkpoint.
    columns: tuple[int, ...] | None = None
    is_turned: bool = False  # see Architecture
    is_rate: bool = False  # the file has -exp(A_log)


def layer_names(config: DecoderConfig, architecture: Architecture) -> dict[str, str]:
    """The names of a layer's modules, without experts: the checkpoint's -> llama.cpp's."""
    norms, mixture = config.family.norms, config.mixture
    names = IN_LAYER | {f"{config.family.mlp}.{name}": its for name, its in IN_MLP.items()}
    for name, theirs in (
        (norms.before_attention, "attn_norm"),
        (norms.after_attention, "post_attention_norm"),
        (norms.before_mlp, "ffn_norm"),
        (norms.after_mlp, "post_ffw_norm"),
    ):
        if name is not None:
            names[name] = theirs
    for name, theirs in zip(
        config.family.qk_norm_names, ("attn_q_norm", "attn_k_norm"), strict=True
    ):
        names[f"self_attn.{name}"] = theirs
    for name, theirs in zip(config.family.ungated or (), ("ffn_up", "ffn_down"), strict=False):
        names[name] = theirs
    if mixture is not None:
        names[mixture.router] = "ffn_gate_inp"
        names[mixture.shared_gate] = "ffn_gate_inp_shexp"
        if (beside := mixture.style.beside) is not None:
            names[beside.before] = "pre_ffw_norm_2"
            names[beside.after] = "post_ffw_norm_2"
            names[beside.after_mlp] = "post_ffw_norm_1"
        for part in ("gate", "up", "down"):
            names[f"{mixture.shared}.{part}_proj"] = f"ffn_{part}_shexp"
    replaced = architecture.names
    return {ours: replaced.get(theirs, theirs) for ours, theirs in names.items()}


def places(
    config: DecoderConfig, architecture: Architecture, stored: Container[str] = ()
) -> dict[str, TensorPlace]:
    """The places of all tensors of a checkpoint, except those in the metadata; `stored` are the
    file's tensors.
    """
    shapes, inner = tensor_shapes(config), layer_names(config, architecture)
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith(ALPHAS)}
    outer = OUTER | {"model.norm": architecture.final_norm}
    found = dict[str, TensorPlace]()
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        stack, _, index = module.rpartition(".")
        if module in outer:
            found[name] = TensorPlace(f"{outer[module]}.{kind}", shape)
        elif stack in STACKS:
            stacked = config.num_streams - 1, *shape
            found[name] = TensorPlace(f"{STACKS[stack]}.{kind}", stacked, int(index))
        else:
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            place = layer_place(config, inner, (f"blk.{number}.", rest), shape, stored)
            turns = architecture.is_turned and rest.startswith(TURNED)
            found[name] = place._replace(is_turned=turns)
    if isinstance(config.recurrent, GatedDelta):
        found |= delta_places(config.recurrent, architecture, found, stored)
    return found


def layer_place(
    config: DecoderConfig,
    modules: Mapping[str, str],
    name: tuple[str, str],
    shape: tuple[int, ...],
    stored: Container[str],
) -> TensorPlace:
    """The place of a layer's tensor; `name` is the layer's in the file, and the tensor's within the
    layer of a checkpoint.
    """
    block, rest = name
    module, _, kind = rest.rpartition(".")
    if (other := others(config).get(rest)) is not None:
        # Mamba-2's rates and factors have a second dimension.
        whole = (*shape, 1) if rest in ("mamba.A_log", "mamba.D") else shape
        return TensorPlace(f"{block}{other}", whole, is_rate=rest.endswith("A_log"))
    if rest == "mamba.norm.weight" and isinstance(config.recurrent, Mamba2):
        groups = config.recurrent.num_groups
        return TensorPlace(f"{block}ssm_norm.weight", (groups, shape[0] // groups))
    if config.mixture is not None and rest == config.mixture.correction:
        return TensorPlace(f"{block}exp_probs_b.bias", shape[-1:])
    if module not in modules:
        return expert_place(config, block, rest, shape, stored)
    theirs = modules[module]
    # The file's gate of a shared expert is a vector, not a matrix of one row. Convolutions have no
    # dimension of size 1.
    is_conv = theirs in ("shortconv.conv", "ssm_conv1d") and kind == "weight"
    is_flat = theirs == "ffn_gate_inp_shexp" or is_conv
    own = f"{block}{theirs}.{kind}"
    # llama.cpp's converter writes a name without a suffix for Falcon H1.
    if own not in stored and f"{block}{theirs}" in stored:
        own = f"{block}{theirs}"
    return TensorPlace(own, tuple(n for n in shape if n > 1) if is_flat else shape)


def others(config: DecoderConfig) -> dict[str, str]:
    """OTHERS, and the tensors of experts next to an MLP."""
    beside = None if config.mixture is None else config.mixture.style.beside
    if beside is None:
        return OTHERS
    return OTHERS | {
        beside.router_scale: "ffn_gate_inp.scale",
        beside.factors: "ffn_down_exps.scale",
    }


def delta_places(
    delta: GatedDelta,
    architecture: Architecture,
    found: Mapping[str, TensorPlace],
    stored: Container[str],
) -> dict[str, TensorPlace]:
    """The places of tensors of gated DeltaNets that files have in another order."""
    changed = {}
    for name, place in found.items():
        begin, is_of_delta, rest = name.partition(".linear_attn.")
        if not is_of_delta:
            continue
        prefix = f"blk.{begin.rpartition('.')[2]}."
        if not architecture.is_tiled and ".in_proj_" in name:
            changed[name] = joined(delta, rest.removesuffix(".weight"), prefix, place, stored)
        elif architecture.is_tiled and delta.num_v_heads > delta.num_k_heads:
            changed[name] = tiled(delta, rest.removesuffix(".weight"), place)
    return changed


def joined(
    delta: GatedDelta, part: str, prefix: str, place: TensorPlace, stored: Container[str]
) -> TensorPlace:
    """Qwen3-Next has b and a in one map, by key head. Old files have such a map of q, k, v and z,
    too.
    """
    order = msgspec.structs.replace(delta, is_interleaved=True).input_rows()
    assert order is not None, "the maps are not joined"
    begin, width = 0, place.shape[-1]
    for own, height in (
        ("in_proj_qkv", delta.inner),
        ("in_proj_z", delta.value_width),
        ("in_proj_b", delta.num_v_heads),
        ("in_proj_a", delta.num_v_heads),
    ):
        rows, first = order[begin : begin + height], delta.inner + delta.value_width
        begin += height
        if own != part:
            continue
        if own in ("in_proj_b", "in_proj_a"):
            of_both = tuple(row - first for row in rows)
            return TensorPlace(f"{prefix}ssm_ba.weight", (2 * height, width), rows=of_both)
        if (legacy := f"{prefix}{LEGACY}.weight") in stored:
            return TensorPlace(legacy, (first, width), rows=tuple(rows))
    return place


def tiled(delta: GatedDelta, part: str, place: TensorPlace) -> TensorPlace:
    """Qwen 3.5 has the value heads in another order."""
    heads = value_heads(delta)
    match part:
        case "in_proj_qkv" | "conv1d":
            first = 2 * delta.num_k_heads * delta.k_dim
            return place._replace(rows=rows_of_heads(heads, delta.v_dim, first))
        case "in_proj_z":
            return place._replace(rows=rows_of_heads(heads, delta.v_dim))
        case "in_proj_b" | "in_proj_a" | "A_log" | "dt_bias":
            return place._replace(rows=tuple(heads))
        case "out_proj":
            return place._replace(columns=tuple(heads))
    return place


def expert_place(
    config: DecoderConfig, block: str, rest: str, shape: tuple[int, ...], stored: Container[str]
) -> TensorPlace:
    """The place of an expert's tensor; `rest` is its name within the layer."""
    mixture = config.mixture
    assert mixture is not None, rest
    module, _, kind = rest.rpartition(".")
    _, expert, part = module.rsplit(".", 2)
    which = dict(zip(mixture.style.maps, ("gate", "up", "down"), strict=True))[part]
    fused = f"{block}ffn_gate_up_exps.{kind}"
    if which != "down" and fused in stored:
        height = shape[0]
        begin = height if which == "up" else 0
        whole = mixture.num_experts, 2 * height, *shape[1:]
        return TensorPlace(fused, whole, int(expert), slice(begin, begin + height))
    name = f"{block}ffn_{which}_exps.{kind}"
    return TensorPlace(name, (mixture.num_experts, *shape), int(expert))


def files_shapes(found: Mapping[str, TensorPlace]) -> dict[str, tuple[int, ...]]:
    """The tensors that a file must have."""
    return {place.name: place.shape for place in found.values()}
