"""A step of one model as data: all that a forward and its draws read, as plain arrays."""

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.exchange.sampling_params import Sampling
from specserve.memory import BlockTable, KVUpdates, PendingUpdates
from specserve_drafters import Draft
from specserve_kernels import Rows, SampleParams


class Draws(NamedTuple):
    """What the token after each of n rows is drawn with; the columns are those of SampleParams."""

    is_greedy: bool  # every temperature is 0: the other columns change nothing
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.int64]
    token_index: NDArray[np.int64]

    def params(self, rows: NDArray[np.int64] | None = None) -> SampleParams:
        """The parameters of all rows, or of some, as host tensors."""
        if self.is_greedy:
            return SampleParams.greedy(len(self.seeds if rows is None else rows))
        columns = self[1:] if rows is None else [column[rows] for column in self[1:]]
        return SampleParams(*map(torch.from_numpy, columns))


@cache
def greedy_draws(n: int) -> Draws:
    """Draws of the likeliest token after each of n rows. Cached, so never written to."""
    zeros, ones = np.zeros(n, np.float32), np.ones(n, np.float32)
    integers = np.zeros(n, np.int64)
    return Draws(True, zeros, integers.astype(np.int32), ones, zeros, integers, integers)


def draws_of(
    samplings: Sequence[Sampling], lengths: Sequence[int], drafts: Sequence[Draft]
) -> Draws:
    """Draws after the root and every guess of each request, request by request.

    `lengths` counts the requests' known tokens: the token after a node has index length + depth in
    its request's token_ids, whatever the node's number, and is drawn with that index's noise.
    """
    counts = [1 + len(draft) for draft in drafts]
    if all(s.temperature == 0 for s in samplings):
        return greedy_draws(sum(counts))
    places = [n + depth for n, d in zip(lengths, drafts, strict=True) for depth in d.depths()]

    def column(values: list[Any], dtype: Any) -> NDArray[Any]:
        return np.repeat(np.array(values, dtype), counts)

    return Draws(
        False,
        column([s.temperature for s in samplings], np.float32),
        column([s.top_k for s in samplings], np.int32),
        column([s.top_p for s in samplings], np.float32),
        column([s.min_p for s in samplings], np.float32),
        column([s.seed for s in samplings], np.int64),
        np.array(places, np.int64),
    )


class RowGroup(NamedTuple):
    """One request's rows: tokens in the slots [start, start + n) of its table.

    Without masks they are causal rows. With masks they are nodes of a tree that see the slots
    [0, prefix), and slot prefix + j for each bit j of their mask.
    """

    table: BlockTable
    token_ids: "array[int] | list[int]"
    start: int
    num_read: int  # rows at the end whose logits are read
    prefix: int = 0
    masks: list[int] | None = None


class StepInput(NamedTuple):
    """A step as plain arrays, which a recorded graph or a native program could take as well.

    updates    done first, to any model's KV
    token_ids  [R]  int64
    qo_indptr .. mask     the fields of kernels' Rows, in its order and dtypes
    read       [n]  int64  the rows whose logits are read, ascending
    draws      how the token after each of these is drawn; None where the logits alone are wanted
    """

    updates: KVUpdates
    token_ids: NDArray[np.int64]
    qo_indptr: NDArray[np.int32]
    indptr: NDArray[np.int32]
    indices: NDArray[np.int32]
    last_page_len: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int64]
    prefix: NDArray[np.int32]
    mask: NDArray[np.int64]
    read: NDArray[np.int64]
    draws: Draws | None

    def rows(self) -> Rows:
        """The rows as the ops take them; host tensors that share the arrays' memory."""
        return Rows(*(torch.from_numpy(getattr(self, name)) for name in Rows._fields))


def build_step_input(
    groups: Sequence[RowGroup], pending: PendingUpdates, draws: Draws | None = None
) -> StepInput:
    """One step of all the groups' rows, in order.

    The pending updates are taken last, when hardly anything can fail any more: from then on they
    are lost unless the step is launched.
    """
    block_size = groups[0].table.block_size
    token_ids, blocks, begin, used = array("i"), array("i"), [0], [0]
    for g in groups:
        token_ids.extend(g.token_ids)
        begin.append(len(token_ids))
        # A slice is a copy: an array whose memory numpy shares could neither grow nor shrink.
        blocks.extend(g.table.blocks[: -(-(g.start + len(g.token_ids)) // block_size)])
        used.append(len(blocks))
    qo_indptr, indptr = np.array(begin, np.int32), np.array(used, np.int32)
    counts = np.diff(qo_indptr)
    starts = np.array([g.start for g in groups], np.int32)
    place = np.arange(begin[-1], dtype=np.int32) + np.repeat(starts - qo_indptr[:-1], counts)
    position, prefix = place.copy(), place + 1
    mask = np.zeros(begin[-1], np.uint64)
    for i, g in enumerate(groups):
        if g.masks is not None:
            at = slice(begin[i], begin[i + 1])
            mask[at], prefix[at] = g.masks, g.prefix
            position[at] = np.bitwise_count(mask[at])
            position[at] += g.prefix - 1
    indices = np.frombuffer(blocks, np.int32)
    block, offset = np.divmod(place, block_size)
    block += np.repeat(indptr[:-1], counts)
    slots = indices[block].astype(np.int64) * block_size + offset
    last_page_len = (starts + counts - 1) % block_size + 1
    read = rows_read(groups, begin)
    return StepInput(
        updates=pending.take(),
        token_ids=np.array(token_ids, np.int64),
        qo_indptr=qo_indptr,
        indptr=indptr,
        indices=indices,
        last_page_len=last_page_len,
        positions=position,
        slots=slots,
        prefix=prefix,
        mask=mask.view(np.int64),
        read=read,
        draws=draws,
    )


def rows_read(groups: Sequence[RowGroup], begin: Sequence[int]) -> NDArray[Any]:
    """The last `num_read` rows of each group."""
    read = array("q")
    for group, end in zip(groups, begin[1:], strict=True):
        read.extend(range(end - group.num_read, end))
    return np.array(read, np.int64)
