"""Weights in integers of few bits, and rounding weights to codes of 4 or 8 bits."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

WIDENED = 1 << 22  # values that are widened at a time, so that float32 numbers are few
# Columns of a weight whose rows are rounded: so many products of 127 and 255 add up to less than
# 2^31.
MAX_ROUNDED = 1 << 16


class Codes(NamedTuple):
    """A weight [N, K] of which each value is (q - zero) * scale, or that and an offset.

    `group` columns of a row share a scale, a zero and an offset; it divides K. Codes that round
    rows have 8 bits, neither zeros nor offsets, one group and at most MAX_ROUNDED columns.
    """

    bits: int  # 4 or 8
    group: int
    q: Tensor  # [N, K] uint8, below 2 ** bits
    scale: Tensor  # [N, K / group] float32
    zero: Tensor | None = None  # [N, K / group] uint8; None: 2 ** (bits - 1) everywhere
    offset: Tensor | None = None  # [N, K / group] float32; None: 0 everywhere
    # Rows get 8 bits, too, and a scale each, before they are multiplied: reference/layers.py.
    rounds_rows: bool = False

    @property
    def may_round_rows(self) -> bool:
        K = self.q.shape[1]
        is_plain = self.bits == 8 and self.zero is None and self.offset is None
        return is_plain and self.group == K <= MAX_ROUNDED

    def widen(self, dtype: torch.dtype) -> Tensor:
        """The values, [N, K], each rounded once from float32."""
        N, K = self.q.shape
        wide = torch.empty(N, K, dtype=dtype, device=self.q.device)
        height = max(1, WIDENED // K)
        for start in range(0, N, height):
            rows = slice(start, start + height)
            wide[rows] = self._values(rows).view(-1, K)
        return wide

    def _values(self, rows: slice) -> Tensor:
        """Those of some rows, [rows, K / group, group] float32."""
        values = self.q[rows].float().view(-1, self.scale.shape[1], self.group)
        values -= self.middle if self.zero is None else self.zero[rows, :, None]
        values *= self.scale[rows, :, None]
        return values if self.offset is None else values.add_(self.offset[rows, :, None])

    def take(self, rows: Tensor) -> "Codes":
        """Some rows [n] int64, in the order given."""
        return self.each(lambda x: x.index_select(0, rows))

    def each(self, do: Callable[[Tensor], Tensor]) -> "Codes":
        """With what a function makes of each tensor."""
        zero, offset = (None if x is None else do(x) for x in (self.zero, self.offset))
        return self._replace(q=do(self.q), scale=do(self.scale), zero=zero, offset=offset)

    def centered(self) -> "Codes":
        """With the middle for every zero, where there are offsets: they take in the difference.

        Kernels then have one of the two to add. An offset is rounded once more.
        """
        if self.offset is None or self.zero is None:
            return self
        offset = self.offset + (self.middle - self.zero.float()) * self.scale
        return self._replace(zero=None, offset=offset)

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)


GROUP = 64  # columns that share a scale of 4-bit codes; 8-bit codes have one for a whole row
# What the code of a group's extreme would be if codes were not limited: all are tried.
ENDS = {4: (7.33, 7.67, 8.0, 8.33, 8.67, 9.0, 9.5, 10.25), 8: (128.0,)}
LEAST = 2.0**-100  # a scale whose inverse is far from overflow
LANES = 16  # sums over a group are added up in so many parts
PIECE = 1 << 20  # values that are rounded at a time


def quantize(weight: Tensor, bits: int) -> Codes:
    """The weight rounded to codes, with the scales that make the error of a group small.

    A scale is negative where a group's extreme is positive, as the lowest code has no positive
    counterpart. It is a bfloat16 number: so much is kept of it in a file. Where a group has NaN or
    infinities, it is NaN.

    weight  [N, K]  bfloat16 | float32; for 4 bits K is a multiple of 64
    bits    4: groups of 64, a scale with the least sum of squares among several; 8: a scale a row
    """
    N, K = weight.shape
    group = GROUP if bits == 4 else K
    rows = max(1, PIECE // K)
    pieces = [_round(piece.float().view(-1, group), bits) for piece in torch.split(weight, rows)]
    q, scale = map(torch.cat, zip(*pieces, strict=True))
    return Codes(bits, group, q.view(N, K), scale.view(N, K // group))


def _round(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups [n, group], as in quantize.cpp: with equal bits."""
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
    """Over rows, in the order of vec.h."""
    first, *others = x.view(len(x), -1, LANES).unbind(1)
    for part in others:
        first = first + part
    while first.shape[1] > 1:
        front, back = first.chunk(2, dim=1)
        first = front + back
    return first[:, 0]
