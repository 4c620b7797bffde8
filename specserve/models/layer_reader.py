"""Reads the weights of a layer."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from specserve.models import per_layer_names as per_layer
from specserve.models import rotary, tensor_shapes
from specserve.models.altup import AltUp
from specserve.models.decoder import (
    DeltaWeights,
    Experts,
    ExpertsBeside,
    Layer,
    MambaWeights,
    SharedExpert,
    ShortConvWeights,
    windows_of,
)
from specserve.models.decoder_config import DecoderConfig
from specserve.models.per_layer import PerLayerMaps
from specserve.models.reader import CONV, DELTA, MAMBA, Reader
from specserve.models.recurrent import GatedDelta, Mamba2, ShortConv
from specserve.models.recurrent_shard import recurrent_part
from specserve.models.tensor_shapes import ALPHAS, SCALAR, SINKS, STREAM_SCALE
from specserve_kernels import DeltaParams, MambaParams, QKNorm, Rotary

BETA = 0.5  # slope of xIELU at zero, as in `Ops.activate`
# Parts of `Layer` that a layer without attention or without an MLP lacks.
MIXER = "window", "rotary", "qk_norm", "qkv", "qkv_bias", "out", "out_bias", "sinks"
MLP = "gate_up", "gate_up_bias", "down", "down_bias"


def read_altup(reader: Reader, config: DecoderConfig, layer: str) -> AltUp:
    names = (f"{layer}.{name}" for name in tensor_shapes.altup_maps(config))
    router, predict, correct, left, right = map(reader.read_weight, names)
    scale = reader.read_norm(f"{layer}.{STREAM_SCALE}", False)  # stored in any case
    norms = tensor_shapes.ROUTER_NORM, tensor_shapes.LAUREL_NORM
    norm, laurel = (f"{layer}.{name}.weight" for name in norms)
    return AltUp(
        router_norm=reader.read_norm(norm, config.family.adds_one, 1 / config.hidden_size),
        router=router,
        predict=predict,
        correct=correct,
        output_scale=scale if config.scales_streams else None,
        left=left,
        right=right,
        laurel_norm=reader.read_norm(laurel, config.family.adds_one),
    )


def read_per_layer_maps(reader: Reader, config: DecoderConfig, index: int) -> PerLayerMaps:
    layer = f"model.layers.{index}"
    norm = f"{layer}.{per_layer.OUT_NORM}.weight"
    return PerLayerMaps(
        begin=index * config.per_layer_size,
        gate=reader.read_weight(f"{layer}.{per_layer.GATE}"),
        out=reader.read_weight(f"{layer}.{per_layer.OUT}"),
        norm=reader.read_norm(norm, config.family.adds_one),
    )


def read_layer(reader: Reader, config: DecoderConfig, index: int, table: Rotary | None) -> Layer:
    layer = f"model.layers.{index}"
    mixer: dict[str, Any] = dict.fromkeys(MIXER)
    if config.is_recurrent(index):
        mixer |= read_recurrent(reader, config, layer)
    if config.attends(index):
        mixer |= read_attention(reader, config, layer, index, table)
    norms = config.norms(index)
    mlp = read_mixture if config.has_experts(index) else read_mlp
    has_mixer = config.is_recurrent(index) or config.attends(index)

    def norm(name: str | None, factor: float = 1.0) -> Tensor | None:
        if name is None:
            return None
        return reader.read_norm(f"{layer}.{name}.weight", config.family.adds_one, factor)

    def norm_bias(name: str | None) -> Tensor | None:
        has_bias = name is not None and config.family.norm_bias
        return reader.read_norm(f"{layer}.{name}.bias", False) if has_bias else None

    return Layer(
        attention_norm=norm(norms.before_attention) if has_mixer else None,
        after_attention=norm(norms.after_attention),
        # A factor of the gate multiplies the input of gate and up, and `down_factor` divides by it.
        mlp_norm=norm(norms.before_mlp, config.mlp_factors[0]) if config.has_mlp(index) else None,
        down_factor=config.mlp_factors[1] / config.mlp_factors[0],
        out_factor=config.attention_factor,
        after_mlp=norm(norms.after_mlp),
        attention_norm_bias=norm_bias(norms.before_attention),
        mlp_norm_bias=norm_bias(norms.before_mlp),
        has_kv=config.owns_kv(index),
        scalar=reader.read_norm(f"{layer}.{SCALAR}", False).item()
        if config.family.has_layer_scalars
        else 1.0,
        per_layer=read_per_layer_maps(reader, config, index) if config.per_layer_size else None,
        beside=read_beside(reader, config, layer)
        if config.mixture is not None and config.mixture.style.beside is not None
        else None,
        altup=read_altup(reader, config, layer) if config.num_streams > 1 else None,
        deviations=config.deviations[index] if config.deviations else None,
        **mixer,
        **(mlp(reader, config, index) if config.has_mlp(index) else dict.fromkeys(MLP)),
    )


def read_attention(
    reader: Reader, config: DecoderConfig, layer: str, index: int, table: Rotary | None
) -> dict[str, Any]:
    qkv = [f"{layer}.{name}" for name in config.qkv_names(index)]
    shard, rows = reader.shard, reader.shard.qkv_rows(config, rows_of_qkv(config, index))
    out, gate = f"{layer}.self_attn.o_proj", dict[str, Any]()
    if config.family.gates_attention:
        of_gate = rows_of_gate(config, shard.heads(config).query)
        gate["gate"] = reader.read_weight(qkv[0], rows=of_gate)
        gate["gate_bias"] = reader.read_bias(qkv[0], rows=of_gate)
    return gate | {
        "window": windows_of(config)[index],
        "rotary": table,
        "qk_norm": read_qk_norm(reader, config, index),
        "qkv": reader.read_weight(*qkv, rows=rows),
        "qkv_bias": reader.read_bias(*qkv, rows=rows),
        "out": reader.read_weight(out, rows=shard.rows(config.hidden_size)),
        "out_bias": reader.read_bias(out, rows=shard.rows(config.hidden_size)),
        "sinks": read_sinks(reader, config, layer) if config.family.has_sinks else None,
    }


def read_recurrent(reader: Reader, config: DecoderConfig, layer: str) -> dict[str, Any]:
    if isinstance(config.recurrent, Mamba2):
        return {"mamba": read_mamba(reader, config.recurrent, layer, config.norm_eps)}
    if isinstance(config.recurrent, GatedDelta):
        return read_delta(reader, config.recurrent, layer, config.norm_eps)
    assert config.recurrent is not None, "the layer is recurrent"
    return read_short_conv(reader, config.recurrent, layer)


def read_mamba(reader: Reader, mamba: Mamba2, layer: str, eps: float) -> MambaWeights:
    rate, dt_bias, D, weight, bias = (f"{layer}.{name}" for name in MAMBA)
    inputs, out, norm = (f"{layer}.mamba.{name}" for name in ("in_proj", "out_proj", "norm.weight"))
    z, *of_conv, dt = mamba.factors
    part, hidden = recurrent_part(mamba, reader.shard), reader.shard.rows(reader.hidden_size)
    group = mamba.num_groups * mamba.state_dim
    # The convolution is linear in its inputs, so that scaling its weight scales them.
    widths = torch.tensor([mamba.width, group, group])
    channels = reader.ops.place(torch.tensor(of_conv).repeat_interleave(widths))
    whole = reader.read_norm(weight, False).squeeze(1) * channels[:, None]
    return MambaWeights(
        inputs=reader.read_weight(inputs, rows=part.inputs),
        inputs_bias=reader.read_bias(inputs, rows=part.inputs),
        weight=part.of_channels(whole),
        bias=part.of_channels(reader.read_norm(bias, False)) if mamba.conv_bias else None,
        params=MambaParams(
            rate=-part.of_heads(reader.read_norm(rate, False)).exp(),
            dt_bias=part.of_heads(reader.read_norm(dt_bias, False)),
            D=part.of_heads(reader.read_norm(D, False)),
            norm=part.of_heads(reader.read_norm(norm, False), mamba.head_dim)
            if mamba.has_norm
            else None,
            eps=eps,
            num_groups=part.own.num_groups if isinstance(part.own, Mamba2) else 1,
            gates_first=mamba.gates_first,
            z_factor=z,
            dt_factor=dt,
        ),
        out=reader.read_weight(out, rows=hidden),
        out_bias=reader.read_bias(out, rows=hidden),
        factor=mamba.out_factor,
    )


def read_delta(reader: Reader, delta: GatedDelta, layer: str, eps: float) -> dict[str, Any]:
    weight, rate, dt_bias = (f"{layer}.{name}" for name in DELTA)
    part, hidden = recurrent_part(delta, reader.shard), reader.shard.rows(reader.hidden_size)
    params = DeltaParams(
        rate=-part.of_heads(reader.read_norm(rate, False)).exp(),
        dt_bias=part.of_heads(reader.read_norm(dt_bias, False)),
        norm=reader.read_norm(f"{layer}.linear_attn.norm.weight", False),
        eps=eps if delta.norm_eps is None else delta.norm_eps,
        num_k_heads=part.own.num_k_heads if isinstance(part.own, GatedDelta) else 1,
        beta_factor=delta.beta_factor,
    )
    names = (f"{layer}.{name}" for name in delta.input_names)
    inputs = reader.read_weight(*names, rows=part.inputs)
    own = part.of_channels(reader.read_norm(weight, False).squeeze(1))
    out = reader.read_weight(f"{layer}.linear_attn.out_proj", rows=hidden)
    return {"out": out, "out_bias": None, "delta": DeltaWeights(inputs, own, params)}


def read_short_conv(reader: Reader, conv: ShortConv, layer: str) -> dict[str, Any]:
    inputs, out = f"{layer}.conv.in_proj", f"{layer}.conv.out_proj"
    weight, bias = (f"{layer}.{name}" for name in CONV)
    part, hidden = recurrent_part(conv, reader.shard), reader.shard.rows(reader.hidden_size)
    weights = ShortConvWeights(
        inputs=reader.read_weight(inputs, rows=part.inputs),
        inputs_bias=reader.read_bias(inputs, rows=part.inputs),
        weight=part.of_channels(reader.read_norm(weight, False).squeeze(1)),
        bias=part.of_channels(reader.read_norm(bias, False)) if bias in reader.shapes else None,
    )
    return {
        "out": reader.read_weight(out, rows=hidden),
        "out_bias": reader.read_bias(out, rows=hidden),
        "conv": weights,
    }


def read_mlp(reader: Reader, config: DecoderConfig, index: int) -> dict[str, Any]:
    layer = f"model.layers.{index}"
    gate_up = [f"{layer}.{name}" for name in config.gate_up_names]
    is_sparse = bool(config.deviations) and config.deviations[index] is not None
    is_gated = config.family.ungated is None and not is_sparse
    down = f"{layer}.{config.down_name}"
    alphas = read_alphas(reader, layer) if config.activation == "xielu" else (0.0, 0.0)
    inner, hidden = reader.shard.gate_up_rows(config), reader.shard.rows(config.hidden_size)
    return {
        "alphas": alphas,
        "gate_up": reader.read_weight(*gate_up, is_gated=is_gated, rows=inner),
        "gate_up_bias": reader.read_bias(*gate_up, rows=inner),
        "down": reader.read_weight(down, rows=hidden),
        "down_bias": reader.read_bias(down, rows=hidden),
    }


def read_alphas(reader: Reader, layer: str) -> tuple[float, float]:
    """The factors of xIELU, which a checkpoint has as inverse softplus."""
    p, n = (softplus(reader.read_norm(f"{layer}.{name}", False)).item() for name in ALPHAS)
    return p, BETA + n


def read_sinks(reader: Reader, config: DecoderConfig, layer: str) -> Tensor:
    """Read the sinks of this shard's heads."""
    own = reader.shard.heads(config).query
    return reader.read_norm(f"{layer}.{SINKS}", False)[own.start : own.stop]


def read_mixture(reader: Reader, config: DecoderConfig, index: int) -> dict[str, Any]:
    layer = f"model.layers.{index}"
    return dict.fromkeys(MLP) | {"experts": read_experts(reader, config, layer)}


def read_beside(reader: Reader, config: DecoderConfig, layer: str) -> ExpertsBeside:
    assert config.mixture is not None, "the layer has no experts"
    names = config.mixture.style.beside
    assert names is not None, "experts replace the MLP"
    adds_one = config.family.adds_one
    before, after, after_mlp = (
        reader.read_norm(f"{layer}.{name}.weight", adds_one) for name in names.norms
    )
    factors = reader.read_norm(f"{layer}.{names.factors}", False)
    scale = reader.read_norm(f"{layer}.{names.router_scale}", False, config.hidden_size**-0.5)
    experts = read_experts(reader, config, layer)._replace(factor=factors)
    return ExpertsBeside(experts, scale, before, after, after_mlp)


def read_experts(reader: Reader, config: DecoderConfig, layer: str) -> Experts:
    mixture = config.mixture
    assert mixture is not None, "the layer has no experts"
    shard, hidden = reader.shard, reader.shard.rows(config.hidden_size)
    each = shard.experts(mixture.num_experts)
    num_parts = 2 if mixture.style.is_gated else 1
    inner, outer = shard.rows(mixture.width, num_parts), hidden
    if shard.has_whole_experts:
        inner = outer = None
    gate_up = [[f"{layer}.{name}" for name in mixture.gate_up_names(e)] for e in each]
    router, shared = f"{layer}.{mixture.router}", f"{layer}.{mixture.shared}"
    return Experts(
        router=reader.read_weight(router),
        gate_up=reader.read_experts(gate_up, is_gated=mixture.style.is_gated, rows=inner),
        down=reader.read_experts([[f"{layer}.{mixture.down_name(e)}"] for e in each], rows=outer),
        num_active=mixture.num_active,
        normalizes=mixture.normalizes,
        is_sigmoid=mixture.style.is_sigmoid,
        weighs_input=mixture.style.weighs_input,
        correction=reader.read_norm(f"{layer}.{mixture.correction}", False).flatten()
        if mixture.correction
        else None,
        factor=mixture.factor,
        router_bias=reader.read_bias(router),
        limit=mixture.limit,
        gate="silu" if mixture.style.is_gated else "relu2",
        shared=SharedExpert(
            gate=reader.read_weight(f"{layer}.{mixture.shared_gate}")
            if mixture.style.has_shared_gate
            else None,
            gate_up=reader.read_weight(
                *(f"{layer}.{name}" for name in mixture.shared_gate_up_names),
                is_gated=mixture.style.is_gated,
                rows=shard.rows(mixture.shared_width, num_parts),
            ),
            down=reader.read_weight(f"{shared}.down_proj", rows=hidden),
        )
        if mixture.shared_width
        else None,
    )


def rows_of_qkv(config: DecoderConfig, layer: int = 0) -> Tensor | None:
    """The order of the rows of queries, keys and values in kernels; None: as in the checkpoint."""
    if config.repeats_keys(layer):
        heads = config.kv_heads(layer)
        first = config.num_heads * heads.size
        repeated = torch.arange(first, first + heads.number * heads.size)
        return torch.cat([torch.arange(first), repeated, repeated])
    D, order, H = config.head_dim, order_of_head(config), config.num_heads
    is_gated = config.family.gates_attention
    if order is None and not is_gated:
        return None
    order = torch.arange(D) if order is None else order
    keys = (2 if is_gated else 1) * H * D  # rows before the keys
    queries = torch.arange(0, keys, keys // H)[:, None] + order
    turned = keys + torch.arange(config.num_kv_heads)[:, None] * D + order
    values = keys + (config.num_kv_heads + torch.arange(config.num_kv_heads)[:, None]) * D
    return torch.cat([x.flatten() for x in (queries, turned, values + torch.arange(D))])


def rows_of_gate(config: DecoderConfig, heads: range) -> Tensor:
    """The rows of attention's gate in the map of queries: behind the query of each of these
    heads.
    """
    D = config.head_dim
    return (torch.tensor(heads)[:, None] * 2 * D + D + torch.arange(D)).flatten()


def order_of_head(config: DecoderConfig) -> Tensor | None:
    """The order of a head's dimensions in kernels; None: as in the checkpoint."""
    rope, D = config.rope_parameters, config.head_dim
    has_neighbors = config.family.rotates_neighbors
    if not has_neighbors and rope.rotating(D) == D:
        return None
    return rotary.order(rope, D, has_neighbors)


def read_qk_norm(reader: Reader, config: DecoderConfig, index: int) -> QKNorm | None:
    family, order = config.family, order_of_head(config)
    if config.qk_norm == "bare" and config.rope[index]:
        ones = reader.ops.place(torch.ones(config.head_dim))
        return QKNorm(ones, ones, config.norm_eps, is_last=family.norms_after_rope)
    if not config.has_qk_norm:
        return None
    names = [f"model.layers.{index}.self_attn.{name}.weight" for name in family.qk_norm_names]
    own = names if config.owns_kv(index) else names[:1]
    q, *others = (reader.read_norm(name, family.adds_one) for name in own)
    k = others[0] if others else q  # not read without keys
    if order is not None:
        q, k = (in_order(weight, order.to(weight.device)) for weight in (q, k))
    is_each, heads = config.qk_norm == "each", reader.shard.heads(config)
    if is_each:
        q, k = q[heads.query.start : heads.query.stop], k[heads.kv.start : heads.kv.stop]
    last, has_values = family.norms_after_rope, family.norms_values
    return QKNorm(q, k, config.norm_eps, is_each, last, has_values)


def in_order(weight: Tensor, order: Tensor) -> Tensor:
    """The weight of a norm of heads, with each head's dimensions in another order."""
    return weight.view(-1, len(order))[:, order].view(weight.shape)
