"""8-bit floats (e4m3) with a scale for a tensor, for each row, or for blocks: widened when read."""

from collections.abc import Mapping

from torch import Tensor

from specserve.models.quantized.config import Quantization
from specserve.models.quantized.stored import SCALES, Stored

FLOATS = ("F8_E4M3",)


class Floats:
    def __init__(self, told: Quantization) -> None:
        self.block = told.block

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        scale = "weight_scale_inv" if "weight_scale_inv" in found else "weight_scale"
        has = found.get(scale, Stored((), ()))
        parts = {
            "weight": Stored(shape, FLOATS),
            scale: Stored(self.scale_shape(shape, has.shape), SCALES),
        }
        if "input_scale" in found:  # of activations, which are not quantized here
            parts["input_scale"] = Stored(found["input_scale"].shape, SCALES)
        return parts

    def scale_shape(self, shape: tuple[int, int], found: tuple[int, ...]) -> tuple[int, ...]:
        """Of the allowed shapes that which was found; if none was, one of them."""
        N, K = shape
        allowed: list[tuple[int, ...]] = [(N, 1), (1,), (), (1, 1)]
        if self.block is not None:
            height, width = self.block
            allowed.insert(0, (-(-N // height), -(-K // width)))
        return found if found in allowed else allowed[0]

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Tensor:
        name = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
        scale, weight = tensors[name].float(), tensors["weight"].float()
        if scale.dim() == 2 and self.block is not None and scale.shape != (shape[0], 1):
            for dim, size in enumerate(self.block):
                scale = scale.repeat_interleave(size, dim)[:, : shape[1]][: shape[0]]
        return weight * scale
