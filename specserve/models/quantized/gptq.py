"""GPTQ: integers packed along K, [K, N], with a zero point and a scale for groups of rows.

Two forms differ by 1 in what they store of a zero point, and some files of the second claim to be
of the first. With symmetric quantization it does not matter: all zero points are half of the range.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from specserve.models.quantized.config import Quantization
from specserve.models.quantized.stored import INTEGERS, SCALES, Stored, divided, unpack
from specserve_kernels import Codes


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

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        _, K = shape
        group = self.told.group or K
        check_order(tensors.get("g_idx"), group)
        return Codes(
            bits=self.bits,
            group=group,
            q=unpack(tensors["qweight"].T, self.bits),
            scale=tensors["scales"].T.float().contiguous(),
            zero=self.zeros(tensors["qzeros"]),
        )

    def zeros(self, packed: Tensor) -> Tensor | None:
        stored, middle = unpack(packed, self.bits), 1 << (self.bits - 1)
        if self.told.is_symmetric and torch.isin(stored, torch.tensor([middle - 1, middle])).all():
            return None
        added = stored + 1 if self.told.has_zeros_less_one else stored
        return (added & (1 << self.bits) - 1).T.contiguous()


def check_order(groups: Tensor | None, group: int) -> None:
    """ValueError if columns are not in groups of consecutive ones."""
    if groups is None:
        return
    if not torch.equal(groups.long(), torch.arange(len(groups)) // group):
        raise ValueError("its columns were reordered (desc_act), which is not supported")
