"""Tensors, or columns of them, under other names than those that a checkpoint has for them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve.models.checkpoint import Checkpoint, unquantized

ALL = slice(None)
Place = tuple[str, slice]  # a tensor's name in the checkpoint, and its columns: all, or one half


class Part(NamedTuple):
    """A tensor's columns, in the manner of safetensors' files: of names, it has but its own."""

    file: Any
    name: str
    columns: slice

    def get_slice(self, name: str) -> "Part":
        return self

    def get_shape(self) -> list[int]:
        whole = torch.empty(self.file.get_slice(self.name).get_shape(), device="meta")
        return list(whole[..., self.columns].shape)

    def get_dtype(self) -> str:
        return str(self.file.get_slice(self.name).get_dtype())

    def get_tensor(self, name: str) -> Tensor:
        """A view of the file's."""
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor[..., self.columns]


def stored_shapes(
    shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, Place]
) -> dict[str, tuple[int, ...]]:
    """Of the checkpoint's own tensors."""
    stored = {}
    for name, shape in shapes.items():
        own, columns = places[name]
        stored[own] = shape if columns == ALL else (shape[0], 2 * shape[1])
    return stored


def show(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, Place]
) -> None:
    """Have the tensors under the names that `shapes` has; ConfigError unless they are all there,
    and no others.
    """
    checkpoint.check(unquantized(stored_shapes(shapes, places)))
    parts = {name: Part(checkpoint.files[own], own, at) for name, (own, at) in places.items()}
    checkpoint.show({name: parts[name] for name in shapes})
