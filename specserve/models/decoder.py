"""The decoder of Llama and related families, which runs on `Ops`, and the model interface."""

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specserve.memory.arena import KVLayout, StateLayout
from specserve.models import layouts
from specserve.models.altup import HALF, AltUp, StreamMaps
from specserve.models.decoder_config import DecoderConfig, Shape
from specserve.models.per_layer import PerLayerMaps, PerLayerTable
from specserve.models.recurrent_shard import recurrent_part
from specserve.models.shard import WHOLE, Shard
from specserve.models.weight import Weight
from specserve.models.weight_forms import WeightForms
from specserve_kernels import (
    Chunks,
    DeltaParams,
    Gathering,
    KVCache,
    KVLayer,
    MambaParams,
    ModelForward,
    Ops,
    Program,
    QKNorm,
    Ranks,
    Rotary,
    Rows,
    StateLayer,
    Window,
)
from specserve_kernels.ops import EagerProgram


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

    def state_layouts(self) -> tuple[StateLayout, ...]: ...

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
    weighs_input: bool = False  # a row's expert gets `Ops.weigh_rows`
    correction: Tensor | None = None  # of `Ops.route`
    factor: float | Tensor = 1.0  # of `Ops.route`
    router_bias: Tensor | None = None
    limit: float | None = None  # `limit` of `Ops.experts`
    shared: SharedExpert | None = None
    gate: str = "silu"  # of `Ops.experts`


class ExpertsBeside(NamedTuple):
    """Experts whose output is added to the MLP's output. Norms are [hidden] float32."""

    experts: Experts
    router_norm: Tensor  # of the router's input
    before: Tensor  # of the experts' input
    after: Tensor  # of their output
    after_mlp: Tensor  # of the MLP's output


class ShortConvWeights(NamedTuple):
    """A gated convolution, which replaces attention. `Layer.out` maps its results."""

    inputs: Any  # packed [3 hidden, hidden]
    inputs_bias: Tensor | None
    weight: Tensor  # [hidden, taps] float32
    bias: Tensor | None  # [hidden] float32


class DeltaWeights(NamedTuple):
    """A gated DeltaNet, which replaces attention. `Layer.out` maps its results."""

    inputs: Any  # packed [inner + Hv Dv + 2 Hv, hidden]: queries, keys, values, z, b, a
    weight: Tensor  # of the convolution, [inner, taps] float32
    params: DeltaParams


class MambaWeights(NamedTuple):
    """Mamba-2, which replaces attention or runs in parallel to it."""

    inputs: Any  # packed [inner + H P + H, hidden]: x, B, C, z, dt
    inputs_bias: Tensor | None
    weight: Tensor  # of the convolution, [inner, taps] float32
    bias: Tensor | None  # [inner] float32
    params: MambaParams
    out: Any  # packed [hidden, H P]
    out_bias: Tensor | None
    factor: float = 1.0  # of the output


class LayerAdapters(NamedTuple):
    """The adapter slots of a layer's maps; None: adapters do not change this map."""

    qkv: Any = None
    out: Any = None
    gate_up: Any = None
    down: Any = None
    gate: Any = None  # of attention's results
    inputs: Any = None  # of recurrent ops
    mamba_out: Any = None


class Layer(NamedTuple):
    """One layer's weights and settings. Linear maps are packed, absent parts are None: a layer may
    lack attention, or its MLP. Norms are float32, at the places that `Norms` describes.
    """

    window: Window
    rotary: Rotary | None
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
    has_kv: bool = True  # False: it reads the KV of an earlier layer, and `qkv` has only queries
    scalar: float = 1.0  # factor of the residual stream after the layer
    per_layer: PerLayerMaps | None = None
    beside: ExpertsBeside | None = None
    altup: AltUp | None = None
    deviations: float | None = None  # of `Ops.sparse_gated`; None: gates are not sparse
    # If one of these is set, the parts of attention but `out` are None.
    conv: ShortConvWeights | None = None
    delta: DeltaWeights | None = None
    mamba: MambaWeights | None = None  # has its own last map; `out` maps attention's results
    out_factor: float = 1.0  # of `out`
    down_factor: float = 1.0  # of `down`
    gate: Any = None  # packed [H D, hidden]: a gate of attention's results; None: no gate
    gate_bias: Tensor | None = None

    @property
    def num_states(self) -> int:
        """Number of its recurrent ops."""
        if self.conv is not None:
            return 1
        return 2 if self.delta is not None or self.mamba is not None else 0


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
    per_layer  inputs of layers by token id; None: no such inputs
    streams    maps between one residual stream and several; None: there is only one
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
    per_layer: PerLayerTable | None = None
    streams: StreamMaps | None = None


class Connections(NamedTuple):
    """A rank's connections with the ranks that run the other parts of its model.

    columns  the ranks of its stage, which share the columns of its layers
    every    all ranks, for residuals and logits that go from stage to stage
    """

    columns: Ranks
    every: Ranks


class Gatherings(NamedTuple):
    """How the columns of a layer's tensors are distributed over ranks; None: one rank has all."""

    heads: Gathering | None = None  # queries and attention's results, [R, H D]
    keys: Gathering | None = None  # [R, Hk D]; None, too, if several ranks hold a KV head
    recurrent: Gathering | None = None  # results of recurrent ops
    inner: Gathering | None = None  # inner rows of the MLP
    experts: Gathering | None = None  # inner rows of an expert
    holders: Gathering | None = None  # the experts, if each rank holds some
    shared: Gathering | None = None  # inner rows of the shared expert
    hidden: Gathering | None = None  # the residual stream
    logits: Gathering | None = None


class Decoder:
    """Maps token ids, or a residual, to logits, and writes the KV of every row.

    The caller enables torch.inference_mode, and calls `plan` once per step. A shard of a model runs
    after `connected` has joined it with the other ranks, which run the same steps.
    """

    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        rotary: Rotary,
        weights: DecoderWeights,
        shard: Shard = WHOLE,
        connections: Connections | None = None,
    ) -> None:
        self.config, self.ops, self.rotary, self.weights = config, ops, rotary, weights
        self.forms, self.dtype = weights.forms, weights.dtype
        self.has_head, self.score = weights.has_head, weights.score
        self.shard, self.connections = shard, connections
        self.num_positions, self.num_heads = len(rotary.cos), len(shard.heads(config).query)
        self.gatherings = gatherings(config, shard, connections)
        self.windows = tuple(dict.fromkeys(windows_of(config)))
        own = [i for i in shard.layers(config.num_layers) if config.has_kv(i)]
        # By layer of this shard: the index of its KV in the cache; 0 without attention.
        self.kv_places = [
            own.index(config.kv_layer(i)) if config.attends(i) else 0
            for i in shard.layers(config.num_layers)
        ]
        # Rounded to the model's dtype, as in transformers.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()

    def on(self, ops: Ops) -> "Decoder":
        """The same model with other ops, e.g. ops that record a program's forward pass."""
        return self.replaced(ops=ops)

    def connected(self, connections: Connections) -> "Decoder":
        """The same part of a model, joined with the other ranks."""
        return self.replaced(connections=connections)

    def replaced(self, **parts: Any) -> "Decoder":
        names = "config", "ops", "rotary", "weights", "shard", "connections"
        return Decoder(**{name: getattr(self, name) for name in names} | parts)

    def kv_layouts(self, dtype: torch.dtype | None = None) -> tuple[KVLayout, ...]:
        """The layout of this shard's KV of each layer that has KV, in `dtype`; None: the dtype of
        activations.
        """
        return layouts.kv_layouts(self.config, self.shard, dtype or self.dtype)

    def state_layouts(self) -> tuple[StateLayout, ...]:
        """The layout of the states of this shard's recurrent ops, in the order of a forward."""
        return layouts.state_layouts(self.config, self.shard, self.dtype)

    def program(
        self, kv: KVCache, max_rows: int, max_read: int, aux_layer_ids: Collection[int] = ()
    ) -> Program:
        """The program of the ops, which may record the forward pass."""
        if self.shard.size > 1 and self.ops.records_steps:
            # Ranks must not differ in what they record: a recording reads the logits of more rows.
            return EagerProgram(self, kv, aux_layer_ids)
        return self.ops.program(self, kv, max_rows, max_read, aux_layer_ids)

    def plan(self, rows: Rows, kv: KVCache, also: Sequence[Tensor] = ()) -> Any:
        """The attention plan of a step, which all layers share. `plan.also` has the tensors `also`
        on the ops' device.
        """
        plain = self.config.score_cap is None and all(x.sinks is None for x in self.weights.layers)
        return self.ops.plan(rows, kv, self.num_heads, self.windows, also, plain)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The residual stream before this shard's first layer, [R, hidden], for token ids [R]
        int64. It comes from the previous stage, if there is one.
        """
        if not self.shard.is_first:
            return self.receive(token_ids, self.shard.rank - self.shard.tensor)
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

        With N residual streams, the first result is [R, N hidden], and auxiliary hidden states are
        the first stream.
        """
        num_layers = self.config.num_layers
        if unknown := set(aux_layer_ids).difference(range(num_layers)):
            raise ValueError(
                f"auxiliary layers {sorted(unknown)} do not exist: the model has {num_layers}"
            )
        aux_hidden_states, inputs, table = {}, None, self.weights.per_layer
        if table is not None:
            inputs = table.inputs(self.ops, plan.also[0], residual, self.dtype)
        streams, width = self.weights.streams, self.config.hidden_size
        if streams is not None:
            residual = streams.spread_out(self.ops, residual)
        states = iter(kv.states)
        each = zip(self.weights.layers, self.kv_places, strict=True)
        for i, (layer, place) in enumerate(each, self.shard.layers(num_layers).start):
            if i in aux_layer_ids:
                aux_hidden_states[i] = (
                    self.ops.copy(residual)
                    if streams is None
                    else self.ops.take_columns(residual, 0, width)
                )
            cache = None if layer.qkv is None else kv.layers[place]
            own = tuple(islice(states, layer.num_states))
            residual = self.layer(layer, residual, cache, plan, inputs=inputs, states=own)
        if self.shard.pipeline > 1:
            self.pass_on(residual, aux_hidden_states)
            if self.shard.rank == 0:
                aux_hidden_states |= self.received(residual, aux_layer_ids)
        return residual, aux_hidden_states

    def pass_on(self, residual: Tensor, aux_hidden_states: dict[int, Tensor]) -> None:
        """Send this stage's residual to the next stage, and auxiliary hidden states to rank 0."""
        shard = self.shard
        if not shard.is_last:
            self.ops.send(residual, self.every, shard.rank + shard.tensor)
        if not shard.is_first and shard.column == 0:
            for aux in aux_hidden_states.values():
                self.ops.send(aux, self.every, 0)

    def received(self, rows: Tensor, aux_layer_ids: Collection[int]) -> dict[int, Tensor]:
        """The auxiliary hidden states of the other stages."""
        num_layers, shard = self.config.num_layers, self.shard
        stages = {i: shard.stage_of(i, num_layers) for i in sorted(aux_layer_ids)}
        return {
            i: self.receive(rows, stage * shard.tensor) for i, stage in stages.items() if stage > 0
        }

    def receive(self, rows: Tensor, source: int) -> Tensor:
        return self.ops.receive(rows, self.config.hidden_size, self.dtype, self.every, source)

    @property
    def every(self) -> Ranks:
        assert self.connections is not None, "a shard runs only with the other ranks"
        return self.connections.every

    def layer(
        self,
        layer: Layer,
        residual: Tensor,
        cache: KVLayer | None,
        plan: Any,
        qkv: Tensor | None = None,
        inputs: Tensor | None = None,
        states: tuple[StateLayer, ...] = (),
    ) -> Tensor:
        """The residual after a layer. `qkv` is added to queries, keys and values. `PerLayerTable`
        makes `inputs`.
        """
        ops, c = self.ops, self.config
        if layer.altup is not None and inputs is not None:
            assert cache is not None, "no layer with streams is recurrent"
            return self.altup_layer(layer, layer.altup, residual, cache, plan, inputs)
        read = self.norm(residual, layer.attention_norm, layer.attention_norm_bias)
        if layer.mamba is not None:
            residual = self.add_mamba(layer.mamba, layer.adapters, read, states, plan, residual)
        if layer.out is not None:
            if cache is None:
                h = self.recur(layer, read, states, plan)
            else:
                h = self.attend(layer, read, cache, plan, qkv)
            added, norm = self.added(h, layer.adapters.out, plan), layer.after_attention
            parts = layer.out, layer.out_bias, norm, residual, added, layer.out_factor
            residual = self.add(h, *parts)
        if layer.down is None and layer.experts is None:
            return residual
        if not c.family.is_parallel:
            read = self.norm(residual, layer.mlp_norm, layer.mlp_norm_bias)
        if layer.experts is not None:
            return self.add_experts(read, layer.experts, residual)
        h = self.gather(self.inner(layer, read, plan), self.gatherings.inner)
        added = self.added(h, layer.adapters.down, plan)
        if layer.beside is not None:
            residual = self.add_both(ops.linear(h, layer.down, None, added), layer, residual)
        else:
            norm, factor = layer.after_mlp, layer.down_factor
            residual = self.add(h, layer.down, layer.down_bias, norm, residual, added, factor)
        if layer.per_layer is not None and inputs is not None:
            residual = self.add_inputs(inputs, layer.per_layer, residual)
        return residual if layer.scalar == 1 else ops.scale(residual, layer.scalar)

    def altup_layer(
        self,
        layer: Layer,
        altup: AltUp,
        streams: Tensor,
        cache: KVLayer,
        plan: Any,
        inputs: Tensor,
    ) -> Tensor:
        """All streams after a layer, which computes the first one."""
        ops, width, eps, maps = (
            self.ops,
            self.config.hidden_size,
            self.config.norm_eps,
            layer.per_layer,
        )
        assert layer.attention_norm is not None and maps is not None, "Gemma 3n has both"
        streams = altup.predicted(ops, streams, width, eps)
        first, x = (ops.take_columns(streams, 0, width) for _ in range(2))
        read = ops.rms_norm(first, layer.attention_norm, eps)
        laurel = altup.laurel(ops, read)
        h, more = self.attend(layer, read, cache, plan, None), layer.adapters
        x = self.add(
            h, layer.out, layer.out_bias, layer.after_attention, x, self.added(h, more.out, plan)
        )
        x = ops.rms_norm_add(first, layer.attention_norm, eps, x)
        x = ops.scale(ops.rms_norm_add(laurel, altup.laurel_norm, eps, x), HALF)
        h = self.inner(layer, self.norm(x, layer.mlp_norm), plan)
        x = self.add(
            h, layer.down, layer.down_bias, layer.after_mlp, x, self.added(h, more.down, plan)
        )
        streams = altup.corrected(ops, streams, x, eps)
        gate = ops.linear(altup.scaled(ops, streams, width), maps.gate)
        gate = ops.gate_columns(gate, self.config.activation, inputs, maps.begin)
        found = ops.linear(gate, maps.out)
        for begin in range(width, self.config.num_streams * width, width):
            streams = ops.rms_norm_add(found, maps.norm, eps, streams, begin)
        return streams

    def add_both(self, of_mlp: Tensor, layer: Layer, residual: Tensor) -> Tensor:
        """Add the outputs of MLP and experts, which read the same residual, to the residual."""
        ops, eps, beside = self.ops, self.config.norm_eps, layer.beside
        assert beside is not None and layer.after_mlp is not None, "the layer has only an MLP"
        both = ops.rms_norm(of_mlp, beside.after_mlp, eps)
        _, routing = self.routing(ops.rms_norm(residual, beside.router_norm, eps), beside.experts)
        maps, read = beside.experts, ops.rms_norm(residual, beside.before, eps)
        gate = self.config.activation
        found = ops.experts(read, routing, maps.gate_up, maps.down, None, gate=gate)
        both = ops.rms_norm_add(found, beside.after, eps, both)
        return ops.rms_norm_add(both, layer.after_mlp, eps, residual)

    def add_inputs(self, inputs: Tensor, maps: PerLayerMaps, residual: Tensor) -> Tensor:
        """Add a layer's map of its inputs, gated by the residual."""
        ops, c = self.ops, self.config
        gate = ops.gate_columns(ops.linear(residual, maps.gate), c.activation, inputs, maps.begin)
        return ops.rms_norm_add(ops.linear(gate, maps.out), maps.norm, c.norm_eps, residual)

    def attend(
        self, layer: Layer, h: Tensor, cache: KVLayer, plan: Any, qkv: Tensor | None
    ) -> Tensor:
        """The results of a layer's attention, of all heads."""
        c, q = self.config, self.write(layer, h, cache, plan, qkv)
        scores = c.score_scale, layer.window, c.score_cap, layer.sinks
        out = self.ops.attention(q, cache, plan, *scores)
        if layer.gate is not None:
            added = self.added(h, layer.adapters.gate, plan)
            out = self.ops.gate(out, self.ops.linear(h, layer.gate, layer.gate_bias, added))
        return self.gather(out, self.gatherings.heads)

    def recur(self, layer: Layer, h: Tensor, states: tuple[StateLayer, ...], plan: Any) -> Tensor:
        """The results of a layer's recurrent ops."""
        ops, conv, delta = self.ops, layer.conv, layer.delta
        added = self.added(h, layer.adapters.inputs, plan)
        if conv is not None:
            x = ops.linear(h, conv.inputs, conv.inputs_bias, added)
            found = ops.causal_conv(x, conv.weight, conv.bias, states[0], plan, "gated")
            return self.gather(found, self.gatherings.recurrent)
        assert delta is not None, "a layer with attention has no state"
        x = ops.linear(h, delta.inputs, None, added)
        qkv = ops.causal_conv(x, delta.weight, None, states[0], plan, "silu")
        found = ops.delta_rule(qkv, x, delta.params, states[1], plan)
        return self.gather(found, self.gatherings.recurrent)

    def add_mamba(
        self,
        mamba: MambaWeights,
        adapters: LayerAdapters,
        h: Tensor,
        states: tuple[StateLayer, ...],
        plan: Any,
        residual: Tensor,
    ) -> Tensor:
        """Add the output of Mamba-2 to the residual."""
        ops = self.ops
        x = ops.linear(h, mamba.inputs, mamba.inputs_bias, self.added(h, adapters.inputs, plan))
        xbc = ops.causal_conv(x, mamba.weight, mamba.bias, states[0], plan, "silu")
        y = ops.selective_state_update(xbc, x, mamba.params, states[1], plan)
        y = self.gather(y, self.gatherings.recurrent)
        added = self.added(y, adapters.mamba_out, plan)
        return self.add(y, mamba.out, mamba.out_bias, None, residual, added, mamba.factor)

    def inner(self, layer: Layer, read: Tensor, plan: Any) -> Tensor:
        """The input of the MLP's last map: this rank's columns."""
        ops, activation = self.ops, self.config.activation
        added = self.added(read, layer.adapters.gate_up, plan)
        if layer.deviations is not None:
            both = ops.linear(read, layer.gate_up, layer.gate_up_bias, added)
            return ops.sparse_gated(both, activation, layer.deviations)
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
            qkv, qk_norm = self.norm_widths(qkv, qk_norm), None
        assert layer.rotary is not None, "a layer with attention has a rotary table"
        own = cache if layer.has_kv else None
        return ops.rope_write_kv(qkv, layer.rotary, qk_norm, own, plan)

    def norm_widths(self, qkv: Tensor, norm: QKNorm) -> Tensor:
        """Normalize the queries of all heads together, and the keys."""
        ops, begin = self.ops, 0
        for weight, gathering in ((norm.q, self.gatherings.heads), (norm.k, self.gatherings.keys)):
            if gathering is None:
                qkv = ops.rms_norm_columns(qkv, begin, weight, norm.eps)
                begin += len(weight)
                continue
            first, end = gathering.own
            whole = ops.all_gather(ops.take_columns(qkv, begin, begin + end - first), gathering)
            whole = ops.rms_norm_columns(whole, 0, weight, norm.eps)
            qkv = ops.put_columns(qkv, begin, ops.take_columns(whole, first, end))
            begin += end - first
        return qkv

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
        factor: float = 1.0,
    ) -> Tensor:
        """Add a linear map's result to the residual stream: normalized if there is a norm,
        otherwise multiplied by a factor.
        """
        ops, c = self.ops, self.config
        if norm is None:
            own = self.own_columns(residual)
            own = ops.linear_add(h, packed, bias, own, c.residual_scale * factor, added)
            return self.gather(own, self.gatherings.hidden)
        found = self.gather(ops.linear(h, packed, bias, added), self.gatherings.hidden)
        return ops.rms_norm_add(found, norm, c.norm_eps, residual)

    def add_experts(self, h: Tensor, layer: Experts, residual: Tensor) -> Tensor:
        """Add the output of each row's experts to the residual."""
        ops, gatherings = self.ops, self.gatherings
        logits, routing = self.routing(h, layer)
        weighed = ops.weigh_rows(h, logits) if layer.weighs_input else h
        maps, holders = (layer.gate_up, layer.down), gatherings.holders
        if holders is None:
            own = self.own_columns(residual)
            own = ops.experts(
                *(weighed, routing, *maps, own, layer.limit, gatherings.experts), gate=layer.gate
            )
        else:  # all ranks add all columns
            residual = ops.experts(
                *(weighed, routing, *maps, residual, layer.limit, None, holders), gate=layer.gate
            )
            if layer.shared is None:
                return residual
            own = self.own_columns(residual)
        if layer.shared is not None:
            own = self.add_shared(h, layer.shared, own, layer.gate)
        return self.gather(own, gatherings.hidden)

    def routing(self, h: Tensor, layer: Experts) -> tuple[Tensor, Any]:
        """The router's logits, and each row's experts."""
        logits = self.ops.linear(h, layer.router, layer.router_bias)
        rule = layer.is_sigmoid, layer.correction, layer.factor
        return logits, self.ops.route(logits, layer.num_active, layer.normalizes, *rule)

    def add_shared(self, h: Tensor, shared: SharedExpert, own: Tensor, gate: str) -> Tensor:
        """Add the shared expert's output to this rank's columns of the residual."""
        ops = self.ops
        if gate == "relu2":
            inner = ops.activate(ops.linear(h, shared.gate_up), gate)
        else:
            inner = ops.linear_gated(h, shared.gate_up)
        inner = self.gather(inner, self.gatherings.shared)
        if shared.gate is None:
            return ops.linear_add(inner, shared.down, None, own, self.config.residual_scale)
        return ops.add_gated(ops.linear(inner, shared.down), ops.linear(h, shared.gate), own)

    def own_columns(self, residual: Tensor) -> Tensor:
        """This rank's columns of the residual stream; without ranks, the stream itself."""
        gathering = self.gatherings.hidden
        return residual if gathering is None else self.ops.take_columns(residual, *gathering.own)

    def gather(self, x: Tensor, gathering: Gathering | None, reader: int | None = None) -> Tensor:
        """The columns of all ranks, see `Ops.all_gather`; without ranks, x."""
        return x if gathering is None else self.ops.all_gather(x, gathering, reader)

    def taken(self, residual: Tensor, rows: Tensor) -> Tensor:
        """Some rows of the residual stream, or of all streams as one."""
        some, streams = self.ops.take_rows(residual, rows), self.weights.streams
        return some if streams is None else streams.merged(self.ops, some, self.config.hidden_size)

    def hidden(self, residual: Tensor, rows: Tensor) -> Tensor:
        """The hidden states of some rows after the final norm, as transformers returns them.

        residual  [R, hidden]  from `forward`
        rows      [n]          int64, ascending
        ->        [n, hidden]  float32
        """
        taken, weights = self.taken(residual, rows), self.weights
        hidden = self.norm(taken, weights.norm, weights.norm_bias)
        # The loader multiplied the norm by this factor.
        return hidden.float() / self.config.logit_scale

    def logits(self, residual: Tensor, rows: Tensor) -> Tensor:
        """The logits of some rows: applies the final norm and the head to these rows only.

        residual  [R, hidden]  from `forward`
        rows      [n]          int64, ascending
        ->        [n, V]       float32
        """
        ops, weights, shard = self.ops, self.weights, self.shard
        hidden, V = self.taken(residual, rows), self.config.vocab_size
        last = (shard.pipeline - 1) * shard.tensor
        if not shard.is_last:
            is_reader = shard.rank == 0
            return ops.receive(hidden, V, torch.float32, self.every, last) if is_reader else hidden
        logits = ops.lm_head(self.norm(hidden, weights.norm, weights.norm_bias), weights.head)
        logits = self.gather(logits, self.gatherings.logits, reader=0)
        cap = self.config.logit_cap
        logits = logits if cap is None else ops.soft_cap(logits, cap)
        return logits if shard.rank != last or last == 0 else ops.send(logits, self.every, 0)


def windows_of(config: DecoderConfig) -> tuple[Window, ...]:
    """The window of each layer, as ops take it."""
    if not config.family.has_chunks:
        return config.windows
    return tuple(None if window is None else Chunks(window) for window in config.windows)


def gatherings(config: DecoderConfig, shard: Shard, connections: Connections | None) -> Gatherings:
    if connections is None or shard.tensor == 1:
        return Gatherings()

    def of(num_columns: int) -> Gathering:
        return Gathering(connections.columns, shard.begins(num_columns))

    mixture, has_whole = config.mixture, shard.has_whole_experts
    heads, recurrent = shard.heads(config), config.recurrent
    begins, keys = (
        tuple(config.head_dim * head for head in each) for each in (heads.begins, heads.kv_begins)
    )
    return Gatherings(
        heads=Gathering(connections.columns, begins),
        keys=Gathering(connections.columns, keys) if keys else None,
        recurrent=Gathering(connections.columns, recurrent_part(recurrent, shard).begins)
        if recurrent is not None
        else None,
        inner=of(config.intermediate_size),
        experts=of(mixture.width) if mixture and not has_whole else None,
        holders=Gathering(connections.columns, shard.expert_begins(mixture.num_experts))
        if mixture and has_whole
        else None,
        shared=of(mixture.shared_width) if mixture and mixture.shared_width else None,
        hidden=of(config.hidden_size),
        logits=of(config.vocab_size),
    )
