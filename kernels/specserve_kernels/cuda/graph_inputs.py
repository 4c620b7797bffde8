"""A step's inputs on the device. Recorded steps upload them in one copy to fixed addresses."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve_kernels.cuda import paged
from specserve_kernels.cuda.adapters import AdapterWork, work_of
from specserve_kernels.cuda.attention import PlannedRows
from specserve_kernels.cuda.masks import sight
from specserve_kernels.cuda.staging import ALIGNMENT, Staging, aligned
from specserve_kernels.cuda.state_work import StateWork, fields, on_host, step_work
from specserve_kernels.types import AdapterRows, AttentionKind, KVCache, Rows, Window


class PlacedRows(NamedTuple):
    """The fields of the step's Rows that any kernel may read, on the device."""

    positions: Tensor
    slots: Tensor
    indices: Tensor
    indptr: Tensor


class CudaPlan(NamedTuple):
    """A step's inputs on the device, and its attention: FlashInfer's parts or Triton's work."""

    also: list[Tensor]
    shared: PlacedRows
    parts: list[PlannedRows]
    # By window and number of KV heads.
    work: dict[tuple[Window, int], tuple[paged.Work, paged.Inputs]]
    adapters: AdapterWork | None = None
    states: StateWork | None = None  # of recurrent ops


class Extras(NamedTuple):
    """What a step's plan has for adapters and recurrent ops; none for most models."""

    adapters: Sequence[Tensor]
    states: Sequence[Tensor]

    @staticmethod
    def of(rows: Rows, kv: KVCache) -> "Extras":
        own = () if rows.adapters is None else work_of(rows.adapters, len(rows.slots))
        is_recurrent = kv.states or rows.states is not None
        return Extras(own, on_host(step_work(rows)) if is_recurrent else ())

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.adapters, *self.states]

    def placed(self, tensors: Sequence[Tensor]) -> Iterator[Any]:
        """The same on the device, from the first of these tensors."""
        own, states = tensors[: len(self.adapters)], tensors[len(self.adapters) :]
        yield AdapterWork(*own) if own else None
        yield StateWork(*states[: len(self.states)]) if self.states else None


NOWHERE = -1  # slot of an unused row
ALSO_BYTES = 64  # bytes per row for other tensors of a step
MAX_ALSO = 16  # maximum number of other tensors, for their alignment
PER_KIND = 5  # fields per kind of attention


class InputArray(NamedTuple):
    """An input array of a step. `unused` fills the end that a step does not use."""

    shape: tuple[int, ...]
    dtype: str
    unused: int = 0

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def adapter_arrays(size: int, num_slots: int) -> list[InputArray]:
    """The fields of `AdapterWork`."""
    work = work_of(AdapterRows.of([-1] * size, num_slots), size)
    return [InputArray(tuple(x.shape), str(x.numpy().dtype)) for x in work]


class GraphInputs:
    """The inputs of steps of up to `size` rows. With `num_slots` > 0, rows may have adapters. The
    block numbers are last, those of states behind those of KV: their number varies.

    The device tensors are valid until the next upload of the staging buffer. Objects of other sizes
    share this buffer.
    """

    def __init__(
        self,
        staging: Staging,
        size: int,
        num_heads: int,
        kinds: Sequence[AttentionKind],
        num_slots: int = 0,
        is_recurrent: bool = False,
    ) -> None:
        self.is_recurrent = is_recurrent
        self.staging, self.size, self.num_heads, self.kinds = staging, size, num_heads, kinds
        of_rows = InputArray((size,), "int64")
        merges = InputArray((size, 3), "int32")
        pieces = [
            InputArray((size + paged.num_programs(kind.num_kv_heads), 5), "int32") for kind in kinds
        ]
        self.fields = [
            *(of_rows, of_rows, InputArray((size,), "int32"), of_rows._replace(unused=NOWHERE)),
            InputArray((size + 1,), "int32"),
            *(field for own in pieces for field in (own, merges, *[of_rows] * 3)),
            *(adapter_arrays(size, num_slots) if num_slots else []),
            *(InputArray(x, "int32", -1) for x in (fields(size) if is_recurrent else ())),
        ]
        ends = [*accumulate((aligned(f.num_bytes) for f in self.fields), initial=0)]
        self.begins, self.also_begins = ends[:-1], ends[-1]
        self.indices_begin = self.also_begins + ALSO_BYTES * size + ALIGNMENT * MAX_ALSO
        self.on_host: dict[int, list[NDArray[Any]]] = {}  # by address of the pinned buffer
        self.on_device = [self.view(f, at) for f, at in zip(self.fields, self.begins, strict=True)]
        self.indices = staging.buffer[self.indices_begin :].view(torch.int32)
        self.also: dict[Any, list[Tensor]] = {}  # device tensors, by shapes and dtypes

    def view(self, field: InputArray, begin: int) -> Tensor:
        some = self.staging.buffer[begin : begin + field.num_bytes]
        return some.view(getattr(torch, field.dtype)).view(field.shape)

    def fits(self, rows: Rows, also: Sequence[Tensor]) -> bool:
        room = self.indices_begin - self.also_begins
        has_room = sum(aligned(x.nbytes) for x in also) <= room
        states = 0 if rows.states is None else rows.states.blocks.nbytes * 2  # and snapshots
        numbers = rows.indices.nbytes + states
        return has_room and numbers <= len(self.staging.buffer) - self.indices_begin

    def upload(
        self, rows: Rows, token_ids: Tensor, read: Tensor, also: Sequence[Tensor]
    ) -> CudaPlan:
        """Same as `CudaOps.plan` for Triton's attention. `plan.also` begins with the token ids and
        `read`, both of length `size`.
        """
        sights = {window: sight(rows, window) for window in {kind.window for kind in self.kinds}}
        seen = [sights[kind.window] for kind in self.kinds]
        work = [
            paged.deal(rows, s, self.num_heads, kind.num_kv_heads, self.size)
            for s, kind in zip(seen, self.kinds, strict=True)
        ]
        values = [x.numpy() for x in (token_ids, read, rows.positions, rows.slots, rows.indptr)]
        for s, w in zip(seen, work, strict=True):
            values += [w.pieces, w.merges, s.first, s.prefix, s.mask.view(np.int64)]
        numbers = [rows.indices.numpy()]
        if rows.adapters is not None:
            values += [x.numpy() for x in work_of(rows.adapters, self.size)]
        if self.is_recurrent:
            *states, blocks = step_work(rows, len(rows.indices), self.size)
            values += states
            numbers.append(blocks)
        total = self.indices_begin + sum(x.nbytes for x in numbers)
        host = self.staging.host(total).numpy()
        for field, array, value in zip(self.fields, self.arrays(host), values, strict=True):
            n = len(value)
            array[:n] = value
            if n < len(array):
                array[n:] = field.unused
        host[self.indices_begin : total].view(np.int32)[:] = np.concatenate(numbers)
        placed = self.place(host, also)
        self.staging.send(total)
        token_ids, read, positions, slots, indptr, *tables = self.on_device
        shared = PlacedRows(positions, slots, self.indices, indptr)
        by_kind = {}
        for i, (kind, w) in enumerate(zip(self.kinds, work, strict=True)):
            mine = tables[PER_KIND * i : PER_KIND * (i + 1)]
            by_kind[kind[:2]] = w, paged.Inputs._make((*mine, self.indices, indptr))
        rest = tables[PER_KIND * len(self.kinds) :]
        recurrent = StateWork._make([*rest[-4:], self.indices]) if self.is_recurrent else None
        rest = rest[:-4] if self.is_recurrent else rest
        adapters = AdapterWork(*rest) if rest else None
        return CudaPlan([token_ids, read, *placed], shared, [], by_kind, adapters, recurrent)

    def arrays(self, host: NDArray[Any]) -> list[NDArray[Any]]:
        """Return views of the fields in a pinned buffer."""
        at = host.ctypes.data
        if at not in self.on_host:
            self.on_host[at] = [
                host[begin : begin + f.num_bytes].view(f.dtype).reshape(f.shape)
                for f, begin in zip(self.fields, self.begins, strict=True)
            ]
        return self.on_host[at]

    def place(self, host: NDArray[Any], also: Sequence[Tensor]) -> list[Tensor]:
        """Write other tensors to a pinned buffer; return their future device tensors."""
        begins = accumulate((aligned(x.nbytes) for x in also), initial=self.also_begins)
        parts = [(x, slice(at, at + x.nbytes)) for x, at in zip(also, begins, strict=False)]
        for x, at in parts:
            value = x.numpy()
            host[at].view(value.dtype)[:] = value
        key = tuple((x.shape, x.dtype) for x in also)
        if key not in self.also:
            self.also[key] = [self.staging.buffer[at].view(x.dtype) for x, at in parts]
        return self.also[key]
