"""A small model's EAGLE-3 head at a larger one's cost, as `specserve.models.scaling` has a model.

Its target is the scaled one, whose first layers, and so its taps, are the source's:

* `fc` reads each tap, and the first layer's q/k/v read embedding and feature, side by side. Each of
  them is padded, and what is made of them is padded with zeros.
* Without q/k norms, the queries make up for the sqrt(d/d0) that scores are divided by.
* Added tokens must not win. The first tap has the target's constant, and `fc` hands it on to the
  feature. A norm divides it by the source's RMS, as it does with a dimension whose weight is 1: in
  each draft step again, if it norms features. Tokens are added under any ids that are left.
"""

import math
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from specserve.models.checkpoint import Checkpoint, unquantized
from specserve.models.eagle_config import EagleConfig
from specserve.models.eagle_loader import (
    FUSE,
    OFFSETS,
    places,
    read_targets,
    shown_shapes,
)
from specserve.models.gguf.tensors import Slice
from specserve.models.loader import EMBEDDING, HEAD
from specserve.models.places import stored_shapes
from specserve.models.scaled_shape import HeadSizes
from specserve.models.scaling import (
    DTYPE,
    RANDOM,
    Axis,
    axes,
    constant,
    fill,
    part,
    put,
    refuse_other_rotation,
)

SILENCE = 1e20  # as of `scaling`, and ten draft steps may divide the constant by 50 each


class HeadTensors:
    """The tensors of a head, made as they are read, in the way that safetensors gives a file's."""

    def __init__(self, source: Path, sizes: HeadSizes) -> None:
        """ConfigError for weights that cannot be scaled."""
        small, large = sizes.small, sizes.large
        refuse_other_rotation(source, small.layers, large.layers)
        self.small, self.checkpoint = small.layers, Checkpoint(source)
        self.num_known, self.axes = small.draft_vocab_size, head_axes(small, large)
        self.offsets = offsets(read_targets(self.checkpoint, small), large)
        self.source_shapes = shapes(self.checkpoint, small)
        self.shapes = shapes(self.checkpoint, large)
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
        num = self.shapes[name][0] // hidden.size  # of taps that are normed together, else 1
        return Axis(num, num), hidden

    def silence(self, name: str, out: Tensor) -> None:
        """Keep added tokens from winning. No layer reads the constant."""
        at = self.small.hidden_size
        if out.dim() == 1:
            out[at] = self.norm_factor
        if name == FUSE:
            out[at, at] = 1
        if name == HEAD:
            out[self.num_known :, at] = -SILENCE / constant(self.small)


def head_axes(small: EagleConfig, large: EagleConfig) -> dict[str, tuple[Axis, ...]]:
    """As `axes`."""
    layers = axes(small.layers, large.layers)
    (hidden,), num_taps = layers["norm"], len(small.taps)
    inputs = {
        name: (*layers[name][:-1], Axis(2, 2), hidden) for name in ("q_proj", "k_proj", "v_proj")
    }
    return (
        layers
        | inputs
        | {
            "fc": (hidden, Axis(num_taps, num_taps), hidden),
            "lm_head": (Axis(small.draft_vocab_size, large.draft_vocab_size), hidden),
        }
    )


def shapes(checkpoint: Checkpoint, config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Of a head that has its target's embedding, under the checkpoint's names."""
    shown = shown_shapes(config)
    del shown[EMBEDDING]
    return stored_shapes(shown, places(checkpoint, config, shown))


def offsets(known: Tensor, large: EagleConfig) -> Tensor:
    """How far the target's ids are from the head's, with those of added tokens."""
    is_left = torch.ones(large.layers.vocab_size, dtype=torch.bool)
    is_left[known] = False
    num_added = large.draft_vocab_size - len(known)
    added = is_left.nonzero()[len(is_left) - len(known) - num_added :, 0]
    return torch.cat([known, added]) - torch.arange(large.draft_vocab_size)
