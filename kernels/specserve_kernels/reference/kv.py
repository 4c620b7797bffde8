"""KV of 8 bits: codes, and a scale for each token and head."""

import torch
from torch import Tensor

from specserve_kernels.types import KVLayer

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # of a code
SMALLEST_FP8 = 2.0**-6  # builds need to know no smaller ones, which are subnormal
SMALLEST_HEAD = 2.0**-100  # below it the inverse of a scale could overflow


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of which the products are x, as nearly as 8 bits can be.

    x   [.., D]  float32
    ->  [.., D]  int8 | float8_e4m3fn  x / scale, rounded to the nearest, to even in a tie; an fp8
                                       code below SMALLEST_FP8 is 0
    ->  [..]     float32               the largest |x| / LARGEST; 0 where that is below
                                       SMALLEST_HEAD, NaN where a number is infinite or NaN

    Nothing but the head itself decides about its codes: neither earlier tokens nor other rows.
    """
    most = x.abs().amax(-1)
    is_zero, is_finite = most < SMALLEST_HEAD, most.isfinite()
    largest = torch.full_like(most, LARGEST[dtype])  # torch divides a number in two roundings
    inverse = torch.where(is_zero | ~is_finite, 0.0, largest / most)
    scaled = torch.where(is_finite[..., None], x * inverse[..., None], 0.0)
    if dtype == torch.int8:
        codes = scaled.round()
    else:
        codes = torch.where(scaled.abs() < SMALLEST_FP8, 0.0, scaled)
    scale = torch.where(is_zero, 0.0, most / largest)
    return codes.to(dtype), torch.where(is_finite, scale, torch.nan)


def put(kv: KVLayer, at: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
    """Write the K and V of some tokens, [n, Hk, D] float32, at (blocks, offsets)."""
    for x, codes, scales in ((k, kv.k, kv.k_scale), (v, kv.v, kv.v_scale)):
        if scales is None:
            codes[at] = x.to(codes.dtype)
        else:
            codes[at], scales[at] = quantize(x, codes.dtype)


def take(kv: KVLayer, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What was put there: the K and V of some tokens, [n, Hk, D] float32."""
    k, v = kv.k[at].float(), kv.v[at].float()
    if kv.k_scale is None or kv.v_scale is None:
        return k, v
    return k * kv.k_scale[at][..., None], v * kv.v_scale[at][..., None]
