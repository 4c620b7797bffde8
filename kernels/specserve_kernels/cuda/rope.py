"""Norm and rotation of the heads, and the KV write. Each program takes a few heads of a row."""

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.cuda import kv_codes
from specserve_kernels.cuda.kv_codes import PLAIN, code, scale_of
from specserve_kernels.types import KVLayer, QKNorm, Rotary

HEADS = 8  # per program


@triton.jit
def _normed(a, b, weight_a, weight_b, inside, eps, D: tl.constexpr, IS_CENTERED: tl.constexpr):
    """Normalize heads, given in halves."""
    if IS_CENTERED:
        mean = ((tl.sum(a, axis=1) + tl.sum(b, axis=1)) / D)[:, None]
        a, b = tl.where(inside, a - mean, 0.0), tl.where(inside, b - mean, 0.0)
    square = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D
    scale = (1 / tl.sqrt(square + eps))[:, None]
    return a * scale * weight_a, b * scale * weight_b


@triton.jit
def _rope_write_kv(
    qkv,
    q_out,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    cos,
    sin,
    q_norm,
    k_norm,
    query_scale,
    positions,
    slots,
    num_heads,
    num_kv_heads,
    block_size,
    block_stride,
    scale_stride,
    norm_stride,  # distance of the heads' weights; 0: one for all heads
    eps,
    HAS_NORM: tl.constexpr,
    IS_CENTERED: tl.constexpr,
    IS_LAST: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_VALUES: tl.constexpr,  # value heads are normalized without a weight
    HALF: tl.constexpr,  # D / 2
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    CODES: tl.constexpr,  # the KV format
):
    row = tl.program_id(0).to(tl.int64)
    heads = num_heads + 2 * num_kv_heads
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, HALF_BLOCK)[None, :]
    D: tl.constexpr = 2 * HALF
    inside = (head < heads) & (i < HALF)
    at = qkv + (row * heads + head) * D + i
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    is_q = head < num_heads
    is_v = head >= num_heads + num_kv_heads

    if HAS_NORM:
        q_at = q_norm + head * norm_stride + i
        k_at = k_norm + (head - num_heads) * norm_stride + i
        has_q, has_k = is_q & (i < HALF), (head >= num_heads) & ~is_v & (i < HALF)
        wa = tl.load(q_at, mask=has_q, other=0.0) + tl.load(k_at, mask=has_k, other=0.0)
        q_at, k_at = q_at + HALF, k_at + HALF
        wb = tl.load(q_at, mask=has_q, other=0.0) + tl.load(k_at, mask=has_k, other=0.0)
    na, nb = a, b
    if HAS_NORM and not IS_LAST:
        na, nb = _normed(a, b, wa, wb, i < HALF, eps, D, IS_CENTERED)
    angle = tl.load(positions + row).to(tl.int64) * HALF + i
    c = tl.load(cos + angle, mask=i < HALF, other=0.0)
    s = tl.load(sin + angle, mask=i < HALF, other=0.0)
    ra, rb = na * c - nb * s, nb * c + na * s
    if HAS_NORM and IS_LAST:
        ra, rb = _normed(ra, rb, wa, wb, i < HALF, eps, D, IS_CENTERED)
    if HAS_SCALE:
        factor = tl.where(is_q, tl.load(query_scale + tl.load(positions + row).to(tl.int64)), 1.0)
        ra, rb = ra * factor, rb * factor

    q_at = q_out + (row * num_heads + head) * D + i
    tl.store(q_at, ra.to(q_out.dtype.element_ty), mask=inside & is_q)
    tl.store(q_at + HALF, rb.to(q_out.dtype.element_ty), mask=inside & is_q)
    slot = tl.load(slots + row)
    is_used = slot >= 0  # an unused row of a graph has no slot
    inside &= is_used
    place = (slot // block_size) * block_stride + (slot % block_size) * num_kv_heads * D + i
    k_at = k_cache + place + (head - num_heads) * D
    v_at = v_cache + place + (head - num_heads - num_kv_heads) * D
    is_k = (head >= num_heads) & (head < num_heads + num_kv_heads)
    if HAS_VALUES:
        a, b = _normed(a, b, 1.0, 1.0, i < HALF, eps, D, False)
    if CODES == PLAIN:
        tl.store(k_at, ra.to(k_cache.dtype.element_ty), mask=inside & is_k)
        tl.store(k_at + HALF, rb.to(k_cache.dtype.element_ty), mask=inside & is_k)
        tl.store(v_at, a.to(v_cache.dtype.element_ty), mask=inside & is_v)
        tl.store(v_at + HALF, b.to(v_cache.dtype.element_ty), mask=inside & is_v)
    else:
        scales = (slot // block_size) * scale_stride + slot % block_size
        k_scales, k_inverse = scale_of(ra, rb, CODES)
        tl.store(k_at, code(ra, k_inverse, CODES), mask=inside & is_k)
        tl.store(k_at + HALF, code(rb, k_inverse, CODES), mask=inside & is_k)
        tl.store(k_scale + scales + (head - num_heads) * block_size, k_scales, mask=is_k & is_used)
        v_scales, v_inverse = scale_of(a, b, CODES)
        tl.store(v_at, code(a, v_inverse, CODES), mask=inside & is_v)
        tl.store(v_at + HALF, code(b, v_inverse, CODES), mask=inside & is_v)
        v_head = head - num_heads - num_kv_heads
        is_v_head = is_v & (head < heads) & is_used
        tl.store(v_scale + scales + v_head * block_size, v_scales, mask=is_v_head)


def rope_write_kv(
    qkv: Tensor,
    rotary: Rotary,
    norm: QKNorm | None,
    kv: KVLayer | None,
    positions: Tensor,
    slots: Tensor,
) -> Tensor:
    """Same as the reference op, with the rows' positions and slots on the device."""
    assert qkv.is_contiguous(), "rows with gaps"
    D = 2 * rotary.cos.shape[1]
    if kv is None:  # no head is a key head or a value head, so this tensor is not written
        nothing = qkv.view(1, 1, 1, -1)
        kv, num_kv_heads, block_size, stride = KVLayer(nothing, nothing), 0, 1, 0
    else:
        _, block_size, num_kv_heads, _ = kv.k.shape
        stride, *inner = kv.k.stride()
        assert kv.v.stride() == kv.k.stride(), "K and V have different strides"
        assert inner == [num_kv_heads * D, D, 1], "KV with gaps in a block"
    R, heads = len(positions), qkv.shape[1] // D
    num_heads = heads - 2 * num_kv_heads
    q = qkv.new_empty(R, num_heads, D)
    if R:
        *stored, scale_stride, codes = kv_codes.arguments(kv)
        _rope_write_kv[(R, triton.cdiv(heads, HEADS))](
            *(qkv, q, *stored, rotary.cos, rotary.sin),
            *((norm.q, norm.k) if norm else (rotary.cos, rotary.cos)),
            rotary.cos if rotary.query_scale is None else rotary.query_scale,
            *(positions, slots, num_heads, num_kv_heads, block_size, stride, scale_stride),
            D if norm is not None and norm.q.dim() == 2 else 0,
            norm.eps if norm else 0.0,
            HAS_NORM=norm is not None,
            IS_CENTERED=norm is not None and norm.is_centered,
            IS_LAST=norm is not None and norm.is_last,
            HAS_SCALE=rotary.query_scale is not None,
            HAS_VALUES=norm is not None and norm.has_values,
            HALF=D // 2,
            HALF_BLOCK=triton.next_power_of_2(D // 2),
            HEADS=HEADS,
            CODES=codes,
            num_warps=4,
            # A fused multiply-add does not round the product, so ties would get different codes.
            enable_fp_fusion=codes == kv_codes.PLAIN.value,
        )
    return q
