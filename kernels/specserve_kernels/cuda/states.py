"""The recurrent ops over states in the arena."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specserve_kernels.cuda import causal_conv as convolution
from specserve_kernels.cuda import recurrent
from specserve_kernels.cuda.graph_inputs import CudaPlan
from specserve_kernels.cuda.state_work import StateWork
from specserve_kernels.states import DeltaParams, MambaParams, StateLayer


class ReplayRun(NamedTuple):
    """Equal ops, whose kept inputs are `layer_stride` elements apart, with all their pieces."""

    first: StateLayer
    places: Tensor
    layer_stride: int


@dataclass(slots=True)
class CudaState:
    """A state as the kernels read it.

    memory  [num_blocks, ..]  the arena, in the dtype of the pieces
    places  [P, 2]  int64     by piece: index among the state's blocks, and the first element
    kept    address of the kept inputs
    runs    of all states of a model, if this is the first one
    """

    memory: Tensor
    places: Tensor
    kept: int
    runs: tuple[list[int], list[ReplayRun]] | None = None


def native(state: StateLayer) -> CudaState:
    if state.native is None:
        memory = state.memory.view(state.dtype)
        places = state.places // torch.tensor([1, state.dtype.itemsize])
        state.native = CudaState(memory, places.to(memory.device), state.kept.data_ptr())
    own: CudaState = state.native
    return own


def work_of(plan: CudaPlan) -> StateWork:
    assert plan.states is not None, "a plan of a model without recurrent ops"
    return plan.states


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: StateLayer,
    plan: CudaPlan,
    form: str,
) -> Tensor:
    """Same as the reference op, like the functions below."""
    own, work = native(state), work_of(plan)
    is_gated = form == "gated"
    given = own.memory, own.places, state.kept, work, is_gated
    out = convolution.conv(x, weight, bias, *given)
    convolution.store_tails(x, own.memory, own.places, work, state.shape, is_gated)
    return out


def delta_rule(
    qkv: Tensor, x: Tensor, params: DeltaParams, state: StateLayer, plan: CudaPlan
) -> Tensor:
    own = native(state)
    return recurrent.delta_rule(qkv, x, params, state, own.memory, own.places, work_of(plan))


def selective_state_update(
    xbc: Tensor, x: Tensor, params: MambaParams, state: StateLayer, plan: CudaPlan
) -> Tensor:
    own, work = native(state), work_of(plan)
    return recurrent.selective_state_update(xbc, x, params, state, own.memory, own.places, work)


def replay(states: Sequence[StateLayer], work: StateWork, runs: Sequence[slice]) -> None:
    """Run the lanes of each slice together, one slice after the other."""
    for first, places, layer_stride in replay_runs(states):
        memory = native(first).memory
        for some in runs:
            own = work._replace(lanes=work.lanes[some])
            if first.is_conv:
                given = memory, places, own, first.shape
                convolution.store_tails(first.kept, *given, layer_stride=layer_stride)
            else:
                recurrent.replay(first, memory, places, own, layer_stride)


def replay_runs(states: Sequence[StateLayer]) -> list[ReplayRun]:
    """Group equal ops whose kept inputs lie at equal distances, so that one launch runs them."""
    head = native(states[0])
    addresses = [state.kept.data_ptr() for state in states]
    if head.runs is None or head.runs[0] != addresses:
        head.runs = addresses, [*grouped(states)]
    return head.runs[1]


def grouped(states: Sequence[StateLayer]) -> Iterator[ReplayRun]:
    alike = dict[tuple[object, ...], list[StateLayer]]()
    for state in states:
        kind = state.shape, state.dtype, state.kept.shape, state.num_groups
        alike.setdefault(kind, []).append(state)
    for some in alike.values():
        stride = distance(some[0], some[1]) if len(some) > 1 else 0
        run = some[:1]
        for last, state in pairwise(some):
            if distance(last, state) != stride:
                yield run_of(run, stride)
                run = []
            run.append(state)
        yield run_of(run, stride)


def distance(a: StateLayer, b: StateLayer) -> int:
    return (b.kept.data_ptr() - a.kept.data_ptr()) // a.kept.element_size()


def run_of(states: Sequence[StateLayer], layer_stride: int) -> ReplayRun:
    places = torch.cat([native(state).places for state in states])
    return ReplayRun(states[0], places, layer_stride)
