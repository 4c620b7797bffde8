"""Experts that share tensors, as gpt-oss stores them: a checkpoint then shows each with its own.

`mlp.experts.gate_up_proj` [E, hidden, 2 F] has the outputs of gate and up by turns, transposed;
`_bias` [E, 2 F] its biases. In MXFP4 there are `_blocks` [E, 2 F, hidden / 32, 16] and `_scales`
[E, 2 F, hidden / 32] in its place. `down_proj` is stored likewise.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.checkpoint import Checkpoint

STACKED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(|_bias|_blocks|_scales)")
SUFFIXES = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
NUM_DIMS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}


class Part(NamedTuple):
    """A tensor of one expert, in the manner of safetensors' files: of names, it has but its own."""

    file: Any
    name: str  # of the tensor of all experts
    header: Any  # the part, of a tensor on the device `meta`
    dtype: str
    expert: int
    outputs: slice
    is_transposed: bool

    def get_slice(self, name: str) -> "Part":
        return self

    def get_shape(self) -> list[int]:
        return list(self.header.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def get_tensor(self, name: str) -> Tensor:
        """A view of the file's."""
        return self.of(self.file.get_tensor(self.name))

    def of(self, stacked: Tensor) -> Tensor:
        one = stacked[self.expert]
        return (one.T if self.is_transposed else one)[self.outputs]


def part_experts(checkpoint: Checkpoint, num_experts: int) -> None:
    """Have each expert's tensors in place of those that all experts share."""
    parted: dict[str, Any] = {}
    for name, file in checkpoint.files.items():
        found = STACKED.fullmatch(name)
        if found is None:
            parted[name] = file
        else:
            check_stacked(checkpoint, name, (num_experts, NUM_DIMS[found[3]]))
            parted.update(parts_of(checkpoint, name, found))
    checkpoint.show(parted)


def check_stacked(checkpoint: Checkpoint, name: str, wanted: tuple[int, int]) -> None:
    """ConfigError unless a tensor has so many experts and dimensions."""
    shape = checkpoint.stored(name).shape
    if (shape[:1], len(shape)) != ((wanted[0],), wanted[1]):
        raise ConfigError(
            f"{checkpoint.folder}: the tensor {name} has the shape {list(shape)}, and that of all "
            f"experts has {wanted[1]} dimensions, the first of {wanted[0]} experts; correct "
            "config.json, or download the model again"
        )


def parts_of(checkpoint: Checkpoint, name: str, found: re.Match[str]) -> Iterator[tuple[str, Part]]:
    module, which, suffix = found.groups()
    stored = checkpoint.stored(name)
    whole = torch.empty(stored.shape, device="meta")
    halves = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    each = halves if which == "gate_up" else {"down": slice(None)}
    for expert in range(stored.shape[0]):
        for kind, outputs in each.items():
            args = stored.dtypes[0], expert, outputs, suffix == ""
            part = Part(checkpoint.files[name], name, None, *args)
            shown = f"{module}.{expert}.{kind}_proj.{SUFFIXES[suffix]}"
            yield shown, part._replace(header=part.of(whole))
