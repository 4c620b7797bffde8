"""How a quantized linear map stands in a checkpoint: as several tensors of a module."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specserve_kernels import Codes

INTEGERS = ("I32",)
SCALES = ("F32", "F16", "BF16")
# Of activations, which are not quantized here.
UNUSED = ("activation_scale", "input_scale", "input_zero_point")


class Stored(NamedTuple):
    """A tensor as a file has it, or what it has to be."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # safetensors' names; what it has to be is one of them


class NotFinite(ValueError):
    """A map's tensor of this suffix has numbers that are not finite."""


class WeightFormat(Protocol):
    """Reads the linear maps of one format. A map of shape [N, K] has tensors `name.suffix`."""

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        """The tensors by suffix that a map must have, given those that it has.

        ValueError if those that it has fit no map of this shape.
        """
        ...

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes | Tensor: ...


def is_finite(values: Tensor) -> bool:
    """Whether none of the numbers is NaN or infinite. Their sum shows this in one fast pass; only a
    sum that overflows needs a closer look.
    """
    total = values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)
    return bool(total.isfinite()) or bool(values.isfinite().all())


def unpack(words: Tensor, bits: int) -> Tensor:
    """Integers [..., n 32 / bits] uint8 from words [..., n] int32, the lowest bits first."""
    octets = bytes_of(words)
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)


def bytes_of(words: Tensor) -> Tensor:
    """[..., n 4] uint8 from words [..., n], as a copy."""
    # contiguous() keeps the strides of a tensor that is one column, and may make no copy.
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def unused(found: Mapping[str, Stored]) -> dict[str, Stored]:
    return {name: found[name] for name in UNUSED if name in found}


def divided(number: int, by: int, what: str) -> int:
    if number % by:
        raise ValueError(f"{what}: {number} is no multiple of {by}")
    return number // by
