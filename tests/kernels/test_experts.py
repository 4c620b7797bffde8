"""Mixtures of experts: the router's table, and what is added to the residual stream."""

import pytest
import torch

from specserve_kernels import reference
from tests.kernels.random_steps import random_tensor

BUILDS = pytest.mark.parametrize("ops", [reference], ids=["reference"])

ROUTES = {  # logits, k, normalizes -> experts, weights in units of e^logit over the sum of all
    "the largest first": ([0.0, 2.0, 1.0], 2, False, [1, 2]),
    "of equal ones the lowest": ([1.0, 3.0, 3.0, 3.0], 2, False, [1, 2]),
    "all are equal": ([0.0] * 40, 3, False, [0, 1, 2]),
    "all are chosen": ([-1.0, 5.0, 0.0], 3, True, [1, 2, 0]),
    "one is chosen": ([-1.0, 5.0, 0.0], 1, True, [1]),
    "large logits": ([1e4, 1e4 - 1, -1e4], 2, True, [0, 1]),
}


@BUILDS
@pytest.mark.parametrize(("logits", "k", "normalizes", "want"), ROUTES.values(), ids=ROUTES)
def test_a_row_has_its_k_likeliest_experts(ops, logits, k, normalizes, want):
    routing = ops.route(torch.tensor([logits]), k, normalizes)
    weights = torch.tensor(logits).double().softmax(0)[want]
    if normalizes:
        weights /= weights.sum()
    assert routing.experts.tolist() == [want] and routing.experts.dtype == torch.int32
    torch.testing.assert_close(routing.weights[0].double(), weights, rtol=1e-6, atol=1e-12)


def mixture(ops, x, experts, weights, gate_up, down, residual):
    """What some rows have, whose experts are given."""
    routing = reference.Routing(weights, experts.int())
    packed = ops.prepack_experts(gate_up, is_gated=True), ops.prepack_experts(down)
    return ops.experts(x, routing, *packed, residual.clone())


def test_the_sum_over_a_rows_experts_is_added_to_the_residual():
    E, K, F, N, k, R = 5, 24, 20, 33, 3, 7
    gate_up = [random_tensor(2 * F, K, seed=e) for e in range(E)]
    down = [random_tensor(N, F, seed=9 + e) for e in range(E)]
    x, residual, weights = random_tensor(R, K), random_tensor(R, N, seed=1), torch.rand(R, k)
    experts = torch.stack([torch.randperm(E)[:k] for _ in range(R)])
    got = mixture(reference, x, experts, weights, gate_up, down, residual)
    for r in range(R):
        want = residual[r].double()
        for weight, e in zip(weights[r].double(), experts[r], strict=True):
            gate, up = (gate_up[e].double() @ x[r].double()).chunk(2)
            want = want + weight * (down[e].double() @ (gate * gate.sigmoid() * up))
        torch.testing.assert_close(got[r].double(), want, rtol=1e-5, atol=1e-4)
