"""The host tier: which block of host memory has which key."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from specserve.memory.disk_tier import TierStats


class HostTier:
    """Which host block has which key.

    A host block is free, or it has a key. A block with a key that is not held can be evicted, in
    least-recently-used order.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.found: dict[bytes, int] = {}
        self.idle: OrderedDict[bytes, None] = OrderedDict()  # not held, in order of eviction
        self.holders: dict[bytes, int] = {}  # number of copies that read or write the block
        self.pinned: dict[bytes, None] = {}  # keys that are not evicted
        self.stats = TierStats()

    def touch(self, key: bytes) -> None:
        """Evict a block later than all others."""
        if key in self.idle:
            self.idle.move_to_end(key)

    def try_add(self, key: bytes) -> int | None:
        """Return a host block for a new key; None if all blocks are held."""
        assert key not in self.found, "the tier has the key"
        if not self.free and not self.try_evict():
            return None
        self.found[key] = block = self.free.pop()
        if key not in self.pinned:
            self.idle[key] = None
        return block

    def try_evict(self) -> bool:
        if not self.idle:
            return False
        self.drop(next(iter(self.idle)))
        self.stats.evictions += 1
        return True

    def drop(self, key: bytes) -> None:
        """Free the block of a key that is not held."""
        assert key not in self.holders, "a copy still uses the block"
        self.idle.pop(key, None)
        self.free.append(self.found.pop(key))

    def hold(self, key: bytes) -> int:
        """Keep a block until `release`, and return it."""
        self.idle.pop(key, None)
        self.holders[key] = self.holders.get(key, 0) + 1
        return self.found[key]

    def release(self, key: bytes) -> None:
        """End a hold. The block is evicted later than all others."""
        self.holders[key] -= 1
        if self.holders[key] == 0:
            del self.holders[key]
            if key not in self.pinned:
                self.idle[key] = None

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keep the blocks of exactly these keys until the next call. They fill at most half of the
        tier, so that other blocks can pass through it.
        """
        before, self.pinned = self.pinned, dict.fromkeys(islice(keys, self.num_blocks // 2))
        for key in before:
            if key in self.found and key not in self.pinned and key not in self.holders:
                self.idle[key] = None
        for key in self.pinned:
            self.idle.pop(key, None)

    def check(self) -> None:
        """Assert the invariant."""
        used = [*self.free, *self.found.values()]
        assert sorted(used) == list(range(self.num_blocks)), "a host block is lost or used twice"
        kept = self.holders.keys() | self.pinned.keys() & self.found.keys()
        assert self.found.keys() == self.idle.keys() | kept, "a host block is never evicted"
        assert not self.idle.keys() & kept, "a held host block can be evicted"
