"""compressed-tensors: packed integers, bytes, or 8-bit floats; a map's own tensors tell which.

Integers are stored less half of the range when they are bytes, and as they are when packed; so are
zero points, which are packed along N.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from specserve.models.quantized.config import Quantization
from specserve.models.quantized.floats import FLOATS, Floats
from specserve.models.quantized.order import ordered
from specserve.models.quantized.stored import (
    INTEGERS,
    SCALES,
    Stored,
    WeightFormat,
    unpack,
    unused,
)
from specserve_kernels import Codes

ABSENT = Stored((), ("nothing",))


class Compressed:
    def __init__(self, told: Quantization) -> None:
        self.floats = Floats(told)

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        is_float = found.get("weight", ABSENT).dtypes[0] in FLOATS
        return self.form("weight_packed" in found, is_float).expected(shape, found)

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes | Tensor:
        is_float = "weight" in tensors and tensors["weight"].is_floating_point()
        return self.form("weight_packed" in tensors, is_float).read(shape, tensors)

    def form(self, is_packed: bool, is_float: bool) -> WeightFormat:
        return PackedIntegers() if is_packed else self.floats if is_float else Bytes()


class PackedIntegers:
    """Integers of 4 or 8 bits in words."""

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        N, K = shape
        bits, groups = bits_of(K, found), num_groups(K, found)
        parts = {
            "weight_packed": Stored((N, num_words(K, bits)), INTEGERS),
            "weight_scale": Stored((N, groups), SCALES),
            "weight_shape": Stored((2,), ("I64", "I32")),
        }
        may_have = {
            "weight_zero_point": Stored((num_words(N, bits), groups), INTEGERS),
            "weight_g_idx": Stored((K,), INTEGERS),
        }
        has = {name: may_have[name] for name in may_have if name in found}
        return parts | has | unused(found)

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes | Tensor:
        N, K = shape
        if tensors["weight_shape"].tolist() != [N, K]:
            raise ValueError(f"weight_shape is not {[N, K]}")
        packed, scale = tensors["weight_packed"], tensors["weight_scale"].float()
        bits = 4 if packed.shape[1] == num_words(K, 4) else 8
        group, zero = K // scale.shape[1], tensors.get("weight_zero_point")
        if zero is not None:
            zero = unpack(zero.T, bits)[:, :N].T.contiguous()
        codes = Codes(bits, group, unpack(packed, bits)[:, :K].contiguous(), scale, zero)
        return ordered(codes, tensors.get("weight_g_idx"))


class Bytes:
    """Integers of 8 bits, one in a byte."""

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        N, K = shape
        scale = found.get("weight_scale", ABSENT).shape
        if scale not in ((), (1,)):  # one for all
            scale = N, num_groups(K, found)
        parts = {"weight": Stored(shape, ("I8",)), "weight_scale": Stored(scale, SCALES)}
        if "weight_zero_point" in found:
            parts["weight_zero_point"] = Stored(scale, ("I8",))
        return parts | unused(found)

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        N, K = shape
        scale, zero = tensors["weight_scale"].float(), tensors.get("weight_zero_point")
        if zero is not None:
            zero = raised(zero)
        if scale.dim() < 2:
            scale = scale.expand(N).reshape(N, 1)
            zero = None if zero is None else zero.expand(N).reshape(N, 1)
        return Codes(8, K // scale.shape[1], raised(tensors["weight"]), scale, zero)


def raised(signed: Tensor) -> Tensor:
    """Bytes from 0 to 255 for those from -128 to 127."""
    return signed.contiguous().view(torch.uint8) ^ 128


def num_words(values: int, bits: int) -> int:
    return -(-values * bits // 32)


def bits_of(K: int, found: Mapping[str, Stored]) -> int:
    width = found["weight_packed"].shape[-1:]
    for bits in (4, 8):
        if width == (num_words(K, bits),):
            return bits
    raise ValueError(f"weight_packed of {list(width)} columns fits {K} of neither 4 nor 8 bits")


def num_groups(K: int, found: Mapping[str, Stored]) -> int:
    """The columns of the scales, 1 if there is no such table."""
    scale = found.get("weight_scale", ABSENT).shape
    groups = scale[1] if len(scale) == 2 else 1
    if groups < 1 or K % groups:
        raise ValueError(f"weight_scale of {groups} columns does not divide {K}")
    return groups
