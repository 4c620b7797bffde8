"""Mixtures of experts: which experts a row has, and what they add to the residual stream."""

from collections.abc import Iterable

import torch
from torch import Tensor

from specserve_kernels.codes import Codes
from specserve_kernels.reference.layers import linear_gated, prepack, products
from specserve_kernels.types import PackedExperts, Routing

ALPHA = 1.702  # of the clamped gate


def prepack_experts(
    weights: Iterable[Tensor | Codes], is_gated: bool = False, bias: Tensor | None = None
) -> PackedExperts:
    """The weights of all experts, each as for `prepack`, in the form that `experts` takes.

    weights   by expert, of one shape and one form; each may be freed when the next is asked for
    is_gated  they are the first map of a mixture, else the second
    bias      [E, N]  of the dtype of the rows that they multiply
    """
    return PackedExperts([prepack(weight, is_gated) for weight in weights], bias)


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
    gate_up: PackedExperts,
    down: PackedExperts,
    residual: Tensor,
    limit: float | None = None,
) -> Tensor:
    """Add to the residual stream, in place, what a row's experts make of it; the residual stream.

    An expert's inner row is silu(gate) * up, rounded as that of `linear_gated`; or, with a limit,
    (up + 1) * gate * sigmoid(ALPHA * gate), with gate at most the limit, and up between -limit and
    limit. What its second map and bias make of that is not rounded: it is multiplied by the
    expert's weight, and added up over the row's experts, the likeliest first.

    x         [R, K]  bfloat16 | float32
    gate_up   of weights [2F, K], by expert
    down      of weights [N, F], by expert
    residual  [R, N]  as x; becomes residual + the sum, rounded once
    """
    for r, (weights, chosen) in enumerate(zip(*routing, strict=True)):
        total = torch.zeros(residual.shape[1], device=x.device)
        for weight, e in zip(weights, chosen.tolist(), strict=True):
            inner = _inner(x[r : r + 1], gate_up, e, limit)
            total += weight * products(inner, down.each[e], _bias(down, e))[0]
        residual[r] = residual[r].float() + total
    return residual


def _inner(x: Tensor, gate_up: PackedExperts, e: int, limit: float | None) -> Tensor:
    weight, bias = gate_up.each[e], _bias(gate_up, e)
    if limit is None:
        return linear_gated(x, weight, bias)
    gate, up = products(x, weight, bias).chunk(2, dim=1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate / (1 + torch.exp(-ALPHA * gate))).to(x.dtype)


def _bias(packed: PackedExperts, e: int) -> Tensor | None:
    return None if packed.bias is None else packed.bias[e]


def add_gated(x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
    """Add sigmoid(gate) * x to the residual stream, in place, rounded once; the residual stream.

    x         [R, K]  bfloat16 | float32
    gate      [R, 1]  as x
    residual  [R, K]  as x
    """
    return residual.copy_(residual.float() + x.float() / (1 + torch.exp(-gate.float())))
