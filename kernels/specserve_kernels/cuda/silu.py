"""The gated SiLU; each program computes a piece of a row."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _silu_mul(gate_up, out, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < F
    gate = tl.load(gate_up + 2 * F * row + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + 2 * F * row + F + i, mask=inside, other=0.0).to(tl.float32)
    e = tl.exp(-tl.abs(gate))  # at most 1
    silu = gate * tl.where(gate >= 0, 1.0, e) / (1 + e)
    tl.store(out + F * row + i, (silu * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    gate_up  [R, 2F]  bfloat16 | float32  gate in the first half of a row, up in the second
    ->       [R, F]   as gate_up
    """
    assert gate_up.is_contiguous(), "rows with gaps"
    R, F = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(R, F)
    if R:
        _silu_mul[(R, triton.cdiv(F, BLOCK))](gate_up, out, F, BLOCK=BLOCK, num_warps=4)
    return out
