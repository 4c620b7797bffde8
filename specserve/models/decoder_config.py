"""The shape of a model, and of its layers: all that the decoder needs besides the weights."""

from typing import ClassVar

import msgspec

from specserve.models.experts import Mixture
from specserve.models.family import Family, Norms
from specserve.models.quantized.config import Quantization
from specserve.models.recurrent import (
    GatedDelta,
    Mamba2,
    ShortConv,
)
from specserve.models.rope import QueryGrowth, RopeParameters


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model that its callers need; each implementation has a subclass."""

    implementation: ClassVar[str]  # native | transformers
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    quantization: Quantization | None

    @property
    def num_layer_weights(self) -> int:
        """Number of weights in the linear maps of all layers, each of which multiplies a row. It is
        an estimate for models that transformers runs.
        """
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)


class KVHeads(msgspec.Struct, frozen=True):
    """The KV heads of a layer. Queries have the same size."""

    number: int
    size: int


class DecoderConfig(Shape, frozen=True, kw_only=True):
    """Everything besides the weights that the decoder needs to run a model."""

    implementation = "native"
    is_multimodal: bool = False  # the checkpoint has parts that are not read
    norm_eps: float
    activation: str  # of the MLP, in the names of `Ops.linear_gated` and `Ops.activate`
    score_scale: float
    score_cap: float | None
    embedding_scale: float
    residual_scale: float  # factor of the additions to the residual stream
    logit_scale: float
    logit_cap: float | None
    tied: bool  # the head is the embedding table, unless the checkpoint has a head
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: str  # as `Family.qk_norm`
    family: Family
    windows: tuple[int | None, ...]  # by layer; None is full attention
    rope: tuple[bool, ...]  # by layer: whether it has rotary embedding
    rope_parameters: RopeParameters
    local_rope_parameters: RopeParameters  # of layers with a window
    query_growth: QueryGrowth | None = None  # of layers without rotary embedding
    mixture: Mixture | None = None
    num_mtp_layers: int = 0  # see mtp_config.py
    # Of the recurrent layers; None: no layer is recurrent
    recurrent: ShortConv | GatedDelta | Mamba2 | None = None
    recurrent_layers: tuple[bool, ...] = ()  # by layer; () if none is recurrent
    attention_layers: tuple[bool, ...] = ()  # by layer; (): all that are not recurrent
    mlp_layers: tuple[bool, ...] = ()  # by layer: whether it has an MLP or experts; (): all have
    attention_factor: float = 1.0  # of attention's output
    mlp_factors: tuple[float, float] = (1.0, 1.0)  # of the gate and of the output
    has_head: bool = True  # for text; without it, the embedding table stands for the head
    num_labels: int = 0  # outputs of a sequence classifier's head; 0: the model has none
    global_heads: KVHeads | None = None  # of layers without a window; None: as in other layers
    has_equal_values: bool = False  # in layers without a window, values are the keys' map
    num_shared_layers: int = 0  # the last layers, which read the KV of earlier layers
    shared_mlp_factor: int = 1  # of intermediate_size in these layers
    per_layer_size: int = 0  # columns of each layer's inputs, see per_layer.py; 0: no inputs
    per_layer_vocab: int = 0  # token ids with such inputs; others have those of id 0
    inner_sizes: tuple[int, ...] = ()  # by layer; empty: see `inner_size`
    num_streams: int = 1  # residual streams, see altup.py
    laurel_rank: int = 0
    scales_streams: bool = False  # AltUp multiplies the stream that gates a layer's inputs
    deviations: tuple[float | None, ...] = ()  # by layer: of `Ops.sparse_gated`

    def has_experts(self, layer: int) -> bool:
        """Whether experts replace a layer's MLP."""
        return self.mixture is not None and self.mixture.replaces_mlp(layer)

    def is_recurrent(self, layer: int) -> bool:
        return self.recurrent is not None and self.recurrent_layers[layer]

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        if self.attention_layers:
            return self.attention_layers[layer]
        return not self.is_recurrent(layer)

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts."""
        return not self.mlp_layers or self.mlp_layers[layer]

    def norms(self, layer: int) -> Norms:
        """The names of a layer's norms."""
        own = self.family.recurrent_norms if self.is_recurrent(layer) else None
        return self.family.norms if own is None else own

    def has_kv(self, layer: int) -> bool:
        """Whether a layer stores KV."""
        return self.owns_kv(layer) and self.attends(layer)

    def kv_heads(self, layer: int) -> KVHeads:
        if self.global_heads is not None and self.windows[layer] is None:
            return self.global_heads
        return KVHeads(self.num_kv_heads, self.head_dim)

    def owns_kv(self, layer: int) -> bool:
        return layer < self.num_layers - self.num_shared_layers

    def kv_layer(self, layer: int) -> int:
        """The layer whose KV a layer reads: itself, or the last layer of its kind that has KV."""
        if self.owns_kv(layer):
            return layer
        own = range(self.num_layers - self.num_shared_layers)
        return max(i for i in own if self.windows[i] == self.windows[layer])

    def repeats_keys(self, layer: int) -> bool:
        """Whether values are the same map as keys."""
        return self.has_equal_values and self.windows[layer] is None and self.owns_kv(layer)

    def inner_size(self, layer: int) -> int:
        """The width of a layer's MLP."""
        if self.inner_sizes:
            return self.inner_sizes[layer]
        return self.intermediate_size * (1 if self.owns_kv(layer) else self.shared_mlp_factor)

    def qkv_names(self, layer: int) -> list[str]:
        """Names of a layer's maps to queries, keys and values."""
        parts = ["qkv"] if self.family.fuses_qkv else ["q", "k", "v"]
        if not self.owns_kv(layer):
            parts = ["q"]
        elif self.repeats_keys(layer):
            parts = ["q", "k"]
        return [f"self_attn.{part}_proj" for part in parts]

    @property
    def gate_up_names(self) -> list[str]:
        if self.family.ungated is not None:
            return [self.family.ungated[0]]
        parts = ["gate_up"] if self.family.fuses_gate_up else ["gate", "up"]
        return [f"{self.family.mlp}.{part}_proj" for part in parts]

    @property
    def down_name(self) -> str:
        ungated = self.family.ungated
        return f"{self.family.mlp}.down_proj" if ungated is None else ungated[1]

    @property
    def has_qk_norm(self) -> bool:
        """Whether layers have weights of norms of queries and keys."""
        return self.qk_norm not in ("none", "bare")

    def qk_norm_shapes(self, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the weights of the norms of queries and keys."""
        of_layer = self.kv_heads(layer)
        heads, kv_heads, D = self.num_heads, of_layer.number, of_layer.size
        match self.qk_norm:
            case "each":
                return (heads, D), (kv_heads, D)
            case "width":
                return (heads * D,), (kv_heads * D,)
        return (D,), (D,)

    @property
    def num_layer_weights(self) -> int:
        """Number of weights in the linear maps of all layers that multiply a row."""
        N = self.num_streams if self.num_streams > 1 else 0
        altup = self.hidden_size * (N + 2 * self.laurel_rank) + N**3 + N**2
        each = (self.mixer_width(i) + self.row_width(i) for i in range(self.num_layers))
        return self.hidden_size * sum(each) + self.num_layers * altup

    def mixer_width(self, layer: int) -> int:
        """Weights of a layer's attention or recurrence that multiply a row, divided by
        hidden_size.
        """
        own = 0
        if self.recurrent is not None and self.recurrent_layers[layer]:
            own = self.recurrent.row_width
        if not self.attends(layer):
            return own
        heads = self.kv_heads(layer)
        num_kv_maps = 0 if not self.owns_kv(layer) else 1 if self.repeats_keys(layer) else 2
        num_heads = 3 * self.num_heads if self.family.gates_attention else 2 * self.num_heads
        return own + (num_heads + num_kv_maps * heads.number) * heads.size

    def row_width(self, layer: int) -> int:
        """Weights of a layer's maps that multiply a row, divided by hidden_size."""
        mlp = (3 if self.family.ungated is None else 2) * self.inner_size(layer)
        width = 2 * self.per_layer_size + mlp * (
            self.has_mlp(layer) and not self.has_experts(layer)
        )
        if self.mixture is not None and self.mixture.layers[layer]:
            width += self.mixture.row_width
        return width
