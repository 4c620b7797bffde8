"""The supported model families, and the decoder's shape as config.json describes it."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from specserve.errors import ConfigError
from specserve.models import rope
from specserve.models.experts import (
    MIXTRAL_STYLE,
    OLMOE_STYLE,
    QWEN3_STYLE,
    ExpertStyle,
    Mixture,
    number_field,
    sparse_layers,
)
from specserve.models.folder import read_json
from specserve.models.quantized import config as quantized
from specserve.models.rope import RopeParameters
from specserve.models.shape import Shape

MAX_HEAD_DIM = 512  # of the kernels: MAX_D in attention.cpp
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1
MAX_EXPERTS = 1024  # of the kernels, too: in experts.cpp
LLAMA: dict[str, Any] = {  # values of missing fields
    "attention_bias": False,
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": None,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "no_rope_layers": None,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": None,  # num_attention_heads
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MISTRAL = LLAMA | {
    "intermediate_size": 14336,
    "max_position_embeddings": 4096 * 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
QWEN2 = LLAMA | {
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SMOLLM3 = LLAMA | {
    "hidden_size": 2048,
    "max_position_embeddings": 32768,
    "no_rope_layer_interval": 4,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
PHI3 = LLAMA | {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32064,
}

QWEN3_MOE = LLAMA | {
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 32768,
    "mlp_only_layers": None,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL = LLAMA | {
    "intermediate_size": 14336,
    "max_position_embeddings": 4096 * 32,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}


OLMOE = LLAMA | {
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50304,
}
GEMMA2 = LLAMA | {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": False,
    "vocab_size": 256000,
}
GEMMA3 = GEMMA2 | {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 131072,
    "rope_local_base_freq": 10_000.0,
    "rope_theta": 1_000_000.0,
    "sliding_window_pattern": 6,
    "vocab_size": 262208,
}
OLMO2 = LLAMA | {"rms_norm_eps": 1e-5, "vocab_size": 50304}
GRANITE = LLAMA | {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}
GLM4 = LLAMA | {
    "attention_bias": True,
    "head_dim": 128,
    "intermediate_size": 13696,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 0.00000015625,
    "vocab_size": 151552,
}
COHERE2 = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
    "vocab_size": 256000,
}
EXAONE4 = LLAMA | {
    "intermediate_size": 16384,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "vocab_size": 102400,
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # as `Ops.linear_gated` has them


class Norms(msgspec.Struct, frozen=True, kw_only=True):
    """The names of a layer's norms in a checkpoint; None: there is none in this place.

    Those before attention and MLP normalize what they read of the residual stream, those after them
    what is added to it.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


NORMS_AFTER = Norms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
NORMS_OF_GEMMA = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
NORMS_OF_GLM = Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """A family's names of fields in config.json; None: it has none."""

    activation: str = "hidden_act"
    norm_eps: str = "rms_norm_eps"
    query_scalar: str | None = None  # scores are divided by its root
    score_scale: str | None = None  # scores are multiplied by it; both None: by 1 / sqrt(head_dim)
    embedding_scale: str | None = None
    residual_scale: str | None = None  # what layers add to the residual stream is multiplied by it
    logit_scale: str | None = None
    logit_divisor: str | None = None
    score_cap: str | None = None
    logit_cap: str | None = None
    local_theta: str | None = None  # of layers with a window


GEMMA_KEYS = Keys(
    activation="hidden_activation",
    query_scalar="query_pre_attn_scalar",
    score_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
)


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's code fixes, whatever its config says; None: the config's value is taken."""

    models: str  # known ones, for the documentation
    defaults: Mapping[str, Any]
    keys: Keys = Keys()
    qkv_bias: bool | None = None  # None: attention_bias
    out_bias: bool | None = None  # None: attention_bias
    mlp_bias: bool | None = None  # None: mlp_bias
    qk_norm: Literal["none", "heads", "width"] = "none"  # of each head, or of all of them together
    norms: Norms = Norms()
    adds_one: bool = False  # to the weights of norms
    is_centered: bool = False  # norms are LayerNorm
    is_parallel: bool = False  # the MLP reads what attention reads
    scales_by_width: bool = False  # embeddings, by sqrt(hidden_size)
    fuses_qkv: bool = False  # the checkpoint has queries, keys and values in one map
    fuses_gate_up: bool = False
    rotates_a_share: bool = False  # of each head's dimensions, by partial_rotary_factor
    rotates_neighbors: bool = False  # a pair are dimensions 2i and 2i + 1, not i and i + D/2
    rope_names: Mapping[str, str] = {}  # its own for kinds of rotary embedding
    # Which layers have the sliding_window where there are no layer_types: all, or all but each
    # sliding_window_pattern-th; or, if use_sliding_window says so, all, those from
    # max_window_layers on, or those without rotary embedding.
    windowed: Literal["none", "all", "asked", "upper", "unrotated", "pattern"] = "none"
    # Which layers rotate: as no_rope_layers says, or those with a window, or these, but all where
    # there is no sliding_window.
    rotated: Literal["named", "windowed", "windowed if any"] = "named"
    experts: ExpertStyle | None = None


# SmolLM and SmolLM2 are LlamaForCausalLM.
FAMILIES = {
    "LlamaForCausalLM": Family(
        models="Llama 2, 3, 3.1, 3.2 (text), SmolLM, SmolLM2, TinyLlama, many others in this form",
        defaults=LLAMA,
    ),
    "MistralForCausalLM": Family(
        models="Mistral 7B and others of the family without vision or experts",
        defaults=MISTRAL,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        windowed="all",
    ),
    "Qwen2ForCausalLM": Family(
        models="Qwen 2, Qwen 2.5",
        defaults=QWEN2,
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
        windowed="upper",
    ),
    "Qwen3ForCausalLM": Family(
        models="Qwen 3, dense",
        defaults=QWEN2 | {"head_dim": 128},
        mlp_bias=False,
        qk_norm="heads",
        windowed="upper",
    ),
    "SmolLM3ForCausalLM": Family(models="SmolLM3", defaults=SMOLLM3, windowed="unrotated"),
    "Phi3ForCausalLM": Family(
        models="Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4 mini",
        defaults=PHI3,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        fuses_qkv=True,
        fuses_gate_up=True,
        rotates_a_share=True,
        rope_names={"su": "longrope", "yarn": "longrope"},
        windowed="all",
    ),
    "Gemma2ForCausalLM": Family(
        models="Gemma 2",
        defaults=GEMMA2,
        keys=GEMMA_KEYS,
        mlp_bias=False,
        norms=NORMS_OF_GEMMA,
        adds_one=True,
        scales_by_width=True,
        windowed="pattern",
    ),
    "Gemma3ForCausalLM": Family(
        models="Gemma 3 without vision: 270M, 1B",
        defaults=GEMMA3,
        keys=msgspec.structs.replace(GEMMA_KEYS, local_theta="rope_local_base_freq"),
        mlp_bias=False,
        qk_norm="heads",
        norms=NORMS_OF_GEMMA,
        adds_one=True,
        scales_by_width=True,
        windowed="pattern",
    ),
    "Olmo2ForCausalLM": Family(
        models="OLMo 2", defaults=OLMO2, mlp_bias=False, qk_norm="width", norms=NORMS_AFTER
    ),
    "GraniteForCausalLM": Family(
        models="Granite 3, dense",
        defaults=GRANITE,
        keys=Keys(
            score_scale="attention_multiplier",
            embedding_scale="embedding_multiplier",
            residual_scale="residual_multiplier",
            logit_divisor="logits_scaling",
        ),
    ),
    "Glm4ForCausalLM": Family(
        models="GLM-4 of 2025: GLM-4-0414, GLM-Z1",
        defaults=GLM4,
        out_bias=False,
        mlp_bias=False,
        norms=NORMS_OF_GLM,
        fuses_gate_up=True,
        rotates_a_share=True,
        rotates_neighbors=True,
    ),
    "Cohere2ForCausalLM": Family(
        models="Command R7B, Command A",
        defaults=COHERE2,
        keys=Keys(norm_eps="layer_norm_eps", logit_scale="logit_scale"),
        mlp_bias=False,
        norms=Norms(before_mlp=None),
        is_centered=True,
        is_parallel=True,
        rotates_neighbors=True,
        windowed="pattern",
        rotated="windowed",
    ),
    "Exaone4ForCausalLM": Family(
        models="EXAONE 4",
        defaults=EXAONE4,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm="heads",
        norms=NORMS_AFTER,
        windowed="pattern",
        rotated="windowed if any",
    ),
    "Qwen3MoeForCausalLM": Family(
        models="Qwen 3 with experts: 30B-A3B and others",
        defaults=QWEN3_MOE,
        mlp_bias=False,
        qk_norm="heads",
        windowed="asked",
        experts=QWEN3_STYLE,
    ),
    "MixtralForCausalLM": Family(
        models="Mixtral 8x7B and 8x22B",
        defaults=MIXTRAL,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        windowed="all",
        experts=MIXTRAL_STYLE,
    ),
    "OlmoeForCausalLM": Family(
        models="OLMoE", defaults=OLMOE, qk_norm="width", experts=OLMOE_STYLE
    ),
}


class DecoderConfig(Shape, frozen=True, kw_only=True):
    """All that the decoder needs of a model besides its weights."""

    implementation = "native"
    norm_eps: float
    activation: str  # of the MLP's gate: as `Ops.linear_gated` has them
    score_scale: float
    score_cap: float | None
    embedding_scale: float
    residual_scale: float  # what layers add to the residual stream is multiplied by it
    logit_scale: float
    logit_cap: float | None
    tied: bool  # the head is the embedding table, unless the checkpoint has one of its own
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    family: Family
    windows: tuple[int | None, ...]  # by layer; None is full attention
    rope: tuple[bool, ...]  # by layer; whether it has rotary embedding
    rope_parameters: RopeParameters
    local_rope_parameters: RopeParameters  # of layers with a window
    mixture: Mixture | None = None

    def has_experts(self, layer: int) -> bool:
        return self.mixture is not None and self.mixture.layers[layer]

    @property
    def qkv_names(self) -> list[str]:
        """Of a layer's maps to queries, keys and values."""
        parts = ["qkv"] if self.family.fuses_qkv else ["q", "k", "v"]
        return [f"self_attn.{part}_proj" for part in parts]

    @property
    def gate_up_names(self) -> list[str]:
        parts = ["gate_up"] if self.family.fuses_gate_up else ["gate", "up"]
        return [f"mlp.{part}_proj" for part in parts]

    @property
    def norm_names(self) -> list[str]:
        """Of a layer's norms of rows as wide as the residual stream."""
        norms = self.family.norms
        places = norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp
        return [name for name in places if name is not None]

    @property
    def qk_norm_widths(self) -> tuple[int, int] | None:
        """Of the norms of queries and of keys; None if there are none."""
        match self.family.qk_norm:
            case "none":
                return None
            case "heads":
                return self.head_dim, self.head_dim
            case "width":
                return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

    @property
    def num_layer_weights(self) -> int:
        """Weights in the linear maps of all layers that a row is multiplied by."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.hidden_size * sum(
            attention + self.row_width(layer) for layer in range(self.num_layers)
        )

    def row_width(self, layer: int) -> int:
        """Of a layer's other maps: the weights that a row is multiplied by, over hidden_size."""
        if self.mixture is None or not self.mixture.layers[layer]:
            return 3 * self.intermediate_size
        return self.mixture.num_experts + 3 * self.mixture.num_active * self.mixture.width


T = TypeVar("T")


def load_config(folder: Path) -> DecoderConfig:
    """The decoder that a folder's config.json describes."""
    return read_config(folder, parse)


def read_config(folder: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """What `parse` reads from a folder's config.json; its ValueError comes out as ConfigError."""
    path = folder / "config.json"
    try:
        return parse(read_json(path))
    except ValueError as e:
        raise ConfigError(
            f"{path}: {e}; take another checkpoint, or correct the file if it is wrong"
        ) from e


def names_family(written: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a supported family, or does not say of which it is."""
    named = written.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return not named or (isinstance(first, str) and first in FAMILIES)


def parse(written: dict[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes; ValueError says what cannot be served, and why."""
    architecture, family = find_family(written)
    fields, keys = {**family.defaults, **written}, family.keys
    if fields.get("use_bidirectional_attention"):
        raise ValueError(
            "use_bidirectional_attention = true is not supported: tokens see earlier ones"
        )
    if fields.get("clip_qkv") is not None:
        raise ValueError(f"clip_qkv = {fields['clip_qkv']!r} is not supported: only null is")
    heads, kv_heads, head_dim = head_shape(fields)
    max_positions, rotates = positive(fields, "max_position_embeddings"), named_to_rotate(fields)
    seen = windows(fields, family, rotates)
    if family.rotated == "windowed" or (family.rotated != "named" and fields["sliding_window"]):
        rotates = tuple(window is not None for window in seen)

    def rope_of(told: Mapping[str, Any]) -> RopeParameters:
        shares, names = family.rotates_a_share, family.rope_names
        return rope.parse(told, max_positions, head_dim, shares, names)

    return DecoderConfig(
        architecture=architecture,
        num_layers=len(rotates),
        hidden_size=positive(fields, "hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=positive(fields, "intermediate_size"),
        vocab_size=positive(fields, "vocab_size"),
        max_positions=max_positions,
        norm_eps=norm_eps(fields, keys.norm_eps),
        activation=activation(fields, keys.activation),
        score_scale=score_scale(fields, keys, head_dim),
        score_cap=optional_number(fields, keys.score_cap),
        embedding_scale=embedding_scale(fields, family),
        residual_scale=optional_number(fields, keys.residual_scale) or 1.0,
        logit_scale=logit_scale(fields, keys),
        logit_cap=optional_number(fields, keys.logit_cap),
        tied=flag(fields, "tie_word_embeddings"),
        qkv_bias=either(family.qkv_bias, fields, "attention_bias"),
        out_bias=either(family.out_bias, fields, "attention_bias"),
        mlp_bias=either(family.mlp_bias, fields, "mlp_bias"),
        family=family,
        windows=seen,
        rope=rotates,
        rope_parameters=rope_of(global_rope(fields)),
        local_rope_parameters=rope_of(local_rope(fields, keys) or global_rope(fields)),
        quantization=quantized.parse(written),
        mixture=parse_mixture(fields, family.experts, len(rotates)),
    )


def parse_mixture(
    fields: Mapping[str, Any], style: ExpertStyle | None, num_layers: int
) -> Mixture | None:
    """None where no layer has experts."""
    if style is None:
        return None
    name = number_field(fields)
    number = fields.get(name, style.number)
    if number == 0:
        return None
    num_experts = positive({name: number}, name, MAX_EXPERTS)
    every, without = 1, fields.get("mlp_only_layers") or []
    if "decoder_sparse_step" in fields:
        every = positive(fields, "decoder_sparse_step")
    if not isinstance(without, list):
        raise ValueError(f"mlp_only_layers = {without!r} is no list of layers")
    layers = sparse_layers(num_layers, every, without)
    return (
        None
        if not any(layers)
        else Mixture(
            num_experts=num_experts,
            num_active=positive(fields, "num_experts_per_tok", num_experts),
            width=positive(fields, style.width),
            normalizes=either(style.normalizes, fields, "norm_topk_prob"),
            layers=layers,
            module=style.module,
            maps=style.maps,
        )
    )


def find_family(fields: Mapping[str, Any]) -> tuple[str, Family]:
    named = fields.get("architectures")
    if not named:
        raise ValueError(
            f"architectures is missing or empty; it names the model's kind: {', '.join(FAMILIES)} "
            "are supported"
        )
    if isinstance(named, list) and isinstance(named[0], str) and named[0] in FAMILIES:
        return named[0], FAMILIES[named[0]]
    raise ValueError(f"architectures = {named!r} is not supported: {', '.join(FAMILIES)} are")


def head_shape(fields: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, KV heads, head size."""
    heads = positive(fields, "num_attention_heads")
    has_own = fields["num_key_value_heads"] is not None
    kv_heads = positive(fields, "num_key_value_heads") if has_own else heads
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}"
        )
    head_dim = head_size(fields, heads)
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim = {head_dim} is not supported: rotary embedding needs pairs")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim = {head_dim} is not supported: at most {MAX_HEAD_DIM} is")
    return heads, kv_heads, head_dim


def head_size(fields: Mapping[str, Any], heads: int) -> int:
    if fields["head_dim"] is not None:
        return positive(fields, "head_dim")
    hidden = positive(fields, "hidden_size")
    if hidden % heads:
        raise ValueError(f"hidden_size = {hidden} is no multiple of num_attention_heads = {heads}")
    return hidden // heads


def norm_eps(fields: Mapping[str, Any], key: str) -> float:
    eps = fields[key]
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps <= 1:
        raise ValueError(f"{key} = {eps!r} must be a number from 0 to 1")
    return float(eps)


def activation(fields: Mapping[str, Any], key: str) -> str:
    named = fields[key]
    if not isinstance(named, str) or named not in ACTIVATIONS:
        raise ValueError(f"{key} = {named!r} is not supported: {', '.join(ACTIVATIONS)} are")
    return ACTIVATIONS[named]


def score_scale(fields: Mapping[str, Any], keys: Keys, head_dim: int) -> float:
    if keys.score_scale is not None:
        return number(fields, keys.score_scale)
    root = math.sqrt(number(fields, keys.query_scalar) if keys.query_scalar else head_dim)
    return 1.0 / root


def embedding_scale(fields: Mapping[str, Any], family: Family) -> float:
    if family.scales_by_width:
        return math.sqrt(positive(fields, "hidden_size"))
    return optional_number(fields, family.keys.embedding_scale) or 1.0


def logit_scale(fields: Mapping[str, Any], keys: Keys) -> float:
    if keys.logit_divisor is not None:
        return 1.0 / number(fields, keys.logit_divisor)
    return optional_number(fields, keys.logit_scale) or 1.0


def global_rope(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields with the rotary embedding of layers without a window, where there are two."""
    told = fields.get("rope_parameters")
    if not isinstance(told, dict) or "full_attention" not in told:
        return fields
    return {**fields, "rope_parameters": told["full_attention"]}


def local_rope(fields: Mapping[str, Any], keys: Keys) -> Mapping[str, Any] | None:
    """The fields with the rotary embedding of layers with a window; None: it is that of all."""
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
    window, kinds = fields["sliding_window"], fields["layer_types"]
    if family.windowed in ("upper", "asked") and not flag(fields, "use_sliding_window"):
        window = None
    if kinds is None:
        names = {True: "sliding_attention", False: "full_attention"}
        has_any = window is not None
        kinds = [names[has_any and w] for w in windowed_layers(fields, family, rotates)]
    if not isinstance(kinds, list) or len(kinds) != len(rotates):
        raise ValueError(
            f"layer_types = {kinds!r} is no list of {len(rotates)}, one for each layer"
        )
    return tuple(layer_window(kind, window) for kind in kinds)


def windowed_layers(
    fields: Mapping[str, Any], family: Family, rotates: tuple[bool, ...]
) -> list[bool]:
    """Which layers have the window if there is one, by the family's own rule."""
    if family.windowed == "upper":
        first = natural(fields, "max_window_layers")
        return [i >= first for i in range(len(rotates))]
    if family.windowed == "unrotated":
        is_used = flag(fields, "use_sliding_window")
        return [is_used and not rotating for rotating in rotates]
    if family.windowed == "pattern":
        every = positive(fields, "sliding_window_pattern") if fields["sliding_window"] else 1
        return [(i + 1) % every != 0 for i in range(len(rotates))]
    return [family.windowed in ("all", "asked")] * len(rotates)


def layer_window(kind: Any, window: Any) -> int | None:
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise ValueError(
            f"layer type {kind!r} is not supported: full_attention and sliding_attention are"
        )
    if not is_int(window) or not 1 <= window <= MAX_SIZE:
        raise ValueError(f"a layer has sliding_attention, and the sliding_window is {window!r}")
    return int(window)


def named_to_rotate(fields: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether a layer has rotary embedding, by layer, as the config names them."""
    num_layers = positive(fields, "num_hidden_layers", MAX_LAYERS)
    layers = fields["no_rope_layers"]  # 1 means rotary embedding, despite the name
    if layers is None and "no_rope_layer_interval" in fields:
        interval = positive(fields, "no_rope_layer_interval")
        layers = [(i + 1) % interval for i in range(num_layers)]
    if layers is None:
        return (True,) * num_layers
    if not isinstance(layers, list) or len(layers) < num_layers:
        raise ValueError(
            f"no_rope_layers = {layers!r} is no list of {num_layers}, one for each layer"
        )
    return tuple(bool(x) for x in layers[:num_layers])


def either(fixed: bool | None, fields: Mapping[str, Any], key: str) -> bool:
    return flag(fields, key) if fixed is None else fixed


def flag(fields: Mapping[str, Any], key: str) -> bool:
    value = fields[key]
    if not isinstance(value, bool):
        raise ValueError(f"{key} = {value!r} must be true or false")
    return value


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
    """Every tensor that a checkpoint must hold, by its Hugging Face name."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    layers = {has: layer_shapes(config, has) for has in (False, True)}
    for i in range(config.num_layers):
        layer = layers[config.has_experts(i)]
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def layer_shapes(config: DecoderConfig, has_experts: bool) -> dict[str, tuple[int, ...]]:
    hidden, inner, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * D, config.num_kv_heads * D
    qkv, gate_up = [q, kv, kv], [inner, inner]
    qkv = [sum(qkv)] if config.family.fuses_qkv else qkv
    gate_up = [sum(gate_up)] if config.family.fuses_gate_up else gate_up
    linears = dict[str, tuple[int, int, bool]]()  # name -> output width, input width, has a bias
    for name, out in zip(config.qkv_names, qkv, strict=True):
        linears[name] = out, hidden, config.qkv_bias
    linears["self_attn.o_proj"] = hidden, q, config.out_bias
    if config.mixture is not None and has_experts:
        for name, (out, width) in config.mixture.shapes(hidden):
            linears[name] = out, width, False
    else:
        for name, out in zip(config.gate_up_names, gate_up, strict=True):
            linears[name] = out, hidden, config.mlp_bias
        linears["mlp.down_proj"] = hidden, inner, config.mlp_bias
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": (hidden,) for n in config.norm_names}
    for part, width in zip("qk", config.qk_norm_widths or (), strict=False):
        shapes[f"self_attn.{part}_norm.weight"] = (width,)
    for name, (out, width, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (out, width)
        if has_bias:
            shapes[f"{name}.bias"] = (out,)
    return shapes
