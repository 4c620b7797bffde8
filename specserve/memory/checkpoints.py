"""Checkpoints of recurrent states in the prefix cache: where they are due, and who finds them."""

from array import array
from collections.abc import Sequence

from specserve.memory.blocks import BlockTable
from specserve.memory.states import StateReplay


def match_checkpoint(table: BlockTable, token_ids: "array[int]", spare: int) -> None:
    """Extend an empty table by the longest cached prefix that ends at a checkpoint, and copy
    the checkpoint. Without blocks for a copy, the table takes the checkpoint's own blocks.
    """
    state, pool, keys = table.state, table.pool, table.keys_after(token_ids, 0)
    table.epoch = pool.num_resets
    found = table.find(token_ids)
    num_known = len(pool.find(keys))
    if num_known > len(found):
        state.wanted.add(num_known)
    if not found or sum(pool.counts[block] == 0 for block in found) > spare:
        return
    key = keys[len(found) - 1]
    checkpoint = pool.checkpoints[key]
    for block in (*found, *checkpoint):
        pool.hold(block)
    own = pool.try_allocate(state.size, table.owner)
    if own is None:
        pool.drop_checkpoint(key)
        own = checkpoint
    else:
        for pair in zip(checkpoint, own, strict=True):
            pool.updates.copy(*pair)
        pool.release(checkpoint)
    state.blocks = own
    table.blocks.extend(found)
    table.num_published = len(found)
    table.num_computed = table.num_published * table.block_size
    pool.num_checkpoint_hits += table.owner == "target"


def due_checkpoints(table: BlockTable, token_ids: "array[int]", end: int) -> list[int]:
    """Return after which numbers of tokens, beyond the computed ones and up to `end`, a
    checkpoint is due.
    """
    state = table.state
    if not state.size or not table.is_publishing:
        return []
    size, last = table.block_size, table.num_keys(token_ids)
    every = -(-state.interval // size)  # blocks
    places = {last, *state.wanted, *(range(every, last, every) if every else ())}
    keys, known = table.keys_after(token_ids, 0), table.pool.checkpoints
    return [
        place * size
        for place in sorted(places)
        if table.num_computed < place * size <= min(end, last * size)
        and keys[place - 1] not in known
    ]


def chunk_end(table: BlockTable, token_ids: "array[int]", end: int) -> int:
    """Shorten rows that end at `end`, so that at most one checkpoint is due within them."""
    due = due_checkpoints(table, token_ids, end)
    return due[0] if len(due) > 1 else end


def begin_snapshot(table: BlockTable, token_ids: "array[int]", end: int, spare: int) -> None:
    """Let the step that computes the tokens up to `end` copy the state, if a checkpoint is due
    within them and there are `spare` blocks.
    """
    state = table.state
    due = due_checkpoints(table, token_ids, end)
    if due and state.size <= spare:
        blocks = table.pool.try_allocate(state.size, table.owner)
        assert blocks is not None, "fewer blocks are available than `spare`"
        state.snapshot, state.snapshot_end = blocks, due[0]


def publish_snapshot(table: BlockTable, token_ids: "array[int]") -> None:
    """Publish the checkpoint that the last step wrote, if any."""
    state = table.state
    blocks, state.snapshot = state.snapshot, []
    if blocks and table.is_publishing:
        place = state.snapshot_end // table.block_size - 1
        table.pool.publish_checkpoint(table.keys_after(token_ids, 0)[place], blocks)
    elif blocks:
        table.pool.release(blocks)


def ends_block(table: BlockTable, end: int) -> bool:
    """Return whether a full block ends after `end` tokens or later, up to the computed ones."""
    size = table.block_size
    return table.state.size > 0 and table.num_computed // size * size >= end


def advance_state(
    table: BlockTable,
    token_ids: "array[int]",
    end: int,
    places: Sequence[int],
    spare: int,
) -> None:
    """Let the next launch advance the state, which has `end` tokens, by accepted draft tokens
    with their inputs at `places`. A checkpoint at the end of a full block replaces the last
    one of the output.
    """
    state = table.state
    border = table.num_computed // table.block_size * table.block_size
    snapshot = next_checkpoint(table, token_ids, border, spare) if border >= end else []
    if places or snapshot:
        at = border - end if snapshot else -1
        table.pool.updates.replay(StateReplay([*state.blocks], places, at, snapshot))


def next_checkpoint(
    table: BlockTable, token_ids: "array[int]", border: int, spare: int
) -> list[int]:
    """Publish a checkpoint that the next launch writes; return its blocks, [] for none."""
    state = table.state
    if not border or not table.is_publishing or table.hasher is None:
        return []
    pool = table.pool
    key = table.hasher.extend(token_ids, border)[border // table.block_size - 1]
    if key in pool.checkpoints:
        return []
    if state.latest in pool.checkpoints:
        pool.drop_checkpoint(state.latest)
        spare += state.size
    if spare < state.size:
        return []
    blocks = pool.try_allocate(state.size, table.owner)
    assert blocks is not None, "fewer blocks are available than `spare`"
    pool.publish_checkpoint(key, blocks)
    state.latest = key
    return blocks
