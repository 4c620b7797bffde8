"""8-bit floats (e4m3) with a scale for a tensor, for each row, or for blocks: widened when read."""

from collections.abc import Container, Mapping

from torch import Tensor

from specserve.models.quantized.config import Quantization
from specserve.models.quantized.stored import SCALES, Stored, unused

FLOATS = ("F8_E4M3",)
POWERS = ("F8_E8M0",)  # of two


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
        """The shape of the scales of blocks, if there are blocks."""
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
    """vLLM's name for it, or DeepSeek's, which says what it is the inverse of."""
    return "weight_scale_inv" if "weight_scale_inv" in names else "weight_scale"
