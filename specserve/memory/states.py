"""The recurrent state of a request: its blocks, its checkpoints, and replays of draft tokens."""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from specserve.memory.blocks import BlockTable


class Replay(NamedTuple):
    """Accepted draft tokens of the target's last step, which advance a state.

    blocks       of the state
    places       of the kept inputs of these tokens, in order
    snapshot_at  the state after so many of them is copied; -1: no copy
    snapshot     blocks of the copy
    """

    blocks: Sequence[int]
    places: Sequence[int]
    snapshot_at: int = -1
    snapshot: Sequence[int] = ()


class RequestState:
    """The blocks of a request's recurrent state.

    After the pending updates, the state has the inputs of the table's `num_computed` tokens. Rows
    of known tokens advance it in their step. Accepted draft tokens advance it in the next launch.

    A checkpoint is a copy at the end of a full block of tokens, with that block's key. It is
    written before the last known token, where a lookup found KV without a checkpoint, at regular
    intervals, and at the last full block of the output.
    """

    def __init__(self, size: int = 0, interval: int = 0) -> None:
        """`size`: blocks of a state; 0: the model has no state. `interval`: tokens; 0: none."""
        self.size, self.interval = size, interval
        self.blocks: list[int] = []
        self.snapshot: list[int] = []  # blocks to which the planned step copies the state
        self.snapshot_end = 0  # number of tokens whose inputs this copy has
        self.wanted: set[int] = set()  # numbers of blocks after which others need a checkpoint
        self.latest = b""  # key of the last checkpoint of output

    def take(self) -> list[int]:
        """Return all blocks, and forget them."""
        blocks = [*self.blocks, *self.snapshot]
        self.blocks, self.snapshot = [], []
        return blocks

    def match(self, table: "BlockTable", token_ids: "array[int]", spare: int) -> None:
        """Extend an empty table by the longest cached prefix that ends at a checkpoint, and copy
        the checkpoint. Without blocks for a copy, the table takes the checkpoint's own blocks.
        """
        pool, keys = table.pool, table.keys_after(token_ids, 0)
        found = table.find(token_ids)
        num_known = len(pool.find(keys))
        if num_known > len(found):
            self.wanted.add(num_known)
        if not found or sum(pool.counts[block] == 0 for block in found) > spare:
            return
        key = keys[len(found) - 1]
        checkpoint = pool.checkpoints[key]
        for block in (*found, *checkpoint):
            pool.hold(block)
        own = pool.try_allocate(self.size, table.owner)
        if own is None:
            pool.drop_checkpoint(key)
            own = checkpoint
        else:
            for pair in zip(checkpoint, own, strict=True):
                pool.updates.copy(*pair)
            pool.release(checkpoint)
        self.blocks = own
        table.blocks.extend(found)
        table.num_published = len(found)
        table.num_computed = table.num_published * table.block_size
        pool.num_checkpoint_hits += 1

    def borders(self, table: "BlockTable", token_ids: "array[int]", end: int) -> list[int]:
        """Return after which numbers of tokens, beyond the computed ones and up to `end`, a
        checkpoint is due.
        """
        if not self.size or not table.is_publishing:
            return []
        size, last = table.block_size, table.num_keys(token_ids)
        every = self.interval // size
        places = {last, *self.wanted, *(range(every, last, every) if every else ())}
        keys, known = table.keys_after(token_ids, 0), table.pool.checkpoints
        return [
            place * size
            for place in sorted(places)
            if table.num_computed < place * size <= min(end, last * size)
            and keys[place - 1] not in known
        ]

    def chunk_end(self, table: "BlockTable", token_ids: "array[int]", end: int) -> int:
        """Shorten rows that end at `end`, so that at most one checkpoint is due within them."""
        due = self.borders(table, token_ids, end)
        return due[0] if len(due) > 1 else end

    def begin_snapshot(
        self, table: "BlockTable", token_ids: "array[int]", end: int, spare: int
    ) -> None:
        """Let the step that computes the tokens up to `end` copy the state, if a checkpoint is due
        within them and there are `spare` blocks.
        """
        due = self.borders(table, token_ids, end)
        if due and self.size <= spare:
            blocks = table.pool.try_allocate(self.size, table.owner)
            assert blocks is not None, "fewer blocks are available than `spare`"
            self.snapshot, self.snapshot_end = blocks, due[0]

    def publish_snapshot(self, table: "BlockTable", token_ids: "array[int]") -> None:
        """Publish the checkpoint that the last step wrote, if any."""
        blocks, self.snapshot = self.snapshot, []
        if blocks and table.is_publishing:
            place = self.snapshot_end // table.block_size - 1
            table.pool.publish_checkpoint(table.keys_after(token_ids, 0)[place], blocks)
        elif blocks:
            table.pool.release(blocks)

    def ends_block(self, table: "BlockTable", end: int) -> bool:
        """Return whether a full block ends after `end` tokens or later, up to the computed ones."""
        return self.size > 0 and table.num_computed // table.block_size * table.block_size >= end

    def replay(
        self,
        table: "BlockTable",
        token_ids: "array[int]",
        end: int,
        places: Sequence[int],
        spare: int,
    ) -> None:
        """Let the next launch advance the state, which has `end` tokens, by accepted draft tokens
        with their inputs at `places`. A checkpoint at the end of a full block replaces the last
        one of the output.
        """
        border = table.num_computed // table.block_size * table.block_size
        snapshot = self.next_checkpoint(table, token_ids, border, spare) if border >= end else []
        if places or snapshot:
            at = border - end if snapshot else -1
            table.pool.updates.replay(Replay([*self.blocks], places, at, snapshot))

    def next_checkpoint(
        self, table: "BlockTable", token_ids: "array[int]", border: int, spare: int
    ) -> list[int]:
        """Publish a checkpoint that the next launch writes; return its blocks, [] for none."""
        if not border or not table.is_publishing or table.hasher is None:
            return []
        pool = table.pool
        key = table.hasher.extend(token_ids, border)[border // table.block_size - 1]
        if key in pool.checkpoints:
            return []
        if self.latest in pool.checkpoints:
            pool.drop_checkpoint(self.latest)
            spare += self.size
        if spare < self.size:
            return []
        blocks = pool.try_allocate(self.size, table.owner)
        assert blocks is not None, "fewer blocks are available than `spare`"
        pool.publish_checkpoint(key, blocks)
        self.latest = key
        return blocks
