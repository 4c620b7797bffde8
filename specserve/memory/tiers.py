"""The tiers below the block pool: evicted KV blocks in host memory and on disk, and their loads."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import NamedTuple

from specserve.memory.blocks import BlockPool, BlockTable, state_key, state_keys
from specserve.memory.disk_tier import DiskTier, TierStats
from specserve.memory.host_tier import HostTier
from specserve_kernels import HostMemory

LEAST = 1e-9  # seconds; least time to load a block
SAVED = 8  # most blocks of the pool that a step saves


class Load:
    """Blocks that come back to the pool, for requests that wait for them.

    found   blocks of the same prefix that the pool has; they stay until the load ends
    blocks  new blocks of the pool, one per key
    hosts   host blocks, one per key; a read from disk may still fill them
    state   key of a checkpoint, and number of its blocks, which come last; 0: no checkpoint
    """

    def __init__(self, found: Sequence[int], state: tuple[bytes, int] = (b"", 0)) -> None:
        self.found, self.read = [*found], set[bytes]()  # keys that only the disk had
        self.state = state
        self.keys, self.blocks, self.hosts = list[bytes](), list[int](), list[int]()
        self.num_issued = self.num_loaded = 0  # keys, in order
        self.waiting: set[int] = set()  # ids of requests

    @property
    def is_done(self) -> bool:
        return self.num_loaded == len(self.keys)

    @property
    def held(self) -> list[int]:
        """Return the blocks of the pool that the load holds."""
        return [*self.found, *self.blocks]


class Loadable(NamedTuple):
    """A prefix that the pool does not have completely, but tiers do.

    num_blocks  of the prefix
    found       leading blocks that the pool has
    keys        of the blocks to load: of the rest of the prefix, then of its checkpoint
    state       see `Load.state`
    """

    num_blocks: int
    found: list[int]
    keys: list[bytes]
    state: tuple[bytes, int]


class Tiers:
    """Moves evicted blocks of a pool to the tiers, and loads them back.

    A block that the pool evicts with a key is stored in the host tier, and from there also on disk.
    A load turns blocks of the tiers into cached blocks of the pool. It takes at least one step:
    the blocks are copied by a launch, and requests find them in the next step.
    """

    def __init__(
        self,
        pool: BlockPool,
        host: HostTier,
        memory: HostMemory,
        disk: DiskTier | None = None,
        host_seconds: float = 0.0,
    ) -> None:
        """`memory` has the host tier's blocks. `host_seconds` is the time to load a block."""
        self.pool, self.host, self.memory, self.disk = pool, host, memory, disk
        self.host_seconds = host_seconds
        self.loads: list[Load] = []
        self.loading: dict[bytes, Load] = {}  # by key
        self.stored: dict[bytes, None] = {}  # keys whose blocks the next launch stores, in order
        self.reads: dict[bytes, Future[bool]] = {}  # from disk to host blocks
        self.writes: OrderedDict[bytes, Future[None]] = OrderedDict()  # they end in this order
        self.saving: dict[bytes, None] = {}  # keys that shall be on disk, in order
        pool.on_evict = self.store

    @property
    def tables(self) -> list[list[int]]:
        """The blocks that loads hold, for `BlockPool.check`."""
        return [load.held for load in self.loads]

    def store(self, block: int, key: bytes) -> None:
        """Store an evicted block in the host tier, unless the tier has it or all of it is held."""
        if key in self.host.found:
            self.host.touch(key)
            return
        host_block = self.host.try_add(key)
        if host_block is None:
            self.host.stats.skips += 1
            return
        self.host.stats.stores += 1
        self.pool.updates.stores.append((block, host_block))
        if self.disk is not None:
            self.stored[key] = None

    def has(self, key: bytes) -> bool:
        return key in self.host.found or (self.disk is not None and key in self.disk)

    def has_checkpoint(self, key: bytes, num_blocks: int) -> bool:
        """Return whether the tiers have all blocks of a checkpoint."""
        return all(self.has(state_key(key, number)) for number in range(num_blocks))

    def count(self, keys: Iterable[bytes]) -> int:
        """The number of keys before the first one that no tier has."""
        num = 0
        for key in keys:
            if not self.has(key):
                break
            num += 1
        return num

    def seconds(self, keys: Sequence[bytes]) -> float:
        """Estimate the time to load these blocks."""
        num_read = sum(key not in self.host.found for key in keys)
        of_disk = 0.0 if self.disk is None else num_read * self.disk.seconds
        return of_disk + len(keys) * self.host_seconds

    def begin(
        self,
        owner: str,
        found: Sequence[int],
        keys: Sequence[bytes],
        state: tuple[bytes, int] = (b"", 0),
    ) -> Load | None:
        """Begin to load blocks that follow `found`. Return None if no block can be loaded: the host
        tier has no place for blocks from disk, or another load has the first key. With a
        checkpoint, see `Load.state`, all keys are loaded or none.

        The pool must have as many blocks available, in addition to `found`.
        """
        load = Load(found, state)
        for block in load.found:
            self.pool.hold(block)
        for key in keys:
            if key in self.loading or not self.take(load, key):
                break
        if state[1] and len(load.keys) < len(keys):
            for key in load.keys:
                self.host.release(key)
            load.keys, load.hosts = [], []
        blocks = self.pool.try_allocate(len(load.keys), owner)
        assert blocks is not None, "the caller checks for available blocks"
        load.blocks = blocks
        if not load.keys:
            self.pool.release(reversed(load.found))
            return None
        self.loads.append(load)
        self.loading |= dict.fromkeys(load.keys, load)
        return load

    def take(self, load: Load, key: bytes) -> bool:
        """Hold the host block of a key, and read it from disk if only the disk has it."""
        if key not in self.host.found:
            if not self.try_read(key):
                return False
            load.read.add(key)
        load.keys.append(key)
        load.hosts.append(self.host.hold(key))
        return True

    def try_read(self, key: bytes) -> bool:
        """Begin to read a block from disk into a host block; return False if that is impossible."""
        if self.disk is None or key not in self.disk:
            return False
        host_block = self.host.try_add(key)
        if host_block is None:
            return False
        updates = self.pool.updates  # a store of the key that had the host block before
        updates.stores = [pair for pair in updates.stores if pair[1] != host_block]
        self.host.hold(key)
        self.reads[key] = self.disk.read(key, self.view(host_block))
        return True

    def view(self, host_block: int) -> memoryview:
        """The memory of a host block."""
        view: memoryview = self.memory.memory[host_block].numpy().data
        return view

    def issue(self, seconds: float) -> None:
        """Add copies to the next launch that take about `seconds`, and at least one."""
        budget = max(seconds, LEAST)
        for load in self.loads:
            while budget > 0 and load.num_issued < len(load.keys):
                place = load.num_issued
                if load.keys[place] in self.reads:
                    break
                self.pool.updates.loads.append((load.hosts[place], load.blocks[place]))
                load.num_issued += 1
                budget -= max(self.host_seconds, LEAST)

    def advance(self) -> list[Load]:
        """Return the loads that have ended since the last step, and begin to write to disk.

        Their blocks are cached. If a read from disk failed, these are the blocks before it.
        """
        updates = self.pool.updates
        if updates.stores or updates.loads or not self.memory.is_idle:
            return []  # no launch has run them, or copies still run
        self.write_stored()
        self.save_some()  # the next launch stores these blocks, so `write_stored` comes before
        self.finish_reads()
        ended = []
        for load in [*self.loads]:
            load.num_loaded = load.num_issued
            if load.is_done:
                self.end(load)
                ended.append(load)
        return ended

    def save(self, keys: Sequence[bytes]) -> None:
        """Begin to write these blocks to disk, from the pool or the host tier. They are in `saving`
        until their writes have ended, or they are lost.
        """
        self.saving |= dict.fromkeys(reversed(keys))  # in the order of evictions

    def write_failure(self, keys: Iterable[bytes]) -> str:
        """Return why some of these blocks cannot be written to disk; empty if they are there, or no
        write has failed.
        """
        disk = self.disk
        if disk is None or not disk.failure or all(key in disk for key in keys):
            return ""
        return f"an earlier write failed ({disk.failure}). Repair the disk, then restart"

    def save_some(self) -> None:
        """Store some of the blocks to save in the host tier; `write_stored` writes them."""
        disk, left, block_of = self.disk, SAVED, self.pool.block_of
        if disk is None or not disk.is_writable:
            self.saving.clear()
        for key in [*self.saving]:
            if left == 0 or 2 * (len(self.writes) + len(self.stored)) >= self.host.num_blocks:
                return
            if key in self.writes or key in self.stored:
                continue
            if key in self.host.found and (disk is None or key not in disk):
                self.stored[key] = None
            elif disk is not None and key not in disk and (block := block_of(key)) is not None:
                if self.pool.updates.writes_checkpoint(block):
                    continue  # the next launch writes it
                self.store(block, key)
                left -= 1
            else:  # on disk, or nowhere
                del self.saving[key]

    def fetch(self, keys: Iterable[bytes], most: int) -> None:
        """Begin to read at most so many blocks from disk to the host tier."""
        for key in keys:
            is_near = key in self.host.found or self.pool.block_of(key) is not None
            if is_near or not self.has(key):
                continue
            if most == 0 or not self.try_read(key):
                return
            most -= 1

    def finish_reads(self) -> None:
        """Stop holding host blocks that were read. A read that failed ends its load before it."""
        for key in [key for key, read in self.reads.items() if read.done()]:
            is_right = self.reads.pop(key).result()
            self.host.release(key)
            if is_right:
                continue
            if (load := self.loading.get(key)) is not None:
                self.shorten(load, load.keys.index(key))
            self.host.drop(key)

    def shorten(self, load: Load, num_keys: int) -> None:
        """Drop the last keys of a load. No part of its checkpoint is left."""
        num_keys = min(num_keys, len(load.keys) - load.state[1])
        load.state = b"", 0
        load.num_issued = min(load.num_issued, num_keys)
        for key in load.keys[num_keys:]:
            del self.loading[key]
            self.host.release(key)
        self.pool.release(reversed(load.blocks[num_keys:]))
        for each in (load.keys, load.blocks, load.hosts):
            del each[num_keys:]

    def end(self, load: Load) -> None:
        """Give the loaded blocks their keys, and release all blocks: they become cached."""
        self.loads.remove(load)
        for key in load.keys:
            del self.loading[key]
            of_disk = self.disk is not None and key in load.read
            stats = self.disk.stats if self.disk is not None and of_disk else self.host.stats
            stats.hits += 1
        key, size = load.state
        end = len(load.keys) - size
        if size:
            self.pool.publish_checkpoint(key, load.blocks[end:])
        kv = zip(load.blocks[:end], load.keys[:end], strict=True)
        blocks = [self.pool.publish(*each) for each in kv]
        self.pool.release(reversed([*load.found, *blocks]))
        for key in reversed(load.keys):
            self.host.release(key)

    def cancel(self, load: Load) -> None:
        """End a load without its blocks."""
        self.memory.wait()  # a device may still copy them
        self.loads.remove(load)
        gone = set(load.blocks)
        updates = self.pool.updates
        updates.loads = [pair for pair in updates.loads if pair[1] not in gone]
        self.shorten(load, 0)
        self.pool.release(reversed(load.found))

    def leave(self, id: int) -> None:
        """Cancel the loads for which only this request waits."""
        for load in [load for load in self.loads if id in load.waiting]:
            load.waiting.discard(id)
            if not load.waiting:
                self.cancel(load)

    def write_stored(self) -> None:
        """Queue the stored blocks for the disk. Stop holding those that were written."""
        disk = self.disk
        if disk is None:
            return
        while self.writes and next(iter(self.writes.values())).done():
            key, _ = self.writes.popitem(last=False)
            self.host.release(key)
            self.saving.pop(key, None)  # also if the disk has no place for it
        for key in self.stored:
            if key in self.reads:
                continue  # the host block is not complete
            if key in self.host.found and key not in disk and key not in self.writes:
                # Blocks that wait for the disk cannot be evicted, so they are at most half.
                if 2 * len(self.writes) >= self.host.num_blocks or not disk.is_writable:
                    disk.stats.skips += 1
                    continue
                block = self.host.hold(key)
                self.writes[key] = disk.write(key, self.view(block))
        self.stored.clear()

    def wait(self, seconds: float) -> None:
        """Wait for the next block from disk or to disk."""
        each = [*self.reads.values(), *(self.writes.values() if self.saving else ())]
        wait_for(each, seconds, "FIRST_COMPLETED")

    def reset(self) -> list[Load]:
        """Drop all blocks of all tiers, and return the loads that were cancelled."""
        cancelled = self.forget()
        if self.disk is not None:
            self.disk.clear()
        return cancelled

    def forget(self) -> list[Load]:
        """Drop all blocks of the host tier, and return the loads that were cancelled."""
        cancelled = [*self.loads]
        for load in cancelled:
            self.cancel(load)
        wait_for(self.reads.values())
        self.finish_reads()
        for write in self.writes.values():
            write.cancel()
        self.finish_writes()
        self.saving.clear()
        for key in [*self.host.found]:
            self.host.drop(key)
        return cancelled

    def finish_writes(self) -> None:
        """Wait until the disk has all queued blocks."""
        wait_for(self.writes.values())
        for key in self.writes:
            self.host.release(key)
        self.writes.clear()

    def close(self) -> None:
        """Finish reads and queued writes, and close the disk tier."""
        if self.disk is not None:
            wait_for(self.reads.values())
            self.finish_writes()
            self.disk.close()

    def check(self) -> None:
        """Assert the invariants of loads and host tier."""
        self.host.check()
        holders = dict[bytes, int]()
        of_loads = [key for load in self.loads for key in load.keys]
        for key in [*self.reads, *self.writes, *of_loads]:
            holders[key] = holders.get(key, 0) + 1
        assert holders == self.host.holders, "a host block is held by nothing"
        assert self.loading == {key: load for load in self.loads for key in load.keys}
        for load in self.loads:
            assert len(load.keys) == len(load.blocks) == len(load.hosts)
            assert [self.host.found[key] for key in load.keys] == load.hosts

    @property
    def stats(self) -> dict[str, TierStats]:
        """The sums of each tier, by name."""
        size = self.pool.block_bytes
        self.host.stats.num_bytes = size * len(self.host.found)
        tiers = {"host": self.host.stats}
        if self.disk is not None:
            self.disk.stats.num_bytes = size * len(self.disk)
            tiers["disk"] = self.disk.stats
        return tiers


def loadable(
    table: BlockTable, token_ids: "array[int]", num_found: int, tiers: Tiers
) -> Loadable | None:
    """Return the longest prefix that a load would let a lookup find; None if it is not longer than
    `num_found` blocks. With a recurrent state, the prefix ends at a checkpoint.
    """
    pool, keys, size = table.pool, table.keys_after(token_ids, 0), table.state.size
    found = pool.find(keys)
    end = len(found) + tiers.count(keys[len(found) :])
    while size and end > num_found and not has_checkpoint(pool, tiers, keys[end - 1], size):
        end -= 1
    if end <= num_found:
        return None
    key = keys[end - 1]
    is_missing = size > 0 and key not in pool.checkpoints
    state = (key, size) if is_missing else (b"", 0)
    return Loadable(end, found[:end], keys[len(found) : end] + state_keys(*state), state)


def has_checkpoint(pool: BlockPool, tiers: Tiers, key: bytes, size: int) -> bool:
    return key in pool.checkpoints or tiers.has_checkpoint(key, size)
