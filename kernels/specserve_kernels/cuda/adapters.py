"""LoRA adapters. Only the rows of an adapter are multiplied by its maps, as for an expert."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.cuda.experts import Tiles, multiply, tiles
from specserve_kernels.types import AdapterRows, AdapterSums

BLOCK = 1024  # columns of a row per program


class AdapterWork(NamedTuple):
    """The tiles of a step's rows, each slot being the only expert of its rows, and `places` of
    `AdapterRows`: -1 also for unused rows.
    """

    pairs: Tensor
    expert: Tensor
    first: Tensor
    behind: Tensor
    places: Tensor


def work_of(rows: AdapterRows, size: int) -> AdapterWork:
    """The work of a step of up to `size` rows, on the host."""
    pairs = torch.zeros(size, dtype=torch.int64)
    pairs[: len(rows.order)] = rows.order
    places = torch.full((size,), -1, dtype=torch.int32)
    places[: len(rows.places)] = rows.places
    return AdapterWork(*tiles(pairs, rows.begins.diff().long()), places)


class CudaMapAdapters:
    """Same as the reference's MapAdapters. A slot without matrices for this map has zeros."""

    def __init__(
        self, num_slots: int, rank: int, N: int, K: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.down = torch.zeros(num_slots, rank, K, dtype=dtype, device=device)
        self.up = torch.zeros(num_slots, N, rank, dtype=dtype, device=device)

    def packed(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        shapes = self.down.shape[1:], self.up.shape[1:]
        assert (down.shape, up.shape) == shapes, "The adapter's matrices have the wrong shape."
        return down.to(self.down.device), up.to(self.up.device)

    def put(self, slot: int, packed: tuple[Tensor, Tensor] | None) -> None:
        for own, given in zip((self.down, self.up), packed or (None, None), strict=True):
            if given is None:
                own[slot].zero_()
            else:
                own[slot].copy_(given)


@triton.jit
def _add(sums, places, out, factor, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(places + row) >= 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        more = tl.load(sums + row * N + i, mask=i < N, other=0.0)
        before = tl.load(out + row * N + i, mask=i < N, other=0.0).to(tl.float32)
        tl.store(out + row * N + i, (before + factor * more).to(out.dtype.element_ty), mask=i < N)


def adapted(x: Tensor, adapters: CudaMapAdapters, work: AdapterWork) -> AdapterSums:
    """Same as the reference op."""
    some = Tiles(*work[:-1])
    inner = multiply(x, adapters.down, None, some, x.dtype)
    return AdapterSums(multiply(inner, adapters.up, None, some, torch.float32), work.places)


def add(out: Tensor, added: AdapterSums | None, factor: float = 1.0) -> Tensor:
    """Add factor * its adapter's sums to each row of `out`, in place; return `out`."""
    if added is None or not len(out):
        return out
    R, N = out.shape
    grid = R, triton.cdiv(N, BLOCK)
    _add[grid](added.sums, added.places, out, factor, N, BLOCK=BLOCK, num_warps=4)
    return out
