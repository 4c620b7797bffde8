"""Reads a GGUF file's tensors by Hugging Face name, with the interface of a safetensors file."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specserve.models.gguf import header
from specserve.models.gguf.blocks import codes_of
from specserve.models.gguf.header import BY_NAME, QUANTIZED
from specserve.models.gguf.names import TensorPlace
from specserve.models.gguf.source import GgufFile
from specserve.models.quantized.config import Quantization
from specserve.models.quantized.stored import NotFinite, Stored
from specserve.models.tensor_shapes import tensor_shapes
from specserve.models.weight_files import Slice
from specserve_kernels import Codes


class Gguf:
    """The `WeightFormat` of GGUF: each linear map has its own type."""

    def __init__(self, told: Quantization) -> None:
        pass

    def expected(self, shape: tuple[int, int], found: Mapping[str, Stored]) -> dict[str, Stored]:
        N, K = shape
        type = BY_NAME[type_of(found)]
        order = {ORDER: found[ORDER]} if ORDER in found else {}
        return {type.name: Stored((N, K // type.width * type.size), ("U8",))} | order

    def read(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        name = type_of(tensors)
        try:
            codes = codes_of(name, tensors[name].view(shape[0], -1, BY_NAME[name].size))
        except NotFinite as e:
            raise NotFinite(name) from e
        return in_order(codes, tensors[ORDER]) if ORDER in tensors else codes


def in_order(codes: Codes, order: Tensor) -> Codes:
    """The codes with equal parts of their columns in another order."""
    width = codes.q.shape[1] // len(order)
    if width % codes.group:
        raise ValueError(f"heads of {width} columns are not multiples of {codes.group}, a block")
    return codes.each(lambda x: parts_of(x, order).reshape(x.shape))


def parts_of(x: Tensor, order: Tensor) -> Tensor:
    return x.view(len(x), len(order), -1)[:, order.long()]


ORDER = "order"  # the order of the heads, which are equal parts of the columns


def type_of(parts: Mapping[str, object]) -> str:
    return next(name for name in QUANTIZED if name in parts)


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Part(NamedTuple):
    """A tensor of the checkpoint, in a tensor of the file."""

    place: TensorPlace
    entry: header.Tensor
    shape: tuple[int, ...]  # with the bytes of a row, if it is quantized


class GgufTensors:
    """The tensors of a GGUF file. A quantized weight `module.weight` has its type in its name, e.g.
    `module.Q8_0`, and consists of the bytes of its rows.

    The files stay mapped during the lifetime of this object.
    """

    def __init__(self, path: Path) -> None:
        source = GgufFile(path)
        config, entries = source.config(), source.header.tensors
        self.head_dim, shapes = config.head_dim, tensor_shapes(config)
        self.parts: dict[str, Part] = {}
        self.orders: dict[str, tuple[int, ...]] = {}
        for name, place in source.places().items():
            entry, shape = entries[place.name], shapes[name]
            if not entry.type.is_plain:
                module = name.removesuffix("weight")
                if place.columns is not None:
                    self.orders[f"{module}{ORDER}"] = place.columns
                name = module + entry.type.name
                shape = *shape[:-1], row_bytes(entry)
            self.parts[name] = Part(place, entry, shape)
        self.numbers = source.numbers()
        files = {part.entry.file for part in self.parts.values()}
        self.bytes = {
            file: torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
            for file in files
        }

    def keys(self) -> list[str]:
        return [*self.parts, *self.numbers, *self.orders]

    def get_slice(self, name: str) -> Slice:
        if name in self.numbers:
            return Slice((1,), "F32")
        if name in self.orders:
            return Slice((len(self.orders[name]),), "I32")
        _, entry, shape = self.parts[name]
        return Slice(shape, entry.type.name if entry.type.is_plain else "U8")

    def get_tensor(self, name: str) -> Tensor:
        """A tensor: mapped, not copied, unless its rows must be reordered."""
        if name in self.numbers:
            return torch.tensor([self.numbers[name]])
        if name in self.orders:
            return torch.tensor(self.orders[name], dtype=torch.int32)
        place, entry, shape = self.parts[name]
        stored = self.bytes[entry.file][entry.offset : entry.offset + entry.size]
        if entry.type.is_plain:
            stored = stored.view(DTYPES[entry.type.name]).view(place.shape)
        else:
            stored = stored.view(*place.shape[:-1], row_bytes(entry))
        if place.expert is not None:
            stored = stored[place.expert]
        if place.rows != slice(None):
            stored = stored[list(place.rows) if isinstance(place.rows, tuple) else place.rows]
        if place.columns is not None and entry.type.is_plain:
            stored = parts_of(stored, torch.tensor(place.columns))
        if place.is_turned:
            neighbours = stored.view(-1, self.head_dim // 2, 2, *stored.shape[1:])
            stored = neighbours.transpose(1, 2)
        if place.is_rate:
            stored = (-stored.float()).log()
        return stored.reshape(shape)


def row_bytes(tensor: header.Tensor) -> int:
    return tensor.shape[-1] // tensor.type.width * tensor.type.size
