"""Linear maps with what follows them, and RMSNorm, a row at a time."""

from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor

from specserve_kernels.codes import Codes
from specserve_kernels.reference.kv import quantize
from specserve_kernels.threads import FixedThreads, Threads, check_threads


def prepack(weight: Tensor | Codes, is_gated: bool = False) -> Tensor | Codes:
    """A weight in the form that the linear ops take.

    weight    [N, K]  bfloat16 | float32, or codes, which rows of either dtype can be multiplied by
    is_gated  it is for `linear_silu_mul`, else for the other two
    """
    return weight if isinstance(weight, Codes) else weight.float()


def linear(x: Tensor, packed: Tensor | Codes, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias.

    x     [R, K]  bfloat16 | float32
    bias  [N]     as x
    ->    [R, N]  as x
    """
    return products(x, packed, bias).to(x.dtype)


def linear_add(x: Tensor, packed: Tensor | Codes, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Add x W^T + bias to the residual stream, in place; the residual stream.

    x         [R, K]  bfloat16 | float32
    bias      [N]     as x
    residual  [R, N]  as x; becomes residual + x W^T + bias, rounded once
    """
    return residual.copy_(residual.float() + products(x, packed, bias))


def linear_silu_mul(x: Tensor, packed: Tensor | Codes, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of x W^T + bias (SwiGLU, Shazeer
    2002.05202). Rounded at the end; a build may round gate and up before, too.

    x       [R, K]  bfloat16 | float32
    packed  of a weight [2F, K], the gate's rows in its first half
    bias    [2F]    as x
    ->      [R, F]  as x
    """
    gate, up = products(x, packed, bias).chunk(2, dim=1)
    rows = [g / (1 + torch.exp(-g)) * u for g, u in zip(gate.clone(), up.clone(), strict=True)]
    return torch.stack(rows).to(x.dtype) if rows else gate.to(x.dtype)


def products(x: Tensor, packed: Tensor | Codes, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, not rounded."""
    out = _rounded(x, packed) if _rounds_rows(packed) else _plain(x, packed)
    return out if bias is None else out + bias.float()


def _rounds_rows(packed: Tensor | Codes) -> TypeGuard[Codes]:
    return isinstance(packed, Codes) and packed.rounds_rows


def _rounded(x: Tensor, codes: Codes) -> Tensor:
    """x W^T, where a row is rounded to int8 codes c and a scale, as heads of 8-bit KV are.

    The sum of c * (q - 128) is an integer; as a float it is multiplied by (the row's scale * the
    weight's).
    """
    rows, scale = quantize(x.float(), torch.int8)
    # Exact in float64, in any order.
    sums = rows.double() @ (codes.q.double() - 128).T
    return sums.float() * (scale[:, None] * codes.scale[:, 0])


def _plain(x: Tensor, packed: Tensor | Codes) -> Tensor:
    weight = packed.widen(torch.float32) if isinstance(packed, Codes) else packed
    # A copy of each row: the product's bits depend on where in memory a vector begins.
    rows = [torch.mv(weight, row.clone().float()) for row in x]
    return torch.stack(rows) if rows else weight.new_empty(0, weight.shape[0])


def embed(table: Tensor | Codes, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The embeddings of some tokens, as a new tensor: later layers add to it in place.

    table      [V, K]  of dtype, or codes, whose values are each rounded once
    token_ids  [R]     int64
    dtype      bfloat16 | float32
    ->         [R, K]  of dtype
    """
    if isinstance(table, Codes):
        return table.take(token_ids).widen(dtype)
    return table.index_select(0, token_ids)


def copy(x: Tensor) -> Tensor:
    """A tensor of its own, for what is read after a later op has added to `x`."""
    return x.clone()


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a tensor, in the order given.

    x     [R, K]  bfloat16 | float32
    rows  [n]     int64
    ->    [n, K]  as x
    """
    return x.index_select(0, rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, rounded once, at the end (Zhang, Sennrich 1910.07467).

    x       [R, K]  bfloat16 | float32
    weight  [K]     as x
    ->      [R, K]  as x
    """
    rows = [row * torch.rsqrt(row.square().mean() + eps) * weight.float() for row in x.float()]
    return torch.stack(rows).to(x.dtype)


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
