"""RMSNorm, alone and after adding to the residual stream; each program computes a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, residual, weight, out, K, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * K
    i = tl.arange(0, BLOCK)
    inside = i < K
    v = tl.load(x + row + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        v += tl.load(residual + row + i, mask=inside, other=0.0).to(tl.float32)
        rounded = v.to(residual.dtype.element_ty)
        tl.store(residual + row + i, rounded, mask=inside)
        v = rounded.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(v * v, axis=0) / K + eps)
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + i, (v * scale * w).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference's."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference's."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    assert x.is_contiguous() and (residual is None or residual.is_contiguous()), "rows with gaps"
    R, K = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(K)
    if R:
        _rms_norm[(R,)](
            *(x, x if residual is None else residual, weight, out, K, eps),
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return out
