"""A step's inputs on the device."""

from typing import NamedTuple

from torch import Tensor

from specserve_kernels.cuda import paged
from specserve_kernels.cuda.attention import PlannedRows
from specserve_kernels.types import AdapterRows


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
    work: dict[int | None, tuple[paged.Work, paged.Inputs]]  # by window
    adapters: AdapterRows | None = None
