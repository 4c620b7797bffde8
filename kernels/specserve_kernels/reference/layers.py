"""Linear maps with fused epilogues, embeddings and norms, row by row."""

import math
from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor

from specserve_kernels.codes import Codes
from specserve_kernels.reference.rounded import rounded_products
from specserve_kernels.threads import check_threads
from specserve_kernels.types import AdapterSums, FixedThreads, Threads


def prepack(weight: Tensor | Codes, is_gated: bool = False) -> Tensor | Codes:
    """Pack a weight for the linear ops.

    weight    [N, K]  bfloat16 | float32, or codes, which accept rows of either dtype
    is_gated  for `linear_gated`; else for the other linear ops
    """
    return weight if isinstance(weight, Codes) else weight.float()


def linear(
    x: Tensor, packed: Tensor | Codes, bias: Tensor | None = None, added: AdapterSums | None = None
) -> Tensor:
    """Return x W^T + bias, plus the adapters' outputs.

    x      [R, K]  bfloat16 | float32
    bias   [N]     as x
    added          the result of `adapted` for these rows; same in `linear_add` and `linear_gated`
    ->     [R, N]  as x; rounded once
    """
    return products(x, packed, bias, added).to(x.dtype)


def lm_head(x: Tensor, packed: Tensor | Codes) -> Tensor:
    """Return logits x W^T in float32: bfloat16 would often make the two most probable tokens equal.

    x   [R, K]  bfloat16 | float32
    ->  [R, V]  float32
    """
    return products(x, packed)


def linear_add(
    x: Tensor,
    packed: Tensor | Codes,
    bias: Tensor | None,
    residual: Tensor,
    factor: float = 1.0,
    added: AdapterSums | None = None,
) -> Tensor:
    """Add factor * (x W^T + bias) to the residual stream, in place; return it.

    x         [R, K]  bfloat16 | float32
    bias      [N]     as x
    residual  [R, N]  as x; the sum is rounded once
    """
    return residual.copy_(residual.float() + factor * products(x, packed, bias, added))


def linear_gated(
    x: Tensor,
    packed: Tensor | Codes,
    bias: Tensor | None = None,
    gate: str = "silu",
    added: AdapterSums | None = None,
) -> Tensor:
    """Return f(gate) * up; gate and up are the halves of x W^T + bias (Shazeer 2002.05202).

    The result is rounded once; a build may also round gate and up before.

    gate    the function f: `silu`, or `gelu_tanh`, an approximate GELU (Hendrycks, Gimpel
            1606.08415)

    x       [R, K]  bfloat16 | float32
    packed  a weight [2F, K]; its first half is the gate
    bias    [2F]    as x
    ->      [R, F]  as x
    """
    first, up = products(x, packed, bias, added).chunk(2, dim=1)
    curve = GATES[gate]
    rows = [curve(g) * u for g, u in zip(first.clone(), up.clone(), strict=True)]
    return torch.stack(rows).to(x.dtype) if rows else up.to(x.dtype)


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))


GATES = {"silu": _silu, "gelu_tanh": _gelu_tanh}
BETA = 0.5  # slope of xIELU at zero


def products(
    x: Tensor, packed: Tensor | Codes, bias: Tensor | None = None, added: AdapterSums | None = None
) -> Tensor:
    """Return x W^T + bias + added, not rounded."""
    out = rounded_products(x, packed) if _rounds_rows(packed) else _plain(x, packed)
    if bias is not None:
        out = out + bias.float()
    if added is not None:
        has = added.places >= 0
        out[has] += added.sums[added.places[has].long()]
    return out


def _rounds_rows(packed: Tensor | Codes) -> TypeGuard[Codes]:
    return isinstance(packed, Codes) and packed.rounds_rows


def _plain(x: Tensor, packed: Tensor | Codes) -> Tensor:
    weight = packed.widen(torch.float32) if isinstance(packed, Codes) else packed
    # Copy each row, because the product's bits depend on the vector's memory alignment.
    rows = [torch.mv(weight, row.clone().float()) for row in x]
    return torch.stack(rows) if rows else weight.new_empty(0, weight.shape[0])


def embed(table: Tensor | Codes, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return token embeddings as a new tensor, because later layers add to it in place.

    table      [V, K]  of dtype, or codes; each code's value is rounded once
    token_ids  [R]     int64
    dtype      bfloat16 | float32
    ->         [R, K]  of dtype
    """
    if isinstance(table, Codes):
        return table.take(token_ids).widen(dtype)
    return table.index_select(0, token_ids)


def copy(x: Tensor) -> Tensor:
    """Return a copy, for values that are read after a later op has modified `x`."""
    return x.clone()


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Select rows of a tensor, in the given order.

    x     [R, K]  bfloat16 | float32
    rows  [n]     int64
    ->    [n, K]  as x
    """
    return x.index_select(0, rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, rounded once at the end (Zhang, Sennrich
    1910.07467).

    x       [R, K]  bfloat16 | float32
    weight  [K]     float32
    ->      [R, K]  as x
    """
    return _normed(x, weight, eps).to(x.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = [row * torch.rsqrt(row.square().mean() + eps) * weight for row in x.float()]
    return torch.stack(rows) if rows else x.float()


def layer_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, rounded once.

    This is LayerNorm (Ba et al. 1607.06450). Shapes as for `rms_norm`; the bias as the weight.
    """
    centered = [row - row.mean() for row in x.float()]
    if not centered:
        return x.clone()
    normed = _normed(torch.stack(centered), weight, eps)
    return (normed if bias is None else normed + bias).to(x.dtype)


def rms_norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor, begin: int = 0) -> Tensor:
    """Add rms_norm(x) to the residual stream, in place, rounded once; return it.

    If the weight is shorter than a row, every group of that many columns has its own norm.

    x         [R, G K]  bfloat16 | float32
    weight    [K]       float32
    residual  [R, W]    as x; its columns [begin, begin + G K) change
    """
    normed = _normed(x.reshape(-1, len(weight)), weight, eps).view(x.shape)
    columns = residual[:, begin : begin + x.shape[1]]
    columns.copy_(columns.float() + normed)
    return residual


def rms_norm_columns(x: Tensor, begin: int, weight: Tensor, eps: float) -> Tensor:
    """Normalize the columns [begin, begin + K) of each row, in place; return x.

    x       [R, W]  bfloat16 | float32
    weight  [K]     float32
    """
    columns = x[:, begin : begin + len(weight)]
    columns.copy_(rms_norm(columns, weight, eps))
    return x


def scale(x: Tensor, factor: float) -> Tensor:
    """Multiply x [R, K] bfloat16 | float32 by factor, in place; return x."""
    return x.copy_(x.float() * factor)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Replace x [R, K] bfloat16 | float32 by cap * tanh(x / cap), in place; return x."""
    return x.copy_(cap * torch.tanh(x.float() / cap))


def activate(x: Tensor, curve: str, alphas: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    """Apply the activation function of a map without a gate, in place; return x.

    x       [R, K]  bfloat16 | float32
    curve   `silu`, `gelu_tanh`, `relu2` (max(x, 0)^2), or `xielu` (Huang, Schlag 2411.13010)
    alphas  of `xielu`: of positive, and of other numbers
    """
    wide = x.float()
    if curve == "relu2":
        return x.copy_(wide.clamp(min=0).square())
    if curve == "xielu":
        positive, negative = alphas
        right = positive * wide.square() + BETA * wide
        left = (torch.expm1(wide.clamp(max=0)) - wide) * negative + BETA * wide
        return x.copy_(torch.where(wide > 0, right, left))
    rows = [GATES[curve](row) for row in wide.clone()]
    return x.copy_(torch.stack(rows)) if rows else x


def gate_columns(x: Tensor, curve: str, other: Tensor, begin: int) -> Tensor:
    """Replace x by f(x) * the columns [begin, begin + K) of `other`, in place, rounded once; return
    x.

    x      [R, K]  bfloat16 | float32
    curve  the function f, `silu` or `gelu_tanh`
    other  [R, W]  as x
    """
    bent = activate(x.float(), curve)
    return x.copy_(bent * other[:, begin : begin + x.shape[1]].float())


def tune(
    step: Callable[[int], Tensor], most: int, threads: int | None, key: str
) -> tuple[Threads, str]:
    """Choose the number of threads for steps, and do the one-time work of first steps.

    step     runs a step of the given number of rows; returns the logits [n, V] of some rows
    most     maximum rows of a step
    threads  the number of threads; None: the build chooses
    key      identifies the model; a build may cache step times under it
    ->       the object that a runner calls around each forward, and the choice as text
    """
    count = torch.get_num_threads() if threads is None else check_threads(threads)
    return FixedThreads(count), f"{count}, with reference kernels"
