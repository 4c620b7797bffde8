"""Attention masks of rows in the forms that the GPU's kernels take; made on the host."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve_kernels.types import Rows

Ints = NDArray[np.int64]
WORD = np.arange(64, dtype=np.uint64)


class Sight(NamedTuple):
    """A row sees its request's slots [first, prefix), and slot prefix + j for every bit j of mask.

    first, prefix  [R]  int64
    mask           [R]  uint64
    """

    first: Ints
    prefix: Ints
    mask: NDArray[np.uint64]

    def from_row(self, begin: int) -> "Sight":
        return Sight(self.first[begin:], self.prefix[begin:], self.mask[begin:])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """On the host, [R] int64 each."""
        first, prefix = map(torch.from_numpy, (self.first, self.prefix))
        return first, prefix, torch.from_numpy(self.mask.view(np.int64))


def sight(rows: Rows, window: int | None) -> Sight:
    """What every row sees, within a window. It counts positions, and a tree's slots are not in
    the order of theirs.

    The nodes of a row's path have the positions prefix, prefix + 1, .. in the order of their bits:
    those before the window are the lowest bits.
    """
    prefix = rows.prefix.numpy().astype(np.int64)
    mask = rows.mask.numpy().view(np.uint64)
    if window is None:
        return Sight(np.zeros_like(prefix), prefix, mask)
    first = rows.positions.numpy().astype(np.int64) + 1 - window
    num_left_behind = first - prefix
    for i in range(min(64, num_left_behind.max(initial=0))):
        mask = np.where(num_left_behind > i, mask & (mask - np.uint64(1)), mask)
    return Sight(first.clip(0), prefix, mask)


def kv_lengths(rows: Rows, block_size: int) -> Ints:
    """Slots in use of every request."""
    num_blocks = np.diff(rows.indptr.numpy()).astype(np.int64)
    lengths: Ints = (num_blocks - 1) * block_size + rows.last_page_len.numpy()
    return lengths


def pack(num_rows: Ints, kv_lengths: Ints, seen: Sight) -> tuple[NDArray[np.uint8], Ints]:
    """FlashInfer's packed mask of some requests.

    num_rows, kv_lengths  [B]     int64  rows and slots of each request
    seen                  [R]            of their rows, one request after the other
    ->                    [..]    uint8  row i of a request sees its slot s where bit
                                         i * kv_length + s of the request's bytes is set, the lowest
                                         bit of a byte first
    ->                    [B+1]   int64  the bytes of request b are [indptr[b], indptr[b+1])

    The layout is that of `segment_packbits` with bitorder "little" in FlashInfer's documentation.
    """
    bits = num_rows * kv_lengths
    indptr = np.concatenate(([0], np.cumsum((bits + 7) // 8)))
    request = np.repeat(np.arange(len(bits)), num_rows)
    index = np.arange(len(request)) - (np.cumsum(num_rows) - num_rows)[request]
    row = 8 * indptr[request] + index * kv_lengths[request]  # its first bit
    # Most bits are a tree's prefix, which is seen. So all are set, and the hidden ones cleared.
    packed = np.full(indptr[-1], 255, dtype=np.uint8)
    shown = (seen.mask[:, None] >> WORD & np.uint64(1)).astype(bool)
    num_nodes = (kv_lengths[request] - seen.prefix).astype(np.uint64)
    in_use = num_nodes[:, None] > WORD
    r, node = np.nonzero(in_use & ~shown)
    hidden = np.concatenate(
        (
            row[r] + seen.prefix[r] + node,
            ranges(row, row + seen.first),
            ranges(8 * indptr[:-1] + bits, 8 * indptr[1:]),  # up to the end of the last byte
        )
    )
    np.bitwise_and.at(packed, hidden >> 3, ~(1 << (hidden & 7)).astype(np.uint8))
    return packed, indptr


def ranges(begin: Ints, end: Ints) -> Ints:
    """The integers of all [begin, end), one range after the other."""
    sizes = end - begin
    before = np.cumsum(sizes) - sizes
    every: Ints = np.arange(sizes.sum()) + np.repeat(begin - before, sizes)
    return every
