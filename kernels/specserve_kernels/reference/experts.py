"""Mixtures of experts: routing, and adding the experts' outputs to the residual stream."""

from collections.abc import Iterable

import torch
from torch import Tensor

from specserve_kernels.codes import Codes
from specserve_kernels.ranks import Gathering
from specserve_kernels.reference.layers import activate, linear, linear_gated, prepack, products
from specserve_kernels.reference.ranks import all_gather
from specserve_kernels.types import PackedExperts, Routing

ALPHA = 1.702  # factor of the clamped gate


def prepack_experts(
    weights: Iterable[Tensor | Codes], is_gated: bool = False, bias: Tensor | None = None
) -> PackedExperts:
    """Pack the weights of all experts, each as for `prepack`, for the op `experts`.

    weights   by expert, all of one shape and type; the iterator may free each one before the next
    is_gated  the weights are the first map of a mixture, else the second
    bias      [E, N]  with the dtype of the input rows
    """
    return PackedExperts([prepack(weight, is_gated) for weight in weights], bias)


def route(
    logits: Tensor,
    k: int,
    normalizes: bool,
    is_sigmoid: bool = False,
    correction: Tensor | None = None,
    factor: float | Tensor = 1.0,
) -> Routing:
    """Choose each row's k experts with the largest logits (Shazeer et al. 1701.06538).

    Equal logits rank by the lower expert index. A weight is the expert's probability among all E.

    logits      [R, E]  bfloat16 | float32
    normalizes  the weights are divided by their sum over the k
    is_sigmoid  a weight is the sigmoid of the logit (DeepSeek-AI 2412.19437)
    correction  [E]     float32  added to the weights before the choice only: the largest sums are
                        chosen; None: no correction
    factor      of the weights, after their normalization: one number, or one per expert, [E]
                float32
    """
    weights = torch.empty(len(logits), k, device=logits.device)
    experts = torch.empty(len(logits), k, dtype=torch.int32, device=logits.device)
    for r, row in enumerate(logits.float()):
        scores = 1 / (1 + torch.exp(-row)) if is_sigmoid else row.clone().softmax(0)
        ranked = row if correction is None else scores + correction
        chosen = ranked.sort(descending=True, stable=True).indices[:k]
        found = scores[chosen]
        own = factor[chosen] if isinstance(factor, Tensor) else factor
        weights[r] = own * (found / found.sum() if normalizes else found)
        experts[r] = chosen
    return Routing(weights, experts)


def experts(
    x: Tensor,
    routing: Routing,
    gate_up: PackedExperts,
    down: PackedExperts,
    residual: Tensor | None,
    limit: float | None = None,
    gathering: Gathering | None = None,
    holders: Gathering | None = None,
    gate: str = "silu",
) -> Tensor:
    """Add the weighted outputs of each row's experts to the residual stream, in place; return it.

    Without a limit, an expert's inner row is f(gate) * up, rounded as `linear_gated` rounds.
    Given a limit, it is (up + 1) * gate * sigmoid(ALPHA * gate), with gate clamped to at most
    `limit`, and up to [-limit, limit]. The outputs of the second map and its bias are not rounded.
    They are multiplied by the expert's weight and summed over the row's experts, the most probable
    first.

    x         [R, K]  bfloat16 | float32
    gate_up   of weights [2F, K], by expert
    down      of weights [N, F], by expert
    residual  [R, N]  as x; becomes residual + the sum, rounded once; None: return the sum
    gathering         of the columns of inner rows, if ranks share the columns of both maps
    holders           of the experts, if each rank holds some: `gate_up` and `down` have only these
    gate              the function f, as in `linear_gated`. With `relu2`, experts have no gate:
                      `gate_up` has only up, [F, K], and an inner row is max(up, 0)^2, where `up` is
                      rounded before
    """
    R = len(x)
    if residual is None:
        packed = down.each[0]
        residual = x.new_zeros(R, len(packed.q if isinstance(packed, Codes) else packed))
    every = [(r, j, e) for r in range(R) for j, e in enumerate(routing.experts[r].tolist())]
    first, end = (0, len(down.each)) if holders is None else holders.own
    held = [(i, r, e - first) for i, (r, _, e) in enumerate(every) if first <= e < end]
    inner = [_inner(x[r : r + 1], gate_up, e, limit, gate) for _, r, e in held]
    if gathering is not None and R:
        inner = [*torch.split(all_gather(torch.cat(inner), gathering), 1)]
    outputs = torch.zeros(len(every), residual.shape[1], device=x.device)
    for (i, _, e), row in zip(held, inner, strict=True):
        outputs[i] = products(row, down.each[e], _bias(down, e))[0]
    if holders is not None:
        outputs = of_holders(outputs, torch.tensor([e for _, _, e in every]), holders)
    totals = torch.zeros(R, residual.shape[1], device=x.device)
    for (r, j, _), output in zip(every, outputs, strict=True):
        totals[r] += routing.weights[r, j] * output
    return residual.copy_(residual.float() + totals)


def of_holders(outputs: Tensor, experts: Tensor, holders: Gathering) -> Tensor:
    """Return each pair's output, from the rank that holds its expert.

    outputs  [pairs, N]  float32  of this rank's experts; others have any values
    experts  [pairs]              of each pair
    """
    N, size = outputs.shape[1], holders.ranks.size
    begins = tuple(N * rank for rank in range(size + 1))
    gathered = all_gather(outputs, Gathering(holders.ranks, begins)).view(-1, size, N)
    holder = torch.bucketize(experts, torch.tensor(holders.begins[1:-1]), right=True)
    return gathered[torch.arange(len(outputs)), holder]


def _inner(x: Tensor, gate_up: PackedExperts, e: int, limit: float | None, curve: str) -> Tensor:
    weight, bias = gate_up.each[e], _bias(gate_up, e)
    if curve == "relu2":
        return activate(linear(x, weight, bias), curve)
    if limit is None:
        return linear_gated(x, weight, bias, curve)
    gate, up = products(x, weight, bias).chunk(2, dim=1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate / (1 + torch.exp(-ALPHA * gate))).to(x.dtype)


def _bias(packed: PackedExperts, e: int) -> Tensor | None:
    return None if packed.bias is None else packed.bias[e]


def add_gated(x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
    """Add sigmoid(gate) * x to the residual stream, in place, rounded once; return it.

    x         [R, K]  bfloat16 | float32
    gate      [R, 1]  as x
    residual  [R, K]  as x
    """
    return residual.copy_(residual.float() + x.float() / (1 + torch.exp(-gate.float())))


def weigh_rows(x: Tensor, logits: Tensor) -> Tensor:
    """Return each row times the sigmoid of its largest logit, rounded once: the input of the only
    expert of a row in Llama 4.

    x       [R, K]  bfloat16 | float32
    logits  [R, E]  as x
    ->      [R, K]  as x
    """
    largest = logits.float().amax(dim=1, keepdim=True)
    return (x.float() / (1 + torch.exp(-largest))).to(x.dtype)
