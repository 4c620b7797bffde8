"""Reads a GGUF file's tensors by Hugging Face name, with the interface of a safetensors file."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from specserve.models.gguf import header
from specserve.models.gguf.blocks import codes_of
from specserve.models.gguf.config import checkpoint_name, is_turned
from specserve.models.gguf.header import BY_NAME, QUANTIZED
from specserve.models.gguf.source import GgufFile
from specserve.models.quantized.config import Quantization
from specserve.models.quantized.stored import NotFinite, Stored
from specserve.models.weight_files import Slice
from specserve_kernels import Codes


class Gguf:
    """The `WeightFormat` of GGUF: each linear map has its own type."""

    def __init__(self, told: Quantization) -> None:
        pass

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        N, K = shape
        type = BY_NAME[type_of(found)]
        return {type.name: Stored((N, K // type.width * type.size), ("U8",))}

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        name = type_of(tensors)
        try:
            return codes_of(name, tensors[name].view(shape[0], -1, BY_NAME[name].size))
        except NotFinite as e:
            raise NotFinite(name) from e


def type_of(parts: Mapping[str, object]) -> str:
    return next(name for name in QUANTIZED if name in parts)


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufTensors:
    """The tensors of a GGUF file. A quantized weight `module.weight` has its type in its name, e.g.
    `module.Q8_0`, and consists of the bytes of its rows.

    The files stay mapped during the lifetime of this object.
    """

    def __init__(self, path: Path) -> None:
        source = GgufFile(path)
        self.head_dim = source.config().head_dim
        self.architecture = str(source.header.metadata["general.architecture"])
        self.tensors: dict[str, tuple[str, header.Tensor]] = {}  # name -> llama.cpp's name, entry
        for name, tensor in source.header.tensors.items():
            ours = checkpoint_name(name)
            if ours is not None and not tensor.type.is_plain:
                ours = ours.removesuffix("weight") + tensor.type.name
            if ours is not None:
                self.tensors[ours] = name, tensor
        files = {tensor.file for _, tensor in self.tensors.values()}
        self.bytes = {
            file: torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
            for file in files
        }

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_slice(self, name: str) -> Slice:
        _, tensor = self.tensors[name]
        if tensor.type.is_plain:
            return Slice(tensor.shape, tensor.type.name)
        return Slice((*tensor.shape[:-1], row_bytes(tensor)), "U8")

    def get_tensor(self, name: str) -> Tensor:
        """A tensor: mapped, not copied, unless its rows must be reordered."""
        theirs, tensor = self.tensors[name]
        stored = self.bytes[tensor.file][tensor.offset : tensor.offset + tensor.size]
        if tensor.type.is_plain:
            stored = stored.view(DTYPES[tensor.type.name]).view(tensor.shape)
        else:
            stored = stored.view(*tensor.shape[:-1], row_bytes(tensor))
        if not is_turned(self.architecture, theirs):
            return stored
        neighbours = stored.view(-1, self.head_dim // 2, 2, *stored.shape[1:])
        return neighbours.transpose(1, 2).reshape(stored.shape)


def row_bytes(tensor: header.Tensor) -> int:
    return tensor.shape[-1] // tensor.type.width * tensor.type.size
