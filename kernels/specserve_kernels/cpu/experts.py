"""Mixtures of experts on the CPU: the places of pairs of a row and an expert, and their maps."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specserve_kernels.codes import Codes
from specserve_kernels.cpu import arguments
from specserve_kernels.cpu.arguments import Coding
from specserve_kernels.cpu.ops import activate, all_gather, common_form, prepack, prepack_as, run
from specserve_kernels.ranks import Gathering
from specserve_kernels.types import PackedExperts


class RoutedPairs(NamedTuple):
    """The experts of each row, and each expert's list of rows.

    A pair is a row and one of its experts. Pairs are ordered by expert, then by row. The place of
    a pair is its index in this order.

    weights  [R, k]   float32
    experts  [R, k]   int32    in descending order of weight
    places   [R, k]   int32    place of each pair
    rows     [R, k]   int32    row of each pair, by place (a flat list)
    begins   [E + 1]  int32    first place of each expert, and the number of pairs
    """

    weights: Tensor
    experts: Tensor
    places: Tensor
    rows: Tensor
    begins: Tensor


def prepack_experts(
    weights: Iterable[Tensor | Codes], is_gated: bool = False, bias: Tensor | None = None
) -> PackedExperts:
    each = tuple(prepack(weight, is_gated) for weight in weights)
    forms = {packed._replace(words=None) for packed in each}  # type: ignore[arg-type]
    kinds = [form.kind for form in forms if isinstance(form.kind, Coding)]
    if len(forms) == len(kinds) > 1 and (common := common_form(kinds)) is not None:
        del each  # before the weights are read again
        each = tuple(prepack_as(weight, is_gated, common) for weight in weights)
        forms = {packed._replace(words=None) for packed in each}  # type: ignore[arg-type]
    assert len(forms) == 1, f"experts of different forms: {forms}"
    addresses = np.array([packed.words.data_ptr() for packed in each], np.int64)
    outputs = each[0].N * (2 if is_gated else 1)
    assert bias is None or bias.shape == (len(each), outputs), "bias needs one row per expert"
    return PackedExperts(each, None if bias is None else bias.contiguous(), addresses)


def route(
    logits: Tensor,
    k: int,
    normalizes: bool,
    is_sigmoid: bool = False,
    correction: Tensor | None = None,
    factor: float | Tensor = 1.0,
) -> RoutedPairs:
    R, E = logits.shape
    chosen, places, rows = torch.empty(3, R, k, dtype=torch.int32)
    begins = torch.zeros(E + 1, dtype=torch.int32)
    routing = RoutedPairs(torch.empty(R, k), chosen, places, rows, begins)
    rule = normalizes, is_sigmoid, correction, factor
    run("route", arguments.route(0, logits, routing, *rule), R, R * E * k)
    return routing


def held(begins: Tensor, holders: Gathering | None) -> Tensor:
    """Return the first places of the experts that this rank holds, and the end."""
    if holders is None:
        return begins
    first, end = holders.own
    return begins[first : end + 1]


def experts(
    x: Tensor,
    routing: RoutedPairs,
    gate_up: PackedExperts,
    down: PackedExperts,
    residual: Tensor | None,
    limit: float | None = None,
    gathering: Gathering | None = None,
    holders: Gathering | None = None,
    gate: str = "silu",
) -> Tensor:
    (R, k), N = routing.weights.shape, down.each[0].N
    out = x.new_empty(R, N) if residual is None else residual
    assert len(x) == len(out) == R, "x, routing and residual differ in their number of rows"
    inner, sums = x.new_empty(R * k, gate_up.each[0].N), torch.empty(R * k, N)
    rows, begins = routing.rows, held(routing.begins, holders)
    size = x.numel() * inner.shape[1]
    first = arguments.expert_maps(x, rows, gate_up, begins, inner, limit, gate)
    run("expert_maps", first, R, size)
    if R and not gate_up.each[0].is_gated:
        activate(inner.view(R, -1), gate)
    if gathering is not None:
        inner = all_gather(inner, gathering)
    run("expert_maps", arguments.expert_maps(inner, None, down, begins, sums), R, size)
    if holders is not None:
        args, _ = arguments.gather_pairs(0, sums, routing.begins, holders)
        run("gather_pairs", args, R, 0)
        holders.ranks.check()
    kept = routing.weights, routing.places, out, residual is not None
    run("add_experts", arguments.add_experts(0, sums, *kept), R, size)
    return out


def add_gated(x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
    args = arguments.add_gated(0, x, gate, residual)
    run("add_gated", args, len(x), x.numel())
    return residual


def weigh_rows(x: Tensor, logits: Tensor) -> Tensor:
    out = torch.empty_like(x)
    run("weigh_rows", arguments.weigh_rows(0, x, logits, out), len(x), x.numel())
    return out
