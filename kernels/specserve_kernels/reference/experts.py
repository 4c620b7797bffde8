"""Mixtures of experts: which experts a row has, and what they add to the residual stream."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specserve_kernels.codes import Codes
from specserve_kernels.reference.layers import linear_gated, prepack, products


class Routing(NamedTuple):
    """The experts of each row, the likeliest first.

    weights  [R, k]  float32
    experts  [R, k]  int32
    """

    weights: Tensor
    experts: Tensor


def prepack_experts(
    weights: Iterable[Tensor | Codes], is_gated: bool = False
) -> Sequence[Tensor | Codes]:
    """The weights of all experts, each as for `prepack`, in the form that `experts` takes.

    weights   by expert, of one shape and one form; each may be freed when the next is asked for
    is_gated  they are the first map of a mixture, else the second
    """
    return [prepack(weight, is_gated) for weight in weights]


def route(logits: Tensor, k: int, normalizes: bool) -> Routing:
    """The k experts with the largest logits, of equal ones the lowest, and their probabilities
    among all experts (Shazeer et al. 1701.06538).

    logits      [R, E]  bfloat16 | float32
    normalizes  probabilities are divided by their sum over the k
    """
    weights = torch.empty(len(logits), k, device=logits.device)
    experts = torch.empty(len(logits), k, dtype=torch.int32, device=logits.device)
    for r, row in enumerate(logits.float()):
        chosen = row.sort(descending=True, stable=True).indices[:k]
        found = row.clone().softmax(0)[chosen]
        weights[r] = found / found.sum() if normalizes else found
        experts[r] = chosen
    return Routing(weights, experts)


def experts(
    x: Tensor,
    routing: Routing,
    gate_up: Sequence[Tensor | Codes],
    down: Sequence[Tensor | Codes],
    residual: Tensor,
) -> Tensor:
    """Add to the residual stream, in place, what a row's experts make of it; the residual stream.

    An expert's inner row is silu(gate) * up, rounded as that of `linear_gated`. What its second
    map makes of that is not rounded: it is multiplied by the expert's weight, and added up over the
    row's experts, the likeliest first.

    x         [R, K]  bfloat16 | float32
    gate_up   of weights [2F, K], by expert
    down      of weights [N, F], by expert
    residual  [R, N]  as x; becomes residual + the sum, rounded once
    """
    for r, (weights, chosen) in enumerate(zip(*routing, strict=True)):
        total = torch.zeros(residual.shape[1], device=x.device)
        for weight, e in zip(weights, chosen.tolist(), strict=True):
            inner = linear_gated(x[r : r + 1], gate_up[e])
            total += weight * products(inner, down[e])[0]
        residual[r] = residual[r].float() + total
    return residual
