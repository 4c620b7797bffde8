"""Finds and reads the quantized linear maps of a checkpoint."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.checkpoint import DTYPES, Checkpoint, drop_tensor
from specserve.models.gguf.blocks import bits_in_memory
from specserve.models.gguf.tensors import type_of
from specserve.models.quantized.config import Quantization
from specserve.models.quantized.formats import FLOATS, FORMATS
from specserve.models.quantized.stored import SCALES, UNUSED, NotFinite, Stored, is_finite
from specserve_kernels import Codes

PLAIN = {"weight", "bias", "e_score_correction_bias"}  # the last one is of a router
UNTOLD = "but config.json has no quantization_config"
SIZES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}  # bytes, by type
REMEDY = "Download the model again, or use another quantization of it"


class QuantizedMaps:
    """The quantized linear maps of a checkpoint, by the name of their unquantized weight.

    A map is quantized if it has other tensors than weight and bias, or a weight with a dtype that
    unquantized weights do not have. Lists of exceptions in config.json are ignored.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        told: Quantization | None,
    ) -> None:
        self.checkpoint, self.told = checkpoint, told
        self.format = FORMATS[told.method](told) if told is not None else None
        self.shapes: dict[str, tuple[int, int]] = {}  # of the quantized maps
        self.suffixes: dict[str, list[str]] = {}  # of the tensors to read
        self.expected: dict[str, Stored] = {}  # all tensors that the checkpoint must have
        for name, shape in shapes.items():
            module, _, suffix = name.rpartition(".")
            is_map = suffix == "weight" and len(shape) == 2
            if is_map and self.is_quantized(module):
                self.add(name, module, (shape[0], shape[1]), f"{module}.bias" in shapes)
            else:
                self.expected[name] = Stored(shape, tuple(DTYPES))

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def is_quantized(self, module: str) -> bool:
        found = self.checkpoint.parts(module)
        is_plain = PLAIN.issuperset(found)
        if self.format is None:
            if not is_plain and "weight" not in found:
                raise self.refusal(module, f"it has {', '.join(sorted(found))}, {UNTOLD}")
            return False
        return not is_plain or ("weight" in found and found["weight"].dtypes[0] not in DTYPES)

    def add(self, name: str, module: str, shape: tuple[int, int], has_bias: bool) -> None:
        assert self.format is not None
        found = self.checkpoint.parts(module)
        try:
            parts = self.format.expected(shape, found)
        except ValueError as e:
            raise self.refusal(module, str(e)) from e
        if "bias" in found and not has_bias:  # old versions of AutoGPTQ wrote zeros
            parts["bias"] = Stored(shape[:1], SCALES)
        self.shapes[name] = shape
        self.suffixes[name] = [suffix for suffix in parts if suffix not in UNUSED]
        self.expected |= {f"{module}.{suffix}": wanted for suffix, wanted in parts.items()}

    def read(self, name: str) -> Codes | Tensor:
        """Read a weight [N, K], as codes or as float32 values, and drop the pages of the file.
        Raises ConfigError for values that are not finite.
        """
        assert self.format is not None and self.told is not None
        module = name.removesuffix(".weight")
        tensors = self.checkpoint.tensors(module, self.suffixes[name])
        try:
            for suffix, tensor in tensors.items():
                if "scale" in suffix and not is_finite(tensor.float()):
                    raise NotFinite(suffix)
            if "bias" in tensors and tensors["bias"].any():
                raise ValueError("it has a bias, but config.json describes none")
            weight = self.format.read(self.shapes[name], tensors)
            if isinstance(weight, Tensor) and "weight" in tensors and not is_finite(weight):
                raise NotFinite("weight")
        except NotFinite as e:
            raise self.checkpoint.not_finite(f"{module}.{e}") from e
        except ValueError as e:
            raise self.refusal(module, str(e)) from e
        for tensor in tensors.values():
            drop_tensor(tensor)
        if isinstance(weight, Codes) and weight.are_whole_rows:
            return weight._replace(rounds_rows=self.told.activations.rounds(module, weight.group))
        return weight

    def num_bytes(self, name: str, dtype: torch.dtype) -> int:
        """Approximate bytes of a map in memory; 8-bit floats are converted to `dtype`."""
        found = self.checkpoint.parts(name.removesuffix(".weight"))
        parts = [found[suffix] for suffix in self.suffixes[name]]
        if self.told is not None and self.told.method in ("gguf", "mxfp4"):
            type = type_of(found) if self.told.method == "gguf" else "MXFP4"
            return int(math.prod(self.shapes[name]) * bits_in_memory(type)) // 8
        if any(part.dtypes[0] in FLOATS for part in parts):
            return math.prod(self.shapes[name]) * dtype.itemsize
        return sum(math.prod(part.shape) * SIZES[part.dtypes[0]] for part in parts)

    def refusal(self, module: str, reason: str) -> ConfigError:
        return ConfigError(f"{self.checkpoint.folder}: {module}: {reason}. {REMEDY}")
