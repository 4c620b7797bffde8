"""GPTQ: integers packed along K, [K, N], with a zero point and a scale for groups of rows.

Two forms differ by 1 in what they store of a zero point, and some files of the second claim to be
of the first. With symmetric quantization it does not matter: all zero points are half of the range.
Where a zero point is 0, subtracting 1 borrowed from the next one in the word, and adding 1 to the
whole word gives both back.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from specserve.models.quantized.config import Quantization
from specserve.models.quantized.order import ordered
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
