"""The gated activation f(gate) * up. Each program computes a piece of a row."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
GATES = ("silu", "gelu_tanh", "clamped")
ALPHA = tl.constexpr(1.702)  # same as in reference/experts.py


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
    e = tl.exp(-tl.abs(at))  # at most 1
    active = gate * tl.where(at >= 0, 1.0, e) / (1 + e)
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
