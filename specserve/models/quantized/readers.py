"""The reader of each format."""

from collections.abc import Callable

from specserve.models.gguf.format import Gguf
from specserve.models.quantized.awq import Awq
from specserve.models.quantized.compressed import Compressed
from specserve.models.quantized.config import Quantization
from specserve.models.quantized.floats import Floats
from specserve.models.quantized.gptq import Gptq
from specserve.models.quantized.mxfp4 import Mxfp4
from specserve.models.quantized.stored import WeightFormat

FORMATS: dict[str, Callable[[Quantization], WeightFormat]] = {
    "awq": Awq,
    "compressed-tensors": Compressed,
    "fp8": Floats,
    "gguf": Gguf,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}


def reader(told: Quantization) -> WeightFormat:
    return FORMATS[told.method](told)
