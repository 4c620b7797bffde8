"""Readers of quantized linear maps: one class per format, and the table FORMATS."""

from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor

from specserve.models.gguf.tensors import Gguf
from specserve.models.quantized.config import Quantization
from specserve.models.quantized.stored import (
    INTEGERS,
    MXFP4,
    MXFP4_GROUP,
    SCALES,
    Stored,
    WeightFormat,
    bytes_of,
    divided,
    e8m0_halves,
    tabled,
    unpack,
    unused,
)
from specserve_kernels import Codes


def ordered(codes: Codes, groups: Tensor | None) -> Codes | Tensor:
    """The codes if column i is in group i / group; else their values in float32, with column i in
    `groups[i]`.

    Codes cannot represent permuted groups, and kernels do not permute rows.
    """
    if groups is None or torch.equal(groups.long(), torch.arange(len(groups)) // codes.group):
        return codes
    columns = groups.long()
    if columns.min() < 0 or columns.max() >= codes.scale.shape[1]:
        raise ValueError(f"g_idx has invalid groups: there are only {codes.scale.shape[1]}")
    zero = None if codes.zero is None else codes.zero[:, columns]
    return codes._replace(group=1, scale=codes.scale[:, columns], zero=zero).widen(torch.float32)


FLOATS = ("F8_E4M3",)
POWERS = ("F8_E8M0",)  # powers of two


class Floats:
    def __init__(self, told: Quantization) -> None:
        self.block = told.block

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        scale = name_of_scale(found)
        has = found.get(scale, Stored((), ())).shape
        allowed = [*self.blocks(shape), (shape[0], 1), (1,), (), (1, 1)]
        parts = {
            "weight": Stored(shape, FLOATS),
            scale: Stored(has if has in allowed else allowed[0], SCALES + POWERS),
        }
        return parts | unused(found)

    def blocks(self, shape: tuple[int, int]) -> list[tuple[int, ...]]:
        """The shape of block scales in a list; empty if there are no blocks."""
        if self.block is None:
            return []
        return [tuple(-(-n // size) for n, size in zip(shape, self.block, strict=True))]

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Tensor:
        scale, weight = tensors[name_of_scale(tensors)].float(), tensors["weight"].float()
        if self.block is not None and scale.shape in self.blocks(shape):
            for dim, size in enumerate(self.block):
                height = min(size, shape[dim])
                scale = scale.repeat_interleave(height, dim).narrow(dim, 0, shape[dim])
        return weight * scale


def name_of_scale(names: Container[str]) -> str:
    """vLLM's name of the scale, or DeepSeek's name weight_scale_inv."""
    return "weight_scale_inv" if "weight_scale_inv" in names else "weight_scale"


PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # nibble of columns 0, 1, ... in a word


class Awq:
    def __init__(self, told: Quantization) -> None:
        self.told = told

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        N, K = shape
        groups, width = divided(K, self.told.group or K, "group_size"), divided(N, 8, "columns")
        return {
            "qweight": Stored((K, width), INTEGERS),
            "qzeros": Stored((groups, width), INTEGERS),
            "scales": Stored((groups, N), SCALES),
        }

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        return Codes(
            bits=4,
            group=self.told.group or shape[1],
            q=in_order(tensors["qweight"]),
            scale=tensors["scales"].T.float().contiguous(),
            zero=in_order(tensors["qzeros"]),
        )


def in_order(words: Tensor) -> Tensor:
    """Unpack words [rows, columns / 8] to [columns, rows]."""
    octets = bytes_of(words.T).view(words.shape[1], -1, 4)  # [columns / 8, rows, 4]
    columns = [octets[..., place // 2] >> 4 * (place % 2) & 15 for place in PLACES]
    return torch.stack(columns, dim=1).flatten(0, 1)


class Gptq:
    def __init__(self, told: Quantization) -> None:
        assert told.bits is not None
        self.told, self.bits = told, told.bits

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        N, K = shape
        per_word, groups = 32 // self.bits, divided(K, self.told.group or K, "group_size")
        parts = {
            "qweight": Stored((divided(K, per_word, "rows of qweight"), N), INTEGERS),
            "qzeros": Stored((groups, divided(N, per_word, "columns of qzeros")), INTEGERS),
            "scales": Stored((groups, N), SCALES),
        }
        if "g_idx" in found:
            parts["g_idx"] = Stored((K,), INTEGERS)
        return parts

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes | Tensor:
        codes = Codes(
            bits=self.bits,
            group=self.told.group or shape[1],
            q=unpack(tensors["qweight"].T, self.bits),
            scale=tensors["scales"].T.float().contiguous(),
            zero=self.zeros(tensors["qzeros"]),
        )
        return ordered(codes, tensors.get("g_idx"))

    def zeros(self, words: Tensor) -> Tensor | None:
        stored, middle = unpack(words, self.bits), 1 << (self.bits - 1)
        if self.told.is_symmetric and torch.isin(stored, torch.tensor([middle - 1, middle])).all():
            return None
        if self.told.has_zeros_less_one:
            ones = sum(1 << place for place in range(0, 32, self.bits))
            stored = unpack(words + ones, self.bits)
        return stored.T.contiguous()


class Mxfp4:
    def __init__(self, told: Quantization) -> None:
        pass

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        groups = divided(shape[1], MXFP4_GROUP, "columns")
        return {
            "blocks": Stored((shape[0], groups, MXFP4_GROUP // 2), ("U8",)),
            "scales": Stored((shape[0], groups), ("U8",)),
        }

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        blocks = tensors["blocks"]
        nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1)
        return tabled(MXFP4, nibbles, e8m0_halves(tensors["scales"]))


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
    """Reads integers of 4 or 8 bits that are packed into 32-bit words."""

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        N, K = shape
        width, groups = found["weight_packed"].shape[-1:], num_groups(K, found)
        bits = next((bits for bits in (4, 8) if width == (num_words(K, bits),)), None)
        if bits is None:
            raise ValueError(
                f"weight_packed has {list(width)} columns, which fit {K} values of neither 4 nor 8 "
                "bits"
            )
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
    """Reads 8-bit integers, one per byte."""

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        N, K = shape
        scale = found.get("weight_scale", ABSENT).shape
        if scale not in ((), (1,)):  # not a single scale
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
    """Map bytes from -128..127 to 0..255."""
    return signed.contiguous().view(torch.uint8) ^ 128


def num_words(values: int, bits: int) -> int:
    return -(-values * bits // 32)


def num_groups(K: int, found: Mapping[str, Stored]) -> int:
    """The number of scales per row; 1 if the scales are not a matrix."""
    scale = found.get("weight_scale", ABSENT).shape
    groups = scale[1] if len(scale) == 2 else 1
    if groups < 1 or K % groups:
        raise ValueError(f"weight_scale has {groups} columns, which do not divide {K}")
    return groups


FORMATS: dict[str, Callable[[Quantization], WeightFormat]] = {
    "awq": Awq,
    "compressed-tensors": Compressed,
    "fp8": Floats,
    "gguf": Gguf,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
