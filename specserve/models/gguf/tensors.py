"""Reads a GGUF file's tensors by Hugging Face name, with the interface of a safetensors file.

A quantized weight is integer * scale, or integer * scale + offset. Blocks are [N, blocks per row,
bytes]; ggml's quants.c defines the bytes of a block.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from specserve.models.gguf import header
from specserve.models.gguf.config import checkpoint_name, is_turned
from specserve.models.gguf.header import QUANTIZED, TYPES
from specserve.models.gguf.source import GgufFile
from specserve.models.quantized.config import Quantization
from specserve.models.quantized.stored import NotFinite, Stored, is_finite
from specserve.models.weight_files import Slice
from specserve_kernels import Codes

BY_NAME = {type.name: type for type in TYPES.values()}


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


def codes_of(type: str, blocks: Tensor) -> Codes:
    match type:
        case "Q4_0":
            return codes(4, nibbles(blocks[..., 2:18]), half(blocks, 0))
        case "Q4_1":
            return affine(4, nibbles(blocks[..., 4:20]), half(blocks, 0), half(blocks, 2))
        case "Q5_0":
            q = nibbles(blocks[..., 6:22]) | bits(blocks[..., 2:6]) << 4
            return codes(8, q + (128 - 16), half(blocks, 0))
        case "Q5_1":
            q = nibbles(blocks[..., 8:24]) | bits(blocks[..., 4:8]) << 4
            return affine(5, q, half(blocks, 0), half(blocks, 2))
        case "Q8_0":
            return codes(8, blocks[..., 2:34] ^ 128, half(blocks, 0))
        case "Q4_K":
            return affine(4, in_eighths(blocks[..., 16:144]), *k_scales(blocks))
        case "Q5_K":
            high = (blocks[..., None, 16:48] >> SHIFTS[:, None]) & 1
            return affine(5, in_eighths(blocks[..., 48:176]) | high << 4, *k_scales(blocks))
    assert type == "Q6_K", type
    low = nibbles(rows(blocks[..., 0:128], 2))  # per half of a block
    high = rows(blocks[..., 128:192], 2)[..., None, :] >> SHIFTS[::2, None] & 3
    q = (rows(low, 4) | high << 4).flatten(-3)
    scale = half(blocks, 208) * blocks[..., 192:208].view(torch.int8).float()
    return codes(8, q + (128 - 32), scale)


SHIFTS = torch.arange(8, dtype=torch.uint8)


def codes(bits: int, q: Tensor, scale: Tensor) -> Codes:
    """Codes without zero points. Each scale belongs to an equal share of a row's columns."""
    N, scale = len(q), scale.reshape(len(q), -1)
    q = q.reshape(N, -1)
    return Codes(bits, q.shape[1] // scale.shape[1], q, scale)


def affine(width: int, q: Tensor, scale: Tensor, offset: Tensor) -> Codes:
    """Codes for q * scale + offset, with q of `width` bits: 4 bits stay, 5 bits become 8-bit codes
    with the same middle.
    """
    up = 0 if width == 4 else 128 - (1 << width - 1)
    made = codes(4 if width == 4 else 8, q + up, scale)
    zero = torch.full_like(made.scale, up, dtype=torch.uint8)
    return made._replace(zero=zero, offset=offset.reshape(made.scale.shape))


def half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as [N, blocks, 1] float32."""
    values = blocks[..., start : start + 2].contiguous().view(torch.float16).float()
    if not is_finite(values):
        raise NotFinite("a block's scale")
    return values


def nibbles(octets: Tensor) -> Tensor:
    """The low 4 bits of all bytes, then the high 4 bits."""
    return torch.cat([octets & 15, octets >> 4], dim=-1)


def bits(octets: Tensor) -> Tensor:
    """Each byte's bits, the lowest first."""
    return ((octets[..., None] >> SHIFTS) & 1).flatten(-2)


def rows(octets: Tensor, number: int) -> Tensor:
    """Reshape the last dimension to a matrix with `number` rows."""
    return octets.reshape(*octets.shape[:-1], number, -1)


def in_eighths(octets: Tensor) -> Tensor:
    """[N, blocks, 8, 32]: for each 32 bytes, the low 4 bits, then the high 4 bits."""
    quarters = rows(octets, 4)
    return torch.stack([quarters & 15, quarters >> 4], dim=-2).flatten(-3, -2)


def k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the offset of each eighth of a block, [N, blocks, 8].

    Both have 6 bits. The first four have separate bytes, whose upper bits belong to the other four.
    """
    scale, least, mixed = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([scale & 63, (mixed & 15) | (scale >> 6) << 4], dim=-1)
    leasts = torch.cat([least & 63, (mixed >> 4) | (least >> 6) << 4], dim=-1)
    return half(blocks, 0) * scales.float(), -(half(blocks, 2) * leasts.float())


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
