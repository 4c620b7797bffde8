"""Converts the blocks of GGUF's quantized types to codes of the same values.

Blocks are [N, blocks per row, bytes]; ggml's quants.c defines the bytes of a block.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from specserve.models.gguf.grids import grid
from specserve.models.gguf.header import BY_NAME
from specserve.models.quantized.stored import MXFP4, NotFinite, e8m0_halves, is_finite, tabled
from specserve_kernels import Codes


def codes_of(type: str, blocks: Tensor) -> Codes:
    """The codes of a weight, of the same float32 values. Raises NotFinite for invalid scales."""
    return READERS[type](blocks)


@cache
def bits_in_memory(type: str) -> float:
    """Bits per value of a weight in memory, with scales and offsets."""
    codes = codes_of(type, torch.zeros(1, 1, BY_NAME[type].size, dtype=torch.uint8))
    beside = 32 if codes.offset is None else 64
    return codes.bits + beside / codes.group


def fields(octets: Tensor, width: int, number: int = 1) -> Tensor:
    """The fields of `width` bits of all bytes, [N, blocks, bytes * 8 / width]. The bytes consist of
    `number` equal parts; each part's lowest fields come first.
    """
    parts = octets.reshape(*octets.shape[:-1], number, 1, -1)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return (parts >> shifts & (1 << width) - 1).flatten(-3)


def words(octets: Tensor, size: int) -> Tensor:
    """The unsigned words of `size` bytes, [N, blocks, bytes / size] int64."""
    dtype = {2: torch.int16, 4: torch.int32}[size]
    return viewed(octets, dtype).long() & (1 << 8 * size) - 1


def viewed(octets: Tensor, dtype: torch.dtype) -> Tensor:
    # contiguous() may return a part of a single block unchanged, and unaligned.
    return octets.clone(memory_format=torch.contiguous_format).view(dtype)


def half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as [N, blocks, 1] float32."""
    return finite(viewed(blocks[..., start : start + 2], torch.float16).float())


def finite(values: Tensor) -> Tensor:
    if not is_finite(values):
        raise NotFinite("a block's scale")
    return values


def codes(bits: int, q: Tensor, scale: Tensor) -> Codes:
    """Codes without zero points. Each scale belongs to an equal share of a row's columns."""
    N, scale = len(q), scale.reshape(len(q), -1)
    q = q.reshape(N, -1)
    return Codes(bits, q.shape[1] // scale.shape[1], q, scale)


def affine(width: int, q: Tensor, scale: Tensor, offset: Tensor) -> Codes:
    """Codes for q * scale + offset, with q of `width` bits. The codes have 4 or 8 bits, and the
    middle of q is the middle of the codes.
    """
    bits = 4 if width <= 4 else 8
    up = (1 << bits - 1) - (1 << width - 1) if width != bits else 0
    made = codes(bits, q + up, scale)
    zero = torch.full_like(made.scale, up, dtype=torch.uint8)
    return made._replace(zero=zero, offset=offset.reshape(made.scale.shape))


def q4_0(blocks: Tensor) -> Codes:
    return codes(4, fields(blocks[..., 2:18], 4), half(blocks, 0))


def q4_1(blocks: Tensor) -> Codes:
    return affine(4, fields(blocks[..., 4:20], 4), half(blocks, 0), half(blocks, 2))


def q5_0(blocks: Tensor) -> Codes:
    q = fields(blocks[..., 6:22], 4) | fields(blocks[..., 2:6], 1, 4) << 4
    return codes(8, q + (128 - 16), half(blocks, 0))


def q5_1(blocks: Tensor) -> Codes:
    q = fields(blocks[..., 8:24], 4) | fields(blocks[..., 4:8], 1, 4) << 4
    return affine(5, q, half(blocks, 0), half(blocks, 2))


def q8_0(blocks: Tensor) -> Codes:
    return codes(8, blocks[..., 2:34] ^ 128, half(blocks, 0))


def q2_k(blocks: Tensor) -> Codes:
    scales, q = blocks[..., 0:16], fields(blocks[..., 16:80], 2, 2)
    scale, offset = half(blocks, 80) * (scales & 15), half(blocks, 82) * (scales >> 4)
    return affine(2, q, scale, -offset)


def q3_k(blocks: Tensor) -> Codes:
    q = fields(blocks[..., 32:96], 2, 2) | fields(blocks[..., 0:32], 1) << 2
    scales = fields(blocks[..., 96:104], 4) | fields(blocks[..., 104:108], 2) << 4
    return codes(4, q + (8 - 4), half(blocks, 108) * (scales.float() - 32))


def q4_k(blocks: Tensor) -> Codes:
    return affine(4, fields(blocks[..., 16:144], 4, 4), *k_scales(blocks))


def q5_k(blocks: Tensor) -> Codes:
    q = fields(blocks[..., 48:176], 4, 4) | fields(blocks[..., 16:48], 1) << 4
    return affine(5, q, *k_scales(blocks))


def k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the offset of each eighth of a block, [N, blocks, 8].

    Both have 6 bits. The first four have separate bytes, whose upper bits belong to the other four.
    """
    scale, least, mixed = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([scale & 63, (mixed & 15) | (scale >> 6) << 4], dim=-1)
    leasts = torch.cat([least & 63, (mixed >> 4) | (least >> 6) << 4], dim=-1)
    return half(blocks, 0) * scales, -(half(blocks, 2) * leasts)


def q6_k(blocks: Tensor) -> Codes:
    q = fields(blocks[..., 0:128], 4, 2) | fields(blocks[..., 128:192], 2, 2) << 4
    scale = half(blocks, 208) * viewed(blocks[..., 192:208], torch.int8)
    return codes(8, q + (128 - 32), scale)


def q8_k(blocks: Tensor) -> Codes:
    """The last bytes of a block are sums of its codes, for products with other types."""
    scale = finite(viewed(blocks[..., 0:4], torch.float32))
    return codes(8, blocks[..., 4:260] ^ 128, scale)


NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_nl(blocks: Tensor) -> Codes:
    return tabled(NON_LINEAR, fields(blocks[..., 2:18], 4), half(blocks, 0))


def iq4_xs(blocks: Tensor) -> Codes:
    scales = fields(blocks[..., 4:8], 4, 4) | fields(blocks[..., 2:4], 2, 2) << 4
    scale = half(blocks, 0) * (scales.float() - 32)
    return tabled(NON_LINEAR, fields(blocks[..., 8:136], 4, 8), scale)


def mxfp4(blocks: Tensor) -> Codes:
    return tabled(MXFP4, fields(blocks[..., 1:17], 4), e8m0_halves(blocks[..., 0:1]))


class Lattice(NamedTuple):
    """A codebook type: values are signs times the levels of a point of its grid."""

    type: str
    levels: tuple[int, ...]

    def codes(self, points: Tensor, signs: Tensor, scale: Tensor) -> Codes:
        """`points` [N, blocks, n] are numbers of points; `signs` has a bit per value."""
        levels = grid(self.type)[points].flatten(-2)
        signed = [*self.levels, *(-level for level in self.levels)]
        return tabled(signed, levels + signs * len(self.levels), scale)


IQ2_LEVELS = (8, 25, 43)
IQ3_XXS = Lattice("IQ3_XXS", (4, 12, 20, 28, 36, 44, 52, 62))
IQ3_S = Lattice("IQ3_S", (1, 3, 5, 7, 9, 11, 13, 15))


def even_signs(index: Tensor) -> Tensor:
    """The signs of 8 values from 7 bits: the number of negative values is even."""
    bits = (index[..., None] >> torch.arange(7)) & 1
    return torch.cat([bits, bits.sum(-1, keepdim=True) & 1], dim=-1).flatten(-2).to(torch.uint8)


def seventh_bits(word: Tensor) -> Tensor:
    """The four lowest fields of 7 bits of each word."""
    return (word[..., None] >> torch.arange(0, 28, 7) & 127).flatten(-2)


def iq2_xxs(blocks: Tensor) -> Codes:
    pairs = blocks[..., 2:66].reshape(*blocks.shape[:-1], 8, 8)
    points, word = pairs[..., 0:4].flatten(-2), words(pairs[..., 4:8].flatten(-2), 4)
    scale = half(blocks, 0) * (0.5 + (word >> 28)) * 0.25
    return Lattice("IQ2_XXS", IQ2_LEVELS).codes(points.int(), even_signs(seventh_bits(word)), scale)


def iq2_xs(blocks: Tensor) -> Codes:
    word, scales = words(blocks[..., 2:66], 2), fields(blocks[..., 66:74], 4, 8)
    scale = half(blocks, 0) * (0.5 + scales) * 0.25
    return Lattice("IQ2_XS", IQ2_LEVELS).codes(word & 511, even_signs(word >> 9), scale)


def iq2_s(blocks: Tensor) -> Codes:
    points = blocks[..., 2:34].int() | fields(blocks[..., 66:74], 2, 8).int() << 8
    scale = half(blocks, 0) * (0.5 + fields(blocks[..., 74:82], 4, 8)) * 0.25
    return Lattice("IQ2_S", IQ2_LEVELS).codes(points, fields(blocks[..., 34:66], 1, 32), scale)


def iq3_xxs(blocks: Tensor) -> Codes:
    points, word = blocks[..., 2:66].int(), words(blocks[..., 66:98], 4)
    scale = half(blocks, 0) * (0.5 + (word >> 28)) * 0.5
    return IQ3_XXS.codes(points, even_signs(seventh_bits(word)), scale)


def iq3_s(blocks: Tensor) -> Codes:
    points = blocks[..., 2:66].int() | fields(blocks[..., 66:74], 1, 8).int() << 8
    scale = half(blocks, 0) * (1 + 2 * fields(blocks[..., 106:110], 4, 4))
    return IQ3_S.codes(points, fields(blocks[..., 74:106], 1, 32), scale)


# Values -1, 0 and 1, each plus or minus an eighth, in eighths.
EIGHTHS = (-7, 1, 9, -9, -1, 7)


def eighths(points: Tensor, is_minus: Tensor, scale: Tensor) -> Codes:
    """`is_minus` [N, blocks, n] has a bit per point."""
    levels = grid("IQ1_S")[points] + 3 * is_minus[..., None].to(torch.uint8)
    return tabled(EIGHTHS, levels.flatten(-2), scale / 8)


def iq1_s(blocks: Tensor) -> Codes:
    word = words(blocks[..., 34:50], 2)
    high = word[..., None] >> torch.arange(0, 12, 3) & 7
    points = blocks[..., 2:34].int() | high.flatten(-2) << 8
    scale = half(blocks, 0) * (2 * (word >> 12 & 7) + 1)
    return eighths(points, (word >> 15).repeat_interleave(4, dim=-1), scale)


def iq1_m(blocks: Tensor) -> Codes:
    word = words(blocks[..., 48:56], 2)
    bits = (word >> 12 << torch.arange(0, 16, 4)).sum(-1, keepdim=True)  # of a float16
    d = finite(bits.to(torch.uint16).view(torch.float16).float())
    scales = (word[..., None] >> torch.arange(0, 12, 3) & 7).flatten(-2)
    high = fields(blocks[..., 32:48], 4, 16).int()
    points = blocks[..., 0:32].int() | (high & 7) << 8
    return eighths(points, high >> 3, d * (2 * scales + 1))


def tq1_0(blocks: Tensor) -> Codes:
    """Ternary digits of bytes that are fractions of 256, the first digit in the first fraction."""

    def digits(octets: Tensor, number: int) -> Tensor:
        powers = 3 ** torch.arange(number)[:, None]
        return ((octets[..., None, :].int() * powers & 255) * 3 >> 8).flatten(-2)

    parts = (
        digits(blocks[..., 0:32], 5),
        digits(blocks[..., 32:48], 5),
        digits(blocks[..., 48:52], 4),
    )
    q = torch.cat(parts, dim=-1).to(torch.uint8)
    return codes(4, q + (8 - 1), half(blocks, 52))


def tq2_0(blocks: Tensor) -> Codes:
    return codes(4, fields(blocks[..., 0:64], 2, 2) + (8 - 1), half(blocks, 64))


READERS: dict[str, Callable[[Tensor], Codes]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "Q8_K": q8_k,
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
}
