"""Messages from rank 0 to the other ranks, which run the same steps, and their answers."""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from specserve.config import Config
from specserve.memory.blocks import KVUpdates
from specserve.memory.states import StateReplay
from specserve_kernels import AdapterRows, Rows, StateRows

# dtypes of the fields of Rows, in their order
DTYPES = (*["int32"] * 5, "int64", "int32", "int64")


class RankStart(msgspec.Struct, frozen=True):
    """The first message to a rank: what to load."""

    config: Config
    rank: int
    folder: str | None  # where ranks with a GPU each find each other
    ends_with_thread: bool  # the rank is killed once the thread that started it ends
    peers: tuple[tuple[str, int], ...] = ()  # addresses of ranks 1, 2, ... below this one
    cpus: tuple[int, ...] = ()  # of the machine, before rank 0 was bound to a node; empty: another


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A rank's weights are loaded. Ranks whose values differ could compute different text."""

    version: str  # of specserve
    sources: str  # digest of the kernels' sources
    arithmetic: str  # build and instruction set
    model: str  # digest of the checkpoint
    dtype: str
    num_bytes: int  # of the weights

    def differing(self, other: "RankReady") -> str | None:
        """Return the name of the first value that differs and must not; None: there is none."""
        names = "version", "sources", "arithmetic", "model", "dtype"
        return next((n for n in names if getattr(self, n) != getattr(other, n)), None)


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot start; the reason is an operator's mistake."""

    reason: str


class Allocate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Allocate the KV of this rank's heads and layers, and prepare the forward."""

    num_blocks: int
    block_size: int  # tokens
    max_rows: int
    max_read: int
    aux_layer_ids: tuple[int, ...]
    state_size: int  # blocks of a request's recurrent state; 0: no rank has recurrent layers


class AllocateHost(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Allocate the blocks of the host tier."""

    num_blocks: int


class ReadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read an adapter's folder in a thread, for a later `PutAdapter`."""

    folder: str


class PutAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Put an adapter that was read into a slot; without a digest, clear the slot."""

    slot: int
    digest: str | None


class Forward(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run a step's forward. The arrays are those of `StepInput`."""

    threads: int
    rows: Sequence[bytearray]  # fields of Rows, in their order, without adapters
    token_ids: bytearray
    read: bytearray
    adapters: Sequence[bytearray] | None  # fields of AdapterRows, int32
    states: Sequence[bytearray] | None  # fields of StateRows, int32


class Logits(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute the logits of other rows of the last forward."""

    read: bytearray


class Update(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Update the KV as in `KVUpdates`; `moves` are those of the target model."""

    moves: list[tuple[int, int]]
    stores: list[tuple[int, int]]
    copies: list[tuple[int, int]]
    loads: list[tuple[int, int]]
    replays: list[StateReplay]


Command = Allocate | AllocateHost | ReadAdapter | PutAdapter | Forward | Logits | Update


def forward_of(rows: Rows, token_ids: Tensor, read: Tensor) -> Forward:
    *fields, adapters, states = rows
    return Forward(
        threads=torch.get_num_threads(),
        rows=[bytes_of(x) for x in fields],
        token_ids=bytes_of(token_ids),
        read=bytes_of(read),
        adapters=None if adapters is None else [bytes_of(x) for x in adapters],
        states=None if states is None else [bytes_of(x) for x in states],
    )


def update_of(updates: KVUpdates) -> Update:
    moves, replays = updates.moves.get("target", []), [*updates.replays]
    return Update(moves, updates.stores, updates.copies, updates.loads, replays)


def rows_in(message: Forward) -> Rows:
    adapters = message.adapters
    fields = (tensor_of(x, dtype) for x, dtype in zip(message.rows, DTYPES, strict=True))
    given = None if adapters is None else AdapterRows(*(tensor_of(x, "int32") for x in adapters))
    return Rows._make([*fields, given, states_in(message)])


def states_in(message: Forward) -> StateRows | None:
    if message.states is None:
        return None
    states = StateRows._make(tensor_of(x, "int32") for x in message.states)
    num_requests = len(states.committed)
    blocks, snapshots = (x.view(num_requests, -1) for x in (states.blocks, states.snapshots))
    return states._replace(blocks=blocks, snapshots=snapshots)


def bytes_of(x: Tensor) -> bytearray:
    return bytearray(x.numpy().data)


def tensor_of(data: bytearray, dtype: str = "int64") -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype))
