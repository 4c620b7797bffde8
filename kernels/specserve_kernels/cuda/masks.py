"""Attention masks in the formats of the GPU kernels, computed on the host."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve_kernels.types import Chunks, Rows, Window

Ints = NDArray[np.int64]
WORD = np.arange(64, dtype=np.uint64)


class Sight(NamedTuple):
    """Visible slots of each row: [first, prefix), and prefix + j for every set bit j of mask.

    first, prefix  [R]  int64
    mask           [R]  uint64
    """

    first: Ints
    prefix: Ints
    mask: NDArray[np.uint64]

    def from_row(self, begin: int) -> "Sight":
        return Sight(self.first[begin:], self.prefix[begin:], self.mask[begin:])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return first, prefix and mask as host tensors, [R] int64 each."""
        first, prefix = map(torch.from_numpy, (self.first, self.prefix))
        return first, prefix, torch.from_numpy(self.mask.view(np.int64))


def sight(rows: Rows, window: Window) -> Sight:
    """Compute the visible slots of every row within a window.

    A window counts positions, and the slots of a draft tree are not in order of position. The nodes
    of a row's path have the positions prefix, prefix + 1, .. in the order of their bits. Nodes
    before the window are therefore the lowest bits.
    """
    prefix = rows.prefix.numpy().astype(np.int64)
    mask = rows.mask.numpy().view(np.uint64)
    if window is None:
        return Sight(np.zeros_like(prefix), prefix, mask)
    position = rows.positions.numpy().astype(np.int64)
    if isinstance(window, Chunks):
        first = position // window.size * window.size
    else:
        first = position + 1 - window
    num_left_behind = first - prefix
    for i in range(min(64, num_left_behind.max(initial=0))):
        mask = np.where(num_left_behind > i, mask & (mask - np.uint64(1)), mask)
    return Sight(first.clip(0), prefix, mask)


def kv_lengths(rows: Rows, block_size: int) -> Ints:
    """Return the number of used slots of every request."""
    num_blocks = np.diff(rows.indptr.numpy()).astype(np.int64)
    lengths: Ints = (num_blocks - 1) * block_size + rows.last_page_len.numpy()
    return lengths


def pack(num_rows: Ints, kv_lengths: Ints, seen: Sight) -> tuple[NDArray[np.uint8], Ints]:
    """Pack the masks of some requests for FlashInfer.

    num_rows, kv_lengths  [B]     int64  rows and slots of each request
    seen                  [R]            visible slots of their rows, one request after the other

    ->                    [..]    uint8  bit i * kv_length + s of a request is set if its row i sees
                                         its slot s; lowest bit of a byte first

    ->                    [B+1]   int64  the bytes of request b are [indptr[b], indptr[b+1])

    The layout equals `segment_packbits` with bitorder "little" in FlashInfer's documentation.
    """
    bits = num_rows * kv_lengths
    indptr = np.concatenate(([0], np.cumsum((bits + 7) // 8)))
    request = np.repeat(np.arange(len(bits)), num_rows)
    index = np.arange(len(request)) - (np.cumsum(num_rows) - num_rows)[request]
    row = 8 * indptr[request] + index * kv_lengths[request]  # first bit of each row
    # Most slots are visible: they precede the tree. Set all bits, then clear the hidden ones.
    packed = np.full(indptr[-1], 255, dtype=np.uint8)
    shown = (seen.mask[:, None] >> WORD & np.uint64(1)).astype(bool)
    num_nodes = (kv_lengths[request] - seen.prefix).astype(np.uint64)
    in_use = num_nodes[:, None] > WORD
    r, node = np.nonzero(in_use & ~shown)
    hidden = np.concatenate(
        (
            row[r] + seen.prefix[r] + node,
            ranges(row, row + seen.first),
            ranges(8 * indptr[:-1] + bits, 8 * indptr[1:]),  # the padding of the last byte
        )
    )
    np.bitwise_and.at(packed, hidden >> 3, ~(1 << (hidden & 7)).astype(np.uint8))
    return packed, indptr


def ranges(begin: Ints, end: Ints) -> Ints:
    """Concatenate the integers of all ranges [begin, end)."""
    sizes = end - begin
    before = np.cumsum(sizes) - sizes
    every: Ints = np.arange(sizes.sum()) + np.repeat(begin - before, sizes)
    return every
