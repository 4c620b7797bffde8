"""A demo model padded to a larger model's compute: its config, and its file in the package.

`specserve_bench.demo.scaled_weights` makes its weights as they are read. Does not import torch.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from specserve.config import DEMO
from specserve.errors import ConfigError
from specserve.models import parse_config
from specserve.models.decoder_config import DecoderConfig
from specserve.models.eagle_config import LLAMA, EagleConfig, names_head, parts
from specserve.models.folder import SCALED, Scaled, read_json, refuse_transformers
from specserve.models.parse_config import load_config
from specserve.models.source import Folder, load_eagle_config

NOTE = (
    "a demo: the source model, padded to the compute of a larger shape. It is as fast as the "
    "shape. Text and accepted draft tokens match the source model, up to rounding of the dtype"
)
DRAFT_VOCAB = 32_000  # tokens of a head: the size that most published heads have
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
LLAMA3 = QWEN3 | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
}


def sizes_of(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int, is_tied: bool
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": is_tied,
    }


SHAPES: dict[str, dict[str, Any]] = {  # config.json of known models, and of draft models for them
    "qwen3-0.6b": QWEN3 | sizes_of(1024, 3072, 28, 16, 8, 128, True),
    "qwen3-0.6b-draft": QWEN3 | sizes_of(256, 1024, 1, 4, 4, 64, True),
    "llama-3.1-8b": LLAMA3 | sizes_of(4096, 14336, 32, 32, 8, 128, False),
    "llama-3.1-8b-draft": LLAMA3 | sizes_of(1024, 3072, 1, 8, 8, 128, True),
}


def shape_config(shape: str) -> DecoderConfig:
    return parse_config.parse(SHAPES[shape])


class ScaledSizes(NamedTuple):
    """A model and the larger one that is made of it, whose config.json has the fields."""

    small: DecoderConfig
    large: DecoderConfig
    fields: dict[str, Any]


class ScaledDemo:
    """The `MadeModel` that a file of the package names: a demo model and a shape."""

    def __init__(self, path: Path) -> None:
        self.path, self.recipe = path, msgspec.json.decode(path.read_bytes(), type=Recipe)
        self.source = source = Folder(DEMO / self.recipe.source)
        self.defaults, self.ends = source.defaults, source.ends
        self.tokenizer, self.check = source.tokenizer, source.check

    @cached_property
    def sizes(self) -> ScaledSizes:
        return scaled_sizes(self.source.path, self.recipe.like, "bfloat16", self.recipe.source)

    @property
    def is_head(self) -> bool:
        return names_head(read_json(self.source.path / "config.json"))

    def head_config(self) -> EagleConfig:
        return head_sizes(self.source.path, self.recipe.like)[1]

    def config(self) -> DecoderConfig:
        return self.sizes.large

    def shape(self, implementation: str) -> DecoderConfig:
        refuse_transformers(self.path, implementation)
        return self.config()

    def scaled(self) -> Scaled:
        return Scaled(self.recipe.source, self.recipe.like, NOTE)

    def identity(self) -> Iterator[bytes]:
        yield self.path.read_bytes()
        yield from self.source.identity()

    def tensors(self) -> Any:
        from specserve_bench.demo.scaled_weights import HeadTensors, ScaledTensors

        folder = self.source.path
        if self.is_head:
            return HeadTensors(folder, *head_sizes(folder, self.recipe.like))
        return ScaledTensors(folder, self.sizes.small, self.sizes.large)


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    made_by: str  # this module's ScaledDemo
    source: str  # a model of the package
    like: str  # the shape whose compute it has


def scaled_sizes(source: Path, shape: str, dtype: str, name: str) -> ScaledSizes:
    """ConfigError if the source cannot be scaled to the shape: a name in SHAPES, or a folder with a
    config.json. `dtype` is torch's name of that of the weights, `name` what the source is called.
    """
    written = read_json(source / "config.json")
    if names_head(written):
        raise ConfigError(
            f"{source}: an EAGLE-3 head. Heads are scaled with the demo models only "
            "(model.demo_compute). Name its target or a draft model."
        )
    small, like = load_config(source), read_shape(shape)
    refuse_unfit(source, small, "Qwen3ForCausalLM")
    refuse_smaller(source, small, shape, like)
    fields = scaled_fields(written, small, like, dtype)
    fields[SCALED] = {"source": name, "like": shape_name(shape), "note": NOTE}
    return ScaledSizes(small, parse_config.parse(fields), fields)


def head_sizes(source: Path, shape: str) -> tuple[EagleConfig, EagleConfig]:
    """As `scaled_sizes`, of an EAGLE-3 head; the shape is its target's."""
    small, like = load_eagle_config(source), read_shape(shape)
    refuse_unfit(source, small.layers, LLAMA)
    refuse_unfit_head(source, small)
    refuse_smaller(source, small.layers, shape, like)
    _, of_layers = parts(read_json(source / "config.json"))
    large = structs.replace(
        small,
        layers=parse_config.parse(of_layers | size_fields(small.layers, like)),
        target_hidden_size=like.hidden_size,
        draft_vocab_size=DRAFT_VOCAB,
    )
    return small, large


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
    """The size of every layer's MLP, or of an expert's."""
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
    """Fields of the experts. The weights of a row's experts add up to 1, because each computes the
    source's MLP.
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
