"""Rotary embedding: how fast each pair of dimensions turns, and the tables made of it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specserve_kernels.types import Rotary

SUPPORTED = ("default", "linear", "llama3", "yarn")
LENGTH_BOUND = ("dynamic", "longrope")


def frequencies(config: Any, head_dim: int) -> tuple[Tensor, float]:
    """What a transformers config says of rope; ValueError where it cannot be served.

    ->  [D/2]  float32  radians a position
    ->         the factor of all cosines and sines (yarn's attention factor)
    """
    rope = config.rope_parameters
    refuse_unsupported(rope)
    if rope["rope_type"] == "default":
        inverse, factor = default_frequencies(rope["rope_theta"], head_dim), 1.0
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    if not inverse.isfinite().all():
        raise ValueError(f"rope_parameters = {rope} give infinite frequencies")
    return inverse, float(factor)


def refuse_unsupported(rope: Mapping[str, Any]) -> None:
    kind, partial = rope.get("rope_type"), rope.get("partial_rotary_factor", 1.0)
    if kind in LENGTH_BOUND:
        raise ValueError(
            f"rope type {kind!r} is not supported: its frequencies depend on the length of the "
            f"batch, and so would a token's KV; {', '.join(SUPPORTED)} are supported"
        )
    if kind not in SUPPORTED:
        raise ValueError(f"rope type {kind!r} is not supported: {', '.join(SUPPORTED)} are")
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor = {partial} is not supported: only 1.0 is")


def default_frequencies(theta: float, head_dim: int) -> Tensor:
    """theta^(-2i/D), in float32 throughout, as transformers has it."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse: Tensor = 1.0 / (theta**exponent)
    return inverse


def tables(inverse: Tensor, factor: float, length: int) -> Rotary:
    """Cosines and sines of the positions [0, length)."""
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse
    return Rotary(angles.cos() * factor, angles.sin() * factor)


def still(rotary: Rotary) -> Rotary:
    """A table of the same size that rotates nothing, for a layer without rotary embedding."""
    return Rotary(torch.ones_like(rotary.cos), torch.zeros_like(rotary.sin))
