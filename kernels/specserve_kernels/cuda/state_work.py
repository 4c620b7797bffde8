"""What the kernels of recurrent ops do in a step or in replays, as arrays, computed on the host.

A *lane* is a sequence of rows that update one state. Committed rows of a request are a lane. Each
leaf of a draft tree is another lane: it has the leaf's path, and begins with the committed state.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve_kernels.states import Replays
from specserve_kernels.types import Rows

Int32s = NDArray[np.int32]
BEGIN, END, READ, WRITE, SNAPSHOT, SNAPSHOT_AT = range(6)  # columns of a lane
LANE = 8  # columns and padding: slices of lanes are aligned, too
BEHIND = 7  # rows before a row, which a convolution reads
ROW = 2 + BEHIND
PATHS = 17  # maximum elements of all draft lanes per row: 63 nodes have at most 32 paths of 32
WORD = np.arange(64, dtype=np.uint64)


class StateWork(NamedTuple):
    """The work of a step; int32, on the host or on the device.

    lanes   [n, LANE]  of committed rows: elements [BEGIN, END) of `order` are their rows. The lane
                       begins with the state in the blocks at READ, and stores it at WRITE. After
                       SNAPSHOT_AT rows it stores it at SNAPSHOT. -1: zeros, or no store
    drafts  [m, LANE]  of draft tokens
    order   [..]       rows of the step, or places of kept inputs
    rows    [R, ROW]   by row: the state's blocks or -1, the place of its kept inputs or -1, and the
                       rows before it, the nearest first. -n is the n-th last input of the state
    tables  [..]       block numbers; READ, WRITE, SNAPSHOT and the first column of `rows` are
                       places in it
    """

    lanes: Any
    drafts: Any
    order: Any
    rows: Any
    tables: Any


def step_work(rows: Rows, at: int = 0, size: int = 0) -> StateWork:
    """The work of a step, on the host. `tables` begins at place `at` of the device's tensor.

    With more than R rows in `size`, the other rows are lanes without a state, so that their results
    are finite.
    """
    borders = rows.qo_indptr.numpy()
    first, sizes = borders[:-1], np.diff(borders)
    (B,), R = first.shape, int(borders[-1])
    unused = np.arange(R, max(size, R), dtype=np.int32)
    each = np.arange(R + len(unused), dtype=np.int32)
    lanes = np.full((B + len(unused), LANE), -1, np.int32)
    lanes[:, BEGIN] = np.concatenate([first, unused])
    lanes[:B, END], lanes[B:, END] = borders[1:], unused + 1
    by_row = np.full((len(each), ROW), -1, np.int32)
    by_row[:, 2:] = -1 - np.arange(BEHIND)
    index = each[:R] - np.repeat(first, sizes)
    behind = index[:, None] + by_row[0, 2:]
    by_row[:R, 2:] = np.where(behind >= 0, behind + (each[:R] - index)[:, None], behind)
    nodes = rows.mask.numpy().view(np.uint64)[:R]
    has_trees = nodes.any()
    if has_trees:
        put_ancestors(by_row, nodes, each[:R] - index, index)
    no_drafts = np.empty((0, LANE), np.int32)
    if rows.states is None:
        return StateWork(lanes, no_drafts, each, by_row, no_drafts[:, 0])
    blocks, committed, kept, snapshot_at, snapshots = (x.numpy() for x in rows.states)
    n = blocks.shape[1]
    own = at + n * np.arange(B, dtype=np.int32)
    is_new = rows.positions.numpy()[first] == 0
    has_snapshot = np.flatnonzero(snapshot_at)
    lanes[:B, END] = first + committed
    lanes[:B, READ], lanes[:B, WRITE] = np.where(is_new, -1, own), own
    lanes[has_snapshot, SNAPSHOT] = at + n * (B + np.arange(len(has_snapshot)))
    lanes[:B, SNAPSHOT_AT] = snapshot_at
    tables = np.concatenate([blocks.ravel(), snapshots[has_snapshot].ravel()])
    by_row[:R, 0] = np.repeat(lanes[:B, READ], sizes)
    if int(committed.sum()) == R:
        return StateWork(lanes, no_drafts, each, by_row, tables)
    ahead = index - np.repeat(committed, sizes)  # number of a draft token
    by_row[:R, 1] = np.where(ahead >= 0, ahead + np.repeat(kept, sizes), -1)
    is_tree = (nodes != 0) & (ahead >= 0)
    chained = (sizes > committed) & ~is_tree[borders[1:] - 1]
    chains = lanes_of(first[chained] + committed[chained], borders[1:][chained], own[chained])
    if not is_tree.any():
        return StateWork(lanes, chains, each, by_row, tables)
    paths, lengths, requests = leaf_paths(nodes, is_tree, ahead, first, sizes)
    ends = len(each) + np.cumsum(lengths)
    leaves = lanes_of(ends - lengths, ends, own[requests])
    order = np.concatenate([each, paths]).astype(np.int32)
    return StateWork(lanes, np.concatenate([chains, leaves]), order, by_row, tables)


def lanes_of(begins: Any, ends: Any, blocks: Any) -> Int32s:
    """Lanes of draft tokens, which store nothing."""
    lanes = np.full((len(begins), LANE), -1, np.int32)
    lanes[:, BEGIN], lanes[:, END], lanes[:, READ] = begins, ends, blocks
    return lanes


def put_ancestors(
    by_row: Int32s, nodes: NDArray[np.uint64], first: NDArray[Any], index: NDArray[Any]
) -> None:
    """Write the rows before each node: its ancestors, then inputs of the state."""
    at = np.flatnonzero(nodes)
    bits = (nodes[at, None] >> WORD & np.uint64(1)).astype(bool) & (
        index[at, None].astype(np.uint64) > WORD
    )
    counts = bits.sum(1)
    by_row[at, 2:] = counts[:, None] - 1 - np.arange(BEHIND)
    node, ancestor = bits.nonzero()
    rank = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(node))  # 0: the nearest
    node, ancestor, rank = (x[rank < BEHIND] for x in (node, ancestor, rank))
    by_row[at[node], 2 + rank] = first[at[node]] + ancestor
    no_ancestor = by_row[at, 2:] < 0
    assert (no_ancestor == (np.arange(BEHIND) >= counts[:, None])).all(), "a mask of later rows"


def leaf_paths(
    nodes: NDArray[np.uint64],
    is_tree: NDArray[Any],
    ahead: NDArray[Any],
    first: NDArray[Any],
    sizes: NDArray[Any],
) -> tuple[Any, Any, Any]:
    """Return the draft tokens on the paths of all leaves as rows, the length of each path, and the
    leaf's request.
    """
    at = np.flatnonzero(is_tree)
    bits = (nodes[at, None] >> WORD & np.uint64(1)).astype(bool)
    request = np.repeat(np.arange(len(sizes)), sizes)[at]
    node, bit = bits.nonzero()
    seen = first[request[node]] + bit
    is_draft = ahead[seen] >= 0
    node, seen = node[is_draft], seen[is_draft]
    is_leaf = np.bincount(seen, minlength=len(nodes))[at] == 1
    lengths = np.bincount(node, minlength=len(at))[is_leaf]
    return seen[is_leaf[node]], lengths, request[is_leaf]


def replay_work(replays: Replays) -> tuple[StateWork, list[slice]]:
    """Return the work of replays, and runs of lanes whose order does not matter.

    The snapshot of a later one may be in the blocks of an earlier one, whose request has ended.
    """
    blocks, begins, places, snapshot_at, snapshots = (x.numpy() for x in replays)
    M, n = blocks.shape
    lanes = np.full((M, LANE), -1, np.int32)
    lanes[:, BEGIN], lanes[:, END] = begins[:-1], begins[1:]
    lanes[:, READ] = lanes[:, WRITE] = n * np.arange(M)
    has_snapshot = snapshot_at >= 0
    lanes[has_snapshot, SNAPSHOT] = n * (M + np.flatnonzero(has_snapshot))
    lanes[:, SNAPSHOT_AT] = snapshot_at
    tables = np.concatenate([blocks.ravel(), snapshots.ravel()])
    runs, begin, used = list[slice](), 0, set[int]()
    for m in range(M):
        mine = {*blocks[m].tolist(), *(snapshots[m].tolist() if has_snapshot[m] else ())}
        if used & mine:
            runs.append(slice(begin, m))
            begin, used = m, set()
        used |= mine
    runs.append(slice(begin, M))
    none = np.empty((0, LANE), np.int32)
    return StateWork(lanes, none, places, np.empty((0, ROW), np.int32), tables), runs


def on_host(work: StateWork) -> list[Tensor]:
    """The arrays as host tensors."""
    return [torch.from_numpy(np.ascontiguousarray(x, np.int32)) for x in work]


def fields(size: int) -> Sequence[tuple[int, ...]]:
    """The largest shapes of a step's arrays without `tables`, for up to `size` rows."""
    drafts = size if size > 1 else 0  # one row is a committed one
    return (size, LANE), (drafts, LANE), (size + PATHS * drafts,), (size, ROW)
