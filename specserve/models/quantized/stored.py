"""The stored form of a quantized linear map: several tensors of a module."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specserve_kernels import Codes

INTEGERS = ("I32",)
SCALES = ("F32", "F16", "BF16")
# Tensors for static quantization of activations, which specserve does not use.
UNUSED = ("activation_scale", "input_scale", "input_zero_point")


class Stored(NamedTuple):
    """Shape and dtype of a stored tensor, or the expected shape and dtypes."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # safetensors' names; several: any of them is allowed


class NotFinite(ValueError):
    """The tensor with this suffix has values that are not finite."""


MXFP4_GROUP = 32
# Twice the values of 4-bit floats, which are integers.
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
BIAS, NAN = 127, 255  # exponent bias and NaN of e8m0 numbers


class WeightFormat(Protocol):
    """Reads linear maps of one format. A map of shape [N, K] has tensors `name.suffix`."""

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        """The tensors that a map must have, by suffix; `found` are its tensors.

        Raises ValueError if `found` does not fit a map of this shape.
        """
        ...

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes | Tensor: ...


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite. A finite sum shows this in one fast pass; the values are
    checked one by one only if the sum is not finite.
    """
    total = values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)
    return bool(total.isfinite()) or bool(values.isfinite().all())


def tabled(values: Sequence[int], q: Tensor, scale: Tensor) -> Codes:
    """Codes for values[q] * scale. There are up to 16 values from -128 to 127; each scale belongs
    to an equal share of a row's columns.
    """
    N, scale = len(q), scale.reshape(len(q), -1)
    q, table = q.reshape(N, -1), (*values, *[0] * (16 - len(values)))
    return Codes(4, q.shape[1] // scale.shape[1], q, scale, table=table)


def e8m0_halves(exponents: Tensor) -> Tensor:
    """Half of each e8m0 number, as float32. Raises NotFinite for NaN."""
    if (exponents == NAN).any():
        raise NotFinite("scales")
    return torch.ldexp(torch.full(exponents.shape, 0.5), exponents.int() - BIAS)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack words [..., n] int32 to integers [..., n 32 / bits] uint8, the lowest bits first."""
    octets = bytes_of(words)
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)


def bytes_of(words: Tensor) -> Tensor:
    """Copy words [..., n] to bytes [..., n 4] uint8."""
    # contiguous() may return a tensor with one column unchanged, with its strides.
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def unused(found: Mapping[str, Stored]) -> dict[str, Stored]:
    return {name: found[name] for name in UNUSED if name in found}


def divided(number: int, by: int, what: str) -> int:
    if number % by:
        raise ValueError(f"{what}: {number} is not a multiple of {by}")
    return number // by
