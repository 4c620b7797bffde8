"""A GGUF file's tensors by their Hugging Face names, in the way that safetensors gives a file's."""

from pathlib import Path

import torch
from torch import Tensor

from specserve.models.gguf import header, names
from specserve.models.gguf.source import GgufFile
from specserve.models.weight_files import Slice

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufTensors:
    """A quantized weight `module.weight` is here `module.Q8_0`, by its type: the bytes of its rows.

    The files stay mapped for as long as this object lives.
    """

    def __init__(self, path: Path) -> None:
        source = GgufFile(path)
        self.head_dim = source.config().head_dim
        self.architecture = str(source.header.metadata["general.architecture"])
        self.tensors: dict[str, tuple[str, header.Tensor]] = {}  # with llama.cpp's name of it
        for name, tensor in source.header.tensors.items():
            ours = names.checkpoint_name(name)
            if ours is not None and not tensor.type.is_plain:
                ours = ours.removesuffix("weight") + tensor.type.name
            if ours is not None:
                self.tensors[ours] = name, tensor
        files = {tensor.file for _, tensor in self.tensors.values()}
        self.bytes = {file: map_file(file) for file in files}

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_slice(self, name: str) -> Slice:
        _, tensor = self.tensors[name]
        if tensor.type.is_plain:
            return Slice(tensor.shape, tensor.type.name)
        return Slice((*tensor.shape[:-1], row_bytes(tensor)), "U8")

    def get_tensor(self, name: str) -> Tensor:
        """Mapped, not copied, unless its rows have another order in a checkpoint."""
        theirs, tensor = self.tensors[name]
        stored = self.bytes[tensor.file][tensor.offset : tensor.offset + tensor.size]
        if tensor.type.is_plain:
            stored = stored.view(DTYPES[tensor.type.name]).view(tensor.shape)
        else:
            stored = stored.view(*tensor.shape[:-1], row_bytes(tensor))
        if not names.is_turned(self.architecture, theirs):
            return stored
        neighbours = stored.view(-1, self.head_dim // 2, 2, *stored.shape[1:])
        return neighbours.transpose(1, 2).reshape(stored.shape)


def row_bytes(tensor: header.Tensor) -> int:
    return tensor.shape[-1] // tensor.type.width * tensor.type.size


def map_file(path: Path) -> Tensor:
    mapped: Tensor = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    return mapped
