"""Parses config.json of a decoder: its shape, and the tensors of its checkpoint."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any, ClassVar, TypeVar

import msgspec

from specserve.errors import ConfigError
from specserve.models import per_layer_names as per_layer
from specserve.models import rope
from specserve.models.experts import ExpertStyle, Mixture, number_field
from specserve.models.families import FAMILIES, MULTIMODAL, UNSUPPORTED
from specserve.models.family import ConfigKeys, Family
from specserve.models.folder import read_json
from specserve.models.multimodal import text_fields, text_type
from specserve.models.quantized import config as quantized
from specserve.models.quantized.config import Quantization
from specserve.models.recurrent import (
    MAX_STATE_DIM,
    MAX_TAPS,
    RECURRENT_KINDS,
    GatedDelta,
    Mamba2,
    ShortConv,
    gated_delta_kinds,
    mamba_fields,
    recurrent_layers,
    short_conv_fields,
)
from specserve.models.rope import QueryGrowth, RopeParameters

MAX_HEAD_DIM = 512  # limit of the kernels: MAX_D in attention.cpp
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1
MAX_EXPERTS = 1024  # limit of the kernels, in experts.cpp
ALPHA = 1.702  # slope of clamped gates in `Ops.experts`
SINKS = "self_attn.sinks"  # tensor name within a layer
SCALAR = "layer_scalar"  # tensor name within a layer
MAX_STREAMS = 8  # limit of the kernels, in streams.cpp
STREAMS = ("model.altup_projections", "model.altup_unembed_projections")
# Modules and tensors of AltUp and LAuReL within a layer.
ROUTER, PREDICT, CORRECT = (
    f"altup.{name}" for name in ("modality_router", "prediction_coefs", "correction_coefs")
)
ROUTER_NORM, STREAM_SCALE = "altup.router_norm", "altup.correct_output_scale"
LEFT, RIGHT, LAUREL_NORM = (
    f"laurel.{name}" for name in ("linear_left", "linear_right", "post_laurel_norm")
)
# Fields with the number of MTP layers: of DeepSeek, GLM and MiMo, and of Qwen.
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
ARCHITECTURES = (*FAMILIES, *MULTIMODAL)
# Architectures without a head for text; their layers are those of the family's ...ForCausalLM.
HEADLESS = re.compile(r"(\w+?)(ForSequenceClassification|Model)")
SCORE = "score.weight"  # tensor of a sequence classifier's head
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # -> names of ops
UNGATED = ACTIVATIONS | {"relu2": "relu2", "xielu": "xielu"}  # in MLPs without a gate
NO_LIMIT = (math.inf, {"__float__": "Infinity"})  # of time steps, in time_step_limit
ALPHAS = ("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n")  # xIELU's tensors within a layer


class Unsupported(ValueError):
    """A feature that the native code lacks, and that transformers' modules may support."""


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


T = TypeVar("T")


def load_config(folder: Path) -> DecoderConfig:
    """The decoder that a folder's config.json describes."""
    return read_config(folder, parse)


def read_config(folder: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """Parse a folder's config.json with `parse`; its ValueError becomes a ConfigError."""
    path = folder / "config.json"
    try:
        return parse(read_json(path))
    except ValueError as e:
        raise ConfigError(
            f"{path}: {e}. Use another checkpoint, or correct the file if it is wrong"
        ) from e


def names_family(written: Mapping[str, Any]) -> bool:
    """Whether a config.json names a known architecture, or none at all."""
    named = written.get("architectures")
    return not named or causal_name(named) in (*ARCHITECTURES, *UNSUPPORTED)


def causal_name(named: Any) -> str | None:
    """The family's name for the first of a config.json's `architectures`."""
    first = named[0] if isinstance(named, list) and named else None
    if not isinstance(first, str):
        return None
    headless = HEADLESS.fullmatch(first)
    return first if headless is None else f"{headless[1]}ForCausalLM"


def num_labels(fields: Mapping[str, Any]) -> int:
    """The outputs of a sequence classifier; 0 for other models."""
    named = fields.get("architectures")
    if not str(named[0] if isinstance(named, list) and named else "").endswith("Classification"):
        return 0
    names = fields.get("id2label")
    count = len(names) if isinstance(names, Mapping) else fields.get("num_labels", 2)
    return positive({"num_labels": count}, "num_labels")


def parse(written: dict[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes. Raises ValueError for unsupported models."""
    architecture, family = find_family(written)
    is_multimodal = architecture in MULTIMODAL
    written = text_fields(written) if is_multimodal else written
    fields, keys = {**family.defaults, **written}, family.keys
    if family.recurrent == "short_conv":
        check_short_conv(fields)
        fields = short_conv_fields(fields)
    if family.recurrent == "gated_delta" and fields["layer_types"] is None:
        positive(fields, "full_attention_interval")
        fields["layer_types"] = gated_delta_kinds(fields)
    if family.recurrent == "mamba":
        fields = mamba_fields(fields)
    mixers = fields["layer_types"] if family.recurrent == "mamba" else []
    has_head = architecture in written["architectures"]
    # "vision": only tokens of images attend to later ones.
    if (seen_later := fields.get("use_bidirectional_attention")) not in (None, False, "vision"):
        named = "true" if seen_later is True else repr(seen_later)
        raise ValueError(
            f"use_bidirectional_attention = {named} is not supported: attention must be causal"
        )
    if fields.get("clip_qkv") is not None:
        raise Unsupported(f"clip_qkv = {fields['clip_qkv']!r} is not supported, only null")
    for name in family.refused:
        if flag(fields, name):
            raise Unsupported(f"{name} = true is not supported, only false")
    heads, kv_heads, head_dim = head_shape(fields)
    if family.rotates_a_share and fields.get("rotary_dim") is not None:
        fields["partial_rotary_factor"] = positive(fields, "rotary_dim") / head_dim
    inner_sizes = layer_sizes(fields, "intermediate_size") if family.has_streams else ()
    if inner_sizes:
        fields["intermediate_size"] = max(inner_sizes)
    max_positions, rotates = positive(fields, "max_position_embeddings"), named_to_rotate(fields)
    is_recurrent = recurrent_layers(fields) if family.recurrent != "none" else ()
    if is_recurrent:
        others = {*fields["layer_types"]} - {"mlp", "moe"}
        if all(kind in RECURRENT_KINDS for kind in others) and "hybrid" not in mixers:
            raise ValueError("layer_types: a model needs at least one layer with attention")
        attends = [
            "full_attention" if x or k in ("mlp", "moe") else k
            for x, k in zip(is_recurrent, fields["layer_types"], strict=True)
        ]
        fields["layer_types"] = attends
    seen = windows(fields, family, rotates)
    if family.rotated == "windowed" or (family.rotated != "named" and fields["sliding_window"]):
        rotates = tuple(window is not None for window in seen)

    kinds = layer_kinds(fields, family, seen, heads, KVHeads(kv_heads, head_dim))
    of_global = kinds.get("global_heads") or KVHeads(kv_heads, head_dim)

    def rope_of(told: Mapping[str, Any], size: int) -> RopeParameters:
        shares, names = family.rotates_a_share, family.rope_names
        return rope.parse(told, max_positions, size, shares, names)

    return DecoderConfig(
        architecture=architecture,
        is_multimodal=is_multimodal,
        num_layers=len(rotates),
        hidden_size=positive(fields, "hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=positive(fields, keys.inner),
        vocab_size=positive(fields, "vocab_size"),
        max_positions=rope.longest_text(global_rope(fields), max_positions, family.rope_names),
        norm_eps=norm_eps(fields, keys.norm_eps),
        activation=activation(fields, keys.activation, family),
        score_scale=(family.score_scale or score_scale(fields, keys, head_dim))
        * query_factor(fields, keys),
        score_cap=optional_number(fields, keys.score_cap),
        embedding_scale=embedding_scale(fields, family),
        residual_scale=optional_number(fields, keys.residual_scale) or 1.0,
        logit_scale=logit_scale(fields, keys),
        logit_cap=optional_number(fields, keys.logit_cap),
        tied=flag(fields, "tie_word_embeddings") or not has_head,
        qkv_bias=either(family.qkv_bias, fields, keys.qkv_bias),
        out_bias=either(family.out_bias, fields, keys.out_bias),
        mlp_bias=either(family.mlp_bias, fields, keys.mlp_bias),
        qk_norm=family.qk_norm if keys.qk_norm is None or flag(fields, keys.qk_norm) else "none",
        family=family,
        windows=seen,
        rope=rotates,
        rope_parameters=rope_of(global_rope(fields), of_global.size),
        local_rope_parameters=rope_of(local_rope(fields, keys) or global_rope(fields), head_dim),
        query_growth=query_growth(fields) if family.grows_queries else None,
        quantization=parse_quantization(written, family),
        mixture=parse_mixture(fields, family, len(rotates)),
        num_mtp_layers=num_mtp_layers(written),
        has_head=has_head,
        num_labels=num_labels(written),
        recurrent=parse_recurrent(fields, family) if any(is_recurrent) else None,
        recurrent_layers=is_recurrent if any(is_recurrent) else (),
        attention_layers=tuple(kind in ("full_attention", "hybrid") for kind in mixers),
        mlp_layers=tuple(kind in ("mlp", "moe") for kind in mixers) if family.is_split else (),
        attention_factor=attention_factor(fields, keys),
        mlp_factors=factors(fields, keys.mlp_scales, 2) or (1.0, 1.0),
        inner_sizes=inner_sizes,
        **(per_layer_sizes(fields, family) if family.has_per_layer_inputs else {}),
        **(streams(fields, len(rotates)) if family.has_streams else {}),
        **kinds,
    )


def parse_recurrent(fields: Mapping[str, Any], family: Family) -> ShortConv | GatedDelta | Mamba2:
    if family.recurrent == "mamba":
        return parse_mamba(fields, family)
    is_conv = family.recurrent == "short_conv"
    name = "conv_L_cache" if is_conv else "linear_conv_kernel_dim"
    taps = positive(fields, name)
    if not 2 <= taps <= MAX_TAPS:
        raise ValueError(f"{name} = {taps} is not supported, only 2 to {MAX_TAPS}")
    if is_conv:
        width = positive(fields, "hidden_size")
        return ShortConv(width=width, taps=taps, has_bias=flag(fields, "conv_bias"))
    heads, num_k_heads = (
        positive(fields, f"linear_num_{kind}_heads", MAX_SIZE) for kind in ("value", "key")
    )
    if heads % num_k_heads:
        raise ValueError(
            f"linear_num_value_heads = {heads} is not a multiple of "
            f"linear_num_key_heads = {num_k_heads}"
        )
    return GatedDelta(
        num_k_heads=num_k_heads,
        num_v_heads=heads,
        k_dim=positive(fields, "linear_key_head_dim", MAX_STATE_DIM),
        v_dim=positive(fields, "linear_value_head_dim", MAX_STATE_DIM),
        taps=taps,
        is_interleaved=family.has_joined_inputs,
    )


def parse_mamba(fields: Mapping[str, Any], family: Family) -> Mamba2:
    taps, heads = positive(fields, "mamba_d_conv"), positive(fields, "mamba_n_heads")
    if not 2 <= taps <= MAX_TAPS:
        raise ValueError(f"mamba_d_conv = {taps} is not supported, only 2 to {MAX_TAPS}")
    groups = positive(fields, "mamba_n_groups")
    if heads % groups:
        raise ValueError(f"mamba_n_heads = {heads} is not a multiple of mamba_n_groups = {groups}")
    if fields.get("mamba_hidden_act", "silu") != "silu":
        raise ValueError(
            f"mamba_hidden_act = {fields['mamba_hidden_act']!r} is not supported, only 'silu'"
        )
    limit = fields.get("time_step_limit")
    if limit is not None and (len(limit) != 2 or limit[0] or limit[1] not in NO_LIMIT):
        raise ValueError(f"time_step_limit = {limit!r} is not supported, only [0, Infinity]")
    of_inputs = factors(fields, "ssm_multipliers", 5) or (1.0,) * 5
    scale = optional_number(fields, "ssm_in_multiplier") if "ssm_in_multiplier" in fields else None
    z, x, b, c, dt = (factor * (scale or 1.0) for factor in of_inputs)
    has_out = "ssm_out_multiplier" in fields
    return Mamba2(
        num_heads=heads,
        head_dim=positive(fields, "mamba_d_head", MAX_STATE_DIM),
        state_dim=positive(fields, "mamba_d_state", MAX_STATE_DIM),
        num_groups=groups,
        taps=taps,
        conv_bias=flag(fields, "mamba_conv_bias"),
        has_bias=flag(fields, "mamba_proj_bias"),
        has_norm=flag(fields, "mamba_rms_norm"),
        gates_first=not flag(fields, "mamba_norm_before_gate"),
        factors=(z, x, b, c, dt),
        out_factor=(optional_number(fields, "ssm_out_multiplier") if has_out else None) or 1.0,
    )


def factors(fields: Mapping[str, Any], key: str | None, count: int) -> Any:
    """A list of `count` numbers as a tuple; None: the config has none."""
    values = fields.get(key) if key is not None else None
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{key} = {values!r} is not a list of {count} numbers")
    return tuple(number({f"{key}[{i}]": x}, f"{key}[{i}]") for i, x in enumerate(values))


def query_factor(fields: Mapping[str, Any], keys: ConfigKeys) -> float:
    """The factor of scores that comes from factors of attention's input and of keys."""
    scale = optional_number(fields, keys.attention_in_scale) or 1.0
    return scale * scale * (optional_number(fields, keys.key_scale) or 1.0)


def attention_factor(fields: Mapping[str, Any], keys: ConfigKeys) -> float:
    """The factor of attention's output. The factor of its input also multiplies the values."""
    names = keys.attention_in_scale, keys.attention_out_scale
    return math.prod(optional_number(fields, name) or 1.0 for name in names)


def layer_kinds(
    fields: Mapping[str, Any],
    family: Family,
    windows: tuple[int | None, ...],
    heads: int,
    local: KVHeads,
) -> dict[str, Any]:
    """The fields of DecoderConfig by which layers differ in their heads, KV and MLP."""
    if not family.has_kinds:
        return {}
    num_shared = natural(fields, "num_kv_shared_layers")
    own = windows[: len(windows) - num_shared]
    if num_shared and set(own) != set(windows):
        raise ValueError(
            f"num_kv_shared_layers = {num_shared} leaves no layer whose KV the last layers can read"
        )
    return {
        "global_heads": global_heads(fields, windows, heads, local),
        "has_equal_values": flag(fields, "attention_k_eq_v"),
        "num_shared_layers": num_shared,
        "shared_mlp_factor": 2 if flag(fields, "use_double_wide_mlp") else 1,
    }


def global_heads(
    fields: Mapping[str, Any], windows: tuple[int | None, ...], heads: int, local: KVHeads
) -> KVHeads | None:
    """The KV heads of layers without a window: in fields, or in transformers' per_layer_config."""
    told = fields["per_layer_config"]
    if told is None and fields["global_head_dim"] is None:
        return None
    if told is None:
        has_own = flag(fields, "attention_k_eq_v") and fields["num_global_key_value_heads"]
        number = positive(fields, "num_global_key_value_heads") if has_own else local.number
        found = KVHeads(number, positive(fields, "global_head_dim", MAX_HEAD_DIM))
    else:
        each = [str(i) for i, window in enumerate(windows) if window is None]
        if not isinstance(told, dict) or any(told.get(i) != told.get(each[0]) for i in each):
            raise ValueError("per_layer_config must have equal heads for all full_attention layers")
        if others := {*told} - {*each}:
            raise ValueError(
                f"per_layer_config has layers {', '.join(sorted(others))}, but only layers with "
                "full_attention may have other heads"
            )
        own = {"num_key_value_heads": local.number, "head_dim": local.size, **told.get(each[0], {})}
        if unknown := {*own} - {"num_key_value_heads", "head_dim"}:
            raise ValueError(f"per_layer_config: {', '.join(sorted(unknown))} is not supported")
        size = positive(own, "head_dim", MAX_HEAD_DIM)
        found = KVHeads(positive(own, "num_key_value_heads"), size)
    if heads % found.number or found.size % 2:
        raise ValueError(
            f"{found.number} KV heads of size {found.size} in layers with full_attention do not "
            f"fit num_attention_heads = {heads}, or the size is odd"
        )
    return found


def layer_sizes(fields: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The numbers of a list with one entry per layer; empty if the field is one number."""
    if not isinstance(fields[key], list):
        return ()
    num_layers = positive(fields, "num_hidden_layers", MAX_LAYERS)
    if len(fields[key]) != num_layers:
        raise ValueError(f"{key} is not a list of {num_layers} entries, one per layer")
    return tuple(positive({key: size}, key) for size in fields[key])


def streams(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The fields of DecoderConfig about residual streams and sparse gates."""
    if fields["altup_active_idx"] != 0:
        raise ValueError(
            f"altup_active_idx = {fields['altup_active_idx']!r} is not supported, only 0"
        )
    if not fields["hidden_size_per_layer_input"]:
        raise ValueError("hidden_size_per_layer_input = 0 is not supported with altup_num_inputs")
    sparse = fields["activation_sparsity_pattern"]
    if sparse is None:
        num_sparse = 10 if num_layers > 10 else 0
        sparse = [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    if not isinstance(sparse, list) or len(sparse) != num_layers:
        raise ValueError(f"activation_sparsity_pattern is not a list of {num_layers} entries")
    if any(not isinstance(share, float | int) or not 0 <= share < 1 for share in sparse):
        raise ValueError("activation_sparsity_pattern must have numbers from 0 to below 1")
    num_streams = positive(fields, "altup_num_inputs", MAX_STREAMS)
    if num_streams == 1:
        raise ValueError("altup_num_inputs = 1 is not supported: it must be at least 2")
    return {
        "num_streams": num_streams,
        "laurel_rank": positive(fields, "laurel_rank"),
        "scales_streams": flag(fields, "altup_correct_scale"),
        "deviations": tuple(NormalDist().inv_cdf(x) if x > 0 else None for x in sparse),
    }


def per_layer_sizes(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    size = natural(fields, "hidden_size_per_layer_input")
    if size == 0:
        return {}
    vocab = positive(fields, "vocab_size_per_layer_input")
    if vocab < positive(fields, "vocab_size") and not family.has_streams:
        raise ValueError(
            f"vocab_size_per_layer_input = {vocab} must be at least vocab_size = "
            f"{fields['vocab_size']}, because each token has inputs of layers"
        )
    return {"per_layer_size": size, "per_layer_vocab": vocab}


def num_mtp_layers(fields: Mapping[str, Any]) -> int:
    for key in MTP_LAYERS:
        if fields.get(key):
            return positive(fields, key, MAX_LAYERS)
    return 0


def parse_quantization(written: Mapping[str, Any], family: Family) -> Quantization | None:
    found = quantized.parse(written)
    is_gpt_oss = family.experts is not None and family.experts.has_biases
    if found is not None and found.method == "mxfp4" and not is_gpt_oss:
        raise ValueError("quantization_config.quant_method = 'mxfp4' is supported only for gpt-oss")
    return found


def parse_mixture(fields: Mapping[str, Any], family: Family, num_layers: int) -> Mixture | None:
    """The layers' mixtures of experts; None if no layer has experts."""
    style = family.experts
    if style is None or (style.enabled is not None and not flag(fields, style.enabled)):
        return None
    name = number_field(fields, style.number_keys)
    number = fields.get(name, style.number)
    if number == 0:
        return None
    num_experts = positive({name: number}, name, MAX_EXPERTS)
    layers = layers_with_experts(fields, num_layers)
    if not any(layers):
        return None
    check_gate(fields, style)
    if fields.get("n_group", 1) != 1:
        raise ValueError(f"n_group = {fields['n_group']!r} is not supported, only 1")
    if style.weighs_input and fields[style.active_key] != 1:
        raise ValueError(
            f"{style.active_key} = {fields[style.active_key]!r} is not supported for this family, "
            "only 1"
        )
    count = natural(fields, style.shared_count) if style.shared_count else 1
    factors = (style.factor, family.keys.residual_scale)
    return Mixture(
        num_experts=num_experts,
        num_active=positive(fields, style.active_key, num_experts),
        width=positive(fields, style.width),
        normalizes=either(style.normalizes, fields, "norm_topk_prob"),
        layers=layers,
        style=style,
        limit=optional_number(fields, style.limit),
        shared_width=count * positive(fields, style.shared_width) if style.shared_width else 0,
        factor=math.prod(optional_number(fields, key) or 1.0 for key in factors),
    )


def layers_with_experts(fields: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """By layer: whether it has experts. Families have different fields for this."""
    if (named := fields.get("moe_layers")) is not None:
        if not isinstance(named, list):
            raise ValueError(f"moe_layers = {named!r} is not a list of layers")
        return tuple(i in named for i in range(num_layers))
    every, without = 1, fields.get("mlp_only_layers") or []
    for name in ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step"):
        every = positive(fields, name) if name in fields else every
    first, last = 0, num_layers - 1
    for name in ("moe_layer_start_index", "first_k_dense_replace"):
        first = natural(fields, name) if name in fields else first
    if fields.get("moe_layer_end_index", -1) != -1:  # -1: up to the last layer
        last = natural(fields, "moe_layer_end_index")
    if not isinstance(without, list):
        raise ValueError(f"mlp_only_layers = {without!r} is not a list of layers")
    return tuple(
        (i + 1) % every == 0 and first <= i <= last and i not in without for i in range(num_layers)
    )


def check_gate(fields: Mapping[str, Any], style: ExpertStyle) -> None:
    if not style.is_gated:
        if fields["mlp_hidden_act"] != "relu2":
            raise ValueError(
                f"mlp_hidden_act = {fields['mlp_hidden_act']!r} is not supported for experts, only "
                "'relu2'"
            )
        if fields.get("moe_latent_size") is not None:
            raise ValueError(
                f"moe_latent_size = {fields['moe_latent_size']!r} is not supported, only null"
            )
        if fields["mlp_bias"]:
            raise ValueError("mlp_bias = true is not supported for experts, only false")
        return
    if style.beside is None and fields["hidden_act"] != "silu":
        raise ValueError(
            f"hidden_act = {fields['hidden_act']!r} is not supported for experts, only 'silu'"
        )
    if style.limit is None:
        return
    if fields["swiglu_alpha"] != ALPHA:
        raise ValueError(
            f"swiglu_alpha = {fields['swiglu_alpha']!r} is not supported, only {ALPHA}"
        )
    number(fields, style.limit)


def find_family(fields: Mapping[str, Any]) -> tuple[str, Family]:
    """The architecture, and the family of the model or of its text model."""
    named, supported = fields.get("architectures"), ", ".join(ARCHITECTURES)
    if not named:
        raise ValueError(f"architectures is missing or empty. Supported architectures: {supported}")
    name = causal_name(named)
    if name in UNSUPPORTED:
        raise ValueError(f"{name} is not supported: {UNSUPPORTED[name]}")
    if name in FAMILIES:
        return name, FAMILIES[name]
    if name in MULTIMODAL:
        texts = MULTIMODAL[name].texts
        return name, texts[text_type(fields, [*texts])]
    raise ValueError(
        f"architectures = {named!r} is not supported. Supported architectures: {supported}"
    )


def head_shape(fields: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, KV heads, head size."""
    heads = positive(fields, "num_attention_heads")
    has_own = fields["num_key_value_heads"] is not None
    kv_heads = positive(fields, "num_key_value_heads") if has_own else heads
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
        )
    head_dim = fields["head_dim"]
    if head_dim is not None:
        head_dim = positive(fields, "head_dim")
    elif (hidden := positive(fields, "hidden_size")) % heads:
        raise ValueError(
            f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}"
        )
    else:
        head_dim = hidden // heads
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim = {head_dim} is not supported: it must be even for RoPE")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim = {head_dim} exceeds the maximum {MAX_HEAD_DIM}")
    return heads, kv_heads, head_dim


def norm_eps(fields: Mapping[str, Any], key: str) -> float:
    eps = fields[key]
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps <= 1:
        raise ValueError(f"{key} = {eps!r} must be a number from 0 to 1")
    return float(eps)


def activation(fields: Mapping[str, Any], key: str, family: Family) -> str:
    named, known = fields[key], ACTIVATIONS if family.ungated is None else UNGATED
    if not isinstance(named, str) or named not in known:
        raise Unsupported(f"{key} = {named!r} is not supported, only {', '.join(known)}")
    return known[named]


def score_scale(fields: Mapping[str, Any], keys: ConfigKeys, head_dim: int) -> float:
    if keys.score_scale is not None:
        return number(fields, keys.score_scale)
    root = math.sqrt(number(fields, keys.query_scalar) if keys.query_scalar else head_dim)
    return 1.0 / root


def embedding_scale(fields: Mapping[str, Any], family: Family) -> float:
    if family.scales_by_width:
        return math.sqrt(positive(fields, "hidden_size"))
    return optional_number(fields, family.keys.embedding_scale) or 1.0


def logit_scale(fields: Mapping[str, Any], keys: ConfigKeys) -> float:
    if keys.logit_divisor is not None:
        return 1.0 / number(fields, keys.logit_divisor)
    return optional_number(fields, keys.logit_scale) or 1.0


def global_rope(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields, with `rope_parameters` for layers without a sliding window."""
    told = fields.get("rope_parameters")
    if not isinstance(told, dict) or "full_attention" not in told:
        return fields
    return {**fields, "rope_parameters": told["full_attention"]}


def local_rope(fields: Mapping[str, Any], keys: ConfigKeys) -> Mapping[str, Any] | None:
    """The fields, with `rope_parameters` for layers with a window; None: the same as global."""
    told = fields.get("rope_parameters")
    if isinstance(told, dict) and "sliding_attention" in told:
        return {**fields, "rope_scaling": None, "rope_parameters": told["sliding_attention"]}
    if keys.local_theta is None:
        return None
    theta = {"rope_theta": fields[keys.local_theta]}
    return {**fields, "rope_scaling": None, "rope_parameters": theta}


def optional_number(fields: Mapping[str, Any], key: str | None) -> float | None:
    return None if key is None or fields[key] is None else number(fields, key)


def number(fields: Mapping[str, Any], key: str) -> float:
    value = fields[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-6 <= value <= 1e6:
        raise ValueError(f"{key} = {value!r} must be a number from 1e-6 to 1e6")
    return float(value)


def windows(
    fields: Mapping[str, Any], family: Family, rotates: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """The sliding window of each layer, in tokens; None is full attention."""
    window, kinds = fields[family.keys.window], fields["layer_types"]
    windowed = "chunked_attention" if family.has_chunks else "sliding_attention"
    if family.windowed in ("upper", "asked") and not flag(fields, "use_sliding_window"):
        window = None
    if kinds is None:
        names = {True: windowed, False: "full_attention"}
        has_any = window is not None or family.has_chunks
        kinds = [names[has_any and w] for w in windowed_layers(fields, family, rotates)]
    if not isinstance(kinds, list) or len(kinds) != len(rotates):
        raise ValueError(
            f"layer_types = {kinds!r} is not a list of {len(rotates)} entries, one per layer"
        )
    if family.ends_global:
        kinds = [*kinds[:-1], "full_attention"]
    for kind in kinds:
        if kind not in (windowed, "full_attention"):
            raise ValueError(
                f"layer type {kind!r} is not supported, only full_attention and {windowed}"
            )
    if windowed in kinds and not (is_int(window) and 1 <= window <= MAX_SIZE):
        raise ValueError(f"a layer has {windowed}, but {family.keys.window} = {window!r}")
    return tuple(window if kind == windowed else None for kind in kinds)


def windowed_layers(
    fields: Mapping[str, Any], family: Family, rotates: tuple[bool, ...]
) -> list[bool]:
    """Which layers have the sliding window, by the rule of the family."""
    if family.windowed == "upper":
        first = natural(fields, "max_window_layers")
        return [i >= first for i in range(len(rotates))]
    if family.windowed == "lower":
        behind = natural(fields, "max_window_layers")
        is_used = flag(fields, "use_sliding_window")
        return [is_used and i < behind and i % 2 == 0 for i in range(len(rotates))]
    if family.windowed == "unrotated":
        is_used = flag(fields, "use_sliding_window")
        return [is_used and not rotating for rotating in rotates]
    if family.windowed == "rotated":
        return list(rotates)
    if family.windowed == "pattern":
        every = positive(fields, "sliding_window_pattern") if fields["sliding_window"] else 1
        return [(i + 1) % every != 0 for i in range(len(rotates))]
    return [family.windowed in ("all", "asked")] * len(rotates)


def named_to_rotate(fields: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether each layer has rotary embedding, according to the config."""
    num_layers = positive(fields, "num_hidden_layers", MAX_LAYERS)
    layers = fields["no_rope_layers"]  # despite the name, 1 means rotary embedding
    if not layers and "no_rope_layer_interval" in fields:
        interval = positive(fields, "no_rope_layer_interval")
        layers = [(i + 1) % interval for i in range(num_layers)]
    if layers is None:
        return (True,) * num_layers
    if not isinstance(layers, list) or len(layers) < num_layers:
        raise ValueError(
            f"no_rope_layers = {layers!r} is not a list of {num_layers} entries, one per layer"
        )
    return tuple(bool(x) for x in layers[:num_layers])


def query_growth(fields: Mapping[str, Any]) -> QueryGrowth | None:
    name = "attn_temperature_tuning"
    if not isinstance(fields[name], int):  # published as a number, too
        raise ValueError(f"{name} = {fields[name]!r} must be true or false")
    if not fields[name]:
        return None
    return QueryGrowth(scale=number(fields, "attn_scale"), length=positive(fields, "floor_scale"))


def either(fixed: bool | None, fields: Mapping[str, Any], key: str) -> bool:
    return flag(fields, key) if fixed is None else fixed


def flag(fields: Mapping[str, Any], key: str) -> bool:
    value = fields[key]
    if not isinstance(value, bool):
        raise ValueError(f"{key} = {value!r} must be true or false")
    return value


def check_short_conv(fields: Mapping[str, Any]) -> None:
    """ValueError for fields of LFM2 that the sizes of its layers are derived from."""
    width = "intermediate_size" if fields.get("block_ff_dim") is None else "block_ff_dim"
    for name in (width, "block_multiple_of"):
        positive(fields, name)
    factor, attention = fields["block_ffn_dim_multiplier"], fields["full_attn_idxs"]
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if factor is not None and not (is_number and 0 < factor < MAX_SIZE):
        raise ValueError(f"block_ffn_dim_multiplier = {factor!r:.50} must be a number above 0")
    if attention is not None and not isinstance(attention, list):
        raise ValueError(f"full_attn_idxs = {attention!r:.50} must be a list of layers")


def positive(fields: Mapping[str, Any], key: str, most: int = MAX_SIZE) -> int:
    value = fields[key]
    if not is_int(value) or not 1 <= value <= most:
        raise ValueError(f"{key} = {value!r} must be a whole number from 1 to {most}")
    return int(value)


def natural(fields: Mapping[str, Any], key: str) -> int:
    return 0 if fields[key] == 0 else positive(fields, key)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of a checkpoint, by Hugging Face name."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if config.family.norm_bias:
        shapes["model.norm.bias"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    if config.num_labels:
        shapes[SCORE] = (config.num_labels, hidden)
    if config.per_layer_size:
        width = config.num_layers * config.per_layer_size
        shapes[f"{per_layer.TABLE}.weight"] = config.per_layer_vocab, width
        shapes[f"{per_layer.PROJECTION}.weight"] = width, hidden
        shapes[f"{per_layer.NORM}.weight"] = (config.per_layer_size,)
    for i in range(config.num_streams - 1):
        shapes |= {f"{name}.{i}.weight": (hidden, hidden) for name in STREAMS}
    for i in range(config.num_layers):
        layer = layer_shapes(config, i)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def layer_shapes(config: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, heads = config.hidden_size, config.inner_size(layer), config.kv_heads(layer)
    q, kv = config.num_heads * heads.size, heads.number * heads.size
    queries = 2 * q if config.family.gates_attention else q
    qkv, gate_up = [queries, kv, kv], [inner, inner]
    qkv = [sum(qkv)] if config.family.fuses_qkv else qkv
    gate_up = [sum(gate_up)] if config.family.fuses_gate_up else gate_up
    gate_up = [inner] if config.family.ungated is not None else gate_up
    linears = dict[str, tuple[int, int, bool]]()  # name -> output width, input width, has a bias
    if config.attends(layer):
        for name, out in zip(config.qkv_names(layer), qkv, strict=False):
            linears[name] = out, hidden, config.qkv_bias
        linears["self_attn.o_proj"] = hidden, q, config.out_bias
    if config.mixture is not None and config.mixture.layers[layer]:
        linears |= config.mixture.shapes(hidden)
    if config.has_mlp(layer) and not config.has_experts(layer):
        for name, out in zip(config.gate_up_names, gate_up, strict=True):
            linears[name] = out, hidden, config.mlp_bias
        linears[config.down_name] = hidden, inner, config.mlp_bias
    norms = config.family.norms
    places = norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in places if name}
    if config.family.has_sinks:
        shapes[SINKS] = (config.num_heads,)
    if config.family.norm_bias:
        shapes |= {f"{name}.bias": (hidden,) for name in places if name}
    if config.is_recurrent(layer) and config.recurrent is not None:
        shapes |= config.recurrent.shapes(hidden)
    if config.has_qk_norm and config.attends(layer):
        names, each = config.family.qk_norm_names, config.qk_norm_shapes(layer)
        for name, shape in [*zip(names, each, strict=True)][: 2 if config.owns_kv(layer) else 1]:
            shapes[f"self_attn.{name}.weight"] = shape
    if config.mixture is not None and config.mixture.layers[layer]:
        shapes |= config.mixture.other_shapes(hidden)
    if config.family.has_layer_scalars:
        shapes[SCALAR] = (1,)
    if config.num_streams > 1:
        linears |= altup_maps(config)
        scales = STREAM_SCALE, f"{ROUTER_NORM}.weight", f"{LAUREL_NORM}.weight"
        shapes |= dict.fromkeys(scales, (hidden,))
    if config.per_layer_size:
        linears[per_layer.GATE] = config.per_layer_size, hidden, False
        linears[per_layer.OUT] = hidden, config.per_layer_size, False
        shapes[f"{per_layer.OUT_NORM}.weight"] = (hidden,)
    if config.activation == "xielu":
        shapes |= dict.fromkeys(ALPHAS, (1,))
    for name, (out, width, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (out, width)
        if has_bias:
            shapes[f"{name}.bias"] = (out,)
    return shapes


def altup_maps(config: DecoderConfig) -> dict[str, tuple[int, int, bool]]:
    """A layer's maps of AltUp and LAuReL: output width, input width, whether it has a bias."""
    N, hidden, rank = config.num_streams, config.hidden_size, config.laurel_rank
    return {
        ROUTER: (N, hidden, False),
        PREDICT: (N * N, N, False),
        CORRECT: (N, N, False),
        LEFT: (rank, hidden, False),
        RIGHT: (hidden, rank, False),
    }
