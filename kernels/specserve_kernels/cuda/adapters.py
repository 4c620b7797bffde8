"""LoRA adapters: the rows of each adapter are multiplied by its two maps alone.

A step's rows with an adapter come in the order of slots, and are cut into tiles of one slot each. A
graph's launches are fixed, so there are as many programs as there may be tiles; some do nothing.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.cuda.paged import IS_COMPILED
from specserve_kernels.types import AdapterRows

TILE, OUTPUTS, COLUMNS = 16, 64, 64  # rows, outputs of a program, columns that it reads at a time
BLOCK = 1024  # columns of a row that are added to


class Adapters:
    """As the reference's; a slot without a map here has zeros. Graphs hold the addresses."""

    def __init__(
        self, num_slots: int, rank: int, N: int, K: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.down = torch.zeros(num_slots, rank, K, dtype=dtype, device=device)
        self.up = torch.zeros(num_slots, N, rank, dtype=dtype, device=device)

    def put(self, slot: int, down: Tensor | None, up: Tensor | None) -> None:
        for own, given in ((self.down, down), (self.up, up)):
            if down is None or up is None:
                own[slot].zero_()
            else:
                assert given is not None and given.shape == own[slot].shape, "another shape"
                own[slot].copy_(given)


class Added(NamedTuple):
    """As the reference's; rows behind the last have place -1 or are unused."""

    sums: Tensor  # [A, N] float32
    places: Tensor  # [R] int32


@triton.jit
def _multiply(
    x,  # [R, K]
    order,  # [A]
    begins,  # [S + 1]
    weight,  # [S, N, K]
    out,  # [A, N]
    N,
    K,
    S,
    ORDERED: tl.constexpr,  # whether rows of x are those in `order`, or have the places as they are
    TILE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
):
    tile = tl.program_id(0)
    slot, first, behind = tile * 0, tile * 0, tile * 0
    found = 0
    for s in range(0, S):
        begin, end = tl.load(begins + s), tl.load(begins + s + 1)
        tiles = (end - begin + TILE - 1) // TILE
        is_here = (tile >= found) & (tile < found + tiles)
        slot = tl.where(is_here, s, slot)
        first = tl.where(is_here, begin + (tile - found) * TILE, first)
        behind = tl.where(is_here, end, behind)
        found += tiles
    if first < behind:
        place = first + tl.arange(0, TILE)
        is_row = (place < behind)[:, None]
        row = place
        if ORDERED:
            row = tl.load(order + place, mask=place < behind, other=0)
        n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        rows = x + row.to(tl.int64)[:, None] * K
        columns = weight + (slot.to(tl.int64) * N + n) * K
        total = tl.zeros([TILE, OUTPUTS], tl.float32)
        for start in range(0, K, COLUMNS):
            k = start + tl.arange(0, COLUMNS)
            some = tl.load(rows + k[None, :], mask=is_row & (k < K)[None, :], other=0.0)
            part = tl.load(columns + k[:, None], mask=(n < N) & (k < K)[:, None], other=0.0)
            total += tl.dot(some.to(DOT), part.to(DOT), input_precision="ieee")
        at = out + place.to(tl.int64)[:, None] * N + n
        tl.store(at, total.to(out.dtype.element_ty), mask=is_row & (n < N))


@triton.jit
def _add(sums, places, out, factor, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    if place >= 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        more = tl.load(sums + place * N + i, mask=i < N, other=0.0)
        before = tl.load(out + row * N + i, mask=i < N, other=0.0).to(tl.float32)
        tl.store(out + row * N + i, (before + factor * more).to(out.dtype.element_ty), mask=i < N)


def multiply(
    x: Tensor, rows: AdapterRows, is_ordered: bool, weight: Tensor, dtype: torch.dtype
) -> Tensor:
    """What each row's slot makes of it, [A, N], by place."""
    assert x.is_contiguous(), "rows with gaps"
    S, N, K = weight.shape
    A = len(rows.order)
    out = torch.empty(A, N, dtype=dtype, device=x.device)
    most = min(S, A) + A // TILE
    if most:
        _multiply[(most, triton.cdiv(N, OUTPUTS))](
            *(x, rows.order, rows.begins, weight, out, N, K, S),
            ORDERED=is_ordered,
            TILE=TILE,
            OUTPUTS=OUTPUTS,
            COLUMNS=COLUMNS,
            DOT=tl.bfloat16 if x.dtype == torch.bfloat16 and IS_COMPILED else tl.float32,
            num_warps=4,
            num_stages=3,
        )
    return out


def adapted(x: Tensor, adapters: Adapters, rows: AdapterRows) -> Added:
    inner = multiply(x, rows, True, adapters.down, x.dtype)
    return Added(multiply(inner, rows, False, adapters.up, torch.float32), rows.places)


def add(out: Tensor, added: Added | None, factor: float = 1.0) -> Tensor:
    """Add to each row factor * what its adapter adds, in place; out."""
    if added is None or not len(out):
        return out
    R, N = out.shape
    grid = R, triton.cdiv(N, BLOCK)
    _add[grid](added.sums, added.places, out, factor, N, BLOCK=BLOCK, num_warps=4)
    return out
