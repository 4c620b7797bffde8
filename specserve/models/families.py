"""Which models the decoder can be, and what a config.json says of one's shape."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from transformers import CONFIG_MAPPING

from specserve.models.rotary import frequencies

MAX_HEAD_DIM = 512  # of the kernels: MAX_D in attention.cpp


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """How a family's code departs from its config; None leaves the matter to the config."""

    model_type: str
    qkv_bias: bool | None = None  # None: attention_bias
    out_bias: bool | None = None  # None: attention_bias
    mlp_bias: bool | None = None  # None: mlp_bias
    qk_norm: bool = False
    windowed: bool = False  # without layer_types, sliding_window holds for all layers


# SmolLM and SmolLM2 are LlamaForCausalLM.
FAMILIES = {
    "LlamaForCausalLM": Family(model_type="llama"),
    "MistralForCausalLM": Family(
        model_type="mistral", qkv_bias=False, out_bias=False, mlp_bias=False, windowed=True
    ),
    "Qwen2ForCausalLM": Family(model_type="qwen2", qkv_bias=True, out_bias=False, mlp_bias=False),
    "Qwen3ForCausalLM": Family(model_type="qwen3", mlp_bias=False, qk_norm=True),
    "SmolLM3ForCausalLM": Family(model_type="smollm3"),
}


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the decoder knows of a model besides its weights."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    tied: bool  # the head is the embedding table, unless the checkpoint has one of its own
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # by layer; None sees everything
    rope: tuple[bool, ...]  # by layer; False does not rotate
    frequencies: tuple[float, ...]  # D/2 radians a position
    rope_factor: float  # of all cosines and sines


def parse(fields: dict[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes; ValueError says what cannot be served, and why."""
    architecture, family = find_family(fields)
    refuse_quantized(fields)
    # Not AutoConfig, which would look at auto_map: the table alone decides which class reads this.
    config = CONFIG_MAPPING[family.model_type].from_dict(fields)
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act = {config.hidden_act!r} is not supported: only 'silu' is")
    heads, kv_heads, head_dim = head_shape(config)
    inverse, factor = frequencies(config, head_dim)
    return DecoderConfig(
        architecture=architecture,
        num_layers=positive(config, "num_hidden_layers"),
        hidden_size=positive(config, "hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=positive(config, "intermediate_size"),
        vocab_size=positive(config, "vocab_size"),
        max_positions=positive(config, "max_position_embeddings"),
        rms_eps=norm_eps(config),
        tied=config.tie_word_embeddings,
        qkv_bias=either(family.qkv_bias, config, "attention_bias"),
        out_bias=either(family.out_bias, config, "attention_bias"),
        mlp_bias=either(family.mlp_bias, config, "mlp_bias"),
        qk_norm=family.qk_norm,
        windows=windows(config, family),
        rope=rotating_layers(config),
        frequencies=tuple(inverse.tolist()),
        rope_factor=factor,
    )


def find_family(fields: Mapping[str, Any]) -> tuple[str, Family]:
    named = fields.get("architectures") or ["none"]
    if isinstance(named, list) and isinstance(named[0], str) and named[0] in FAMILIES:
        return named[0], FAMILIES[named[0]]
    raise ValueError(f"architectures = {named!r} is not supported: {', '.join(FAMILIES)} are")


def refuse_quantized(fields: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        if fields.get(key):
            raise ValueError(
                f"{key} is set, but quantized weights are not supported: bf16, fp16 and fp32 are"
            )


def head_shape(config: Any) -> tuple[int, int, int]:
    """Query heads, KV heads, head size."""
    heads = positive(config, "num_attention_heads")
    kv_heads = positive(config, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim = {head_dim} is not supported: rotary embedding needs pairs")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim = {head_dim} is not supported: at most {MAX_HEAD_DIM} is")
    return heads, kv_heads, head_dim


def norm_eps(config: Any) -> float:
    eps = config.rms_norm_eps
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise ValueError(f"rms_norm_eps = {eps!r} must be a finite number, 0 or more")
    return float(eps)


def windows(config: Any, family: Family) -> tuple[int | None, ...]:
    num_layers: int = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        is_windowed = family.windowed and window is not None
        types = ["sliding_attention" if is_windowed else "full_attention"] * num_layers
    return tuple(layer_window(kind, window) for kind in types)


def layer_window(kind: str, window: int | None) -> int | None:
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise ValueError(
            f"layer type {kind!r} is not supported: full_attention and sliding_attention are"
        )
    if window is None or window < 1:
        raise ValueError(f"a layer has sliding_attention, and the sliding_window is {window}")
    return window


def rotating_layers(config: Any) -> tuple[bool, ...]:
    num_layers: int = config.num_hidden_layers
    layers = getattr(config, "no_rope_layers", None)  # 1 rotates, whatever the name says
    if layers is None:
        return (True,) * num_layers
    if len(layers) < num_layers:
        raise ValueError(f"no_rope_layers has {len(layers)} entries, fewer than there are layers")
    return tuple(bool(x) for x in layers[:num_layers])


def either(fixed: bool | None, config: Any, key: str) -> bool:
    return bool(getattr(config, key, False)) if fixed is None else fixed


def positive(config: Any, key: str) -> int:
    value = getattr(config, key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} = {value!r} must be at least 1")
    return value


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
    linears = {  # name -> output width, input width, has a bias
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.out_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
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
