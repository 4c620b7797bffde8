"""RMSNorm and LayerNorm. Each program computes one row."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _mean(total, K):
    """`/` may round wrongly, so that equal numbers differ from their mean."""
    return tl.div_rn(total, K * 1.0)


@triton.jit
def _norm(
    x,
    weight,
    bias,
    out,
    K,
    x_stride,
    out_stride,
    eps,
    IS_CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < K
    v = tl.load(x + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    if IS_CENTERED:
        v = tl.where(inside, v - _mean(tl.sum(v, axis=0), K), 0.0)
    scale = 1 / tl.sqrt(_mean(tl.sum(v * v, axis=0), K) + eps)
    y = v * scale * tl.load(weight + i, mask=inside, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias + i, mask=inside, other=0.0)
    at = out + row * out_stride + i
    if ADDS:
        y += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, y.to(out.dtype.element_ty), mask=inside)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: float,
    is_centered: bool,
    adds: bool,
    bias: Tensor | None = None,
) -> None:
    """Launch over whole rows, or over the same columns of `x` and `out`."""
    R, K = x.shape
    block = triton.next_power_of_2(K)
    if R:
        _norm[(R,)](
            *(x, weight, weight if bias is None else bias, out),
            *(K, x.stride(0), out.stride(0), eps),
            IS_CENTERED=is_centered,
            HAS_BIAS=bias is not None,
            ADDS=adds,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Same as the reference op, like the functions below."""
    assert x.is_contiguous(), "rows with gaps"
    out = x.new_empty(x.shape)
    _launch(x, weight, out, eps, is_centered=False, adds=False)
    return out


def layer_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    assert x.is_contiguous(), "rows with gaps"
    out = x.new_empty(x.shape)
    _launch(x, weight, out, eps, is_centered=True, adds=False, bias=bias)
    return out


def rms_norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor, begin: int = 0) -> Tensor:
    assert x.is_contiguous() and residual.is_contiguous(), "rows with gaps"
    columns = residual[:, begin : begin + x.shape[1]]
    if len(weight) < x.shape[1]:
        x, columns = x.view(-1, len(weight)), columns.view(-1, len(weight))
    _launch(x, weight, columns, eps, is_centered=False, adds=True)
    return residual


def rms_norm_columns(x: Tensor, begin: int, weight: Tensor, eps: float) -> Tensor:
    columns = x[:, begin : begin + len(weight)]
    _launch(columns, weight, columns, eps, is_centered=False, adds=False)
    return x
