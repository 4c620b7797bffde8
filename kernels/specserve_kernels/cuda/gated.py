"""The gated activation f(gate) * up, and activations without a gate. Each program computes a piece
of a row.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
GATES = ("silu", "gelu_tanh", "clamped")
CURVES = ("silu", "gelu_tanh", "relu2", "xielu")
BETA = tl.constexpr(0.5)  # same as in reference/layers.py
ALPHA = tl.constexpr(1.702)  # same as in reference/experts.py


@triton.jit
def _sigmoid(x):
    e = tl.exp(-tl.abs(x))  # at most 1
    return tl.where(x >= 0, 1.0, e) / (1 + e)


@triton.jit
def _gated(gate_up, out, F, limit, GATE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < F
    gate = tl.load(gate_up + 2 * F * row + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + 2 * F * row + F + i, mask=inside, other=0.0).to(tl.float32)
    at = gate
    if GATE == "gelu_tanh":  # 0.5 x (1 + tanh u) = x sigmoid(2 u)
        at = gate * (1.59576912 + 0.0713548163 * gate * gate)
    if GATE == "clamped":  # keeps NaN
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1
        at = ALPHA * gate
    active = gate * _sigmoid(at)
    tl.store(out + F * row + i, (active * up).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, gate: str = "silu", limit: float = 0.0) -> Tensor:
    """Return f(gate) * up, as in the reference's `linear_gated`.

    If `gate` is `clamped`, return the inner row of the reference's `experts` with this limit.

    gate_up  [R, 2F]  bfloat16 | float32  gate in the first half of a row, up in the second
    ->       [R, F]   as gate_up
    """
    assert gate_up.is_contiguous(), "rows with gaps"
    assert gate in GATES, f"No kernel implements the gate {gate}."
    R, F = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(R, F)
    if R:
        grid = (R, triton.cdiv(F, BLOCK))
        _gated[grid](gate_up, out, F, limit, GATE=gate, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def _activate(x, K, positive, negative, CURVE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < K
    at = x + K * row + i
    v = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if CURVE == "relu2":
        y = tl.where(v < 0, 0.0, v * v)  # keeps NaN
    elif CURVE == "xielu":
        left = (tl.exp(tl.where(v > 0, 0.0, v)) - 1 - v) * negative
        y = tl.where(v > 0, positive * v * v, left) + BETA * v
    elif CURVE == "gelu_tanh":
        y = v * _sigmoid(v * (1.59576912 + 0.0713548163 * v * v))
    else:
        y = v * _sigmoid(v)
    tl.store(at, y.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _gate_columns(x, other, K, W, begin, CURVE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < K
    at = x + K * row + i
    v = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    by = tl.load(other + W * row + begin + i, mask=inside, other=0.0).to(tl.float32)
    inner = v
    if CURVE == "gelu_tanh":
        inner = v * (1.59576912 + 0.0713548163 * v * v)
    tl.store(at, (v * _sigmoid(inner) * by).to(x.dtype.element_ty), mask=inside)


def gate_columns(x: Tensor, curve: str, other: Tensor, begin: int) -> Tensor:
    """Same as the reference op."""
    assert x.is_contiguous() and other.is_contiguous(), "rows with gaps"
    assert curve in GATES[:2], f"No kernel implements the gate {curve}."
    (R, K), W = x.shape, other.shape[1]
    assert begin + K <= W, "columns beyond a row"
    if R:
        grid = (R, triton.cdiv(K, BLOCK))
        _gate_columns[grid](x, other, K, W, begin, CURVE=curve, BLOCK=BLOCK, num_warps=4)
    return x


def activate(x: Tensor, curve: str, alphas: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    """Same as the reference op."""
    assert x.is_contiguous(), "rows with gaps"
    assert curve in CURVES, f"No kernel implements the curve {curve}."
    R, K = x.shape
    if R:
        _activate[(R, triton.cdiv(K, BLOCK))](x, K, *alphas, CURVE=curve, BLOCK=BLOCK, num_warps=4)
    return x
