"""The decoder of the Llama family, written against the ops alone."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve.memory import KVLayout
from specserve.models.families import DecoderConfig
from specserve.models.weight import Weight
from specserve.models.weight_forms import WeightForms
from specserve_kernels import KVCache, Ops, Program, QKNorm, Rotary, Rows


class Layer(NamedTuple):
    """One layer's weights and settings; linear maps are packed, an absent bias is None."""

    window: int | None
    rotary: Rotary
    qk_norm: QKNorm | None
    attention_norm: Tensor
    qkv: Any
    qkv_bias: Tensor | None
    out: Any
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Any
    gate_up_bias: Tensor | None
    down: Any
    down_bias: Tensor | None


class Weights(NamedTuple):
    """A model's weights.

    embedding  [V, hidden]  the model's dtype, or codes
    layers     L of them
    norm       [hidden]     before the head
    head       packed [V, hidden]
    forms      what of this is codes, and how many bytes it has
    """

    embedding: Weight
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Any
    forms: WeightForms = WeightForms()


class Decoder:
    """Token ids or a residual in, logits out; the KV of every row is written on the way.

    The caller holds torch.inference_mode, and calls `plan` once a step.
    """

    def __init__(self, config: DecoderConfig, ops: Ops, rotary: Rotary, weights: Weights) -> None:
        self.config = config
        self.ops = ops
        self.rotary = rotary
        self.weights = weights
        self.scale = config.head_dim**-0.5
        self.windows = tuple(dict.fromkeys(config.windows))

    def on(self, ops: Ops) -> "Decoder":
        """The same model with other ops: a program's forward is recorded on such a one."""
        return Decoder(self.config, ops, self.rotary, self.weights)

    @property
    def forms(self) -> WeightForms:
        return self.weights.forms

    @property
    def num_positions(self) -> int:
        return len(self.rotary.cos)

    @property
    def num_heads(self) -> int:
        return self.config.num_heads

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""
        return self.weights.norm.dtype

    def kv_layouts(self, dtype: torch.dtype | None = None) -> tuple[KVLayout, ...]:
        """The layout of each layer's KV, of this dtype; None is that of the activations."""
        c = self.config
        return (KVLayout(c.num_kv_heads, c.head_dim, dtype or self.dtype),) * c.num_layers

    def program(self, kv: KVCache, max_rows: int, max_read: int) -> Program:
        """The build's, which may record the forward."""
        return self.ops.program(self, kv, max_rows, max_read)

    def plan(self, rows: Rows, kv: KVCache, also: Sequence[Tensor] = ()) -> Any:
        """The plan that all layers share; `plan.also` are the given tensors on the ops' device."""
        return self.ops.plan(rows, kv, self.num_heads, self.windows, also)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The residual stream before the first layer, [R, hidden], of token ids [R] int64."""
        return self.ops.embed(self.weights.embedding, token_ids, self.dtype)

    def forward(
        self, residual: Tensor, kv: KVCache, plan: Any, taps: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The residual stream after the last layer, and as it came into the layers in `taps`.

        residual  [R, hidden]  the model's dtype; it is written to
        ->        [R, hidden]  what `logits` takes; and by layer, transformers' hidden_states[i]
        """
        ops, eps, scale = self.ops, self.config.rms_eps, self.scale
        if unknown := set(taps).difference(range(len(kv.layers))):
            raise ValueError(f"no layers {sorted(unknown)} to tap: there are {len(kv.layers)}")
        tapped = {}
        for i, (layer, cache) in enumerate(zip(self.weights.layers, kv.layers, strict=True)):
            if i in taps:
                tapped[i] = ops.copy(residual)
            h = ops.rms_norm(residual, layer.attention_norm, eps)
            qkv = ops.linear(h, layer.qkv, layer.qkv_bias)
            q = ops.rope_write_kv(qkv, layer.rotary, layer.qk_norm, cache, plan)
            h = ops.attention(q, cache, plan, scale, layer.window)
            residual = ops.linear_add(h, layer.out, layer.out_bias, residual)
            h = ops.rms_norm(residual, layer.mlp_norm, eps)
            h = ops.linear_silu_mul(h, layer.gate_up, layer.gate_up_bias)
            residual = ops.linear_add(h, layer.down, layer.down_bias, residual)
        return residual, tapped

    def logits(self, residual: Tensor, rows: Tensor) -> Tensor:
        """The logits after some rows: the final norm and the head, for those rows only.

        residual  [R, hidden]  what `forward` returned
        rows      [n]          int64, ascending
        ->        [n, V]       the model's dtype
        """
        ops, weights = self.ops, self.weights
        hidden = ops.rms_norm(ops.take_rows(residual, rows), weights.norm, self.config.rms_eps)
        return ops.linear(hidden, weights.head)
