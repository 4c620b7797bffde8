"""Linear maps, RMSNorm and the gated SiLU, a row at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from specserve_kernels.threads import FixedThreads, Threads, check_threads


def prepack(weight: Tensor) -> Tensor:
    """A weight in the form that `linear` takes.

    weight  [N, K]  bfloat16 | float32
    """
    return weight.float()


def linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias.

    x     [R, K]  bfloat16 | float32
    bias  [N]     as x
    ->    [R, N]  as x
    """
    # A copy of each row: the product's bits depend on where in memory a vector begins.
    rows = [torch.mv(packed, row.clone().float()) for row in x]
    out = torch.stack(rows) if rows else x.new_empty(0, packed.shape[0])
    return (out if bias is None else out + bias.float()).to(x.dtype)


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    """The embeddings of some tokens, as a new tensor: later layers add to it in place.

    table      [V, K]  bfloat16 | float32
    token_ids  [R]     int64
    ->         [R, K]  as table
    """
    return table.index_select(0, token_ids)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a tensor, in the order given.

    x     [R, K]  bfloat16 | float32
    rows  [n]     int64
    ->    [n, K]  as x
    """
    return x.index_select(0, rows)


def add(x: Tensor, residual: Tensor) -> Tensor:
    """Add x to the residual stream, in place; the residual stream.

    x         [R, K]  bfloat16 | float32
    residual  [R, K]  as x; becomes residual + x, rounded
    """
    return residual.copy_(residual.float() + x.float())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, rounded once, at the end (Zhang, Sennrich 1910.07467).

    x       [R, K]  bfloat16 | float32
    weight  [K]     as x
    ->      [R, K]  as x
    """
    rows = [row * torch.rsqrt(row.square().mean() + eps) * weight.float() for row in x.float()]
    return torch.stack(rows).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to the residual stream, in place, and normalize the sum.

    x         [R, K]  bfloat16 | float32
    residual  [R, K]  as x; becomes residual + x, rounded
    weight    [K]     as x
    ->        [R, K]  as x, rms_norm(residual)
    """
    return rms_norm(add(x, residual), weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (SwiGLU, Shazeer 2002.05202).

    gate_up  [R, 2F]  bfloat16 | float32  gate in the first half of a row, up in the second
    ->       [R, F]   as gate_up
    """
    rows = []
    for row in gate_up.float():
        gate, up = row.chunk(2)
        rows.append(gate / (1 + torch.exp(-gate)) * up)
    return torch.stack(rows).to(gate_up.dtype)


def tune(
    step: Callable[[int], Tensor], most: int, threads: int | None, key: str
) -> tuple[Threads, str]:
    """Choose how many threads run a step, and do what only a first step has to do.

    step     runs a step of the given number of rows; the logits [n, V] of some of them
    most     rows that a step may have
    threads  the number to use, or None for the build to choose
    key      identifies the model: times of its steps may be kept under it
    ->       what a runner calls around each forward, and the choice as text
    """
    count = torch.get_num_threads() if threads is None else check_threads(threads)
    return FixedThreads(count), f"{count}, with reference kernels"
