"""Weights in integers of few bits."""

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
