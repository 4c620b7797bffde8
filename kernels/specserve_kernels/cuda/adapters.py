"""LoRA adapters: the rows of each adapter are multiplied by its two maps alone, as by an expert."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.cuda.experts import multiply, tiles
from specserve_kernels.types import AdapterRows, AdapterSums

BLOCK = 1024  # columns of a row that are added to


class CudaMapAdapters:
    """As the reference's; a slot without a map here has zeros."""

    def __init__(
        self, num_slots: int, rank: int, N: int, K: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.down = torch.zeros(num_slots, rank, K, dtype=dtype, device=device)
        self.up = torch.zeros(num_slots, N, rank, dtype=dtype, device=device)

    def packed(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        shapes = self.down.shape[1:], self.up.shape[1:]
        assert (down.shape, up.shape) == shapes, "an adapter of another shape"
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


def adapted(x: Tensor, adapters: CudaMapAdapters, rows: AdapterRows) -> AdapterSums:
    """A row is a pair of itself and its slot, as if that were its only expert."""
    work = tiles(rows.order.long(), rows.begins.diff().long())
    inner = multiply(x, adapters.down, None, work, x.dtype)
    return AdapterSums(multiply(inner, adapters.up, None, work, torch.float32), rows.places)


def add(out: Tensor, added: AdapterSums | None, factor: float = 1.0) -> Tensor:
    """Add to each row factor * what its adapter adds, in place; out."""
    if added is None or not len(out):
        return out
    R, N = out.shape
    grid = R, triton.cdiv(N, BLOCK)
    _add[grid](added.sums, added.places, out, factor, N, BLOCK=BLOCK, num_warps=4)
    return out
