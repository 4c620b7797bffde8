"""Mixtures of experts on the CPU, op by op: see experts.cpp."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve_kernels.codes import Codes
from specserve_kernels.cpu import arguments, ops
from specserve_kernels.types import PackedExperts


class RoutedPairs(NamedTuple):
    """The experts of each row, and the work list: by expert, which rows it has.

    A row and one of its experts are a pair; pairs have places, in the order of experts and rows.

    weights  [R, k]   float32
    experts  [R, k]   int32    the likeliest first
    places   [R, k]   int32    of each pair
    rows     [R, k]   int32    flat: the row of the pair at a place
    begins   [E + 1]  int32    the first place of each expert, and the end
    """

    weights: Tensor
    experts: Tensor
    places: Tensor
    rows: Tensor
    begins: Tensor


def prepack_experts(
    weights: Iterable[Tensor | Codes], is_gated: bool = False, bias: Tensor | None = None
) -> PackedExperts:
    each = tuple(ops.prepack(weight, is_gated) for weight in weights)
    forms = {packed._replace(words=None) for packed in each}  # type: ignore[arg-type]
    assert len(forms) == 1, f"experts of different forms: {forms}"
    addresses = torch.tensor([packed.words.data_ptr() for packed in each])
    outputs = each[0].N * (2 if is_gated else 1)
    assert bias is None or bias.shape == (len(each), outputs), "no bias for each expert"
    return PackedExperts(each, None if bias is None else bias.contiguous(), addresses)


def route(logits: Tensor, k: int, normalizes: bool) -> RoutedPairs:
    R, E = logits.shape
    chosen, places, rows = torch.empty(3, R, k, dtype=torch.int32)
    begins = torch.zeros(E + 1, dtype=torch.int32)
    routing = RoutedPairs(torch.empty(R, k), chosen, places, rows, begins)
    ops.run("route", arguments.route(0, logits, routing, normalizes), R, R * E * k)
    return routing


def experts(
    x: Tensor,
    routing: RoutedPairs,
    gate_up: PackedExperts,
    down: PackedExperts,
    residual: Tensor,
    limit: float | None = None,
) -> Tensor:
    R, k = routing.weights.shape
    assert len(x) == len(residual) == R, "a routing or a residual of another number of rows"
    inner, sums = (x.new_empty(R * k, gate_up.each[0].N), torch.empty(R * k, residual.shape[1]))
    rows, begins = routing.rows, routing.begins
    calls: list[tuple[str, Any]] = [
        ("expert_maps", arguments.expert_maps(x, rows, gate_up, begins, inner, limit)),
        ("expert_maps", arguments.expert_maps(inner, None, down, begins, sums)),
        (
            "add_experts",
            arguments.add_experts(0, sums, routing.weights, routing.places, residual),
        ),
    ]
    for name, args in calls:
        ops.run(name, args, R, x.numel() * inner.shape[1])
    return residual


def add_gated(x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
    args = arguments.add_gated(0, x, gate, residual)
    ops.run("add_gated", args, len(x), x.numel())
    return residual
