"""AWQ: integers of 4 bits packed along N, [K, N], the eight of a word in an order of their own."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specserve.models.quantized.config import Quantization
from specserve.models.quantized.stored import INTEGERS, SCALES, Stored, bytes_of, divided
from specserve_kernels import Codes

PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of columns 0, 1, ... in a word


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
    """[columns, rows] from words [rows, columns / 8]."""
    octets = bytes_of(words.T).view(words.shape[1], -1, 4)  # [columns / 8, rows, 4]
    columns = [octets[..., place // 2] >> 4 * (place % 2) & 15 for place in PLACES]
    return torch.stack(columns, dim=1).flatten(0, 1)
