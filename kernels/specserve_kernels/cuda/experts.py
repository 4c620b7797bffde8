"""Mixtures of experts in torch: right, and slow, as every expert multiplies all rows.

Which experts rows have is known on the device alone, and a graph's launches are fixed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specserve_kernels.cuda.maps import LinearMap


class Routing(NamedTuple):
    """As the reference's."""

    weights: Tensor
    experts: Tensor


def route(logits: Tensor, k: int, normalizes: bool) -> Routing:
    """As the reference's."""
    wide = logits.float()
    experts = wide.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = wide.softmax(dim=1).gather(1, experts)
    if normalizes:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return Routing(weights, experts.int())


def add_experts(
    x: Tensor,
    routing: Routing,
    gate_up: Sequence[LinearMap],
    down: Sequence[LinearMap],
    residual: Tensor,
    silu_mul: Callable[[Tensor], Tensor],
) -> Tensor:
    """As the reference's, but for the order of the sum, which is that of experts."""
    total = torch.zeros(residual.shape, device=x.device)
    for e, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        is_chosen = routing.experts == e
        weight = routing.weights.where(is_chosen, 0.0).sum(dim=1, keepdim=True)
        found = second.linear(silu_mul(first.linear(x, None)), None).float()
        total += torch.where(is_chosen.any(dim=1, keepdim=True), weight * found, 0.0)
    return residual.copy_(residual.float() + total)
