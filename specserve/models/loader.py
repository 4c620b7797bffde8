"""Loading a decoder from a folder, one tensor after the other."""

import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models import families, rotary
from specserve.models.checkpoint import Checkpoint
from specserve.models.decoder import Decoder, Layer, Weights
from specserve.models.families import DecoderConfig
from specserve.models.quantized.maps import QuantizedMaps
from specserve.models.source import open_source
from specserve_drafters.tree import TREE_SLOTS
from specserve_kernels import Codes, Ops, QKNorm, Rotary

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # beside that of the activations
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


def load_decoder(
    folder: Path,
    dtype: str,
    ops: Ops,
    max_len: int | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """The folder's model in `dtype` (auto, bf16, fp32), for requests of up to `max_len` tokens.

    Files are mapped, and a tensor's pages are dropped as soon as it is packed: the weights are
    never resident twice.
    """
    config = open_source(folder).config()
    checkpoint = Checkpoint(folder)
    shapes = families.tensor_shapes(config)
    if "lm_head" in checkpoint.suffixes:  # used even where config.json says that it is tied
        shapes[HEAD] = shapes[EMBEDDING]
    maps = QuantizedMaps(checkpoint, shapes, config.quantization)
    checkpoint.check(maps.expected)
    reader = Reader(checkpoint, shapes, maps, compute_dtype(dtype, checkpoint, ops), ops)
    if progress is not None:
        reader.report = progress
    # A tree's nodes stand at positions beyond the last known token.
    length = (max_len or config.max_positions) + TREE_SLOTS
    tables = rotary.tables(config.rope_parameters, config.head_dim, length)
    table = Rotary(*map(ops.place, tables))
    return Decoder(config, ops, table, read_weights(reader, config, ops, table))


def weight_bytes(folder: Path, dtype: str, ops: Ops) -> int:
    """The bytes of a model's weights once `load_decoder` has loaded them."""
    checkpoint, shapes = Checkpoint(folder), families.tensor_shapes(open_source(folder).config())
    numbers = sum(map(math.prod, shapes.values()))
    return numbers * compute_dtype(dtype, checkpoint, ops).itemsize


def compute_dtype(dtype: str, checkpoint: Checkpoint, ops: Ops) -> torch.dtype:
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ConfigError(f"dtype {dtype!r} is not known; use auto, bf16 or fp32")
    is_fp32 = EMBEDDING in checkpoint and checkpoint.dtype(EMBEDDING) == torch.float32
    return torch.float32 if is_fp32 or not ops.has_bf16() else torch.bfloat16


def name_of_dtype(dtype: torch.dtype) -> str:
    return next(name for name, known in (DTYPES | KV_DTYPES).items() if known == dtype)


class Reader:
    """Reads a checkpoint's tensors in the model's dtype, onto the ops' device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        maps: QuantizedMaps,
        dtype: torch.dtype,
        ops: Ops,
    ) -> None:
        self.checkpoint, self.shapes, self.maps = checkpoint, shapes, maps
        self.dtype, self.ops = dtype, ops
        self.report: Progress = lambda done, total: None
        self.num_read, self.num_elements = 0, sum(map(math.prod, shapes.values()))

    def read(self, name: str) -> Tensor:
        memory = torch.empty(self.shapes[name], dtype=self.dtype)
        return self.ops.place(self.read_into(memory, [name]))

    def read_bias(self, *names: str) -> Tensor | None:
        """The biases of linear maps that are fused into one; None if they have none."""
        biases = [f"{name}.bias" for name in names]
        if biases[0] not in self.shapes:
            return None
        return torch.cat([self.read(bias) for bias in biases])

    def read_weight(self, *names: str, is_gated: bool = False) -> Any:
        """The packed weights of linear maps that are fused into one; the unpacked are freed."""
        weights = [f"{name}.weight" for name in names]
        height, width = sum(self.shapes[w][0] for w in weights), self.shapes[weights[0]][1]
        size = height * width * self.dtype.itemsize
        # Not from malloc: freeing it would leave a hole in the heap between packed weights.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        weight = torch.frombuffer(memory, dtype=self.dtype).view(-1, width)
        return self.ops.prepack(self.read_into(weight, weights), is_gated)

    def read_into(self, out: Tensor, names: list[str]) -> Tensor:
        """Fill `out` with tensors, one below the other."""
        heights = [self.shapes[name][0] for name in names]
        for name, part in zip(names, torch.split(out, heights), strict=True):
            if name in self.maps:
                weight = self.maps.read(name)
                part.copy_(weight.widen(self.dtype) if isinstance(weight, Codes) else weight)
            else:
                self.checkpoint.read(name, part)
            self.num_read += part.numel()
            self.report(self.num_read * out.itemsize, self.num_elements * out.itemsize)
        return out


def read_weights(reader: Reader, config: DecoderConfig, ops: Ops, table: Rotary) -> Weights:
    embedding = reader.read(EMBEDDING)
    # The largest weight comes first: its unpacked form is freed before the others are loaded.
    head = reader.read_weight("lm_head") if HEAD in reader.shapes else ops.prepack(embedding)
    still = table if all(config.rope) else rotary.still(table)
    return Weights(
        embedding=embedding,
        layers=tuple(
            read_layer(reader, config, i, table if config.rope[i] else still)
            for i in range(config.num_layers)
        ),
        norm=reader.read("model.norm.weight"),
        head=head,
    )


def read_layer(reader: Reader, config: DecoderConfig, index: int, table: Rotary) -> Layer:
    layer = f"model.layers.{index}"
    qkv = [f"{layer}.self_attn.{part}_proj" for part in "qkv"]
    gate_up = [f"{layer}.mlp.{part}_proj" for part in ("gate", "up")]
    out, down = f"{layer}.self_attn.o_proj", f"{layer}.mlp.down_proj"
    return Layer(
        window=config.windows[index],
        rotary=table,
        qk_norm=read_qk_norm(reader, config, layer),
        attention_norm=reader.read(f"{layer}.input_layernorm.weight"),
        qkv=reader.read_weight(*qkv),
        qkv_bias=reader.read_bias(*qkv),
        out=reader.read_weight(out),
        out_bias=reader.read_bias(out),
        mlp_norm=reader.read(f"{layer}.post_attention_layernorm.weight"),
        gate_up=reader.read_weight(*gate_up, is_gated=True),
        gate_up_bias=reader.read_bias(*gate_up),
        down=reader.read_weight(down),
        down_bias=reader.read_bias(down),
    )


def read_qk_norm(reader: Reader, config: DecoderConfig, layer: str) -> QKNorm | None:
    if not config.qk_norm:
        return None
    q, k = (reader.read(f"{layer}.self_attn.{part}_norm.weight") for part in "qk")
    return QKNorm(q, k, config.rms_eps)
