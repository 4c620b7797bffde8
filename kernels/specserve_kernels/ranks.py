"""The ranks of one model: processes that each compute some columns of its linear maps."""

import mmap
import os
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

HEADER = mmap.PAGESIZE  # bytes before the slots of shared memory: the barrier
SLOT = 4 << 20  # bytes of a slot


class RankLost(RuntimeError):
    """Another rank has ended, so that no rank can go on."""


class Ranks:
    """One rank's connections with the others that exchange tensors with it.

    rank     number of this process, from 0
    size     number of ranks
    sockets  by rank: a connected stream socket, for each other rank
    memory   file descriptor of `shared_memory`, if all ranks run on one host; else None
    device   the build's own connection, for ranks on GPUs
    native   the same in a form of the build, created at first use
    """

    def __init__(
        self,
        rank: int,
        size: int,
        sockets: Mapping[int, socket.socket],
        memory: int | None = None,
        device: Any = None,
    ) -> None:
        self.rank, self.size, self.sockets = rank, size, dict(sockets)
        self.device = device
        self.shared = None if memory is None else shared(memory)
        self.native: Any = None

    @property
    def is_lost(self) -> bool:
        """Whether a native exchange has failed because another rank has ended."""
        return self.native is not None and bool(self.native.has_failed)

    def check(self) -> None:
        """Raise RankLost if an exchange has failed. Its results are then undefined."""
        if self.is_lost:
            raise RankLost(f"rank {self.rank} lost the connection with another rank")

    def close(self) -> None:
        if self.device is not None:
            self.device.abort()
        for sock in self.sockets.values():
            sock.close()


class Gathering(NamedTuple):
    """The part of each rank, of a tensor's columns or of a mixture's experts: rank r has those in
    [begins[r], begins[r + 1]).
    """

    ranks: Ranks
    begins: tuple[int, ...]

    @property
    def own(self) -> tuple[int, int]:
        """The interval of this rank."""
        return self.begins[self.ranks.rank], self.begins[self.ranks.rank + 1]

    @property
    def width(self) -> int:
        return self.begins[-1]


def shared_memory(slot_bytes: int = SLOT) -> int:
    """Create memory for the exchanges of ranks on one host; return its file descriptor.

    slot_bytes  at least the bytes of a row of any exchanged tensor
    """
    memory = os.memfd_create("specserve ranks")
    os.ftruncate(memory, HEADER + 2 * slot_bytes)
    return memory


def shared(memory: int) -> Tensor:
    mapped = mmap.mmap(memory, os.fstat(memory).st_size, flags=mmap.MAP_SHARED)
    return torch.frombuffer(mapped, dtype=torch.uint8)
