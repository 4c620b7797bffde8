"""The causal convolution over the rows of a step, and its tails. Each program computes some
channels of one row, or the tail of one state.
"""

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.cuda.gated import _sigmoid
from specserve_kernels.cuda.state_work import BEHIND, LANE, ROW, StateWork

BLOCK = 256  # channels of a program
ROW_WIDTH, LANE_WIDTH = tl.constexpr(ROW), tl.constexpr(LANE)
MAX_TAPS = BEHIND + 1


@triton.jit
def _input(x, x_stride, row, i, inside, C, IS_GATED: tl.constexpr):
    """The inputs of a row, in the dtype of x."""
    at = x + row.to(tl.int64) * x_stride + i
    v = tl.load(at, mask=inside, other=0.0)
    if IS_GATED:
        by = tl.load(at + 2 * C, mask=inside, other=0.0)
        v = (v.to(tl.float32) * by.to(tl.float32)).to(x.dtype.element_ty)
    return v


@triton.jit
def _piece(tables, at, place, begin, block_size):
    """Where a piece of a state begins in memory, in elements; 0 if `at` is negative."""
    block = tl.load(tables + at + place, mask=at >= 0, other=0).to(tl.int64)
    return block * block_size + begin


@triton.jit(do_not_specialize=["block_size"])
def _conv(
    x,
    x_stride,
    weight,
    bias,
    out,
    memory,
    block_size,
    places,
    kept,
    rows,
    tables,
    C,
    TAPS: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < C
    own = rows + row * ROW_WIDTH
    blocks, place = tl.load(own), tl.load(own + 1)
    tail = _piece(tables, blocks, tl.load(places), tl.load(places + 1), block_size)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TAPS - 1):
        at = tl.load(own + TAPS - j)
        v = _input(x, x_stride, tl.maximum(at, 0), i, inside & (at >= 0), C, IS_GATED)
        from_tail = memory + tail + (TAPS - 1 + at) * C + i
        s = tl.load(from_tail, mask=inside & (at < 0) & (blocks >= 0), other=0.0)
        v = tl.where(at >= 0, v, s).to(tl.float32)
        total = tl.fma(v, tl.load(weight + i * TAPS + j, mask=inside, other=0.0), total)
    v = _input(x, x_stride, row, i, inside, C, IS_GATED)
    tl.store(kept + place.to(tl.int64) * C + i, v, mask=inside & (place >= 0))
    last = tl.load(weight + i * TAPS + TAPS - 1, mask=inside, other=0.0)
    total = tl.fma(v.to(tl.float32), last, total)
    if HAS_BIAS:
        total += tl.load(bias + i, mask=inside, other=0.0)
    if IS_GATED:
        c = tl.load(x + row.to(tl.int64) * x_stride + C + i, mask=inside, other=0.0)
        total *= c.to(tl.float32)
    else:
        total *= _sigmoid(total)
    tl.store(out + row.to(tl.int64) * C + i, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _last(
    x,
    x_stride,
    order,
    memory,
    tail,
    n,
    begin,
    has_tail,
    i,
    j,
    C,
    LENGTH: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """The last inputs before row n of a lane, [J, BLOCK]."""
    at = n - LENGTH + j
    inside = (i < C) & (j < LENGTH)
    row = tl.load(order + begin + at, mask=(at >= 0) & (j < LENGTH), other=0)
    v = _input(x, x_stride, row, i, inside & (at >= 0), C, IS_GATED)
    s = memory + tail + (LENGTH + at) * C + i
    s = tl.load(s, mask=inside & (at < 0) & has_tail, other=0.0)
    return tl.where(at >= 0, v, s)


@triton.jit(do_not_specialize=["block_size", "layer_stride"])
def _store_tails(
    x,
    x_stride,
    layer_stride,  # of x
    memory,
    block_size,
    places,
    lanes,
    order,
    tables,
    C,
    LENGTH: tl.constexpr,
    J: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own, layer = lanes + tl.program_id(0) * LANE_WIDTH, tl.program_id(2)
    i = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None]
    j = tl.arange(0, J)[:, None]
    x += layer.to(tl.int64) * layer_stride
    place, start = tl.load(places + 2 * layer), tl.load(places + 2 * layer + 1)
    begin, end, read = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    write, snapshot, snapshot_at = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
    tail = _piece(tables, read, place, start, block_size)
    n, has_tail = end - begin, read >= 0
    last = _last(x, x_stride, order, memory, tail, n, begin, has_tail, i, j, C, LENGTH, IS_GATED)
    n = tl.where(snapshot >= 0, snapshot_at, 0)
    copied = _last(x, x_stride, order, memory, tail, n, begin, has_tail, i, j, C, LENGTH, IS_GATED)
    tl.debug_barrier()  # other threads may write what a thread reads
    inside = (i < C) & (j < LENGTH)
    to = memory + _piece(tables, write, place, start, block_size) + j * C + i
    tl.store(to, last, mask=inside & (write >= 0))
    to = memory + _piece(tables, snapshot, place, start, block_size) + j * C + i
    tl.store(to, copied, mask=inside & (snapshot >= 0))


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    memory: Tensor,
    places: Tensor,
    kept: Tensor,
    work: StateWork,
    is_gated: bool,
) -> Tensor:
    """Return the outputs of all rows, and write the inputs of draft tokens to `kept`.

    memory  [num_blocks, block_size]  the arena, in the dtype of x
    places  [1, 2]  int64             of the tail: its block, and the first element in it
    """
    (C, taps), R = weight.shape, len(x)
    assert x.stride(1) == 1 and weight.is_contiguous() and taps <= MAX_TAPS
    out = x.new_empty(R, C)
    _conv[(R, triton.cdiv(C, BLOCK))](
        *(x, x.stride(0), weight, weight if bias is None else bias, out),
        *(memory, memory.stride(0), places, kept, work.rows, work.tables, C),
        TAPS=taps,
        IS_GATED=is_gated,
        HAS_BIAS=bias is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


def store_tails(
    x: Tensor,
    memory: Tensor,
    places: Tensor,
    work: StateWork,
    shape: tuple[int, int],
    is_gated: bool = False,
    layer_stride: int = 0,
) -> None:
    """Store the last inputs of each lane, and of its snapshot.

    places        [layers, 2]  int64
    shape         of a tail: (inputs, channels)
    layer_stride  elements of x between the inputs of two layers
    """
    length, C = shape
    if len(work.lanes):
        _store_tails[(len(work.lanes), triton.cdiv(C, BLOCK), len(places))](
            *(x, x.stride(0), layer_stride, memory, memory.stride(0), places),
            *(work.lanes, work.order, work.tables, C),
            LENGTH=length,
            J=triton.next_power_of_2(length),
            IS_GATED=is_gated,
            BLOCK=BLOCK,
            num_warps=4,
        )
