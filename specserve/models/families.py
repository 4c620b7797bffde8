"""The supported model families, and the decoder's shape as config.json describes it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from specserve.errors import ConfigError
from specserve.models import rope
from specserve.models.folder import read_json
from specserve.models.quantized import config as quantized
from specserve.models.rope import RopeParameters
from specserve.models.shape import Shape

MAX_HEAD_DIM = 512  # of the kernels: MAX_D in attention.cpp
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1
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


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's code fixes, whatever its config says; None: the config's value is taken."""

    defaults: Mapping[str, Any]
    qkv_bias: bool | None = None  # None: attention_bias
    out_bias: bool | None = None  # None: attention_bias
    mlp_bias: bool | None = None  # None: mlp_bias
    qk_norm: bool = False
    is_fused: bool = False  # the checkpoint has queries, keys and values in one map, and the MLP's
    rotates_a_share: bool = False  # of each head's dimensions, by partial_rotary_factor
    rope_names: Mapping[str, str] = {}  # its own for kinds of rotary embedding
    # Which layers have the sliding_window where there are no layer_types: those from
    # max_window_layers on, or those without rotary embedding, if use_sliding_window says so.
    windowed: Literal["none", "all", "upper", "unrotated"] = "none"


# SmolLM and SmolLM2 are LlamaForCausalLM.
FAMILIES = {
    "LlamaForCausalLM": Family(defaults=LLAMA),
    "MistralForCausalLM": Family(
        defaults=MISTRAL, qkv_bias=False, out_bias=False, mlp_bias=False, windowed="all"
    ),
    "Qwen2ForCausalLM": Family(
        defaults=QWEN2, qkv_bias=True, out_bias=False, mlp_bias=False, windowed="upper"
    ),
    "Qwen3ForCausalLM": Family(
        defaults=QWEN2 | {"head_dim": 128}, mlp_bias=False, qk_norm=True, windowed="upper"
    ),
    "SmolLM3ForCausalLM": Family(defaults=SMOLLM3, windowed="unrotated"),
    "Phi3ForCausalLM": Family(
        defaults=PHI3,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        is_fused=True,
        rotates_a_share=True,
        rope_names={"su": "longrope", "yarn": "longrope"},
        windowed="all",
    ),
}


class DecoderConfig(Shape, frozen=True, kw_only=True):
    """All that the decoder needs of a model besides its weights."""

    implementation = "native"
    rms_eps: float
    tied: bool  # the head is the embedding table, unless the checkpoint has one of its own
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    is_fused: bool  # as of Family
    windows: tuple[int | None, ...]  # by layer; None is full attention
    rope: tuple[bool, ...]  # by layer; whether it has rotary embedding
    rope_parameters: RopeParameters

    @property
    def qkv_names(self) -> list[str]:
        """Of a layer's maps to queries, keys and values."""
        parts = ["qkv"] if self.is_fused else ["q", "k", "v"]
        return [f"self_attn.{part}_proj" for part in parts]

    @property
    def gate_up_names(self) -> list[str]:
        parts = ["gate_up"] if self.is_fused else ["gate", "up"]
        return [f"mlp.{part}_proj" for part in parts]


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
    fields = {**family.defaults, **written}
    if fields["hidden_act"] != "silu":
        raise ValueError(f"hidden_act = {fields['hidden_act']!r} is not supported: only 'silu' is")
    heads, kv_heads, head_dim = head_shape(fields)
    max_positions, rotates = positive(fields, "max_position_embeddings"), rotating_layers(fields)
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
        rms_eps=norm_eps(fields),
        tied=flag(fields, "tie_word_embeddings"),
        qkv_bias=either(family.qkv_bias, fields, "attention_bias"),
        out_bias=either(family.out_bias, fields, "attention_bias"),
        mlp_bias=either(family.mlp_bias, fields, "mlp_bias"),
        qk_norm=family.qk_norm,
        is_fused=family.is_fused,
        windows=windows(fields, family, rotates),
        rope=rotates,
        rope_parameters=rope.parse(
            fields, max_positions, head_dim, family.rotates_a_share, family.rope_names
        ),
        quantization=quantized.parse(written),
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


def norm_eps(fields: Mapping[str, Any]) -> float:
    eps = fields["rms_norm_eps"]
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps <= 1:
        raise ValueError(f"rms_norm_eps = {eps!r} must be a number from 0 to 1")
    return float(eps)


def windows(
    fields: Mapping[str, Any], family: Family, rotates: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """The sliding window of each layer, in tokens; None is full attention."""
    window, kinds = fields["sliding_window"], fields["layer_types"]
    if family.windowed == "upper" and not flag(fields, "use_sliding_window"):
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
    return [family.windowed == "all"] * len(rotates)


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


def rotating_layers(fields: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether a layer has rotary embedding, by layer."""
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
    layer = layer_shapes(config)
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * D, config.num_kv_heads * D
    qkv, gate_up = [q, kv, kv], [inner, inner]
    if config.is_fused:
        qkv, gate_up = [sum(qkv)], [sum(gate_up)]
    linears = dict[str, tuple[int, int, bool]]()  # name -> output width, input width, has a bias
    for name, out in zip(config.qkv_names, qkv, strict=True):
        linears[name] = out, hidden, config.qkv_bias
    linears["self_attn.o_proj"] = hidden, q, config.out_bias
    for name, out in zip(config.gate_up_names, gate_up, strict=True):
        linears[name] = out, hidden, config.mlp_bias
    linears["mlp.down_proj"] = hidden, inner, config.mlp_bias
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
    for name, (out, width, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (out, width)
        if has_bias:
            shapes[f"{name}.bias"] = (out,)
    return shapes
