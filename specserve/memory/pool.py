"""The pool of KV blocks: free, cached and held ones."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from specserve.memory.keys import state_key, state_keys
from specserve.memory.updates import PendingUpdates


class BlockPool:
    """All KV blocks, with their reference counts and prefix-cache keys.

    Invariant: free + cached + held = all blocks, and a block's count is the number of tables that
    hold it. `find` finds a block by its key. A block with a key that no table holds is cached.
    Cached blocks are evicted in least-recently-used order if no block is free.

    A checkpoint is a copy of a recurrent state in several blocks, with the key of the block of
    tokens that ends there. Its blocks are cached or evicted together.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int = 0,
    ) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self.updates = PendingUpdates()
        # Called for each block that is evicted with a key, before the key is lost; None: no tiers
        self.on_evict: Callable[[int, bytes], None] | None = None
        # A stack, so that recently used memory is reused first.
        self.free = list(range(num_blocks - 1, -1, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()  # in order of eviction
        self.counts = [0] * num_blocks
        self.owners = [""] * num_blocks  # the model whose KV a block has: "target" or "draft"
        self.keys: list[bytes | None] = [None] * num_blocks
        self.found: dict[bytes, int] = {}
        self.checkpoints: dict[bytes, list[int]] = {}  # by key
        self.checkpoint_of: dict[int, bytes] = {}  # by block
        self.parts: dict[bytes, int] = {}  # blocks of checkpoints by their keys in tiers, if any
        self.num_held: Counter[str] = Counter()  # by owner
        self.num_resets = 0
        self.num_checkpoint_hits = 0  # lookups that found a checkpoint

    @property
    def num_available(self) -> int:
        """Number of blocks that `try_allocate` can return."""
        return len(self.free) + len(self.cached)

    @property
    def is_whole(self) -> bool:
        """Whether no table holds a block."""
        return self.num_available == self.num_blocks

    def holders(self) -> dict[str, int]:
        """Number of blocks by holder; a shared block counts once."""
        held = {owner: self.num_held[owner] for owner in ("target", "draft")}
        return {**held, "cached": len(self.cached), "free": len(self.free)}

    def try_allocate(self, n: int, owner: str = "target") -> list[int] | None:
        """Allocate n blocks with one holder each; None if fewer are available."""
        if n > self.num_available:
            return None
        blocks = [self.free.pop() if self.free else self.evict() for _ in range(n)]
        for block in blocks:
            self.counts[block], self.owners[block] = 1, owner
        self.num_held[owner] += n
        return blocks

    def evict(self) -> int:
        block, _ = self.cached.popitem(last=False)
        if block in self.checkpoint_of:
            self.evict_checkpoint(self.checkpoint_of[block])
            return block
        key = self.keys[block]
        assert key is not None, "a cached block has a key"
        if self.on_evict is not None:
            self.on_evict(block, key)
        self.forget(block)
        return block

    def evict_checkpoint(self, key: bytes) -> None:
        """Drop a checkpoint. Its contents stay until the next launch, so that it can be stored."""
        blocks = self.checkpoints[key]
        if self.on_evict is not None and not self.updates.writes_checkpoint(blocks[0]):
            for each in zip(blocks, state_keys(key, len(blocks)), strict=True):
                self.on_evict(*each)
        self.drop_checkpoint(key)

    def evict_all(self) -> None:
        """Evict all cached blocks, the least recently used first."""
        while self.cached:
            self.free.append(self.evict())

    def forget(self, block: int) -> None:
        key = self.keys[block]
        if key is not None:
            del self.found[key]
            self.keys[block] = None

    def publish_checkpoint(self, key: bytes, blocks: Sequence[int]) -> None:
        """Cache a state, whose blocks the caller held. An existing checkpoint of the key stays."""
        if key not in self.checkpoints:
            self.checkpoints[key] = list(blocks)
            self.checkpoint_of |= dict.fromkeys(blocks, key)
            if self.on_evict is not None:
                keys = state_keys(key, len(blocks))
                self.parts |= zip(keys, blocks, strict=True)
        self.release(blocks)

    def drop_checkpoint(self, key: bytes) -> None:
        """Drop a checkpoint, if it exists; blocks that no table holds become free."""
        for number, block in enumerate(self.checkpoints.pop(key, ())):
            del self.checkpoint_of[block]
            if self.on_evict is not None:
                del self.parts[state_key(key, number)]
            if block in self.cached:
                del self.cached[block]
                self.free.append(block)

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Drop the keys of blocks, so that no request finds them; cached blocks become free."""
        for block in blocks:
            self.forget(block)
            if block in self.cached:
                del self.cached[block]
                self.free.append(block)

    def hold(self, block: int) -> None:
        """Add a holder to a block that is held or cached."""
        if self.counts[block] == 0:
            del self.cached[block]
            self.num_held[self.owners[block]] += 1
        self.counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block. Blocks that become cached are evicted in this order."""
        for block in blocks:
            self.counts[block] -= 1
            assert self.counts[block] >= 0, f"block {block} was released twice"
            if self.counts[block] > 0:
                continue
            self.num_held[self.owners[block]] -= 1
            if self.keys[block] is None and block not in self.checkpoint_of:
                self.free.append(block)
            else:
                self.cached[block] = None

    def publish(self, block: int, key: bytes) -> int:
        """Give a held block a key; return the block that the key finds.

        If another block has the key, the caller holds that block instead of its own. Then a table
        with a block of a prefix also holds the blocks that are found before it.
        """
        twin = self.found.setdefault(key, block)
        if twin == block:
            self.keys[block] = key
        else:
            self.hold(twin)
            self.release([block])
        return twin

    def block_of(self, key: bytes) -> int | None:
        """The block with a key in tiers: of KV, or of a part of a checkpoint."""
        return self.found.get(key, self.parts.get(key))

    @property
    def tier_keys(self) -> list[bytes]:
        """The keys of all blocks that a tier can store."""
        return [*self.found, *self.parts]

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of these keys, up to the first unknown key."""
        blocks = []
        for key in keys:
            block = self.found.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def drop(self, owner: str) -> None:
        """Free the cached blocks of a model that was removed."""
        for block in [block for block in self.cached if self.owners[block] == owner]:
            if block in self.checkpoint_of:
                self.drop_checkpoint(self.checkpoint_of[block])
            elif block in self.cached:
                del self.cached[block]
                self.forget(block)
                self.free.append(block)

    def reset_cache(self) -> None:
        """Drop all keys, so that no earlier KV is found."""
        self.num_resets += 1
        self.keys = [None] * self.num_blocks
        self.found.clear()
        self.checkpoints.clear()
        self.checkpoint_of.clear()
        self.parts.clear()
        self.free.extend(self.cached)
        self.cached.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariant; `tables` are the blocks of all tables."""
        holders = Counter(block for table in tables for block in table)
        free = set(self.free)
        assert len(free) == len(self.free), "a block is free twice"
        for block, count in enumerate(self.counts):
            assert count == holders[block], f"block {block}: {count} != {holders[block]} holders"
            places = (count > 0) + (block in free) + (block in self.cached)
            assert places == 1, f"block {block} is in {places} of held, free and cached, not in 1"
            key = self.keys[block]
            assert key is None or self.found.get(key) == block, f"block {block} is not found"
            has_key = key is not None or block in self.checkpoint_of
            assert has_key or block not in self.cached, f"block {block} has no key"
            assert key is None or block not in self.checkpoint_of, f"block {block} has two keys"
            assert key is None or block not in free, f"block {block} is free, but has a key"
        num_held, num_keys = (sum(map(bool, x)) for x in (self.counts, self.keys))
        owned = self.num_held.total()
        assert owned == num_held, f"num_held counts {owned} blocks, but {num_held} are held"
        assert len(self.found) == num_keys, "more keys than blocks with a key"
        blocks = {b: key for key, each in self.checkpoints.items() for b in each}
        assert blocks == self.checkpoint_of, "checkpoints and their blocks differ"
        assert not free & blocks.keys(), "a block of a checkpoint is free"
        if self.on_evict is not None:
            assert {*self.parts.values()} == blocks.keys(), "a block of a checkpoint has no key"
