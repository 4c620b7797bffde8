"""The unpacked weight of one linear map or of fused maps, and its quantization."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.experts import is_router
from specserve.models.per_layer_names import TABLE
from specserve.models.weight_forms import MapForm, WeightForms
from specserve_kernels import Codes
from specserve_kernels.codes import GROUP, MAX_ROUNDED, MAX_ROUNDED_GROUP

WIDTHS = {"w4": 4, "w8": 8, "w8a8": 8}
# Modules outside of layers.
HEAD, EMBEDDING, PER_LAYER = "lm_head", "model.embed_tokens", TABLE


class Rounding(NamedTuple):
    """Bits of weights in layers, head and embedding; None: not quantized at loading."""

    layers: int | None = None
    head: int | None = None
    with_rows: bool = False  # activations of the layers' maps are quantized to 8 bits, too
    embedding: int | None = None
    activations: str = "auto"  # model.activations

    @classmethod
    def named(
        cls,
        layers: str | None,
        head: str,
        embedding: str = "none",
        activations: str = "auto",
    ) -> "Rounding":
        """The rounding for settings of the config; if `layers` is None, no weight is quantized."""
        if layers is None:
            return cls(activations=activations)
        is_w8a8, of_embedding = layers == "w8a8", WIDTHS.get(embedding)
        return cls(WIDTHS[layers], WIDTHS.get(head), is_w8a8, of_embedding, activations)

    @property
    def rounds_weights(self) -> bool:
        return self.layers is not None

    @property
    def words(self) -> str:
        """A description of quantized weights."""
        rows = f" with activations in {self.layers}" * self.with_rows
        head = f"in {self.head} bits" if self.head else "not quantized"
        return f"maps in {self.layers} bits{rows}, head {head}"

    def bits(self, module: str, width: int) -> int | None:
        """Bits of a weight with rows of `width`: 8 instead of 4 if GROUP does not divide it."""
        return 8 if self.is_odd(module, width) else self.asked(module)

    def rounds_rows(self, module: str, width: int) -> bool:
        is_of_layers = module not in (HEAD, EMBEDDING, PER_LAYER) and not is_router(module)
        return self.with_rows and is_of_layers and width <= MAX_ROUNDED

    def is_odd(self, module: str, width: int) -> bool:
        return self.asked(module) == 4 and width % GROUP != 0

    def asked(self, module: str) -> int | None:
        if is_router(module):
            return None
        others = {HEAD: self.head, EMBEDDING: self.embedding, PER_LAYER: self.embedding}
        return others.get(module, self.layers)


AS_STORED = Rounding()
LEAST_ROUNDED = 32  # minimum columns of a part of a group that rounds rows


Weight = Tensor | Codes

LEAST_GROUP = 8  # columns; kernels pad smaller groups, which would take more memory than bf16


def num_bytes(weight: Weight) -> int:
    """Bytes of a weight, without the kernels' padding."""
    if isinstance(weight, Tensor):
        return weight.nbytes
    beside = weight.zero if weight.offset is None else weight.offset  # offsets include zeros
    num_beside = 0 if beside is None else beside.nbytes
    return weight.q.numel() * weight.bits // 8 + weight.scale.nbytes + num_beside


def form_of(weight: Weight, is_head: bool = False) -> MapForm:
    if isinstance(weight, Tensor):
        return MapForm(8 * weight.itemsize, None, 1, is_head=is_head)
    return MapForm(
        bits=weight.bits,
        group=None if weight.group == weight.q.shape[1] else weight.group,
        number=1,
        activation_bits=8 if weight.rounds_rows else None,
        has_offsets=weight.offset is not None,
        is_head=is_head,
    )


def fuse(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """Concatenate weights along the rows: codes if all parts are codes and this saves memory, else
    values in `dtype`.

    Codes of different forms get the smallest form that represents all values exactly. Activations
    are quantized only if all parts quantize them.
    """
    codes = [part for part in parts if isinstance(part, Codes)]
    if len(codes) < len(parts):
        return torch.cat([values(part, dtype) for part in parts])
    tables = {c.table for c in codes}
    if len(tables) > 1:
        codes = [c.without_table() for c in codes]
    bits, group = max(c.bits for c in codes), math.gcd(*(c.group for c in codes))
    if group < LEAST_GROUP:
        return torch.cat([values(part, dtype) for part in parts])
    codes = [regrouped(rebased(c, bits), group) for c in codes]
    has_zeros = any(c.zero is not None for c in codes)
    has_offsets = any(c.offset is not None for c in codes)
    return Codes(
        bits=bits,
        group=group,
        q=torch.cat([c.q for c in codes]),
        scale=torch.cat([c.scale for c in codes]),
        zero=torch.cat([zeros(c) for c in codes]) if has_zeros else None,
        offset=torch.cat(
            [torch.zeros_like(c.scale) if c.offset is None else c.offset for c in codes]
        )
        if has_offsets
        else None,
        rounds_rows=all(c.rounds_rows for c in codes),
        table=codes[0].table,
    )


def with_activations(weight: Weight, module: str, asked: str) -> Weight:
    """The weight of a map whose activations are quantized to 8 bits (`int8`), or not (`float`), if
    it is codes; `auto`: as the checkpoint asks (for GGUF files, see `open_reader`). Groups of more
    than MAX_ROUNDED_GROUP columns are divided into parts, so that activations have finer scales.
    """
    if isinstance(weight, Tensor) or asked == "auto" or is_router(module):
        return weight
    if asked == "float":
        return weight._replace(rounds_rows=False) if weight.rounds_rows else weight
    size = rounded_group(weight.group)
    return weight if size is None else regrouped(weight, size)._replace(rounds_rows=True)


def check_activations(
    folder: Path, rounding: Rounding, rounds_rows: bool, forms: WeightForms
) -> None:
    """Raise ConfigError if activations of 8 bits are asked for, but none has them."""
    if rounding.activations != "int8" or forms.num_rounding:
        return
    if not rounds_rows:
        raise ConfigError(
            f"{folder}: model.activations = 'int8' is not supported on a GPU. Remove it, or set "
            "model.device to cpu"
        )
    raise ConfigError(
        f"{folder}: model.activations = 'int8' needs quantized weights. Set model.quantize, or "
        "remove model.activations"
    )


def rounded_group(group: int) -> int | None:
    """The largest part of a group that can round rows; None: there is none."""
    if group <= MAX_ROUNDED_GROUP:
        return group
    sizes = range(MAX_ROUNDED_GROUP, LEAST_ROUNDED - 1, -1)
    return next((size for size in sizes if group % size == 0), None)


def values(part: Weight, dtype: torch.dtype) -> Tensor:
    return part.widen(dtype) if isinstance(part, Codes) else part.to(dtype)


def rebased(codes: Codes, bits: int) -> Codes:
    """Convert codes to `bits` bits; the middle of the range stays the middle."""
    up = (1 << bits - 1) - codes.middle
    zero = None if codes.zero is None else codes.zero + up
    return codes._replace(bits=bits, q=codes.q + up if up else codes.q, zero=zero)


def regrouped(codes: Codes, group: int) -> Codes:
    """Convert codes to one scale per `group` columns; `group` divides the codes' group."""
    times = codes.group // group
    if times == 1:
        return codes
    scale = codes.scale.repeat_interleave(times, dim=1)
    zero, offset = (
        None if x is None else x.repeat_interleave(times, dim=1) for x in (codes.zero, codes.offset)
    )
    return codes._replace(group=group, scale=scale, zero=zero, offset=offset)


def zeros(codes: Codes) -> Tensor:
    if codes.zero is not None:
        return codes.zero
    return torch.full_like(codes.scale, codes.middle, dtype=torch.uint8)
