"""Finds the tensors of a checkpoint in a GGUF file, by llama.cpp's names."""

from collections.abc import Container, Mapping
from typing import NamedTuple

from specserve.models.decoder_config import ALPHAS, SINKS, DecoderConfig, tensor_shapes
from specserve.models.gguf.architectures import Architecture
from specserve.models.recurrent import Mamba2

OUTER = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
}
IN_LAYER = {
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
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
# Tensors of Mamba-2 without a suffix: the checkpoint's names -> llama.cpp's
OF_HEADS = {"mamba.A_log": "ssm_a", "mamba.D": "ssm_d"}
DT_BIAS = "mamba.dt_bias"
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
    rows: slice = slice(None)
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
    found = {}
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        if module in outer:
            found[name] = TensorPlace(f"{outer[module]}.{kind}", shape)
            continue
        number, _, rest = name.removeprefix("model.layers.").partition(".")
        block = f"blk.{number}."
        if rest == SINKS:
            found[name] = TensorPlace(f"{block}attn_sinks.weight", shape)
        elif rest in OF_HEADS:
            stored_as, is_rate = f"{block}{OF_HEADS[rest]}", rest == "mamba.A_log"
            found[name] = TensorPlace(stored_as, (*shape, 1), is_rate=is_rate)
        elif rest == DT_BIAS:
            found[name] = TensorPlace(f"{block}ssm_dt.bias", shape)
        elif rest == "mamba.norm.weight" and isinstance(config.recurrent, Mamba2):
            groups = config.recurrent.num_groups
            parts = groups, shape[0] // groups
            found[name] = TensorPlace(f"{block}ssm_norm.weight", parts)
        elif config.mixture is not None and rest == config.mixture.correction:
            found[name] = TensorPlace(f"{block}exp_probs_b.bias", shape[-1:])
        elif (theirs := inner.get(rest.rpartition(".")[0])) is not None:
            turns = architecture.is_turned and theirs in ("attn_q", "attn_k")
            # The file's gate of a shared expert is a vector, not a matrix of one row. Convolutions
            # have no dimension of size 1.
            convolutions = "shortconv.conv", "ssm_conv1d"
            is_flat = theirs == "ffn_gate_inp_shexp" or (
                theirs in convolutions and kind == "weight"
            )
            flat = tuple(n for n in shape if n > 1) if is_flat else shape
            found[name] = TensorPlace(f"{block}{theirs}.{kind}", flat, is_turned=turns)
        else:
            found[name] = expert_place(config, block, rest, shape, stored)
    return found


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
