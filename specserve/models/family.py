"""The properties of a model family: how it differs from Llama."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from specserve.models.experts import ExpertStyle


class Norms(msgspec.Struct, frozen=True, kw_only=True):
    """The names of a layer's norms in a checkpoint; None: no norm at this place.

    Norms before attention and MLP normalize their input, norms after them normalize their output
    before it is added to the residual stream.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


class ConfigKeys(msgspec.Struct, frozen=True, kw_only=True):
    """A family's names of fields in config.json; None: it has no such field."""

    activation: str = "hidden_act"
    inner: str = "intermediate_size"  # width of the MLP
    window: str = "sliding_window"
    qkv_bias: str = "attention_bias"
    out_bias: str = "attention_bias"
    mlp_bias: str = "mlp_bias"
    norm_eps: str = "rms_norm_eps"
    query_scalar: str | None = None  # scores are divided by its square root
    score_scale: str | None = None  # factor of scores; both None: 1 / sqrt(head_dim)
    embedding_scale: str | None = None
    key_scale: str | None = None  # factor of keys
    attention_in_scale: str | None = None  # factor of the input of attention
    attention_out_scale: str | None = None  # factor of attention's output
    mlp_scales: str | None = None  # factors of an MLP's gate and of its output
    residual_scale: str | None = None  # factor of additions to the residual stream
    logit_scale: str | None = None
    logit_divisor: str | None = None
    score_cap: str | None = None
    logit_cap: str | None = None
    local_theta: str | None = None  # of layers with a window
    qk_norm: str | None = None  # whether there are norms of queries and keys; None: as `qk_norm`


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a model family. None: the config's field decides."""

    models: str  # known models, for the documentation
    defaults: Mapping[str, Any]
    keys: ConfigKeys = ConfigKeys()
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    # Norms of queries and keys. `heads`: of each head, with one weight for all heads. `each`:
    # LayerNorm of each head, with its own weight. `width`: over all heads. `bare`: of each head,
    # without a weight, in layers with rotary embedding.
    qk_norm: Literal["none", "heads", "each", "width", "bare"] = "none"
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    norms_after_rope: bool = False  # norms of queries and keys come after the rotation
    norms_values: bool = False  # values are divided by their root mean square
    score_scale: float | None = None  # factor of scores; None: see `ConfigKeys`
    has_sinks: bool = False  # attention sinks: one additional score per head, without a value
    norms: Norms = Norms()
    adds_one: bool = False  # norms multiply by 1 + weight
    is_centered: bool = False  # norms are LayerNorm
    norm_bias: bool = False  # norms have a bias
    has_layer_scalars: bool = False  # each layer's output is multiplied by a number
    is_parallel: bool = False  # attention and MLP read the same input
    scales_by_width: bool = False  # embeddings are multiplied by sqrt(hidden_size)
    fuses_qkv: bool = False  # the checkpoint has queries, keys and values in one map
    fuses_gate_up: bool = False
    mlp: str = "mlp"  # module of an MLP with a gate
    # Names of an MLP without a gate: activation(up(x)) is the input of down; None: it has a gate.
    ungated: tuple[str, str] | None = None
    rotates_a_share: bool = False  # partial_rotary_factor of each head's dimensions rotates
    rotates_neighbors: bool = False  # pairs are dimensions 2i and 2i + 1, not i and i + D/2
    rope_names: Mapping[str, str] = {}  # the family's names of RoPE types
    # Layers with the sliding_window if layer_types is missing. `all`: all layers. `pattern`: all
    # except every sliding_window_pattern-th. The others need use_sliding_window. `asked`: all
    # layers. `upper`: layers from max_window_layers on. `lower`: every second layer below it.
    # `unrotated`: layers without rotary embedding. `rotated`: layers with it.
    windowed: Literal[
        "none", "all", "asked", "upper", "lower", "unrotated", "rotated", "pattern"
    ] = "none"
    has_chunks: bool = False  # windows begin at multiples of their size
    # Layers with rotary embedding. `named`: see no_rope_layers. `windowed`: layers with a window.
    # `windowed if any`: layers with a window, or all layers if there is no sliding_window.
    rotated: Literal["named", "windowed", "windowed if any"] = "named"
    # Queries of layers without rotary embedding grow with the position, see rope.QueryGrowth.
    grows_queries: bool = False
    ends_global: bool = False  # the last layer has no window, whatever layer_types says
    # Layers without a window may have other heads, keys as values, and the last layers no KV.
    has_kinds: bool = False
    has_per_layer_inputs: bool = False  # see per_layer.py
    has_streams: bool = False  # several residual streams, see altup.py, and sparse gates
    experts: ExpertStyle | None = None
    recurrent: Literal["none", "short_conv", "gated_delta", "mamba"] = "none"  # see recurrent.py
    is_split: bool = False  # a layer is either a mixer or an MLP, each with its own norm
    has_joined_inputs: bool = False  # maps of a gated DeltaNet's inputs are grouped by key head
    has_split_inputs: bool = False  # see `GatedDelta.is_split`
    recurrent_norms: Norms | None = None  # of recurrent layers; None: as of other layers
    recurrent_norm_eps: float | None = None  # see `GatedDelta.norm_eps`
    ends_attending: bool = False  # default layer types without attention: the last layer has it
    gates_attention: bool = False  # a gate per query dimension, in the map of queries
    renamed: Mapping[
        str, str
    ] = {}  # parts of tensor names in checkpoints -> names of other families
    refused: tuple[str, ...] = ()  # fields that must be false, because native code lacks them


class Multimodal(msgspec.Struct, frozen=True, kw_only=True):
    """A multimodal architecture, of whose checkpoints only the text model is read."""

    models: str  # known models, for the documentation
    texts: Mapping[str, Family]  # by model_type of text_config; the first one is the default
