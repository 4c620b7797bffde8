"""Several residual streams in a row, and sparse gates, with torch's ops."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from specserve_kernels.reference.streams import (
    LEAST_SQUARE,
    correct_streams,
    mix_streams,
    weigh_columns,
)

__all__ = [
    "add_matched",
    "correct_streams",
    "mix_streams",
    "sparse_gated",
    "spread_streams",
    "weigh_columns",
]


def spread_streams(x: Tensor, first: Tensor) -> Tensor:
    """Same as the reference op, like the functions below."""
    R, K = first.shape
    parts = matched(x.view(R, -1, K), first[:, None]).to(x.dtype)
    return torch.cat([first, parts.flatten(1)], dim=1)


def add_matched(x: Tensor, first: Tensor, total: Tensor) -> Tensor:
    return total.copy_(total.float() + matched(x, first))


def matched(x: Tensor, first: Tensor) -> Tensor:
    wanted, found = (y.float().square().mean(-1, keepdim=True) for y in (first, x))
    return x.float() * (wanted.sqrt() / found.clamp(min=LEAST_SQUARE).sqrt())


def sparse_gated(x: Tensor, curve: str, deviations: float) -> Tensor:
    gate, up = x.float().chunk(2, dim=1)
    mean = gate.mean(1, keepdim=True)
    deviation = (gate - mean).square().mean(1, keepdim=True).sqrt()
    above = (gate - (mean + deviations * deviation)).relu()
    bent = gelu(above, approximate="tanh") if curve == "gelu_tanh" else silu(above)
    return (bent * up).to(x.dtype)
