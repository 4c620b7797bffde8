"""A small model's text at a large model's cost: its checkpoint, written in a larger shape.

Real acceptance of drafts needs a trained model, real cost a large one. Added parts compute, and
their outputs are multiplied by zero:

* The residual stream is padded with zeros. RMSNorm divides by sqrt(mean(x^2) + eps), and the mean
  falls by h0/h: so eps falls as much, and the norms' weights fall by its root.
* Added heads, MLP units and layers have random input weights and zero output weights. The source's
  head j is the first query head of KV group j, and the others of the group read its KV.
* Pair i of a rotary head of d0 becomes pair i*d/d0 of one of d, where the frequency is the same.
  q/k norms have the same eps as all others: s = sqrt(h0*d / (h*d0)) on q and k makes it right for
  them. That leaves each sqrt(d/d0) too long, and scores are divided by sqrt(d): k's norm takes
  back the sqrt(d/d0) that remains of both.
* Added tokens must not win. A dimension of the padding holds a constant, which no layer reads and
  the final norm lets through, and there the head has a very negative number for added tokens.

The result is a Qwen3ForCausalLM in any shape: its q/k norms cost next to nothing.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models import families
from specserve.models.checkpoint import Checkpoint, unquantized
from specserve.models.families import DecoderConfig, load_config
from specserve.models.folder import SCALED, name_of, read_json, resolve
from specserve.models.loader import DTYPES, EMBEDDING, HEAD
from specserve.models.rotary import frequencies
from specserve.models.weight_files import INDEX
from specserve.models.writing import SHARD_BYTES, copy_companions, split, write_json
from specserve_bench import outputs
from specserve_bench.shapes import SHAPES, shape_config

NORM = "model.norm.weight"
NOTE = (
    "a demo: the source's function, padded to the cost of a larger shape. Its speed is that of "
    "the shape, its words and its acceptance of drafts are the source's, as far as its dtype goes"
)
RANDOM = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # what added parts read with
STD = 0.02
CONSTANT_SHARE = 2.0**-40  # of the constant's square in mean(x^2) + eps, at most
SILENCE = 1e10  # over RMS(hidden): how far below zero the logit of an added token is


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="specserve bench scale-model",
        description="Write a small model's function at the cost of a larger shape.",
    )
    parser.add_argument("source", metavar="SRC", help="a Qwen3 with as many KV heads as heads")
    parser.add_argument("target", metavar="DST", type=Path, help="a folder that is yet to be")
    known = ", ".join(SHAPES)
    parser.add_argument(
        "--like", required=True, metavar="NAME", help=f"{known}, or a folder with a config.json"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--seed", type=seed, default=0, help="of what is added; default: 0")
    args = parser.parse_args(argv)
    outputs.check_parent("DST", args.target)
    source = resolve(args.source)
    dtype, name = DTYPES[args.dtype], name_of(args.source)
    try:
        scale_model(source, args.target, args.like, dtype=dtype, seed=args.seed, name=name)
    except OSError as e:
        raise ConfigError(f"{e.filename or args.target}: cannot be written ({e.strerror})") from e
    rounded = "" if args.dtype == "fp32" else f", as far as {args.dtype} goes"
    print(f"{args.target}: computes what {name} does{rounded}, at the cost of {args.like}")
    return 0


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number below 2^63")
    return int(text)


def scale_model(
    source: Path,
    target: Path,
    shape: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    name: str | None = None,
) -> None:
    """Write to `target` a checkpoint of a shape that computes the function of `source`.

    `shape` is a name in SHAPES or a folder with a config.json, `name` what the source is called
    where that is not its folder's. Same arguments, same bytes.
    """
    refuse_existing(target)
    small, like = load_config(source), read_shape(shape)
    refuse_unfit(source, small)
    refuse_smaller(source, small, shape, like)
    checkpoint = open_checkpoint(source, small)
    if like.tied and HEAD in checkpoint:
        raise ConfigError(
            f"{source}: it has a head of its own, and in {shape} the head is the embedding; take "
            "an untied shape"
        )
    fields = scaled_fields(read_json(source / "config.json"), small, like, dtype)
    source_name = name or source.resolve().name
    fields[SCALED] = {"source": source_name, "like": shape_name(shape), "note": NOTE}
    large = families.parse(fields)
    refuse_other_rotation(source, small, large)

    target.mkdir(parents=True, exist_ok=True)
    copy_companions(source, target)
    write_shards(Scaling(checkpoint, small, large, dtype, seed), target, shard_bytes)
    # Last: a folder without a config.json is no model.
    write_json(target / "config.json", fields)


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


def refuse_existing(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(
            f"{target}: exists, and is no empty folder; remove it or name another one"
        )


def refuse_unfit(source: Path, small: DecoderConfig) -> None:
    if small.quantization is not None:
        raise ConfigError(
            f"{source}: quantized already ({small.quantization.words}); take the model that is not "
            "quantized"
        )
    reasons = {
        f"it is a {small.architecture}": small.architecture != "Qwen3ForCausalLM",
        f"it has {small.num_kv_heads} KV heads for {small.num_heads} heads": (
            small.num_kv_heads != small.num_heads
        ),
        "its attention has biases": small.qkv_bias,
        "it has sliding windows": any(window is not None for window in small.windows),
        "its rms_norm_eps is 0": small.rms_eps == 0,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ConfigError(
                f"{source}: cannot be scaled: {reason}; take a Qwen3ForCausalLM with as many KV "
                "heads as heads, without biases and windows, and with an rms_norm_eps above 0"
            )


def refuse_smaller(source: Path, small: DecoderConfig, shape: str, like: DecoderConfig) -> None:
    sizes = {
        "layers": (small.num_layers, like.num_layers),
        "hidden size": (small.hidden_size, like.hidden_size),
        "MLP size": (small.intermediate_size, like.intermediate_size),
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


def refuse_other_rotation(source: Path, small: DecoderConfig, large: DecoderConfig) -> None:
    """Refuse rotary frequencies that are not theta^(-2i/D), such as yarn's."""
    stride = large.head_dim // small.head_dim
    of_small, of_large = (frequencies(c.rope_parameters, c.head_dim) for c in (small, large))
    if not torch.equal(of_large[::stride], of_small):
        raise ConfigError(
            f"{source}: cannot be scaled: its rope_parameters turn heads of {large.head_dim} "
            f"otherwise than its own of {small.head_dim}; take a shape with its head size"
        )


def open_checkpoint(source: Path, small: DecoderConfig) -> Checkpoint:
    checkpoint = Checkpoint(source)
    shapes = families.tensor_shapes(small)
    if HEAD in checkpoint:  # it counts even where config.json calls it tied
        shapes[HEAD] = shapes[EMBEDDING]
    checkpoint.check(unquantized(shapes))
    return checkpoint


def scaled_fields(
    fields: Mapping[str, Any], small: DecoderConfig, like: DecoderConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """The source's config.json with the sizes of the shape."""
    kept = {key: value for key, value in fields.items() if key != "torch_dtype"}
    return kept | {
        "hidden_size": like.hidden_size,
        "intermediate_size": like.intermediate_size,
        "num_hidden_layers": like.num_layers,
        "layer_types": ["full_attention"] * like.num_layers,
        "num_attention_heads": like.num_heads,
        "num_key_value_heads": like.num_kv_heads,
        "head_dim": like.head_dim,
        "vocab_size": like.vocab_size,
        "tie_word_embeddings": like.tied,
        "rms_norm_eps": small.rms_eps * small.hidden_size / like.hidden_size,
        "dtype": str(dtype).removeprefix("torch."),
    }


class Axis(NamedTuple):
    """Of a tensor: how many entries the source has, the shape has, and how far apart they go."""

    num: int
    size: int
    stride: int = 1

    @property
    def place(self) -> slice:
        return slice(0, self.num * self.stride, self.stride)


class Scaling:
    """The tensors of the larger model, one at a time; the bytes depend on the order of calls."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        small: DecoderConfig,
        large: DecoderConfig,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        self.checkpoint, self.small, self.large, self.dtype = checkpoint, small, large, dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.source_shapes = families.tensor_shapes(small)
        self.source_shapes[HEAD] = self.source_shapes[EMBEDDING]
        self.shapes = families.tensor_shapes(large)
        self.axes, self.factors = axes(small, large), factors(small, large)

    def tensor(self, name: str) -> Tensor:
        out = self.added(name)
        given = self.given(name)
        if given is not None:
            layout = self.axes[part(name)]
            view = out.view([axis.size for axis in layout])
            view[layout[0].place] = 0  # the source's own heads and units read the source's alone
            sizes = [axis.num for axis in layout]
            view[tuple(axis.place for axis in layout)] = given.view(sizes).to(self.dtype)
        if self.large.vocab_size > self.small.vocab_size:
            self.silence(name, out)
        return out

    def added(self, name: str) -> Tensor:
        """The entries of a tensor that the source does not have."""
        out = torch.zeros(self.shapes[name], dtype=self.dtype)
        if part(name) in RANDOM:
            return out.normal_(0, STD, generator=self.generator)
        is_norm_of_added_layer = out.dim() == 1 and name not in self.source_shapes
        return out.fill_(1) if is_norm_of_added_layer else out

    def given(self, name: str) -> Tensor | None:
        """The source's tensor, in float32 and scaled; None for an added layer."""
        if name == HEAD and HEAD not in self.checkpoint:
            name = EMBEDDING
        if name not in self.source_shapes:
            return None
        out = torch.empty(self.source_shapes[name])
        self.checkpoint.read(name, out)
        return out.mul_(self.factors.get(part(name), 1.0))

    def silence(self, name: str, out: Tensor) -> None:
        """Keep added tokens from winning: the constant is a, and the head meets it as a/RMS.

        The result's h * (mean(x^2) + eps) is at least h0 * the source's eps, and a^2 a fixed share
        of that. In a tied table a adds a^2/RMS as well, to all logits of the source's alike.
        """
        known, at = self.small.vocab_size, self.small.hidden_size
        a = math.sqrt(CONSTANT_SHARE * self.small.rms_eps * self.small.hidden_size)
        if name == EMBEDDING:
            out[:known, at] = a
        if name == (EMBEDDING if self.large.tied else HEAD):
            out[known:, at] = -SILENCE / a
        if name == NORM:
            out[at] = 1


def part(name: str) -> str:
    """`q_proj` of model.layers.0.self_attn.q_proj.weight."""
    return name.split(".")[-2]


def axes(small: DecoderConfig, large: DecoderConfig) -> dict[str, tuple[Axis, ...]]:
    """How a linear map or a norm is laid out, by its name."""
    hidden = Axis(small.hidden_size, large.hidden_size)
    mlp = Axis(small.intermediate_size, large.intermediate_size)
    vocab = Axis(small.vocab_size, large.vocab_size)
    kv_heads = Axis(small.num_kv_heads, large.num_kv_heads)
    heads = Axis(small.num_heads, large.num_heads, large.num_heads // large.num_kv_heads)
    # Pairs are (i, i + D/2): a stride takes both halves to where they belong.
    dims = Axis(small.head_dim, large.head_dim, large.head_dim // small.head_dim)
    return {
        "embed_tokens": (vocab, hidden),
        "lm_head": (vocab, hidden),
        "norm": (hidden,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "q_proj": (heads, dims, hidden),
        "k_proj": (kv_heads, dims, hidden),
        "v_proj": (kv_heads, dims, hidden),
        "q_norm": (dims,),
        "k_norm": (dims,),
        "o_proj": (hidden, heads, dims),
        "gate_proj": (mlp, hidden),
        "up_proj": (mlp, hidden),
        "down_proj": (hidden, mlp),
    }


def factors(small: DecoderConfig, large: DecoderConfig) -> dict[str, float]:
    width, head = small.hidden_size / large.hidden_size, small.head_dim / large.head_dim
    norm, qk = math.sqrt(width), math.sqrt(width / head)
    return {
        "norm": norm,
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
        "q_proj": qk,
        "k_proj": qk,
        "k_norm": math.sqrt(head),
    }


def write_shards(scaling: Scaling, target: Path, shard_bytes: int) -> None:
    """Write shards one after the other, so that memory holds one."""
    sizes = {name: math.prod(s) * scaling.dtype.itemsize for name, s in scaling.shapes.items()}
    shards = split(sizes, shard_bytes)
    console = Console(stderr=True)
    for file, names in track(
        shards.items(), f"writing {target.name}", console=console, disable=not console.is_terminal
    ):
        tensors = {name: scaling.tensor(name) for name in names}
        save_file(tensors, target / file, metadata={"format": "pt"})
        del tensors  # before the next are made
    if len(shards) > 1:
        weight_map = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(target / INDEX, index)
