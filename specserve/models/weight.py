"""The weight of a linear map, or of several that are multiplied as one, before it is packed; to how
many bits it is rounded, and whether rows are, too.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specserve.models.experts import is_router
from specserve.models.weight_forms import MapForm
from specserve_kernels import Codes
from specserve_kernels.codes import GROUP, MAX_ROUNDED

WIDTHS = {"w4": 4, "w8": 8, "w8a8": 8}
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"  # beside which all are the layers'


class Rounding(NamedTuple):
    """Bits of a weight in the layers, head and embedding; None: as the checkpoint has it."""

    layers: int | None = None
    head: int | None = None
    with_rows: bool = False  # rows that the layers' maps are multiplied by get 8 bits, too
    embedding: int | None = None

    @classmethod
    def named(cls, layers: str | None, head: str, embedding: str = "none") -> "Rounding":
        """As the config says it; nothing is rounded in a model whose layers are not."""
        if layers is None:
            return cls()
        is_w8a8, of_embedding = layers == "w8a8", WIDTHS.get(embedding)
        return cls(WIDTHS[layers], WIDTHS.get(head), is_w8a8, of_embedding)

    @property
    def words(self) -> str:
        """Of weights that are rounded."""
        rows = f" with activations in {self.layers}" * self.with_rows
        head = f"in {self.head} bits" if self.head else "unrounded"
        return f"maps in {self.layers} bits{rows}, head {head}"

    def bits(self, module: str, width: int) -> int | None:
        """Of a weight with rows of this width: 4 bits need whole groups."""
        return 8 if self.is_odd(module, width) else self.asked(module)

    def rounds_rows(self, module: str, width: int) -> bool:
        is_of_layers = module not in (HEAD, EMBEDDING) and not is_router(module)
        return self.with_rows and is_of_layers and width <= MAX_ROUNDED

    def is_odd(self, module: str, width: int) -> bool:
        return self.asked(module) == 4 and width % GROUP != 0

    def asked(self, module: str) -> int | None:
        if is_router(module):
            return None
        return {HEAD: self.head, EMBEDDING: self.embedding}.get(module, self.layers)


AS_STORED = Rounding()


Weight = Tensor | Codes

LEAST_GROUP = 8  # kernels fill smaller groups up: with their scales they would be larger than bf16


def num_bytes(weight: Weight) -> int:
    """Of its numbers; padding is up to the kernels."""
    if isinstance(weight, Tensor):
        return weight.nbytes
    beside = weight.zero if weight.offset is None else weight.offset  # which takes in zeros
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
    """Weights one below the other, as a copy: codes if all of them are and save memory, else values
    in `dtype`.

    Codes of different forms get the narrowest that all can have without a change of their values.
    Rows are rounded if they are for all of them.
    """
    codes = [part for part in parts if isinstance(part, Codes)]
    if len(codes) < len(parts):
        return torch.cat([values(part, dtype) for part in parts])
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
    )


def values(part: Weight, dtype: torch.dtype) -> Tensor:
    return part.widen(dtype) if isinstance(part, Codes) else part.to(dtype)


def rebased(codes: Codes, bits: int) -> Codes:
    """With so many bits; what is the middle of the range stays the middle."""
    up = (1 << bits - 1) - codes.middle
    zero = None if codes.zero is None else codes.zero + up
    return codes._replace(bits=bits, q=codes.q + up if up else codes.q, zero=zero)


def regrouped(codes: Codes, group: int) -> Codes:
    """With a scale for each `group` columns, which divides the codes' own group."""
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
