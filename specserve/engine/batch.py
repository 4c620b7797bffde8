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
    begin, used_blocks, blocks = [0], [0], []
    for g in groups:
        end = g.start + len(g.token_ids)
        begin.append(begin[-1] + len(g.token_ids))
        used_blocks.append(used_blocks[-1] + -(-end // block_size))
        # A slice is a copy: a table that numpy looks into could neither grow nor shrink.
        used = g.table.blocks[: used_blocks[-1] - used_blocks[-2]]
        blocks.append(np.frombuffer(used, np.int32))
    token_ids = np.empty(begin[-1], dtype=np.int64)
    slot, position, prefix, first_block = np.empty((4, begin[-1]), dtype=np.int32)
    mask = np.zeros(begin[-1], dtype=np.uint64)
    for i, g in enumerate(groups):
        at = slice(begin[i], begin[i + 1])
        token_ids[at] = g.token_ids
        slot[at] = np.arange(g.start, g.start + len(g.token_ids))
        first_block[at] = used_blocks[i]
        if g.masks is None:
            position[at], prefix[at] = slot[at], slot[at] + 1
        else:
            mask[at], prefix[at] = g.masks, g.prefix
            position[at] = np.bitwise_count(mask[at])
            position[at] += g.prefix - 1
    indices = np.concatenate(blocks)
    block, offset = np.divmod(slot, block_size)
    slots = indices[first_block + block].astype(np.int64) * block_size + offset
    rows = Rows(
        qo_indptr=_int32(begin),
        indptr=_int32(used_blocks),
        indices=torch.from_numpy(indices),
        last_page_len=_int32([(g.start + len(g.token_ids) - 1) % block_size + 1 for g in groups]),
        positions=torch.from_numpy(position),
        slots=torch.from_numpy(slots),
        prefix=torch.from_numpy(prefix),
        mask=torch.from_numpy(mask.view(np.int64)),
    )
    return Batch(torch.from_numpy(token_ids), rows, logit_rows(groups, begin))


def logit_rows(groups: Sequence[RowGroup], begin: list[int]) -> Tensor:
    """The last `num_logits` rows of each group."""
    read: list[int] = []
    for group, end in zip(groups, begin[1:], strict=True):
        read.extend(range(end - group.num_logits, end))
    return torch.from_numpy(np.array(read, dtype=np.int64))


def _int32(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32))
