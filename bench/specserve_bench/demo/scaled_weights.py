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

* In a mixture of experts each expert has the source's MLP, and the weights of those that a row has
  add up to 1. Routers are random, and read what the source's MLP reads: so which experts a row has
  depends on its text, and differs from layer to layer.

The result is a Qwen3ForCausalLM, or a Qwen3MoeForCausalLM, in any shape: its q/k norms cost next to
nothing. An EAGLE-3 head is padded as well: `HeadTensors`.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models import tensor_shapes
from specserve.models.checkpoint import Checkpoint, unquantized
from specserve.models.decoder_config import DecoderConfig
from specserve.models.eagle_config import EagleConfig
from specserve.models.eagle_head import FUSE, OFFSETS, places, read_targets, shown_shapes
from specserve.models.reader import EMBEDDING, HEAD
from specserve.models.rotary import frequencies
from specserve.models.tensor_views import stored_shapes
from specserve.models.weight_files import Slice

DTYPE = torch.bfloat16  # of demos
RANDOM = ("q_proj", "k_proj", "v_proj", "gate", "gate_proj", "up_proj")  # added parts read by them
EXPERT = re.compile(r"experts\.\d+\.")
STD = 0.02
REST = -1  # of a tensor's size: an axis of an MLP is as wide as an expert or as a dense layer's
CONSTANT_SHARE = 2.0**-40  # of the constant's square in mean(x^2) + eps, at most
SILENCE = 1e10  # over RMS(hidden): how far below zero the logit of an added token is
HEAD_SILENCE = 1e20  # the same of a head: ten draft steps may divide the constant by 50 each
BLOCK = 1 << 20  # random numbers, which a tensor repeats: what they are costs nothing


def open_checkpoint(source: Path, small: DecoderConfig, large: DecoderConfig) -> Checkpoint:
    """ConfigError for weights that cannot be scaled."""
    checkpoint = Checkpoint(source)
    shapes = tensor_shapes.tensor_shapes(small)
    if HEAD in checkpoint:  # it counts even where config.json calls it tied
        shapes[HEAD] = shapes[EMBEDDING]
    checkpoint.check(unquantized(shapes))
    if large.tied and HEAD in checkpoint:
        raise ConfigError(
            f"{source}: it has a head of its own, and in the shape the head is the embedding; take "
            "an untied shape"
        )
    refuse_other_rotation(source, small, large)
    return checkpoint


def refuse_other_rotation(source: Path, small: DecoderConfig, large: DecoderConfig) -> None:
    """Refuse rotary frequencies that are not theta^(-2i/D), such as yarn's."""
    stride = large.head_dim // small.head_dim
    of_small, of_large = (frequencies(c.rope_parameters, c.head_dim) for c in (small, large))
    if not torch.equal(of_large[::stride], of_small):
        raise ConfigError(
            f"{source}: cannot be scaled: its rope_parameters turn heads of {large.head_dim} "
            f"otherwise than its own of {small.head_dim}; take a shape with its head size"
        )


class Axis(NamedTuple):
    """An axis of a tensor: entries of the source and of the shape, and their distance."""

    num: int
    size: int
    stride: int = 1

    @property
    def place(self) -> slice:
        return slice(0, self.num * self.stride, self.stride)


class ScaledTensors:
    """The larger model's tensors, made as they are read, with the interface of a safetensors file.

    The same arguments give the same bytes.
    """

    def __init__(
        self,
        source: Path,
        small: DecoderConfig,
        large: DecoderConfig,
        dtype: torch.dtype = DTYPE,
        seed: int = 0,
    ) -> None:
        """ConfigError for weights that cannot be scaled."""
        self.small, self.large = small, large
        self.checkpoint = open_checkpoint(source, small, large)
        self.dtype, self.seed = dtype, seed
        self.source_shapes = tensor_shapes.tensor_shapes(small)
        self.source_shapes[HEAD] = self.source_shapes[EMBEDDING]
        self.shapes = tensor_shapes.tensor_shapes(large)
        self.axes, self.factors = axes(small, large), factors(small, large)

    def keys(self) -> list[str]:
        return list(self.shapes)

    def get_slice(self, name: str) -> Slice:
        return Slice(self.shapes[name], "BF16" if self.dtype == torch.bfloat16 else "F32")

    def get_tensor(self, name: str) -> Tensor:
        out = self.added(name)
        given = self.given(name)
        if given is not None:
            put(given, out, self.axes[part(name)])
        if self.large.vocab_size > self.small.vocab_size:
            self.silence(name, out)
        return out

    def added(self, name: str) -> Tensor:
        """The entries of a tensor that the source does not have."""
        out = torch.zeros(self.shapes[name], dtype=self.dtype)
        if part(name) in RANDOM:
            return fill(out, self.seed ^ crc32(name.encode()))
        is_norm_of_added_layer = out.dim() == 1 and name not in self.source_shapes
        return out.fill_(1) if is_norm_of_added_layer else out

    def given(self, name: str) -> Tensor | None:
        """The source's tensor, in float32 and scaled; None for an added layer."""
        if name == HEAD and HEAD not in self.checkpoint:
            name = EMBEDDING
        name = EXPERT.sub("", name)
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
        a = constant(self.small)
        if name == EMBEDDING:
            out[:known, at] = a
        if name == (EMBEDDING if self.large.tied else HEAD):
            out[known:, at] = -SILENCE / a
        if name == "model.norm.weight":
            out[at] = 1


def fill(out: Tensor, seed: int) -> Tensor:
    """The same, with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.empty(BLOCK, dtype=out.dtype).normal_(0, STD, generator=generator)
    for piece in torch.split(out.view(-1), BLOCK):
        piece.copy_(block[: len(piece)])
    return out


def put(given: Tensor, out: Tensor, layout: Sequence[Axis]) -> None:
    """Write the source's tensor to its places; the source's heads and units read nothing else."""
    view = out.view([axis.size for axis in layout])
    view[layout[0].place] = 0
    sizes = [axis.num for axis in layout]
    view[tuple(axis.place for axis in layout)] = given.view(sizes).to(out.dtype)


def constant(small: DecoderConfig) -> float:
    """The constant in the padding of the larger model's residual."""
    return math.sqrt(CONSTANT_SHARE * small.norm_eps * small.hidden_size)


def part(name: str) -> str:
    """`q_proj` of model.layers.0.self_attn.q_proj.weight."""
    return name.split(".")[-2]


def axes(small: DecoderConfig, large: DecoderConfig) -> dict[str, tuple[Axis, ...]]:
    """How a linear map or a norm is laid out, by its name."""
    hidden = Axis(small.hidden_size, large.hidden_size)
    mlp = Axis(small.intermediate_size, REST)
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


class HeadTensors:
    """The tensors of a small model's EAGLE-3 head, padded as its target is.

    The first layers of the padded target are the source's, and so are the aux hidden states.

    * `fc` reads each aux hidden state, and the first layer's q/k/v read embedding and feature, side
      by side. Each of them is padded, and what is made of them is padded with zeros.
    * Without q/k norms, the queries make up for the sqrt(d/d0) that scores are divided by.
    * Added tokens must not win. The first tap has the target's constant, and `fc` hands it on to
      the feature. A norm divides it by the source's RMS, as it does with a dimension whose weight
      is 1: in each draft step again, if it norms features. Tokens are added under any ids that are
      left.
    """

    def __init__(self, source: Path, small: EagleConfig, large: EagleConfig) -> None:
        """ConfigError for weights that cannot be scaled."""
        refuse_other_rotation(source, small.layers, large.layers)
        self.small, self.checkpoint = small.layers, Checkpoint(source)
        self.num_known, self.axes = small.draft_vocab_size, head_axes(small, large)
        self.offsets = head_offsets(read_targets(self.checkpoint, small), large)
        self.source_shapes = head_shapes(self.checkpoint, small)
        self.shapes = head_shapes(self.checkpoint, large)
        self.checkpoint.check(unquantized(self.source_shapes))
        self.norm_factor = math.sqrt(small.layers.hidden_size / large.layers.hidden_size)
        self.query_factor = math.sqrt(large.layers.head_dim / small.layers.head_dim)

    def keys(self) -> list[str]:
        return [*self.shapes, OFFSETS]

    def get_slice(self, name: str) -> Slice:
        if name == OFFSETS:
            return Slice(tuple(self.offsets.shape), "I64")
        return Slice(self.shapes[name], "BF16")

    def get_tensor(self, name: str) -> Tensor:
        if name == OFFSETS:
            return self.offsets
        out = torch.zeros(self.shapes[name], dtype=DTYPE)
        if part(name) in RANDOM:
            fill(out, crc32(name.encode()))
        put(self.given(name), out, self.layout(name))
        self.silence(name, out)
        return out

    def given(self, name: str) -> Tensor:
        """The source's tensor, in float32 and scaled."""
        out = torch.empty(self.source_shapes[name])
        self.checkpoint.read(name, out)
        if out.dim() == 1:
            return out.mul_(self.norm_factor)
        return out.mul_(self.query_factor) if part(name) == "q_proj" else out

    def layout(self, name: str) -> tuple[Axis, ...]:
        if len(self.shapes[name]) > 1:
            return self.axes[part(name)]
        (hidden,) = self.axes["norm"]
        num = self.shapes[name][0] // hidden.size  # states that are normed together, else 1
        return Axis(num, num), hidden

    def silence(self, name: str, out: Tensor) -> None:
        """Keep added tokens from winning. No layer reads the constant."""
        at = self.small.hidden_size
        if out.dim() == 1:
            out[at] = self.norm_factor
        if name == FUSE:
            out[at, at] = 1
        if name == HEAD:
            out[self.num_known :, at] = -HEAD_SILENCE / constant(self.small)


def head_axes(small: EagleConfig, large: EagleConfig) -> dict[str, tuple[Axis, ...]]:
    """As `axes`."""
    layers = axes(small.layers, large.layers)
    (hidden,), num_aux_layers = layers["norm"], len(small.aux_layer_ids)
    inputs = {
        name: (*layers[name][:-1], Axis(2, 2), hidden) for name in ("q_proj", "k_proj", "v_proj")
    }
    return (
        layers
        | inputs
        | {
            "fc": (hidden, Axis(num_aux_layers, num_aux_layers), hidden),
            "lm_head": (Axis(small.draft_vocab_size, large.draft_vocab_size), hidden),
        }
    )


def head_shapes(checkpoint: Checkpoint, config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a head that shares its target's embedding, under the checkpoint's names."""
    shown = shown_shapes(config)
    del shown[EMBEDDING]
    return stored_shapes(shown, places(checkpoint, config, shown))


def head_offsets(known: Tensor, large: EagleConfig) -> Tensor:
    """How far the target's ids are from the head's, with those of added tokens."""
    is_left = torch.ones(large.layers.vocab_size, dtype=torch.bool)
    is_left[known] = False
    num_added = large.draft_vocab_size - len(known)
    added = is_left.nonzero()[len(is_left) - len(known) - num_added :, 0]
    return torch.cat([known, added]) - torch.arange(large.draft_vocab_size)
