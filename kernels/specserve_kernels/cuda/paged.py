"""Attention over block tables with mask words, for heads and dtypes that FlashInfer lacks.

Split over the KV as in flash-decoding (Dao et al. 2023): a program takes a few rows of a request,
all query heads of one KV head, and one piece of the slots; a second kernel merges the pieces.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.cuda import kv_codes
from specserve_kernels.cuda.kv_codes import PLAIN, number
from specserve_kernels.cuda.masks import Ints, Sight, Words
from specserve_kernels.types import KVLayer, Rows

MIN_DOT = 16  # least rows of a tl.dot
MAX_FOLDED = 32  # rows times query heads of a program
SLOTS = 64  # of one iteration of a program's loop
MIN_PIECE = 512  # least slots for which another program pays
PROGRAMS = 528  # four for every SM of an H200
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sees(slot, first, prefix, mask):
    """Whether each row sees each slot, [rows, slots]."""
    node = slot[None, :] - prefix[:, None]
    is_node = (node >= 0) & (node < 64)
    bit = (mask[:, None] >> tl.where(is_node, node, 0).to(tl.int64)) & 1
    return (node < 0) & (slot[None, :] >= first[:, None]) | is_node & (bit != 0)


@triton.jit
def _weigh(score, top):
    """The weights of more slots by the highest score, it, and what earlier weights shrink by."""
    higher = tl.maximum(top, tl.max(score, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far
    return tl.exp2(score - base[:, None]), higher, tl.exp2(top - base)


@triton.jit(do_not_specialize=["num_rows", "piece"])  # they change from step to step
def _attend(
    q,
    out,  # [pieces, R, H, D]: float32, or the result itself where there is one piece
    lse,  # [pieces, R, H]
    k,
    v,
    k_scale,
    v_scale,
    tiles,  # [T, 5]: request, first row, rows, and the slots [begin, end) that any of them sees
    first,
    prefix,
    mask,
    indices,
    indptr,
    num_rows,
    num_heads,
    num_kv_heads,
    block_size,
    block_stride,
    scale_stride,
    piece,  # slots
    scale,
    ONE_PIECE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    GROUP_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    DOT: tl.constexpr,  # the dtype that is multiplied
    CODES: tl.constexpr,  # how KV is kept
):
    tile = tiles + 5 * tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    request, row0, tile_rows = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    begin = tl.maximum(tl.load(tile + 3), part * piece)
    end = tl.minimum(tl.load(tile + 4), (part + 1) * piece)

    m = tl.arange(0, ROWS * GROUP_BLOCK)
    r, g = m // GROUP_BLOCK, m % GROUP_BLOCK
    is_row = (r < tile_rows) & (g < GROUP)
    row = (row0 + r).to(tl.int64)
    d = tl.arange(0, D_BLOCK)
    q_at = (row * num_heads + head * GROUP + g)[:, None] * D + d[None, :]
    is_q = is_row[:, None] & (d < D)[None, :]
    x = tl.load(q + q_at, mask=is_q, other=0.0)
    row_first = tl.load(first + row, mask=is_row, other=0)
    row_prefix = tl.load(prefix + row, mask=is_row, other=0)
    row_mask = tl.load(mask + row, mask=is_row, other=0)
    blocks = indices + tl.load(indptr + request)

    top = tl.full([ROWS * GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([ROWS * GROUP_BLOCK], tl.float32)
    acc = tl.zeros([ROWS * GROUP_BLOCK, D_BLOCK], tl.float32)
    for s0 in range(begin, end, SLOTS):
        s = s0 + tl.arange(0, SLOTS)
        in_use = s < end
        block = tl.load(blocks + s // block_size, mask=in_use, other=0).to(tl.int64)
        at = block * block_stride + (s % block_size) * (num_kv_heads * D) + head * D
        is_kv = in_use[:, None] & (d < D)[None, :]
        keys = number(tl.load(k + at[:, None] + d[None, :], mask=is_kv, other=0), CODES)
        score = tl.dot(x.to(DOT), tl.trans(keys).to(DOT), input_precision="ieee")
        score *= scale * LOG2E
        if CODES != PLAIN:
            scales = block * scale_stride + head * block_size + s % block_size
            score *= tl.load(k_scale + scales, mask=in_use, other=0.0)[None, :]
        seen = _sees(s, row_first, row_prefix, row_mask) & in_use[None, :]
        score = tl.where(seen, score, float("-inf"))
        p, top, shrink = _weigh(score, top)
        values = number(tl.load(v + at[:, None] + d[None, :], mask=is_kv, other=0), CODES)
        total = total * shrink + tl.sum(p, axis=1)
        acc *= shrink[:, None]
        if CODES != PLAIN:
            # A hidden value's scale may be NaN, its codes are not.
            p = tl.where(seen, p * tl.load(v_scale + scales, mask=in_use, other=0.0)[None, :], 0.0)
        acc += tl.dot(p.to(DOT), values.to(DOT), input_precision="ieee")

    # A piece of which a row sees nothing has weight 0; any row sees itself in some piece.
    sees = total > 0
    total = tl.where(sees, total, 1.0)
    result = acc / total[:, None]
    at = part.to(tl.int64) * num_rows * num_heads
    tl.store(out + at * D + q_at, result.to(out.dtype.element_ty), mask=is_q)
    if not ONE_PIECE:
        weight = tl.where(sees, top + tl.log2(total), float("-inf"))
        tl.store(lse + at + row * num_heads + head * GROUP + g, weight, mask=is_row)


@triton.jit(do_not_specialize=["pieces", "num_rows_heads"])
def _merge(parts, lse, out, pieces, num_rows_heads, D: tl.constexpr, D_BLOCK: tl.constexpr):
    """Pieces of one head of one row, in order."""
    i = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D_BLOCK)
    top = float("-inf")
    for part in range(pieces):
        top = tl.maximum(top, tl.load(lse + part * num_rows_heads + i))
    total = 0.0
    acc = tl.zeros([D_BLOCK], tl.float32)
    for part in range(pieces):
        at = part * num_rows_heads + i
        weight = tl.exp2(tl.load(lse + at) - top)
        acc += weight * tl.load(parts + at * D + d, mask=d < D, other=0.0)
        total += weight
    tl.store(out + i * D + d, (acc / total).to(out.dtype.element_ty), mask=d < D)


# Triton's interpreter multiplies bfloat16 as if it were integers.
IS_COMPILED = isinstance(_attend, triton.JITFunction)


class Tiles(NamedTuple):
    """How a step's rows and slots are divided among programs.

    table   [T, 5]  int32  see `_attend`
    rows    of a tile
    pieces  into which the slots are cut, each of `size` slots
    """

    table: Tensor
    rows: int
    pieces: int
    size: int


def deal(rows: Rows, seen: Sight, num_heads: int, num_kv_heads: int) -> Tiles:
    """Tiles of a step; host tensors."""
    group = triton.next_power_of_2(num_heads // num_kv_heads)
    qo = rows.qo_indptr.numpy().astype(np.int64)
    longest = int(np.diff(qo).max())
    wanted = triton.next_power_of_2(longest) * group
    folded = max(MIN_DOT, group, min(MAX_FOLDED, wanted))
    each = folded // group
    counts = -(-np.diff(qo) // each)
    request = np.repeat(np.arange(len(counts)), counts)
    row0 = qo[request] + (np.arange(len(request)) - (np.cumsum(counts) - counts)[request]) * each
    table = np.empty((len(request), 5), dtype=np.int32)
    table[:, 0], table[:, 1] = request, row0
    table[:, 2] = np.minimum(each, qo[request + 1] - row0)
    table[:, 3] = np.minimum.reduceat(seen.first, row0)
    table[:, 4] = np.maximum.reduceat(seen.prefix + bit_lengths(seen.mask), row0)
    most = int(table[:, 4].max())
    programs = len(table) * num_kv_heads
    pieces = max(1, min(-(-most // MIN_PIECE), -(-PROGRAMS // programs)))
    size = -(-most // (pieces * SLOTS)) * SLOTS
    return Tiles(torch.from_numpy(table), each, -(-most // size), size)


def bit_lengths(words: Words) -> Ints:
    """The number of the highest bit that is set, counted from 1."""
    lengths: Ints = np.zeros(len(words), dtype=np.int64)
    for shift in (32, 16, 8, 4, 2, 1):
        is_longer = words >> np.uint64(shift) != 0
        lengths += np.where(is_longer, shift, 0)
        words = np.where(is_longer, words >> np.uint64(shift), words)
    lengths += words != 0
    return lengths


class Inputs(NamedTuple):
    """What the kernel reads, on the device; dtypes as in Rows, but first, prefix and mask int64."""

    tiles: Tensor
    first: Tensor
    prefix: Tensor
    mask: Tensor
    indices: Tensor
    indptr: Tensor


def attention(q: Tensor, kv: KVLayer, scale: float, tiles: Tiles, inputs: Inputs) -> Tensor:
    """As the reference's, with the step divided by `deal` and its inputs on the device.

    q   [R, H, D]
    ->  [R, H, D]
    """
    assert q.is_contiguous(), "rows with gaps"
    _, block_size, num_kv_heads, D = kv.k.shape
    R, H, _ = q.shape
    out = torch.empty_like(q)
    group = H // num_kv_heads
    parts, lse = out, out  # lse is not written where there is one piece
    if tiles.pieces > 1:
        parts = q.new_empty(tiles.pieces, R, H, D, dtype=torch.float32)
        lse = q.new_empty(tiles.pieces, R, H, dtype=torch.float32)
    *stored, scale_stride, codes = kv_codes.arguments(kv)
    _attend[(len(inputs.tiles), num_kv_heads, tiles.pieces)](
        *(q, parts, lse, *stored, *inputs),
        *(R, H, num_kv_heads, block_size, kv.k.stride(0), scale_stride, tiles.size, scale),
        ONE_PIECE=tiles.pieces == 1,
        GROUP=group,
        GROUP_BLOCK=triton.next_power_of_2(group),
        ROWS=tiles.rows,
        D=D,
        D_BLOCK=max(MIN_DOT, triton.next_power_of_2(D)),
        SLOTS=SLOTS,
        DOT=tl.bfloat16 if q.dtype == torch.bfloat16 and IS_COMPILED else tl.float32,
        CODES=codes,
        num_warps=4,
        num_stages=2,
    )
    if tiles.pieces > 1:
        _merge[(R * H,)](
            *(parts, lse, out, tiles.pieces, R * H),
            D=D,
            D_BLOCK=triton.next_power_of_2(D),
            num_warps=1,
        )
    return out
