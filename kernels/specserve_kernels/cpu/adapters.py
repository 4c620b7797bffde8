"""LoRA adapters on the CPU, op by op: see adapters.cpp."""

import torch
from torch import Tensor

from specserve_kernels.cpu import arguments, ops
from specserve_kernels.cpu.arguments import FLOATS, PLAIN, Packed
from specserve_kernels.types import AdapterSums


class SlotMaps:
    """One of the two maps of the adapter in each slot. A program holds the address of `addresses`,
    so what is put into a slot counts from the next step on.
    """

    def __init__(self, num_slots: int, N: int, K: int, dtype: torch.dtype) -> None:
        self.packed: list[Packed | None] = [None] * num_slots
        self.addresses = torch.zeros(num_slots, dtype=torch.int64)  # of their words; 0: none
        self.form = ops.prepack(torch.zeros(N, K, dtype=dtype))._replace(words=self.addresses)

    def pack(self, weight: Tensor) -> Packed:
        packed = ops.prepack(weight)
        assert packed[1:] == self.form[1:], "an adapter of another shape or dtype"
        return packed

    def put(self, slot: int, packed: Packed | None) -> None:
        self.packed[slot] = packed
        self.addresses[slot] = 0 if packed is None else packed.words.data_ptr()


class CpuMapAdapters:
    """As the reference's."""

    def __init__(self, num_slots: int, rank: int, N: int, K: int, dtype: torch.dtype) -> None:
        self.down = SlotMaps(num_slots, rank, K, dtype)
        self.up = SlotMaps(num_slots, N, rank, dtype)

    def packed(self, down: Tensor, up: Tensor) -> tuple[Packed, Packed]:
        return self.down.pack(down), self.up.pack(up)

    def put(self, slot: int, packed: tuple[Packed, Packed] | None) -> None:
        down, up = packed or (None, None)
        self.down.put(slot, down)
        self.up.put(slot, up)


def adapter_slots(num_slots: int, rank: int, N: int, K: int, dtype: torch.dtype) -> CpuMapAdapters:
    return CpuMapAdapters(num_slots, rank, N, K, dtype)


def adapted(x: Tensor, adapters: CpuMapAdapters, plan: ops.CpuPlan) -> AdapterSums | None:
    told = plan.rows.adapters
    if told is None:
        return None
    A, down, up = len(told.order), adapters.down, adapters.up
    inner, sums = x.new_empty(A, down.form.N), torch.empty(A, up.form.N)
    first = arguments.adapter_maps(x, told.order, down, told.begins, inner, PLAIN)
    second = arguments.adapter_maps(inner, None, up, told.begins, sums, FLOATS)
    ops.run("adapter_maps", first, A, A * x.shape[1] * down.form.N)
    ops.run("adapter_maps", second, A, sums.numel() * down.form.N)
    return AdapterSums(sums, told.places)
