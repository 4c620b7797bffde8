"""Rotary embedding, the KV write, attention over block tables, and KV moves, row by row."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specserve_kernels.reference.kv import put, take
from specserve_kernels.types import (
    NO_WINDOW,
    Chunks,
    KVCache,
    KVLayer,
    QKNorm,
    Rotary,
    Rows,
    Window,
)


class RowsPlan(NamedTuple):
    rows: Rows
    also: Sequence[Tensor]


def plan(
    rows: Rows,
    kv: KVCache,
    num_heads: int,
    windows: Sequence[Window] = NO_WINDOW,
    also: Sequence[Tensor] = (),
    has_plain_scores: bool = True,
) -> RowsPlan:
    """Prepare the inputs that all layers of a step share.

    windows           every window that the step passes to `attention`; layers may differ in their
                      KV heads
    also              host tensors that other ops of the step take; `plan.also` has them on the
                      ops' device
    has_plain_scores  the step calls `attention` without `soft_cap` and `sinks`
    """
    return RowsPlan(rows, also)


def rope_write_kv(
    qkv: Tensor, rotary: Rotary, norm: QKNorm | None, kv: KVLayer | None, plan: RowsPlan
) -> Tensor:
    """Normalize and rotate the heads. Write K and V of every row into its slot, in the KV's dtype.
    `kv.py` defines 8-bit KV.

    qkv  [R, (H + 2 Hk) D]  bfloat16 | float32  query heads, then key heads, then value heads
    kv                                          None: qkv has only query heads, and no KV is written
    ->   [R, H, D]          as qkv              the rotated queries

    The rotation pairs dimension i with i + D/2 (Su et al. 2104.09864, in the order of Hugging
    Face).
    """
    D, num_kv_heads = 2 * rotary.cos.shape[1], 0 if kv is None else kv.k.shape[2]
    R = len(plan.rows.positions)
    heads = qkv[:R].view(R, -1, D).float()
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads.tensor_split([num_heads, num_heads + num_kv_heads], dim=1)
    if norm is not None and not norm.is_last:
        q, k = _norm(q, norm.q, norm), _norm(k, norm.k, norm)
    position = plan.rows.positions.long()
    cos, sin = rotary.cos[position][:, None], rotary.sin[position][:, None]
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    if norm is not None and norm.is_last:
        q, k = _norm(q, norm.q, norm), _norm(k, norm.k, norm)
    if rotary.query_scale is not None:
        q = q * rotary.query_scale[position][:, None, None]
    if norm is not None and norm.has_values:
        v = _norm(v, v.new_ones(D), norm)
    if kv is not None:
        slots, block_size = plan.rows.slots, kv.k.shape[1]
        put(kv, (slots // block_size, slots % block_size), k, v)
    return q.to(qkv.dtype)


def _norm(x: Tensor, weight: Tensor, norm: QKNorm) -> Tensor:
    if norm.is_centered:
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * weight.float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention(
    q: Tensor,
    kv: KVLayer,
    plan: RowsPlan,
    scale: float,
    window: Window = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale q K^T) V of each row over its visible slots.

    Every row reads 8-bit KV from the cache, also the KV that the same step wrote. Results therefore
    do not depend on which step wrote the KV.

    q         [R, H, D]  as the KV; query head h reads KV head h // (H / Hk)
    window    the visible positions; None: all
    soft_cap  a score s becomes soft_cap * tanh(s / soft_cap); None: unchanged
    sinks     [H]        float32; one more score per head, without a value; None: no sinks
    ->        [R, H D]   as q
    """
    block_size, rows = kv.k.shape[1], plan.rows
    group = q.shape[1] // kv.k.shape[2]
    out = torch.empty_like(q)
    qo, indptr = rows.qo_indptr.tolist(), rows.indptr.tolist()
    for b in range(len(qo) - 1):
        blocks = rows.indices[indptr[b] : indptr[b + 1]].long()
        for r in range(qo[b], qo[b + 1]):
            slot = _visible(int(rows.prefix[r]), int(rows.mask[r]), window)
            at = blocks[slot // block_size], slot % block_size
            k, v = (x.repeat_interleave(group, dim=1) for x in take(kv, at))  # [visible, H, D]
            score = torch.einsum("hd,shd->hs", q[r].float(), k) * scale
            if soft_cap is not None:
                score = soft_cap * torch.tanh(score / soft_cap)
            if sinks is not None:
                score = torch.cat([score, sinks[:, None]], dim=1)
            weight = score.softmax(-1)[:, : len(slot)]
            out[r] = torch.einsum("hs,shd->hd", weight, v).to(q.dtype)
    return out.flatten(1)


def _visible(prefix: int, mask: int, window: Window) -> Tensor:
    """Return the request's slots that a row sees, in the order of their positions."""
    slots = [*range(prefix), *(prefix + j for j in range(64) if mask >> j & 1)]
    if isinstance(window, Chunks):
        slots = slots[(len(slots) - 1) // window.size * window.size :]
    elif window is not None:
        slots = slots[-window:]
    return torch.tensor(slots, dtype=torch.int64)


def move_kv(kv: KVCache, source: Tensor, target: Tensor) -> None:
    """Copy the KV of tokens from slot to slot, in all layers, in the given order.

    source, target  [M]  int64  block number * block_size + offset
    """
    size = kv.block_size
    for s, t in zip(source.tolist(), target.tolist(), strict=True):
        for layer in kv.layers:
            for x in layer.parts:
                x[t // size, t % size] = x[s // size, s % size]
