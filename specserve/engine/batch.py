"""The rows of a forward, as arrays."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specserve.memory import BlockTable
from specserve_kernels import Rows


class RowGroup(NamedTuple):
    """One request's rows: tokens in the slots [start, start + n) of its table.

    Without masks they are causal rows. With masks they are nodes of a tree that see the slots
    [0, prefix), and slot prefix + j for each bit j of their mask.
    """

    table: BlockTable
    token_ids: "array[int] | list[int]"
    start: int
    num_logits: int  # the last so many rows are read
    prefix: int = 0
    masks: list[int] | None = None


class Batch(NamedTuple):
    """The rows of a forward. token_ids [R] int64; logit_rows [n] int64, the rows that are read."""

    token_ids: Tensor
    rows: Rows
    logit_rows: Tensor


def build_batch(groups: Sequence[RowGroup]) -> Batch:
    """Lay the groups' rows one after the other."""
    block_size = groups[0].table.block_size
    sizes = np.array([len(g.token_ids) for g in groups], dtype=np.int32)
    ends = sizes.cumsum(dtype=np.int32)
    begins = ends - sizes
    num_rows = int(ends[-1])
    owner = np.repeat(np.arange(len(groups)), sizes)
    starts = np.array([g.start for g in groups], dtype=np.int32)
    slot = np.arange(num_rows, dtype=np.int32) + (starts - begins)[owner]
    positions, prefix, mask = slot.copy(), slot + 1, np.zeros(num_rows, dtype=np.uint64)
    token_ids = np.empty(num_rows, dtype=np.int64)
    for group, begin, end in zip(groups, begins.tolist(), ends.tolist(), strict=True):
        token_ids[begin:end] = group.token_ids
        if group.masks is not None:
            mask[begin:end] = group.masks
            prefix[begin:end] = group.prefix
            depth = np.bitwise_count(mask[begin:end]).astype(np.int32)
            positions[begin:end] = group.prefix + depth - 1
    lengths = starts + sizes
    used = -(-lengths // block_size)
    indptr = np.concatenate(([0], used.cumsum(dtype=np.int32)), dtype=np.int32)
    indices = np.concatenate(
        [np.frombuffer(g.table.blocks, np.int32, n) for g, n in zip(groups, used.tolist())]
    )
    blocks = indices[indptr[owner] + slot // block_size].astype(np.int64)
    rows = Rows(
        qo_indptr=torch.from_numpy(np.concatenate(([0], ends), dtype=np.int32)),
        indptr=torch.from_numpy(indptr),
        indices=torch.from_numpy(indices),
        last_page_len=torch.from_numpy((lengths - 1) % block_size + 1),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(blocks * block_size + slot % block_size),
        prefix=torch.from_numpy(prefix),
        mask=torch.from_numpy(mask.view(np.int64)),
    )
    return Batch(torch.from_numpy(token_ids), rows, torch.from_numpy(read_rows(groups, ends)))


def read_rows(groups: Sequence[RowGroup], ends: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> (
    "np.ndarray[tuple[int], np.dtype[np.int64]]"
):
    """The last `num_logits` rows of each group."""
    counts = np.array([g.num_logits for g in groups], dtype=np.int64)
    first = np.repeat(ends - counts.cumsum(), counts)
    return first + np.arange(len(first))
