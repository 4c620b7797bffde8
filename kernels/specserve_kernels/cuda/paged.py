"""Triton attention over block tables with mask words: for CUDA graphs, and in place of FlashInfer.

The KV is split as in flash-decoding (Dao et al. 2023). A program takes a few rows of a request, all
query heads of one KV head, and one piece of the slots. A second kernel merges the pieces. Programs
read their work from tables on the device, so one recorded launch fits every step of up to as many
rows.
"""

from array import array
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from specserve_kernels.cuda import kv_codes
from specserve_kernels.cuda.kv_codes import PLAIN, number
from specserve_kernels.cuda.masks import Ints, Sight
from specserve_kernels.types import KVLayer, Rows

Table = NDArray[np.int32]

MIN_DOT = 16  # minimum rows of a tl.dot
MAX_FOLDED = 32  # maximum rows times query heads per program
SLOTS = 64  # maximum slots per iteration of a program's loop
MAX_TILES = 128 << 10  # bytes of shared memory for the tiles of K and V of two iterations
MIN_PIECE = 128  # minimum slots of a piece; a smaller piece does not repay another program
PROGRAMS = 264  # programs that fill a GPU: two per SM of an H200
FEW = 32  # maximum rows for which Python loops are faster than NumPy
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sees(slot, first, prefix, mask):
    """Whether each row sees each slot, [rows, slots]."""
    node = slot[None, :] - prefix[:, None]
    is_node = (node >= 0) & (node < 64)
    bit = (mask[:, None] >> tl.where(is_node, node, 0).to(tl.int64)) & 1
    return (node < 0) & (slot[None, :] >= first[:, None]) | is_node & (bit != 0)


@triton.jit
def _soft_cap(x, cap):
    e = tl.exp(-2 / cap * tl.abs(x))  # at most 1
    return tl.where(x < 0, -cap, cap) * (1 - e) / (1 + e)


@triton.jit
def _weigh(score, top):
    """Return weights of more slots, the new maximum score, and the factor for earlier weights."""
    higher = tl.maximum(top, tl.max(score, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # no visible slot so far
    return tl.exp2(score - base[:, None]), higher, tl.exp2(top - base)


@triton.jit
def _attend(
    q,
    out,  # [W, ROWS, H, D]: float32; the result itself if every tile is one piece
    lse,  # [W, ROWS, H]
    k,
    v,
    k_scale,
    v_scale,
    pieces,  # [W, 5]: request, first row, rows, and the slots [begin, end)
    first,
    prefix,
    mask,
    indices,
    indptr,
    num_heads,
    num_kv_heads,
    block_size,
    block_stride,
    scale_stride,
    scale,
    soft_cap,
    sinks,  # [H] float32
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # every tile is one piece
    GROUP: tl.constexpr,  # query heads per KV head
    GROUP_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the operands of dots
    CODES: tl.constexpr,  # the KV format
):
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    piece = pieces + 5 * index
    request, row0, tile_rows = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    begin, end = tl.load(piece + 3), tl.load(piece + 4)

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
        score *= scale
        if CODES != PLAIN:
            scales = block * scale_stride + head * block_size + s % block_size
            score *= tl.load(k_scale + scales, mask=in_use, other=0.0)[None, :]
        if HAS_CAP:
            score = _soft_cap(score, soft_cap)
        score *= LOG2E
        seen = _sees(s, row_first, row_prefix, row_mask) & in_use[None, :]
        score = tl.where(seen, score, float("-inf"))
        p, top, shrink = _weigh(score, top)
        values = number(tl.load(v + at[:, None] + d[None, :], mask=is_kv, other=0), CODES)
        total = total * shrink + tl.sum(p, axis=1)
        acc *= shrink[:, None]
        if CODES != PLAIN:
            # A hidden value's scale may be NaN, but its codes are finite.
            p = tl.where(seen, p * tl.load(v_scale + scales, mask=in_use, other=0.0)[None, :], 0.0)
        acc += tl.dot(p.to(DOT), values.to(DOT), input_precision="ieee")

    # A piece without visible slots has weight 0. Every row sees itself in some piece.
    sees = total > 0
    if IS_WHOLE and HAS_SINKS:
        sink = tl.load(sinks + head * GROUP + g, mask=is_row, other=0.0) * LOG2E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc *= shrink[:, None]
    total = tl.where(sees, total, 1.0)
    result = acc / total[:, None]
    if IS_WHOLE:
        tl.store(out + q_at, result.to(out.dtype.element_ty), mask=is_q)
    else:
        at = (index * ROWS + r) * num_heads + head * GROUP + g
        tl.store(out + at[:, None] * D + d[None, :], result, mask=is_q)
        weight = tl.where(sees, top + tl.log2(total), float("-inf"))
        tl.store(lse + at, weight, mask=is_row)


@triton.jit
def _merge(
    parts,
    lse,
    merges,
    out,
    sinks,
    num_heads,
    ROWS,
    HAS_SINKS: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
):
    """Merge the pieces of one head of one row, in order. A row without pieces gets zeros."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count = tl.load(merges + 3 * row).to(tl.int64), tl.load(merges + 3 * row + 1)
    at = (first * ROWS + tl.load(merges + 3 * row + 2)) * num_heads + head
    d = tl.arange(0, D_BLOCK)
    top = float("-inf")
    for part in range(count):
        top = tl.maximum(top, tl.load(lse + at + part * ROWS * num_heads))
    total = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2E
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)
    acc = tl.zeros([D_BLOCK], tl.float32)
    for part in range(count):
        place = at + part * ROWS * num_heads
        weight = tl.exp2(tl.load(lse + place) - top)
        acc += weight * tl.load(parts + place * D + d, mask=d < D, other=0.0)
        total += weight
    merged = acc / tl.where(count > 0, total, 1.0)
    place = (row * num_heads + head) * D + d
    tl.store(out + place, merged.to(out.dtype.element_ty), mask=d < D)


# Triton's interpreter multiplies bfloat16 as integers.
IS_COMPILED = isinstance(_attend, triton.JITFunction)


class Work(NamedTuple):
    """The division of a step's rows and slots among programs.

    A tile is some rows of a request. Its slots are cut into pieces.

    pieces    [W, 5]  int32  see `_attend`; a tile's pieces are adjacent; zeros: no rows
    merges    [R, 3]  int32  per row: its first piece, the number of pieces, its place in the tile
    rows      maximum rows of a tile
    is_whole  every tile is one piece, and `merges` is not read
    """

    pieces: Table
    merges: Table
    rows: int
    is_whole: bool


def num_programs(num_kv_heads: int) -> int:
    """Return the number of pieces that fill the GPU. A step has at most so many plus its tiles."""
    return -(-PROGRAMS // num_kv_heads)


def deal(
    rows: Rows, seen: Sight, num_heads: int, num_kv_heads: int, num_rows: int | None = None
) -> Work:
    """Divide a step's work. For launches recorded for `num_rows` rows, W is at most num_rows +
    num_programs.
    """
    group = power_of_2(num_heads // num_kv_heads)
    qo = rows.qo_indptr.numpy().astype(np.int64)
    longest = int(np.diff(qo).max()) if num_rows is None else num_rows
    wanted = power_of_2(longest) * group
    each = max(MIN_DOT, group, min(MAX_FOLDED, wanted)) // group
    divide = divide_few if len(seen.first) <= FEW else divide_many
    pieces, merges = divide(qo, seen, each, num_programs(num_kv_heads))
    is_whole = num_rows is None and len(pieces) == (-(-np.diff(qo) // each)).sum()
    return Work(pieces, merges, each, bool(is_whole))


def divide_many(qo: Ints, seen: Sight, each: int, most: int) -> tuple[Table, Table]:
    """Return pieces and merges for tiles of `each` rows. A request's last tile may have fewer."""
    tiles = -(-np.diff(qo) // each)
    request = np.repeat(np.arange(len(tiles)), tiles)
    place = np.arange(len(request)) - (np.cumsum(tiles) - tiles)[request]
    row0 = qo[request] + place * each
    in_tile = np.minimum(each, qo[request + 1] - row0)
    begin = np.minimum.reduceat(seen.first, row0)
    end = np.maximum.reduceat(seen.prefix + bit_lengths(seen.mask), row0)

    length = piece_length(int((end - begin).sum()), most)
    counts = -(-(end - begin) // length)
    starts = np.cumsum(counts) - counts
    tile = np.repeat(np.arange(len(counts)), counts)
    first = begin[tile] + (np.arange(len(tile)) - starts[tile]) * length
    last = np.minimum(first + length, end[tile])
    pieces = np.stack(
        (request[tile], row0[tile], in_tile[tile], first, last), 1, dtype=np.int32, casting="unsafe"
    )
    of_row = np.repeat(np.arange(len(in_tile)), in_tile)
    place = np.arange(len(seen.first)) - row0[of_row]
    merges = np.stack((starts[of_row], counts[of_row], place), 1, dtype=np.int32, casting="unsafe")
    return pieces, merges


def divide_few(qo: Ints, seen: Sight, each: int, most: int) -> tuple[Table, Table]:
    """Same as `divide_many` without NumPy, whose calls take longer for few rows."""
    first, prefix, mask = (x.tolist() for x in seen)
    tiles = []
    for request, (begin, end) in enumerate(pairwise(qo.tolist())):
        for row0 in range(begin, end, each):
            rows = range(row0, min(row0 + each, end))
            last = max([prefix[r] + mask[r].bit_length() for r in rows])
            tiles.append((request, row0, len(rows), min(first[row0 : rows.stop]), last))
    length = piece_length(sum([end - begin for *_, begin, end in tiles]), most)
    pieces, merges = array("i"), array("i")
    for *tile, begin, end in tiles:
        start = len(pieces) // 5
        for slot in range(begin, end, length):
            pieces.extend((*tile, slot, min(slot + length, end)))
        count = len(pieces) // 5 - start
        for place in range(tile[2]):
            merges.extend((start, count, place))
    shaped = (np.frombuffer(x, np.int32).reshape(-1, n) for x, n in ((pieces, 5), (merges, 3)))
    return next(shaped), next(shaped)


def piece_length(num_slots: int, most: int) -> int:
    """Return the slots per piece, given the slots of all tiles and the maximum number of pieces."""
    return -(-max(MIN_PIECE, -(-num_slots // most)) // SLOTS) * SLOTS


def power_of_2(n: int) -> int:
    """Return the least power of 2 that is at least n. Triton's function is slower."""
    return 1 << (n - 1).bit_length()


def bit_lengths(words: NDArray[np.uint64]) -> Ints:
    """Return the number of the highest set bit, counted from 1; 0 if no bit is set.

    It equals the exponent of the word as a float. Clearing the bit below the highest first prevents
    rounding up to the next power of two.
    """
    highest = words & ~(words >> np.uint64(1))
    return np.frexp(highest.astype(np.float64))[1].astype(np.int64)


def slots_per_iteration(D: int, itemsize: int) -> int:
    """Return the number of slots whose tiles of K and V fit into shared memory."""
    slots = SLOTS
    while slots > MIN_DOT and 4 * slots * D * itemsize > MAX_TILES:
        slots //= 2
    return slots


class Scores(NamedTuple):
    """Score parameters, as in the reference's `attention`."""

    scale: float
    soft_cap: float | None = None
    sinks: Tensor | None = None


class Inputs(NamedTuple):
    """Kernel inputs on the device, with dtypes as in Work and Rows. Exception: first, prefix and
    mask are int64.
    """

    pieces: Tensor
    merges: Tensor
    first: Tensor
    prefix: Tensor
    mask: Tensor
    indices: Tensor
    indptr: Tensor


def attention(q: Tensor, kv: KVLayer, scores: Scores, work: Work, inputs: Inputs) -> Tensor:
    """Same as the reference op, for a step divided by `deal`, with inputs on the device.

    q   [R, H, D]
    ->  [R, H, D]
    """
    assert q.is_contiguous(), "rows with gaps"
    _, block_size, num_kv_heads, D = kv.k.shape
    R, H, _ = q.shape
    out = torch.empty_like(q)
    group, num_pieces = H // num_kv_heads, len(inputs.pieces)
    parts, lse = out, out  # lse is not written if every tile is one piece
    if not work.is_whole:
        parts = q.new_empty(num_pieces, work.rows, H, D, dtype=torch.float32)
        lse = q.new_empty(num_pieces, work.rows, H, dtype=torch.float32)
    *stored, scale_stride, codes = kv_codes.arguments(kv)
    pieces, merges, *seen = inputs
    scale, soft_cap, sinks = scores
    has_sinks, read_sinks = sinks is not None, q if sinks is None else sinks
    _attend[(num_pieces, num_kv_heads)](
        *(q, parts, lse, *stored, pieces, *seen),
        *(H, num_kv_heads, block_size, kv.k.stride(0), scale_stride, scale),
        *(soft_cap or 1.0, read_sinks),
        HAS_CAP=soft_cap is not None,
        HAS_SINKS=has_sinks,
        IS_WHOLE=work.is_whole,
        GROUP=group,
        GROUP_BLOCK=triton.next_power_of_2(group),
        ROWS=work.rows,
        D=D,
        D_BLOCK=max(MIN_DOT, triton.next_power_of_2(D)),
        SLOTS=slots_per_iteration(triton.next_power_of_2(D), q.itemsize),
        DOT=tl.bfloat16 if q.dtype == torch.bfloat16 and IS_COMPILED else tl.float32,
        CODES=codes,
        num_warps=4,
        num_stages=2,
    )
    if not work.is_whole:
        _merge[(R, H)](
            *(parts, lse, merges, out, read_sinks, H, work.rows),
            HAS_SINKS=has_sinks,
            D=D,
            D_BLOCK=triton.next_power_of_2(D),
            num_warps=1,
        )
    return out
