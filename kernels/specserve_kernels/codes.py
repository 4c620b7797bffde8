"""Weights in integers of few bits."""

from typing import NamedTuple

import torch
from torch import Tensor


class Codes(NamedTuple):
    """A weight [N, K] of which each value is (q - zero) * scale.

    `group` columns of a row share a scale and a zero; it divides K.
    """

    bits: int  # 4 or 8
    group: int
    q: Tensor  # [N, K] uint8, below 2 ** bits
    scale: Tensor  # [N, K / group] float32
    zero: Tensor | None = None  # [N, K / group] uint8; None: 2 ** (bits - 1) everywhere

    def widen(self, dtype: torch.dtype) -> Tensor:
        """The values, [N, K], each rounded once from float32."""
        N, K = self.q.shape
        middle = 1 << (self.bits - 1)
        zero = middle if self.zero is None else self.zero[..., None].float()
        values = (self.q.view(N, -1, self.group).float() - zero) * self.scale[..., None]
        return values.view(N, K).to(dtype)
