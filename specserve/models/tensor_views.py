"""Views of a checkpoint's tensors under a decoder's names: parts of tensors, the text model of a
multimodal checkpoint, and stacked experts.

Some families store all experts of a layer together: see `StackedNames`. gpt-oss has biases, too:
`gate_up_proj_bias` [E, 2 F]. In MXFP4, it has `_blocks` [E, 2 F, hidden / 32, 16] and `_scales`
[E, 2 F, hidden / 32] instead of the weight. `down_proj` has the same form.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.checkpoint import Checkpoint, TensorView, unquantized
from specserve.models.experts import Mixture, StackedNames
from specserve.models.multimodal import other_parts, text_name
from specserve.models.weight_files import Slice

ALL = slice(None)
Place = tuple[str, slice]  # a tensor's name in the checkpoint, and its columns: all, or one half
SUFFIXES = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
NUM_DIMS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}


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


def show_text_model(checkpoint: Checkpoint) -> None:
    """Give the tensors of a multimodal checkpoint's text model the names of a text checkpoint, and
    hide the others.
    """
    names = {name: shown for name in checkpoint.files if (shown := text_name(name)) is not None}
    checkpoint.other_parts = other_parts(checkpoint.files)
    checkpoint.show({shown: checkpoint.view(name, same) for name, shown in names.items()})


def show_as_causal(checkpoint: Checkpoint) -> bool:
    """Give the tensors of a model that was saved without a head the names of one with a head.
    Return whether it was.
    """
    if "embed_tokens.weight" not in checkpoint:
        return False
    names = {f"model.{name}": name for name in checkpoint.files}
    checkpoint.show({shown: checkpoint.view(own, same) for shown, own in names.items()})
    return True


def show_renamed(checkpoint: Checkpoint, renamed: Mapping[str, str]) -> None:
    """Replace parts of the tensors' names."""
    if not renamed:
        return

    def shown(name: str) -> str:
        for own, other in renamed.items():
            name = name.replace(own, other)
        return name

    # A view would lose a quantized tensor's form; tensors without another name stay as they are.
    names = {shown(name): name for name in checkpoint.files}
    files = checkpoint.files
    checkpoint.show(
        {
            new: files[own] if new == own else checkpoint.view(own, same)
            for new, own in names.items()
        }
    )


class JoinedTensors(NamedTuple):
    """Several files' tensors, joined along the first dimension, with the interface of a safetensors
    file with one tensor.
    """

    parts: tuple[tuple[Any, str], ...]  # files, and names of the tensors
    header: Slice

    def get_slice(self, name: str) -> Slice:
        return self.header

    def get_tensor(self, name: str) -> Tensor:
        return torch.cat([file.get_tensor(own) for file, own in self.parts])


def show_joined_convs(checkpoint: Checkpoint) -> None:
    """Join the convolutions of queries, keys and values of each layer. transformers saves them as
    three parts of equal size, whatever sizes the heads have.
    """
    parts, shown = ("q", "k", "v"), dict(checkpoint.files)
    for name in checkpoint.files:
        names = [name.replace(".q_conv1d.", f".{part}_conv1d.") for part in parts]
        if names[0] == names[1] or any(own not in shown for own in names):
            continue
        stored = [checkpoint.stored(own) for own in names]
        _, *inner = stored[0].shape
        if any(part.shape[1:] != (*inner,) or part.dtypes != stored[0].dtypes for part in stored):
            continue  # `Checkpoint.check` names the parts
        height = sum(part.shape[0] for part in stored)
        header = Slice((height, *inner), stored[0].dtypes[0])
        each = tuple((shown.pop(own), own) for own in names)
        shown[name.replace(".q_conv1d.", ".conv1d.")] = JoinedTensors(each, header)
    checkpoint.show(shown)


def same(tensor: Tensor) -> Tensor:
    return tensor


def part_experts(checkpoint: Checkpoint, mixture: Mixture) -> None:
    """Replace the tensors that all experts share by one view per expert."""
    names = mixture.style.stacked
    if names is None:
        return
    shared = "|".join(map(re.escape, (names.gate_up, names.down)))
    stacked = re.compile(rf"(.*\.{mixture.style.module})\.({shared})(|_bias|_blocks|_scales)")
    parted: dict[str, Any] = {}
    for name, file in checkpoint.files.items():
        if (found := stacked.fullmatch(name)) is None:
            parted[name] = file
        else:
            check_stacked(checkpoint, name, (mixture.num_experts, NUM_DIMS[found[3]]))
            parted.update(parts_of(checkpoint, names, found, mixture.width))
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
    checkpoint: Checkpoint, names: StackedNames, found: re.Match[str], width: int
) -> Iterator[tuple[str, TensorView]]:
    """The views of one stacked tensor of experts of a width: names in a decoder, and parts."""
    name, (module, which, suffix) = found[0], found.groups()
    shape = checkpoint.stored(name).shape
    is_turned = names.is_transposed and suffix == ""
    if names.is_transposed is None:
        is_turned = shape[2] != width if which == names.down else shape[1] != 2 * width

    def part(expert: int, outputs: slice) -> Callable[[Tensor], Tensor]:
        return lambda stacked: (stacked[expert].T if is_turned else stacked[expert])[outputs]

    if which == names.down:
        maps = {"down": ALL}
    elif names.has_pairs:
        maps = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    else:
        half = shape[-1 if is_turned else 1] // 2
        maps = {"gate": slice(half), "up": slice(half, None)}
    for expert in range(shape[0]):
        for kind, outputs in maps.items():
            shown = f"{module}.experts.{expert}.{kind}_proj.{SUFFIXES[suffix]}"
            yield shown, checkpoint.view(name, part(expert, outputs))
