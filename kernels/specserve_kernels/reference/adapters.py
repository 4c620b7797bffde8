"""LoRA adapters (Hu et al. 2106.09685): each row adds its adapter's output to a linear map."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from specserve_kernels.types import AdapterSums


class MapAdapters:
    """The adapter weights for one linear map [N, K]. `adapter_slots` creates empty slots."""

    def __init__(self, num_slots: int, rank: int, N: int, K: int) -> None:
        self.shapes = (rank, K), (N, rank)
        self.slots: list[tuple[Tensor, Tensor] | None] = [None] * num_slots

    def packed(self, down: Tensor, up: Tensor) -> Any:
        """Pack an adapter's two matrices for `put`. Other threads may run steps meanwhile.

        down  [rank, K]  bfloat16 | float32, as the rows
        up    [N, rank]  with all scaling factors applied
        """
        assert (down.shape, up.shape) == self.shapes, "The adapter's matrices have the wrong shape."
        return down.float(), up.float()

    def put(self, slot: int, packed: Any | None) -> None:
        """Put a packed adapter into a slot. None: the adapter does not change this map."""
        self.slots[slot] = packed


def adapter_slots(num_slots: int, rank: int, N: int, K: int, dtype: torch.dtype) -> MapAdapters:
    """Create adapter slots of equal rank for a linear map [N, K] and rows of `dtype`."""
    return MapAdapters(num_slots, rank, N, K)


def adapted(x: Tensor, adapters: MapAdapters, plan: Any) -> AdapterSums | None:
    """Return up (down x) of each row's adapter, for `added` of a linear op; None if no row has one.

    down x is rounded to x's dtype. The result is float32.

    x  [R, K]  bfloat16 | float32
    """
    told = plan.rows.adapters
    if told is None:
        return None
    sums = torch.zeros(len(told.order), adapters.shapes[1][0])
    for maps, (begin, end) in zip(adapters.slots, pairwise(told.begins.tolist()), strict=True):
        if maps is None:
            continue
        down, up = maps
        for place in range(begin, end):
            inner = torch.mv(down, x[told.order[place]].float()).to(x.dtype)
            sums[place] = torch.mv(up, inner.float())
    return AdapterSums(sums, told.places)
