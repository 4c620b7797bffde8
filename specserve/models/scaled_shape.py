"""The config.json of a small model's text at a large model's cost. Does not import torch.

`specserve.models.scaling` says how its weights are made.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from specserve.errors import ConfigError
from specserve.models import decoder_config
from specserve.models.decoder_config import DecoderConfig, load_config
from specserve.models.eagle_config import (
    LLAMA,
    EagleConfig,
    load_eagle_config,
    names_head,
    parts,
)
from specserve.models.folder import SCALED, read_json
from specserve.models.shapes import SHAPES, shape_config

NOTE = (
    "a demo: the source's function, padded to the cost of a larger shape. Its speed is that of "
    "the shape, its words and its acceptance of drafts are the source's, as far as its dtype goes"
)
DRAFT_VOCAB = 32_000  # tokens that a head knows; published ones mostly have as many


class Sizes(NamedTuple):
    """A model and the larger one that is made of it, whose config.json has the fields."""

    small: DecoderConfig
    large: DecoderConfig
    fields: dict[str, Any]


class HeadSizes(NamedTuple):
    """As `Sizes`, of an EAGLE-3 head."""

    small: EagleConfig
    large: EagleConfig


def sizes(source: Path, shape: str, dtype: str, name: str) -> Sizes:
    """ConfigError if the source cannot be scaled to the shape: a name in SHAPES, or a folder with a
    config.json. `dtype` is torch's name of that of the weights, `name` what the source is called.
    """
    written = read_json(source / "config.json")
    if names_head(written):
        raise ConfigError(
            f"{source}: an EAGLE-3 head, and heads are scaled with the demo only (model.demo_cost);"
            " take its target, or a draft model"
        )
    small, like = load_config(source), read_shape(shape)
    refuse_unfit(source, small, "Qwen3ForCausalLM")
    refuse_smaller(source, small, shape, like)
    fields = scaled_fields(written, small, like, dtype)
    fields[SCALED] = {"source": name, "like": shape_name(shape), "note": NOTE}
    return Sizes(small, decoder_config.parse(fields), fields)


def head_sizes(source: Path, shape: str) -> HeadSizes:
    """As `sizes`, of an EAGLE-3 head; the shape is its target's."""
    small, like = load_eagle_config(source), read_shape(shape)
    refuse_unfit(source, small.layers, LLAMA)
    refuse_unfit_head(source, small)
    refuse_smaller(source, small.layers, shape, like)
    _, of_layers = parts(read_json(source / "config.json"))
    large = structs.replace(
        small,
        layers=decoder_config.parse(of_layers | size_fields(small.layers, like)),
        target_hidden_size=like.hidden_size,
        draft_vocab_size=DRAFT_VOCAB,
    )
    return HeadSizes(small, large)


def read_shape(shape: str) -> DecoderConfig:
    if shape in SHAPES:
        return shape_config(shape)
    if Path(shape, "config.json").exists():
        return load_config(Path(shape))
    raise ConfigError(
        f"--like {shape}: neither a known shape nor a folder with a config.json; known are "
        f"{', '.join(SHAPES)}"
    )


def shape_name(shape: str) -> str:
    return shape if shape in SHAPES else Path(shape).resolve().name


def refuse_unfit(source: Path, small: DecoderConfig, architecture: str) -> None:
    if small.quantization is not None:
        raise ConfigError(
            f"{source}: quantized already ({small.quantization.words}); take the model that is not "
            "quantized"
        )
    reasons = {
        f"it is a {small.architecture}": small.architecture != architecture,
        f"it has {small.num_kv_heads} KV heads for {small.num_heads} heads": (
            small.num_kv_heads != small.num_heads
        ),
        "its attention has biases": small.qkv_bias,
        "its MLP has biases": small.mlp_bias,
        "it has sliding windows": any(window is not None for window in small.windows),
        "its rms_norm_eps is 0": small.norm_eps == 0,
    }
    wanted = (
        f"a {architecture} with as many KV heads as heads, without biases and windows, and with an "
        "rms_norm_eps above 0"
    )
    refuse(source, reasons, wanted)


def refuse_unfit_head(source: Path, small: EagleConfig) -> None:
    reasons = {
        f"it has {small.layers.num_layers} layers": small.layers.num_layers != 1,
        "its hidden size is not its target's": small.target_hidden_size != small.layers.hidden_size,
        f"it knows {small.draft_vocab_size} tokens": small.draft_vocab_size > DRAFT_VOCAB,
    }
    wanted = f"a head with one layer, its target's hidden size and at most {DRAFT_VOCAB} tokens"
    refuse(source, reasons, wanted)


def refuse(source: Path, reasons: Mapping[str, bool], wanted: str) -> None:
    for reason, is_so in reasons.items():
        if is_so:
            raise ConfigError(f"{source}: cannot be scaled: {reason}; take {wanted}")


def refuse_smaller(source: Path, small: DecoderConfig, shape: str, like: DecoderConfig) -> None:
    sizes = {
        "layers": (small.num_layers, like.num_layers),
        "hidden size": (small.hidden_size, like.hidden_size),
        "MLP size": (small.intermediate_size, mlp_size(like)),
        "KV heads": (small.num_kv_heads, like.num_kv_heads),
        "head size": (small.head_dim, like.head_dim),
        "vocabulary": (small.vocab_size, like.vocab_size),
    }
    for name, (has, room) in sizes.items():
        if has > room:
            raise ConfigError(
                f"{source}: {name}: {has}, and {shape} has only {room}; take a larger shape or a "
                "smaller source"
            )
    if like.head_dim % small.head_dim:
        raise ConfigError(
            f"{source}: head size: {shape} has {like.head_dim}, no multiple of {small.head_dim}; "
            "take a shape whose head size is one"
        )
    if like.vocab_size > small.vocab_size and like.hidden_size == small.hidden_size:
        raise ConfigError(
            f"{source}: hidden size: {small.hidden_size} as in {shape}, which leaves no dimension "
            f"to tell its {like.vocab_size - small.vocab_size} added tokens by; take a shape with "
            f"a larger hidden size, or one with a vocabulary of {small.vocab_size}"
        )


def mlp_size(like: DecoderConfig) -> int:
    """Of every layer's MLP, an expert's included."""
    if like.mixture is None:
        return like.intermediate_size
    both = {True: like.mixture.width, False: like.intermediate_size}
    return min(both[has_experts] for has_experts in like.mixture.layers)


def scaled_fields(
    fields: Mapping[str, Any], small: DecoderConfig, like: DecoderConfig, dtype: str
) -> dict[str, Any]:
    """The source's config.json with the sizes of the shape."""
    kept = {key: value for key, value in fields.items() if key != "torch_dtype"}
    return (
        kept
        | mixture_fields(like)
        | size_fields(small, like)
        | {
            "num_hidden_layers": like.num_layers,
            "layer_types": ["full_attention"] * like.num_layers,
            "tie_word_embeddings": like.tied,
            "dtype": dtype,
        }
    )


def size_fields(small: DecoderConfig, like: DecoderConfig) -> dict[str, Any]:
    return {
        "hidden_size": like.hidden_size,
        "intermediate_size": like.intermediate_size,
        "num_attention_heads": like.num_heads,
        "num_key_value_heads": like.num_kv_heads,
        "head_dim": like.head_dim,
        "vocab_size": like.vocab_size,
        "rms_norm_eps": small.norm_eps * small.hidden_size / like.hidden_size,
    }


def mixture_fields(like: DecoderConfig) -> dict[str, Any]:
    """Of the experts: those of a row have weights with the sum 1, as each computes the source's
    MLP.
    """
    mixture = like.mixture
    if mixture is None:
        return {}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.num_active,
        "moe_intermediate_size": mixture.width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, has_experts in enumerate(mixture.layers) if not has_experts],
    }
