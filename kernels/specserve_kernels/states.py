"""Arguments of the recurrent ops: states in the arena, a step's use of them, and replays."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StateRows(NamedTuple):
    """How the requests of a step use their recurrent states; host tensors.

    blocks       [B, n]  int32  blocks of the request's state
    committed    [B]     int32  leading rows that advance the state; other rows are draft tokens
    kept         [B]     int32  place of the first draft token's inputs in `StateLayer.kept`
    snapshot_at  [B]     int32  the state after so many rows is copied to `snapshots`; 0: no copy
    snapshots    [B, n]  int32  blocks of the copy

    The state of a request whose first row has position 0 begins with zeros.
    """

    blocks: Tensor
    committed: Tensor
    kept: Tensor
    snapshot_at: Tensor
    snapshots: Tensor


class Replays(NamedTuple):
    """Accepted draft tokens, whose kept inputs advance states; host tensors.

    blocks       [M, n]  int32  blocks of each state
    begins       [M+1]   int32  state m takes the inputs places[begins[m]:begins[m+1]], in order
    places       [..]    int32  places in `StateLayer.kept`
    snapshot_at  [M]     int32  the state after so many inputs is copied to `snapshots`; -1: no copy
    snapshots    [M, n]  int32  blocks of the copy
    """

    blocks: Tensor
    begins: Tensor
    places: Tensor
    snapshot_at: Tensor
    snapshots: Tensor


@dataclass(slots=True, eq=False)
class StateLayer:
    """The state of one recurrent op, in pieces that lie in the blocks of a request's state.

    memory  [num_blocks, block_bytes]  uint8  the arena
    places  [P, 2]  int64  by piece: index among the state's blocks, and the first byte in the block
    shape           of a piece: (inputs, channels) of a convolution, or (Dk, Dv) of a head
    dtype           of a piece: that of the rows for a convolution, or float32
    kept    [K, W]  inputs of draft tokens of the last step: in the dtype of the pieces
    num_groups      of the heads of Mamba-2, which share keys and queries; 0: another op
    native          the same in a form of the build, created at first use
    """

    memory: Tensor
    places: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    kept: Tensor
    num_groups: int = 0
    native: Any = None

    @property
    def is_conv(self) -> bool:
        """Whether the op is a convolution: it keeps one row of channels per draft token."""
        return self.kept.shape[1] == self.shape[1]

    def piece(self, number: int, blocks: Sequence[int]) -> Tensor:
        """A piece of the state in these blocks, as a view of the arena."""
        place, begin = self.places[number].tolist()
        size = prod(self.shape) * self.dtype.itemsize
        return self.memory[blocks[place], begin : begin + size].view(self.dtype).view(self.shape)


def reserve(states: Sequence[StateLayer], num_kept: int) -> bool:
    """Make place for the inputs of so many draft tokens; return whether memory was replaced. No
    replay may be pending. Ops of equal width and dtype keep their inputs in one tensor.
    """
    alike = dict[tuple[int, torch.dtype], list[StateLayer]]()
    for state in states:
        if num_kept > len(state.kept):
            alike.setdefault((state.kept.shape[1], state.kept.dtype), []).append(state)
    for (width, _), some in alike.items():
        kept = some[0].kept.new_zeros(len(some), num_kept, width)
        for state, own in zip(some, kept, strict=True):
            state.kept = own
            if state.native is not None:
                state.native.kept = own.data_ptr()
    return bool(alike)


class DeltaParams(NamedTuple):
    """Parameters of `Ops.delta_rule`.

    rate     [Hv]  float32  factor of a head's time step; its exponential is the decay
    dt_bias  [Hv]  float32  added to a head's time step
    norm     [Dv]  float32  weight of the norm of each head's output
    beta_factor             multiplies the share of a value that an update writes
    """

    rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    num_k_heads: int
    beta_factor: float = 1.0


class MambaParams(NamedTuple):
    """Parameters of `Ops.selective_state_update`.

    rate         [H]    float32  factor of a head's time step; its exponential is the decay
    dt_bias      [H]    float32  added to a head's time step
    D            [H]    float32  factor of a head's input that is added to its output
    norm         [H P]  float32  weight of the norm of each group's output; None: no norm
    gates_first  the gate multiplies the outputs before their norm, not after it
    z_factor     factor of the gate
    dt_factor    factor of the time steps
    """

    rate: Tensor
    dt_bias: Tensor
    D: Tensor
    norm: Tensor | None
    eps: float
    num_groups: int
    gates_first: bool = True
    z_factor: float = 1.0
    dt_factor: float = 1.0
