"""Weights quantized to integer codes of 4 or 8 bits."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

WIDENED = 1 << 22  # values widened per pass; limits the temporary float32 memory
# Maximum columns of a weight that rounds whole rows: 2^16 products of 127 and 255 sum to less than
# 2^31.
MAX_ROUNDED = 1 << 16
# Maximum columns of a group that rounds rows: 2^8 products of 127 and 255 sum to less than 2^24, so
# that every sum is exact in float32.
MAX_ROUNDED_GROUP = 1 << 8


class Codes(NamedTuple):
    """A quantized weight [N, K]. Each value is (q - zero) * scale + offset, or table[q] * scale.

    Each `group` consecutive columns of a row share a scale, a zero and an offset; `group` divides
    K. Codes with a table have 4 bits, no zeros and no offsets. Codes that round rows have groups of
    at most MAX_ROUNDED_GROUP columns; or 8 bits, no zeros, no offsets, one group, and at most
    MAX_ROUNDED columns.
    """

    bits: int  # 4 or 8
    group: int
    q: Tensor  # [N, K] uint8, less than 2 ** bits
    scale: Tensor  # [N, K / group] float32
    zero: Tensor | None = None  # [N, K / group] uint8; None: 2 ** (bits - 1) everywhere
    offset: Tensor | None = None  # [N, K / group] float32; None: 0 everywhere
    # Input rows are quantized to int8 with one scale per group: reference/rounded.py.
    rounds_rows: bool = False
    table: tuple[int, ...] | None = None  # 16 integers from -128 to 127

    @property
    def are_whole_rows(self) -> bool:
        """Whether a row's codes have one scale and no zeros, as W8A8 needs."""
        K = self.q.shape[1]
        is_plain = self.bits == 8 and self.zero is None and self.offset is None
        return is_plain and self.group == K <= MAX_ROUNDED

    @property
    def may_round_rows(self) -> bool:
        return self.are_whole_rows or self.group <= MAX_ROUNDED_GROUP

    def widen(self, dtype: torch.dtype) -> Tensor:
        """Return the values, [N, K], each rounded once from float32."""
        N, K = self.q.shape
        wide = torch.empty(N, K, dtype=dtype, device=self.q.device)
        height = max(1, WIDENED // K)
        for start in range(0, N, height):
            rows = slice(start, start + height)
            wide[rows] = self._values(rows).view(-1, K)
        return wide

    def _values(self, rows: slice) -> Tensor:
        """Return the values of some rows, [rows, K / group, group] float32."""
        values = self.q[rows]
        if self.table is not None:
            values = torch.tensor(self.table)[values.int()]
        values = values.float().view(-1, self.scale.shape[1], self.group)
        if self.table is None:
            values -= self.middle if self.zero is None else self.zero[rows, :, None]
        values *= self.scale[rows, :, None]
        return values if self.offset is None else values.add_(self.offset[rows, :, None])

    def take(self, rows: Tensor) -> "Codes":
        """Select rows [n] int64, in the given order."""
        return self.each(lambda x: x.index_select(0, rows))

    def each(self, do: Callable[[Tensor], Tensor]) -> "Codes":
        """Apply a function to each tensor."""
        zero, offset = (None if x is None else do(x) for x in (self.zero, self.offset))
        return self._replace(q=do(self.q), scale=do(self.scale), zero=zero, offset=offset)

    def centered(self) -> "Codes":
        """Fold the zeros into the offsets, if there are both. Every zero is then the middle.

        Kernels then add either a zero or an offset, never both. The fold rounds each offset once.
        """
        if self.offset is None or self.zero is None:
            return self
        offset = self.offset + (self.middle - self.zero.float()) * self.scale
        return self._replace(zero=None, offset=offset)

    def without_zeros(self) -> "Codes":
        """Fold the zeros into 8-bit codes, if there are offsets, too. Folding is exact. If a byte
        cannot hold a difference, fold all zeros into the offsets.
        """
        if self.offset is None or self.zero is None:
            return self
        q = self.q.short() - self.zero.short().repeat_interleave(self.group, dim=1) + 128
        low, high = q.aminmax()
        if low < 0 or high > 255:
            return self.centered()
        return self._replace(bits=8, q=q.to(torch.uint8), zero=None)

    def without_table(self) -> "Codes":
        """Return the same values as 8-bit codes, if there is a table."""
        if self.table is None:
            return self
        q = torch.tensor([value + 128 for value in self.table], dtype=torch.uint8)
        return self._replace(bits=8, q=q.to(self.q.device)[self.q.int()], table=None)

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)


GROUP = 64  # columns per scale of 4-bit codes; 8-bit codes have one scale per row
# Candidate unclamped codes of a group's extreme; `quantize` tries each.
ENDS = {4: (7.33, 7.67, 8.0, 8.33, 8.67, 9.0, 9.5, 10.25), 8: (128.0,)}
LEAST = 2.0**-100  # minimum |scale|, so that its inverse cannot overflow; a smaller scale becomes 1
LANES = 16  # partial sums of a sum over a group
PIECE = 1 << 20  # values rounded per pass


def quantize(weight: Tensor, bits: int) -> Codes:
    """Round a weight to codes, with scales that minimize each group's error.

    A scale is negative if a group's extreme is positive, because the lowest code has no positive
    counterpart. Scales are bfloat16 values, because files store them as bfloat16. A group that
    contains NaN or infinity has a NaN scale.

    weight  [N, K]  bfloat16 | float32; for 4 bits K is a multiple of 64
    bits    4: groups of 64, each with the candidate scale of least squared error; 8: one scale per
            row
    """
    N, K = weight.shape
    group = GROUP if bits == 4 else K
    rows = max(1, PIECE // K)
    pieces = [_round(piece.float().view(-1, group), bits) for piece in torch.split(weight, rows)]
    q, scale = map(torch.cat, zip(*pieces, strict=True))
    return Codes(bits, group, q.view(N, K), scale.view(N, K // group))


def _round(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of groups [n, group], bit-identical to quantize.cpp."""
    low, high = x.aminmax(dim=1)
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    extreme = torch.where(-low >= high, low, high)
    scales = [_scale(extreme, end) for end in ENDS[bits]]
    scale, least = scales[0], None
    for tried in scales if len(scales) > 1 else ():
        off = _code(x, tried, bits) * tried[:, None] - x
        error = _sum(off * off)
        scale = tried if least is None else torch.where(error < least, tried, scale)
        least = error if least is None else torch.minimum(error, least)
    q = (_code(x, scale, bits) + (1 << bits - 1)).nan_to_num(0.0).to(torch.uint8)
    return q, torch.where(x.isfinite().all(1), scale, torch.nan)


def _scale(extreme: Tensor, end: float) -> Tensor:
    scale = (extreme / -end).bfloat16().float()
    return torch.where(scale.abs() < LEAST, 1.0, scale)


def _code(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    middle = 1 << bits - 1
    return (x * (1.0 / scale)[:, None]).round().clamp(-middle, middle - 1)


def _sum(x: Tensor) -> Tensor:
    """Sum each row, in the summation order of vec.h."""
    first, *others = x.view(len(x), -1, LANES).unbind(1)
    for part in others:
        first = first + part
    while first.shape[1] > 1:
        front, back = first.chunk(2, dim=1)
        first = front + back
    return first[:, 0]
