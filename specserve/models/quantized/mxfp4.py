"""MXFP4: floats of 4 bits (e2m1), of which 32 share a power of two (e8m0), as gpt-oss has them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specserve.models.quantized.config import Quantization
from specserve.models.quantized.stored import NotFinite, Stored, divided
from specserve_kernels import Codes

GROUP = 32
BITS = 8  # of a code: twice a value is a whole number from -12 to 12
TWICE = (0, 1, 2, 3, 4, 6, 8, 12)  # what a float of these bits means, but for its sign
BIAS, NAN = 127, 255  # of an e8m0 number


class Mxfp4:
    def __init__(self, told: Quantization) -> None:
        pass

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        groups = divided(shape[1], GROUP, "columns")
        return {
            "blocks": Stored((shape[0], groups, GROUP // 2), ("U8",)),
            "scales": Stored((shape[0], groups), ("U8",)),
        }

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        blocks, exponents = tensors["blocks"], tensors["scales"]
        if (exponents == NAN).any():
            raise NotFinite("scales")
        middle = 1 << BITS - 1
        positive = torch.tensor(TWICE, dtype=torch.uint8)
        codes = torch.cat([middle + positive, middle - positive])
        nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1)
        scale = torch.ldexp(torch.full(exponents.shape, 0.5), exponents.int() - BIAS)
        return Codes(BITS, GROUP, codes[nibbles.int()].view(shape), scale)
