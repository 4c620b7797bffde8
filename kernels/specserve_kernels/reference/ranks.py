"""Exchanges between ranks, over their sockets."""

import socket
from pathlib import Path

import torch
from torch import Tensor

from specserve_kernels.ranks import Gathering, RankLost, Ranks


def join(ranks: Ranks, folder: Path, name: str) -> None:
    """Connect the devices of ranks. All ranks call this at the same time.

    Ranks on CPUs exchange tensors over their sockets and shared memory.
    """


def all_gather(x: Tensor, gathering: Gathering, reader: int | None = None) -> Tensor:
    """Return the columns of all ranks, in the order of ranks. All ranks call it at the same time.

    x       [R, n of this rank]  bfloat16 | float32
    reader  the only rank that needs the result; None: all. Others get undefined values
    ->      [R, width]           as x
    """
    ranks, begins = gathering
    out = x.new_zeros(len(x), gathering.width)
    begin, end = gathering.own
    out[:, begin:end] = x
    for other in sorted(ranks.sockets):
        reads, sends = reader in (None, ranks.rank), reader in (None, other)
        width = begins[other + 1] - begins[other]
        # The lower rank of a pair sends first: pairs wait for each other in one order.
        for is_sending in (True, False) if ranks.rank < other else (False, True):
            if is_sending and sends:
                send(x, ranks, other)
            elif not is_sending and reads:
                out[:, begins[other] : begins[other + 1]] = receive(x, width, x.dtype, ranks, other)
    return out


def take_columns(x: Tensor, begin: int, end: int) -> Tensor:
    """Return a copy of the columns [begin, end) of x [R, K] bfloat16 | float32."""
    return x[:, begin:end].clone(memory_format=torch.contiguous_format)


def put_columns(x: Tensor, begin: int, columns: Tensor) -> Tensor:
    """Replace the columns of x [R, K] from `begin` on by others [R, n], in place; return x."""
    x[:, begin : begin + columns.shape[1]] = columns
    return x


def send(x: Tensor, ranks: Ranks, other: int) -> Tensor:
    """Send a tensor to another rank, which calls `receive` with its shape. Return the tensor.

    x  [R, K]  bfloat16 | float32
    """
    data = x.contiguous().view(-1).view(torch.uint8)
    try:
        ranks.sockets[other].sendall(data.numpy().data)
    except OSError as e:
        raise RankLost(f"rank {other} has ended ({e})") from e
    return x


def receive(rows: Tensor, width: int, dtype: torch.dtype, ranks: Ranks, other: int) -> Tensor:
    """Return the tensor [R, width] of `dtype` that another rank sends.

    rows  [R, ...]  any tensor of R rows
    """
    out = torch.empty(len(rows), width, dtype=dtype)
    rest = out.view(-1).view(torch.uint8).numpy().data
    while rest:
        rest = rest[read(ranks.sockets[other], rest, other) :]
    return out


def read(sock: socket.socket, rest: memoryview, other: int) -> int:
    try:
        number = sock.recv_into(rest)
    except OSError as e:
        raise RankLost(f"rank {other} has ended ({e})") from e
    if number == 0:
        raise RankLost(f"rank {other} has ended")
    return number
