"""8-bit KV in Triton: codes and scales, as defined in reference/kv.py.

Fp8 codes are encoded and decoded with integer operations, because GPUs before Ada and Triton's
interpreter lack fp8.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.types import KVLayer

PLAIN, INT8, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SMALLEST_FP8 = tl.constexpr(2.0**-6)
SMALLEST_HEAD = tl.constexpr(2.0**-100)
REBIASED = tl.constexpr(2.0**120)  # factor from e4m3's exponent bias to float32's
TO_INTEGER = tl.constexpr(1.5 * 2**23)  # adding and subtracting it rounds to the nearest integer


@triton.jit
def scale_of(a, b, CODES: tl.constexpr):
    """Return the scales and inverse scales, [heads, 1], of heads with the halves a and b, [heads, D
    / 2].
    """
    LARGEST: tl.constexpr = 127.0 if CODES == INT8 else 448.0
    sizes = tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)
    are_finite = sizes < float("inf")
    most = tl.max(tl.where(are_finite, sizes, 0.0), axis=1)
    is_finite = tl.min(are_finite.to(tl.int32), axis=1)
    counts = (is_finite == 1) & (most >= SMALLEST_HEAD)
    safe = tl.where(counts, most, 1.0)
    inverse = tl.where(counts, tl.div_rn(tl.full(safe.shape, LARGEST, tl.float32), safe), 0.0)
    scale = tl.where(counts, tl.div_rn(safe, tl.full(safe.shape, LARGEST, tl.float32)), 0.0)
    return tl.where(is_finite == 1, scale, float("nan"))[:, None], inverse[:, None]


@triton.jit
def code(x, inverse, CODES: tl.constexpr):
    """Encode numbers as bytes."""
    x = tl.where(inverse > 0, x, 0.0) * inverse  # 0 for heads that are not finite
    if CODES == INT8:
        found = ((x + TO_INTEGER) - TO_INTEGER).to(tl.int8)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        rounded = size + 0x7FFFF + ((size >> 20) & 1)
        rebiased = (rounded >> 20) - (120 << 3)  # e4m3's bias is 7, float32's 127
        rebiased = tl.where(tl.abs(x) < SMALLEST_FP8, 0, rebiased)
        found = (rebiased | ((bits >> 24) & 0x80)).to(tl.uint8)
    return found


@triton.jit
def number(codes, CODES: tl.constexpr):
    """Decode codes to float32, without the scale. Plain KV is returned unchanged."""
    if CODES == PLAIN:
        found = codes
    elif CODES == INT8:
        found = codes.to(tl.float32)
    else:
        bits = codes.to(tl.int32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        found = bits.to(tl.float32, bitcast=True) * REBIASED
    return found


def arguments(kv: KVLayer) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """Return the kernels' KV arguments: K, V, their scales, the scales' block stride, and CODES."""
    if kv.k_scale is None or kv.v_scale is None:
        return kv.k, kv.v, kv.k, kv.v, 0, PLAIN.value
    assert kv.k_scale.stride() == kv.v_scale.stride(), "scales of different strides"
    assert kv.k_scale.stride()[1:] == (1, kv.k.shape[1]), "scales with gaps in a block"
    kind = INT8.value if kv.k.dtype == torch.int8 else FP8.value
    codes = as_bytes(kv.k), as_bytes(kv.v)
    return *codes, kv.k_scale, kv.v_scale, kv.k_scale.stride(0), kind


def as_bytes(x: Tensor) -> Tensor:
    """View fp8 as bytes, because the kernels have no fp8 type."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
