"""Recurrent layers in config.json: which layers they are, and their sizes.

Does not import torch.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from specserve.models.config_fields import MAX_LAYERS, is_int, number, positive

# Layer types with a state, by the kind of recurrent layers. `hybrid` layers have KV, too.
RECURRENT_KINDS = {
    "short_conv": ("conv",),
    "gated_delta": ("linear_attention",),
    "mamba": ("linear_attention", "hybrid"),
}
WITH_STATE = tuple(kind for kinds in RECURRENT_KINDS.values() for kind in kinds)
WITHOUT_STATE = ("full_attention", "sliding_attention", "mlp", "moe")
MAX_TAPS, MAX_STATE_DIM = 8, 256  # limits of the kernels, in recurrent.cpp


class ShortConv(msgspec.Struct, frozen=True, kw_only=True):
    """A gated causal convolution: LFM2's replacement of attention."""

    width: int
    taps: int  # inputs per output
    has_bias: bool

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's tensors."""
        shapes: dict[str, tuple[int, ...]] = {
            "conv.in_proj.weight": (3 * self.width, hidden),
            "conv.conv.weight": (self.width, 1, self.taps),
            "conv.out_proj.weight": (hidden, self.width),
        }
        if self.has_bias:
            shapes |= {
                name.replace("weight", "bias"): (shape[0],) for name, shape in shapes.items()
            }
        return shapes

    @property
    def row_width(self) -> int:
        """Weights of linear maps that multiply a row, divided by hidden_size."""
        return 4 * self.width


class GatedDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A gated DeltaNet: a convolution, and a matrix per head that the gated delta rule updates."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    taps: int  # inputs per output of the convolution
    is_interleaved: bool  # the maps of the inputs are grouped by key head, as in Qwen3-Next
    is_split: bool = False  # queries, keys and values have their own maps, as in OLMo
    beta_factor: float = 1.0  # 2: the update may have negative eigenvalues
    norm_eps: float | None = None  # of the norm of the outputs; None: as the model's norms

    @property
    def inner(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    @property
    def value_width(self) -> int:
        return self.num_v_heads * self.v_dim

    @property
    def input_names(self) -> list[str]:
        """Names of the maps of a layer's inputs, which kernels use as one map."""
        if self.is_split:
            return [f"linear_attn.{part}_proj" for part in ("q", "k", "v", "g", "b", "a")]
        parts = ["qkvz", "ba"] if self.is_interleaved else ["qkv", "z", "b", "a"]
        return [f"linear_attn.in_proj_{part}" for part in parts]

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's tensors."""
        widths = [self.inner, self.value_width, self.num_v_heads, self.num_v_heads]
        if self.is_split:
            keys = self.num_k_heads * self.k_dim
            widths[:1] = keys, keys, self.value_width
        if self.is_interleaved:
            widths = [widths[0] + widths[1], widths[2] + widths[3]]
        maps = zip(self.input_names, widths, strict=True)
        return {f"{name}.weight": (width, hidden) for name, width in maps} | {
            "linear_attn.conv1d.weight": (self.inner, 1, self.taps),
            "linear_attn.A_log": (self.num_v_heads,),
            "linear_attn.dt_bias": (self.num_v_heads,),
            "linear_attn.norm.weight": (self.v_dim,),
            "linear_attn.out_proj.weight": (hidden, self.value_width),
        }

    @property
    def row_width(self) -> int:
        """Weights of linear maps that multiply a row, divided by hidden_size."""
        return self.inner + 2 * self.value_width + 2 * self.num_v_heads

    def input_rows(self) -> list[int] | None:
        """The order of the rows of the joined maps in kernels: queries, keys, values, z, b, a.
        None: as in the checkpoint.
        """
        if not self.is_interleaved:
            return None
        Hk, Dk, group = self.num_k_heads, self.k_dim, self.num_v_heads // self.num_k_heads
        width, wide = group * self.v_dim, 2 * (Dk + group * self.v_dim)
        sizes, begin, rows = (Dk, Dk, width, width), 0, list[int]()
        for size in sizes:  # q, k, v, z of each key head
            for head in range(Hk):
                rows += range(head * wide + begin, head * wide + begin + size)
            begin += size
        for part in range(2):  # b, a of each key head
            for head in range(Hk):
                first = Hk * wide + head * 2 * group + part * group
                rows += range(first, first + group)
        return rows


def layers_of(fields: Mapping[str, Any]) -> int:
    """The number of layers."""
    return positive(fields, "num_hidden_layers", MAX_LAYERS)


def gated_delta_kinds(fields: Mapping[str, Any], ends_attending: bool) -> list[str]:
    """The layer types of a model that has none in config.json."""
    every = positive(fields, "full_attention_interval")
    kinds = [
        "linear_attention" if (i + 1) % every else "full_attention"
        for i in range(layers_of(fields))
    ]
    if ends_attending and "full_attention" not in kinds:
        kinds[-1] = "full_attention"
    return kinds


def olmo_hybrid_fields(fields: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an OLMo hybrid, with the defaults that depend on other fields. `written`: those
    in config.json, whose null in RoPE parameters turns RoPE off.
    """
    found, heads = {**fields}, positive(fields, "num_attention_heads")
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        found[name] = heads if found[name] is None else found[name]
    if found["linear_key_head_dim"] is None:
        hidden, key_heads = (positive(found, x) for x in ("hidden_size", "linear_num_key_heads"))
        found["linear_key_head_dim"] = 3 * hidden // (4 * key_heads)
    if found["linear_value_head_dim"] is None:
        found["linear_value_head_dim"] = 2 * positive(found, "linear_key_head_dim")
    rope = written.get("rope_parameters", {})
    names = "rope_type", "rope_theta"
    is_off = rope is None and written.get("rope_theta") is None and not written.get("rope_scaling")
    if isinstance(rope, dict):
        is_off = any(name in rope and rope[name] is None for name in names)
    if is_off:
        found["rope_parameters"], found["no_rope_layers"] = None, [0] * layers_of(found)
    return found


def short_conv_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an LFM2 model under the names of other families. The width of its MLP is
    derived from intermediate_size.
    """
    found = {**fields}
    for name, other in (
        ("intermediate_size", "block_ff_dim"),
        ("tie_word_embeddings", "tie_embedding"),
    ):
        if found.get(other) is not None:
            found[name] = found[other]
    if "num_dense_layers" in found:
        found["first_k_dense_replace"] = found["num_dense_layers"]
    if found["layer_types"] is None and found["full_attn_idxs"] is not None:
        attention = indices(found, "full_attn_idxs")
        found["layer_types"] = [
            "full_attention" if i in attention else "conv" for i in range(layers_of(found))
        ]
    if found["block_auto_adjust_ff_dim"]:
        width, factor = int(2 * found["intermediate_size"] / 3), found["block_ffn_dim_multiplier"]
        if factor is not None:
            multiple = found["block_multiple_of"]
            width = -(-int(factor * width) // multiple) * multiple
        found["intermediate_size"] = width
    return found


class Mamba2(msgspec.Struct, frozen=True, kw_only=True):
    """Mamba-2: a convolution, and a matrix per head that the selective update changes."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int  # of heads, which share keys and queries
    taps: int  # inputs per output of the convolution
    conv_bias: bool
    has_bias: bool  # of the maps of inputs and outputs
    has_norm: bool
    gates_first: bool  # as in `MambaParams`
    # Factors of z, x, B, C and dt in the results of the map of inputs
    factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    out_factor: float = 1.0  # of the layer's output

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def inner(self) -> int:
        """Channels of the convolution: inputs, keys and queries."""
        return self.width + 2 * self.num_groups * self.state_dim

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's tensors."""
        rows = self.width + self.inner + self.num_heads
        shapes: dict[str, tuple[int, ...]] = {
            "mamba.in_proj.weight": (rows, hidden),
            "mamba.conv1d.weight": (self.inner, 1, self.taps),
            "mamba.out_proj.weight": (hidden, self.width),
        }
        shapes |= {f"mamba.{name}": (self.num_heads,) for name in ("A_log", "dt_bias", "D")}
        if self.has_norm:
            shapes["mamba.norm.weight"] = (self.width,)
        if self.conv_bias:
            shapes["mamba.conv1d.bias"] = (self.inner,)
        if self.has_bias:
            shapes |= {"mamba.in_proj.bias": (rows,), "mamba.out_proj.bias": (hidden,)}
        return shapes

    @property
    def row_width(self) -> int:
        """Weights of linear maps that multiply a row, divided by hidden_size."""
        return 2 * self.width + self.inner + self.num_heads

    def input_rows(self) -> list[int]:
        """The order of the rows of the map of inputs in kernels: x, B, C, z, dt."""
        begin, end = self.width, self.width + self.inner
        return [*range(begin, end), *range(begin), *range(end, end + self.num_heads)]


LAYER_KINDS = {  # names of layer types in configs -> ours
    "attention": "full_attention",
    "full_attention": "full_attention",
    "hybrid": "hybrid",
    "linear_attention": "linear_attention",
    "mamba": "linear_attention",
    "mlp": "mlp",
    "moe": "moe",
    **{"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"},
}
NEMOTRON_FIELDS = {  # names of fields in Nemotron H -> in other families
    "conv_kernel": "mamba_d_conv",
    "mamba_head_dim": "mamba_d_head",
    "mamba_num_heads": "mamba_n_heads",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
}


def mamba_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model with Mamba-2 under the names of other families. Each entry of
    layer_types is linear_attention, full_attention, hybrid, mlp or moe.
    """
    found = {**fields}
    if "ssm_state_size" in found:
        found |= {other: found[name] for name, other in NEMOTRON_FIELDS.items()}
    kinds = mamba_kinds(found)
    found["layer_types"] = [LAYER_KINDS[kind] for kind in kinds]
    if "n_routed_experts" in found:  # Nemotron H; layers of other families all have experts
        found["moe_layers"] = [i for i, kind in enumerate(found["layer_types"]) if kind == "moe"]
    found["num_hidden_layers"] = len(kinds)
    if "position_embedding_type" in found and found["position_embedding_type"] != "rope":
        found["no_rope_layers"] = [0] * len(kinds)
    if "attn_layer_indices" in found and "mamba_d_ssm" not in found:
        found["partial_rotary_factor"] = 0.5  # Bamba's, whatever the config says
    if found.get("num_local_experts") == 0:  # Granite's dense models
        found["intermediate_size"] = found["shared_intermediate_size"]
    width, heads = mamba_width(found), positive(found, "mamba_n_heads")
    if width is not None and found["mamba_d_head"] in (None, "auto"):
        found["mamba_d_head"] = width // heads
    size = positive(found, "mamba_d_head", MAX_STATE_DIM)
    if width is not None and heads * size != width:
        raise ValueError(
            f"mamba_n_heads = {heads} times mamba_d_head = {size} must be the width of the layer, "
            f"{width}"
        )
    return found


def mamba_width(fields: Mapping[str, Any]) -> int | None:
    """The width of a layer with Mamba-2; None: its heads determine it."""
    if fields.get("mamba_d_ssm") is not None:
        return positive(fields, "mamba_d_ssm")
    if "mamba_expand" not in fields:
        return None
    return round(number(fields, "mamba_expand") * positive(fields, "hidden_size"))


def mamba_kinds(fields: Mapping[str, Any]) -> list[str]:
    """The names of the layer types in a config."""
    for name in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        kinds = fields.get(name)
        if kinds:
            if not isinstance(kinds, list | str):
                raise ValueError(f"{name} = {kinds!r:.50} must be a list with a type per layer")
            if unknown := [x for x in kinds if not isinstance(x, str) or x not in LAYER_KINDS]:
                raise ValueError(f"{name}: the layer type {unknown[0]!r:.50} is not supported")
            return [*kinds]
    if "mamba_d_ssm" in fields:
        return ["hybrid"] * layers_of(fields)
    attention = indices(fields, "attn_layer_indices")
    every = range(layers_of(fields))
    return ["full_attention" if i in attention else "linear_attention" for i in every]


def indices(fields: Mapping[str, Any], key: str) -> list[int]:
    """A list of layers; empty if the config has none."""
    layers = fields.get(key)
    if layers is None:
        return []
    if not isinstance(layers, list) or not all(map(is_int, layers)):
        raise ValueError(f"{key} = {layers!r:.50} must be a list of layers")
    return layers


def recurrent_layers(fields: Mapping[str, Any], kind: str) -> tuple[bool, ...]:
    """By layer: whether it is recurrent. `kind`: of the family's recurrent layers."""
    kinds, own = fields["layer_types"], RECURRENT_KINDS[kind]
    if not isinstance(kinds, list):
        return ()
    if unknown := [x for x in kinds if x not in (*own, *WITHOUT_STATE)]:
        raise ValueError(
            f"layer_types: the layer type {unknown[0]!r:.50} is not supported, only "
            f"full_attention and {own[0]}"
        )
    return tuple(x in own for x in kinds)
