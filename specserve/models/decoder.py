"""The decoder of Llama and related families, which runs on `Ops`, and the model interface."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specserve.memory.arena import KVLayout
from specserve.models.decoder_config import DecoderConfig, Shape
from specserve.models.weight import Weight
from specserve.models.weight_forms import WeightForms
from specserve_kernels import (
    KVCache,
    KVLayer,
    ModelForward,
    Ops,
    Program,
    QKNorm,
    Rotary,
    Rows,
)


class LoadedModel(ModelForward, Protocol):
    """Maps token ids, or a residual, to logits, and writes the KV of every row.

    `Decoder` documents the methods without a docstring.
    """

    @property
    def ops(self) -> Ops: ...

    @property
    def config(self) -> Shape: ...

    @property
    def forms(self) -> WeightForms:
        """The quantization of the weights, and their size in bytes."""
        ...

    @property
    def num_positions(self) -> int:
        """Rows, including rows of tree nodes, may have the positions [0, num_positions)."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    def kv_layouts(self, dtype: torch.dtype | None = None) -> tuple[KVLayout, ...]: ...

    def program(
        self, kv: KVCache, max_rows: int, max_read: int, aux_layer_ids: Collection[int] = ()
    ) -> Program:
        """The forward pass for up to `max_rows` rows per step, with logits for up to `max_read`.
        `aux_layer_ids` are auxiliary layers, whose input hidden states the program returns.
        """
        ...


class TargetModel(LoadedModel, Protocol):
    """A model that can also return hidden states, which are pooled to embeddings and scores."""

    @property
    def has_head(self) -> bool:
        """Whether it was trained to generate text."""
        ...

    @property
    def score(self) -> Tensor | None:
        """The head of a sequence classifier, [labels, hidden] float32; None: no such head."""
        ...

    def hidden(self, residual: Tensor, rows: Tensor) -> Tensor: ...


class SharedExpert(NamedTuple):
    """The expert that all rows use, weighted per row by `gate` if there is one; maps are packed."""

    gate: Any  # [1, hidden], or None
    gate_up: Any
    down: Any


class Experts(NamedTuple):
    """A layer's mixture of experts, which replaces the MLP."""

    router: Any  # packed [experts, hidden]
    gate_up: Any
    down: Any
    num_active: int
    normalizes: bool
    is_sigmoid: bool = False
    correction: Tensor | None = None  # of `Ops.route`
    factor: float = 1.0  # of `Ops.route`
    router_bias: Tensor | None = None
    limit: float | None = None  # `limit` of `Ops.experts`
    shared: SharedExpert | None = None


class LayerAdapters(NamedTuple):
    """The adapter slots of a layer's maps; None: adapters do not change this map."""

    qkv: Any = None
    out: Any = None
    gate_up: Any = None
    down: Any = None


class Layer(NamedTuple):
    """One layer's weights and settings. Linear maps are packed, absent parts are None. Norms are
    float32, at the places that `Norms` describes.
    """

    window: int | None
    rotary: Rotary
    qk_norm: QKNorm | None
    attention_norm: Tensor | None
    qkv: Any
    qkv_bias: Tensor | None
    out: Any
    out_bias: Tensor | None
    after_attention: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Any
    gate_up_bias: Tensor | None
    down: Any
    down_bias: Tensor | None
    after_mlp: Tensor | None = None
    sinks: Tensor | None = None  # `sinks` of `Ops.attention`
    experts: Experts | None = None  # if set, the MLP's maps are None
    attention_norm_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None
    alphas: tuple[float, float] = (0.0, 0.0)  # of `Ops.activate`
    adapters: LayerAdapters = LayerAdapters()


class DecoderWeights(NamedTuple):
    """A model's weights.

    embedding  [V, hidden]  in the model's dtype, or quantized
    layers     one per layer
    norm       [hidden]     before the head, float32
    norm_bias  [hidden]     float32, or None
    head       packed [V, hidden]
    dtype      of the activations
    forms      the quantization of the weights, and their size in bytes
    has_head   False: the checkpoint has no head, and `head` is the embedding table
    score      [labels, hidden]  the head of a sequence classifier, float32; None: no such head
    """

    embedding: Weight
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Any
    dtype: torch.dtype
    forms: WeightForms = WeightForms()
    norm_bias: Tensor | None = None
    has_head: bool = True
    score: Tensor | None = None


class Decoder:
    """Maps token ids, or a residual, to logits, and writes the KV of every row.

    The caller enables torch.inference_mode, and calls `plan` once per step.
    """

    def __init__(
        self, config: DecoderConfig, ops: Ops, rotary: Rotary, weights: DecoderWeights
    ) -> None:
        self.config, self.ops, self.rotary, self.weights = config, ops, rotary, weights
        self.forms, self.dtype = weights.forms, weights.dtype
        self.has_head, self.score = weights.has_head, weights.score
        self.num_positions, self.num_heads = len(rotary.cos), config.num_heads
        self.windows = tuple(dict.fromkeys(config.windows))
        # Rounded to the model's dtype, as in transformers.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()

    def on(self, ops: Ops) -> "Decoder":
        """The same model with other ops, e.g. ops that record a program's forward pass."""
        return Decoder(self.config, ops, self.rotary, self.weights)

    def kv_layouts(self, dtype: torch.dtype | None = None) -> tuple[KVLayout, ...]:
        """The layout of each layer's KV in `dtype`; None: the dtype of the activations."""
        c = self.config
        return (KVLayout(c.num_kv_heads, c.head_dim, dtype or self.dtype),) * c.num_layers

    def program(
        self, kv: KVCache, max_rows: int, max_read: int, aux_layer_ids: Collection[int] = ()
    ) -> Program:
        """The program of the ops, which may record the forward pass."""
        return self.ops.program(self, kv, max_rows, max_read, aux_layer_ids)

    def plan(self, rows: Rows, kv: KVCache, also: Sequence[Tensor] = ()) -> Any:
        """The attention plan of a step, which all layers share. `plan.also` has the tensors `also`
        on the ops' device.
        """
        plain = self.config.score_cap is None and all(x.sinks is None for x in self.weights.layers)
        return self.ops.plan(rows, kv, self.num_heads, self.windows, also, plain)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The residual stream before the first layer, [R, hidden], for token ids [R] int64."""
        embedded = self.ops.embed(self.weights.embedding, token_ids, self.dtype)
        factor = self.embedding_scale
        return embedded if factor == 1 else self.ops.scale(embedded, factor)

    def forward(
        self, residual: Tensor, kv: KVCache, plan: Any, aux_layer_ids: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The residual stream after the last layer, and the auxiliary hidden states: the inputs of
        the layers in `aux_layer_ids`.

        residual  [R, hidden]  from `embed`; overwritten
        ->        [R, hidden]  for `logits`; and by layer, transformers' hidden_states[i]
        """
        if unknown := set(aux_layer_ids).difference(range(len(kv.layers))):
            raise ValueError(
                f"auxiliary layers {sorted(unknown)} do not exist: the model has {len(kv.layers)}"
            )
        aux_hidden_states = {}
        for i, (layer, cache) in enumerate(zip(self.weights.layers, kv.layers, strict=True)):
            if i in aux_layer_ids:
                aux_hidden_states[i] = self.ops.copy(residual)
            residual = self.layer(layer, residual, cache, plan)
        return residual, aux_hidden_states

    def layer(
        self,
        layer: Layer,
        residual: Tensor,
        cache: KVLayer,
        plan: Any,
        qkv: Tensor | None = None,
    ) -> Tensor:
        """The residual after a layer. `qkv` is added to queries, keys and values."""
        ops, c = self.ops, self.config
        read = self.norm(residual, layer.attention_norm, layer.attention_norm_bias)
        q = self.write(layer, read, cache, plan, qkv)
        scores = c.score_scale, layer.window, c.score_cap, layer.sinks
        h = ops.attention(q, cache, plan, *scores)
        added = self.added(h, layer.adapters.out, plan)
        residual = self.add(h, layer.out, layer.out_bias, layer.after_attention, residual, added)
        if not c.family.is_parallel:
            read = self.norm(residual, layer.mlp_norm, layer.mlp_norm_bias)
        if layer.experts is not None:
            return add_experts(ops, read, layer.experts, residual)
        h = self.inner(layer, read, plan)
        added = self.added(h, layer.adapters.down, plan)
        return self.add(h, layer.down, layer.down_bias, layer.after_mlp, residual, added)

    def inner(self, layer: Layer, read: Tensor, plan: Any) -> Tensor:
        """The input of the MLP's last map."""
        ops, activation = self.ops, self.config.activation
        added = self.added(read, layer.adapters.gate_up, plan)
        if self.config.family.ungated is None:
            return ops.linear_gated(read, layer.gate_up, layer.gate_up_bias, activation, added)
        up = ops.linear(read, layer.gate_up, layer.gate_up_bias, added)
        return ops.activate(up, activation, layer.alphas)

    def write(
        self, layer: Layer, h: Tensor, cache: KVLayer, plan: Any, qkv: Tensor | None
    ) -> Tensor:
        """Write a layer's KV of the rows; return their queries [R, H, D]."""
        ops, c, qk_norm = self.ops, self.config, layer.qk_norm
        added = self.added(h, layer.adapters.qkv, plan)
        if qkv is None:
            qkv = ops.linear(h, layer.qkv, layer.qkv_bias, added)
        else:
            qkv = ops.linear_add(h, layer.qkv, layer.qkv_bias, qkv, added=added)
        if qk_norm is not None and c.qk_norm == "width":
            qkv = ops.rms_norm_columns(qkv, 0, qk_norm.q, qk_norm.eps)
            qkv = ops.rms_norm_columns(qkv, len(qk_norm.q), qk_norm.k, qk_norm.eps)
            qk_norm = None
        return ops.rope_write_kv(qkv, layer.rotary, qk_norm, cache, plan)

    def norm(self, residual: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        if weight is None:
            return residual
        if self.config.family.is_centered:
            return self.ops.layer_norm(residual, weight, self.config.norm_eps, bias)
        return self.ops.rms_norm(residual, weight, self.config.norm_eps)

    def added(self, x: Tensor, slots: Any, plan: Any) -> Any:
        """The addition of adapters to a linear map of x; None without slots."""
        return None if slots is None else self.ops.adapted(x, slots, plan)

    def add(
        self,
        h: Tensor,
        packed: Any,
        bias: Tensor | None,
        norm: Tensor | None,
        residual: Tensor,
        added: Any,
    ) -> Tensor:
        """Add a linear map's result, normalized if there is a norm, to the residual stream."""
        ops, c = self.ops, self.config
        if norm is None:
            return ops.linear_add(h, packed, bias, residual, c.residual_scale, added)
        return ops.rms_norm_add(ops.linear(h, packed, bias, added), norm, c.norm_eps, residual)

    def hidden(self, residual: Tensor, rows: Tensor) -> Tensor:
        """The hidden states of some rows after the final norm, as transformers returns them.

        residual  [R, hidden]  from `forward`
        rows      [n]          int64, ascending
        ->        [n, hidden]  float32
        """
        taken, weights = self.ops.take_rows(residual, rows), self.weights
        hidden = self.norm(taken, weights.norm, weights.norm_bias)
        # The loader multiplied the norm by this factor.
        return hidden.float() / self.config.logit_scale

    def logits(self, residual: Tensor, rows: Tensor) -> Tensor:
        """The logits of some rows: applies the final norm and the head to these rows only.

        residual  [R, hidden]  from `forward`
        rows      [n]          int64, ascending
        ->        [n, V]       float32
        """
        ops, weights = self.ops, self.weights
        hidden = self.norm(ops.take_rows(residual, rows), weights.norm, weights.norm_bias)
        logits = ops.lm_head(hidden, weights.head)
        cap = self.config.logit_cap
        return logits if cap is None else ops.soft_cap(logits, cap)


def add_experts(ops: Ops, h: Tensor, layer: Experts, residual: Tensor) -> Tensor:
    """Add the output of each row's experts to the residual."""
    logits = ops.linear(h, layer.router, layer.router_bias)
    rule = layer.is_sigmoid, layer.correction, layer.factor
    routing = ops.route(logits, layer.num_active, layer.normalizes, *rule)
    residual = ops.experts(h, routing, layer.gate_up, layer.down, residual, layer.limit)
    if layer.shared is None:
        return residual
    inner = ops.linear_gated(h, layer.shared.gate_up)
    if layer.shared.gate is None:
        return ops.linear_add(inner, layer.shared.down, None, residual)
    found = ops.linear(inner, layer.shared.down)
    return ops.add_gated(found, ops.linear(h, layer.shared.gate), residual)
