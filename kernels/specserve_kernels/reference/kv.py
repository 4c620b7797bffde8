"""8-bit KV: codes, and one scale per token and head."""

import torch
from torch import Tensor

from specserve_kernels.types import KVLayer

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # largest |code|
SMALLEST_FP8 = 2.0**-6  # least nonzero fp8 code; subnormal codes become 0
SMALLEST_HEAD = 2.0**-100  # least max |x| of a head; below it 1 / scale could overflow


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize heads to codes and one scale per head, so that x is about code * scale.

    x   [.., D]  float32

    ->  [.., D]  int8 | float8_e4m3fn  x / scale, rounded to nearest even; fp8: 0 if |x / scale| is
                                       below SMALLEST_FP8

    ->  [..]     float32               max |x| / LARGEST; 0 if max |x| is below SMALLEST_HEAD; NaN
                                       if a number is infinite or NaN

    The codes depend only on the head itself, not on earlier tokens or other rows.
    """
    most = x.abs().amax(-1)
    is_zero, is_finite = most < SMALLEST_HEAD, most.isfinite()
    largest = torch.full_like(most, LARGEST[dtype])  # number / tensor would round twice
    inverse = torch.where(is_zero | ~is_finite, 0.0, largest / most)
    scaled = torch.where(is_finite[..., None], x * inverse[..., None], 0.0)
    if dtype == torch.int8:
        codes = scaled.round()
    else:
        codes = torch.where(scaled.abs() < SMALLEST_FP8, 0.0, scaled)
    scale = torch.where(is_zero, 0.0, most / largest)
    return codes.to(dtype), torch.where(is_finite, scale, torch.nan)


def put(kv: KVLayer, at: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
    """Write the K and V of n tokens, [n, Hk, D] float32, at (blocks, offsets)."""
    for x, codes, scales in ((k, kv.k, kv.k_scale), (v, kv.v, kv.v_scale)):
        if scales is None:
            codes[at] = x.to(codes.dtype)
        else:
            codes[at], scales[at] = quantize(x, codes.dtype)


def take(kv: KVLayer, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Read the K and V of n tokens, [n, Hk, D] float32, from (blocks, offsets)."""
    k, v = kv.k[at].float(), kv.v[at].float()
    if kv.k_scale is None or kv.v_scale is None:
        return k, v
    return k * kv.k_scale[at][..., None], v * kv.v_scale[at][..., None]
