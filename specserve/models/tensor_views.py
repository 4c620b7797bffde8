"""Views of a checkpoint's tensors under a decoder's names: parts of tensors, and stacked experts.

gpt-oss stores all experts of a layer together. `mlp.experts.gate_up_proj` [E, hidden, 2 F] is
transposed, and has alternating outputs of gate and up; `_bias` [E, 2 F] has their biases. MXFP4 has
`_blocks` [E, 2 F, hidden / 32, 16] and `_scales` [E, 2 F, hidden / 32] instead. `down_proj` has the
same form.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.checkpoint import Checkpoint, TensorView, unquantized

ALL = slice(None)
Place = tuple[str, slice]  # a tensor's name in the checkpoint, and its columns: all, or one half
STACKED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(|_bias|_blocks|_scales)")
SUFFIXES = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
NUM_DIMS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}
OUTPUTS = {  # rows of each map in a stacked tensor
    "gate_up": {"gate": slice(0, None, 2), "up": slice(1, None, 2)},
    "down": {"down": ALL},
}


def stored_shapes(
    shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, Place]
) -> dict[str, tuple[int, ...]]:
    """The shapes of the stored tensors."""
    stored = {}
    for name, shape in shapes.items():
        own, columns = places[name]
        stored[own] = shape if columns == ALL else (shape[0], 2 * shape[1])
    return stored


def show(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, Place]
) -> None:
    """Give the checkpoint's tensors the names in `shapes`. Raises ConfigError if tensors are
    missing or unused.
    """

    def columns(at: slice) -> Callable[[Tensor], Tensor]:
        return lambda tensor: tensor[..., at]

    checkpoint.check(unquantized(stored_shapes(shapes, places)))
    where = {name: places[name] for name in shapes}
    checkpoint.show({name: checkpoint.view(own, columns(at)) for name, (own, at) in where.items()})


def show_as_causal(checkpoint: Checkpoint) -> bool:
    """Give the tensors of a model that was saved without a head the names of one with a head.
    Return whether it was.
    """
    if "embed_tokens.weight" not in checkpoint:
        return False
    names = {f"model.{name}": name for name in checkpoint.files}
    checkpoint.show({shown: checkpoint.view(own, whole) for shown, own in names.items()})
    return True


def whole(tensor: Tensor) -> Tensor:
    return tensor


def part_experts(checkpoint: Checkpoint, num_experts: int) -> None:
    """Replace the tensors that all experts share by one view per expert."""
    parted: dict[str, Any] = {}
    for name, file in checkpoint.files.items():
        if (found := STACKED.fullmatch(name)) is None:
            parted[name] = file
        else:
            check_stacked(checkpoint, name, (num_experts, NUM_DIMS[found[3]]))
            parted.update(parts_of(checkpoint, name, found))
    checkpoint.show(parted)


def check_stacked(checkpoint: Checkpoint, name: str, wanted: tuple[int, int]) -> None:
    """Raise ConfigError unless a tensor has `wanted` experts and dimensions."""
    shape = checkpoint.stored(name).shape
    if (shape[:1], len(shape)) != ((wanted[0],), wanted[1]):
        raise ConfigError(
            f"{checkpoint.folder}: the tensor {name} has the shape {list(shape)}, but it must have "
            f"{wanted[1]} dimensions and {wanted[0]} experts. Correct config.json, or download the "
            "model again"
        )


def parts_of(
    checkpoint: Checkpoint, name: str, found: re.Match[str]
) -> Iterator[tuple[str, TensorView]]:
    def part(expert: int, outputs: slice) -> Callable[[Tensor], Tensor]:
        if suffix == "":
            return lambda stacked: stacked[expert].T[outputs]
        return lambda stacked: stacked[expert][outputs]

    module, which, suffix = found.groups()
    for expert in range(checkpoint.stored(name).shape[0]):
        for kind, outputs in OUTPUTS[which].items():
            shown = f"{module}.{expert}.{kind}_proj.{SUFFIXES[suffix]}"
            yield shown, checkpoint.view(name, part(expert, outputs))
