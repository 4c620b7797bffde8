"""The KV block pool (free, cached and held blocks), and the block table of a request."""

import hashlib
from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from specserve.memory.states import NO_STATE, RequestState, StateReplay

LEAST_PART = 8  # a smaller part of a block is not worth a copy
NO_BLOCK = array("i"), -1  # tokens, block
Keys = dict[str, list[bytes]]  # keys of a prompt's full blocks, by name of the KV format


def root_key(*parts: str | int) -> bytes:
    """The first key of a chain: a hash of everything besides tokens that KV depends on."""
    return hashlib.sha256(msgspec.json.encode(parts)).digest()


class BlockHasher:
    """The keys of one request's full blocks for one model, in order.

    key = SHA-256(parent key, tokens): equal keys mean equal prefixes. A weaker hash could collide,
    and give one prompt the KV of another.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root, self.block_size = root, block_size
        self.keys: list[bytes] = []

    def extend(self, token_ids: "array[int]", num_tokens: int) -> list[bytes]:
        """Add the keys of full blocks in the first `num_tokens` tokens; return all keys."""
        size, keys = self.block_size, self.keys
        for start in range(len(keys) * size, num_tokens - size + 1, size):
            tokens = token_ids[start : start + size].tobytes()
            keys.append(hashlib.sha256((keys[-1] if keys else self.root) + tokens).digest())
        return keys

    def parent(self, token_ids: "array[int]", place: int) -> bytes:
        """Return the key before a block: that of the block before, or the first of the chain."""
        return self.extend(token_ids, place * self.block_size)[place - 1] if place else self.root


class KVFormat(msgspec.Struct, frozen=True):
    """The inputs of one model's block keys besides tokens and salt."""

    name: str  # the model, and the dtype of its KV
    block_size: int  # tokens
    is_per_tenant: bool = False  # an API key finds only blocks of its own requests
    tenants: tuple[str, ...] = ()  # what identifies each API key after a restart; () if nothing
    has_state: bool = False  # the model has recurrent layers: prefixes end at checkpoints

    def hasher(self, salt: str, adapter: str = "", tenant: int = 0) -> BlockHasher:
        """A hasher for one request; `adapter` is the digest of its LoRA adapter, or ""."""
        parts: list[str | int] = [salt, adapter] if adapter else [salt]
        if self.is_per_tenant and self.tenants:
            parts.append(f"tenant {self.tenants[tenant]}")  # differs from any adapter's digest
        elif self.is_per_tenant and tenant:
            parts.append(tenant)  # an int, so that it differs from any adapter
        return BlockHasher(root_key(self.name, *parts), self.block_size)


def state_key(key: bytes, number: int) -> bytes:
    """The key in tiers of one of the blocks of a checkpoint."""
    return hashlib.sha256(b"%b state %d" % (key, number)).digest()


def state_keys(key: bytes, num_blocks: int) -> list[bytes]:
    """The keys in tiers of the blocks of a checkpoint."""
    return [state_key(key, number) for number in range(num_blocks)]


def prompt_keys(
    formats: Mapping[str, KVFormat],
    token_ids: Sequence[int],
    salt: str,
    adapter: str = "",
    tenant: int = 0,
) -> Keys:
    """The keys of a prompt's full blocks for every model with a prefix cache. Adapters change only
    the target model.
    """
    tokens = array("i", token_ids)
    hashers = {
        of.name: of.hasher(salt, adapter if model == "target" else "", tenant)
        for model, of in formats.items()
    }
    return {name: hasher.extend(tokens, len(tokens)) for name, hasher in hashers.items()}


class KVUpdates(NamedTuple):
    """Updates of the arena at the start of a launch, in this order: moves, stores, replays, copies,
    loads.

    moves    by model: (from slot, to slot) of a token's KV; slot = block * block_size + offset
    stores   (block, host block): an evicted block moves to the host tier
    copies   (from block, to block) of whole blocks
    loads    (host block, block): a block comes back from the host tier
    replays  accepted draft tokens that recurrent states take up
    """

    moves: dict[str, list[tuple[int, int]]]
    stores: list[tuple[int, int]]
    copies: list[tuple[int, int]]
    loads: list[tuple[int, int]]
    replays: Sequence[StateReplay] = ()

    def __bool__(self) -> bool:
        return any(self)


class PendingUpdates:
    """Updates for the next launch.

    The next launch of either model moves the accepted nodes of the last step before another
    request can write to their blocks. It also replays them, so that a copy of a state has them.
    The other updates are added while a step is planned or drafted, after the moves and replays of
    the last step.

    Evicted blocks are stored before replays, copies and loads overwrite them. A checkpoint that a
    pending replay writes is not stored. Loads come last: a block that
    a copy reads or writes may become free, and then be the target of a load. No copy reads a block
    that is loaded in the same launch, because requests find it later.
    """

    def __init__(self) -> None:
        self.moves: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self.stores: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.loads: list[tuple[int, int]] = []
        self.replays: list[StateReplay] = []

    def __bool__(self) -> bool:
        others = self.stores, self.copies, self.loads, self.replays
        return any((any(self.moves.values()), *others))

    def move(self, model: str, slots: Iterable[tuple[int, int]]) -> None:
        assert not self.copies, "a launch would run this move before the earlier copies"
        self.moves[model] += slots

    def replay(self, replay: StateReplay) -> None:
        assert not self.copies, "a launch would run this replay before the earlier copies"
        self.replays.append(replay)

    def copy(self, source: int, target: int) -> None:
        self.copies.append((source, target))

    def writes_checkpoint(self, block: int) -> bool:
        """Return whether a pending replay writes the checkpoint that this block is part of."""
        return any(block in replay.snapshot for replay in self.replays)

    def take(self) -> KVUpdates:
        """Return and clear all pending updates; the caller must run them."""
        moves = {model: slots for model, slots in self.moves.items() if slots}
        updates = KVUpdates(moves, self.stores, self.copies, self.loads, self.replays)
        self.moves, self.stores, self.copies, self.loads = defaultdict(list), [], [], []
        self.replays = []
        return updates


class BlockTokens:
    """Blocks with a key and their tokens, sorted by tokens, by the key of the block before them.

    KV of a token depends on the tokens before it, and on nothing after it. So a request may copy
    the first tokens of a block, if the block before and these tokens are equal.
    """

    def __init__(self) -> None:
        self.by_parent: dict[bytes, list[tuple[array[int], int]]] = {}
        self.known: dict[int, tuple[bytes, array[int]]] = {}  # by block: parent, tokens

    def add(self, block: int, parent: bytes, tokens: "array[int]") -> None:
        """Add a block, if it is not there."""
        if block not in self.known:
            self.known[block] = parent, tokens
            insort(self.by_parent.setdefault(parent, []), (tokens, block))

    def drop(self, block: int) -> None:
        """Drop a block, if it is there."""
        if block in self.known:
            parent, tokens = self.known.pop(block)
            siblings = self.by_parent[parent]
            del siblings[bisect_left(siblings, (tokens, block))]
            if not siblings:
                del self.by_parent[parent]

    def clear(self) -> None:
        self.by_parent.clear()
        self.known.clear()

    def find(self, parent: bytes, tokens: "array[int]", counts: Sequence[int]) -> tuple[int, int]:
        """Return the block that begins with most of the tokens, and their number; 0 for none.
        `counts` is the number of holders by block: a draft head may still add KV to held blocks.

        The tokens' place among the siblings is next to the best one, apart from held blocks.
        """
        siblings = self.by_parent.get(parent, [])
        place = bisect_left(siblings, (tokens, -1))
        best, most = -1, 0
        for side in range(place - 1, -1, -1), range(place, len(siblings)):
            own, block = next((siblings[i] for i in side if not counts[siblings[i][1]]), NO_BLOCK)
            size = num_equal(own, tokens)
            if size > most:
                best, most = block, size
        return best, most


def num_equal(some: "array[int]", others: "array[int]") -> int:
    """Return how many first tokens are equal."""
    size = min(len(some), len(others))
    if some[:size] == others[:size]:
        return size
    return next(i for i in range(size) if some[i] != others[i])


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
        self.tokens = BlockTokens()
        self.ends = set[int]()  # blocks with a key that are partly full: ends of texts
        self.checkpoints: dict[bytes, list[int]] = {}  # by key
        self.checkpoint_of: dict[int, bytes] = {}  # by block
        self.parts: dict[bytes, int] = {}  # blocks of checkpoints by their keys in tiers, if any
        self.num_held = Counter(target=0, draft=0)  # by owner
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
        if self.on_evict is not None and block not in self.ends:
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
            self.tokens.drop(block)
            self.ends.discard(block)

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

    def publish(
        self, block: int, key: bytes, parent: bytes = b"", tokens: "array[int] | None" = None
    ) -> int:
        """Give a held block a key; return the block that the key finds. With its tokens and the key
        of the block before, a part of it is found, too.

        If another block has the key, the caller holds that block instead of its own. Then a table
        with a block of a prefix also holds the blocks that are found before it.
        """
        twin = self.found.setdefault(key, block)
        if tokens is not None:
            self.tokens.add(twin, parent, tokens)
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
        full = (key for key, block in self.found.items() if block not in self.ends)
        return [*full, *self.parts]

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
        self.tokens.clear()
        self.ends.clear()
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
        keyed = self.ends | self.tokens.known.keys()
        assert all(self.keys[block] for block in keyed), "a block has tokens, but no key"
        blocks = {b: key for key, each in self.checkpoints.items() for b in each}
        assert blocks == self.checkpoint_of, "checkpoints and their blocks differ"
        assert not free & blocks.keys(), "a block of a checkpoint is free"
        if self.on_evict is not None:
            assert {*self.parts.values()} == blocks.keys(), "a block of a checkpoint has no key"


class BlockTable:
    """The blocks of a request for one model; they hold the KV of its first `num_computed` tokens.

    Several tables may hold a block. A block is writable only if one table holds it and it has no
    key, so that shared KV never changes.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        owner: str = "target",
        hasher: BlockHasher | None = None,
        state: RequestState | None = None,
    ) -> None:
        self.pool, self.block_size, self.owner = pool, block_size, owner
        self.hasher = hasher  # None: no prefix cache
        self.blocks = array("i")
        self.state = NO_STATE if state is None else state
        self.num_computed = 0
        self.num_published = 0  # blocks
        self.epoch = pool.num_resets  # number of cache resets when the first block was added

    @property
    def held(self) -> list[int]:
        """All blocks that the table holds: of KV, of the state, and of its next checkpoint."""
        return [*self.blocks, *self.state.blocks, *self.state.snapshot]

    def want_checkpoint(self, num_tokens: int) -> None:
        """Write a checkpoint of the state at the end of the last full block of these tokens."""
        if self.state.size and num_tokens >= self.block_size:
            self.state.wanted.add(num_tokens // self.block_size)

    @property
    def num_state_due(self) -> int:
        """Number of blocks to allocate for the state before the first token is computed."""
        return 0 if self.state.blocks else self.state.size

    @property
    def is_copy_due(self) -> bool:
        """Whether the next slot is in a block that is not writable: shared, or with a key."""
        place = self.num_computed // self.block_size
        if place >= len(self.blocks):
            return False
        block = self.blocks[place]
        return self.pool.counts[block] > 1 or self.pool.keys[block] is not None

    def missing(self, num_slots: int) -> int:
        """Blocks to allocate before the slots [num_computed, num_slots) can be written."""
        new = max(0, -(-num_slots // self.block_size) - len(self.blocks))
        if num_slots <= self.num_computed:
            return new
        new += self.is_copy_due
        return new + self.num_state_due if self.state.size else new

    def try_reserve(self, num_slots: int) -> bool:
        """Hold blocks for `num_slots` slots. Return False and change nothing if too few blocks are
        available.
        """
        missing = self.missing(num_slots)
        if missing == 0:
            return True
        blocks = self.pool.try_allocate(missing, self.owner)
        if blocks is None:
            return False
        if num_slots > self.num_computed and self.is_copy_due:
            self.replace(self.num_computed // self.block_size, blocks.pop())
        if num_slots > self.num_computed and self.num_state_due:
            self.state.blocks = [blocks.pop() for _ in range(self.state.size)]
        self.blocks.extend(blocks)
        return True

    def replace(self, place: int, block: int) -> None:
        """Hold `block` instead of a shared one; the next launch copies the KV into it."""
        shared = self.blocks[place]
        self.pool.updates.copy(shared, block)
        self.blocks[place] = block
        self.pool.release([shared])

    def reserve_some(self, num_slots: int, spare: int) -> int:
        """Hold up to `spare` more blocks for up to `num_slots` slots; return the slots that fit."""
        missing, spare = self.missing(num_slots), max(0, spare)
        if missing == 0:
            return num_slots
        if missing > spare:
            more = spare - self.is_copy_due - self.num_state_due
            num_slots = max(self.num_computed, (len(self.blocks) + more) * self.block_size)
        reserved = self.try_reserve(num_slots)
        assert reserved, "fewer blocks are available than `spare`"
        return num_slots

    @property
    def published_keys(self) -> list[bytes]:
        """The keys in tiers of the blocks that have one, and of their checkpoints, the last one
        first.
        """
        keys = [] if self.hasher is None else self.hasher.keys[: self.num_published]
        found = [key for key in reversed(keys) if key in self.pool.checkpoints]
        return keys + [part for key in found for part in state_keys(key, self.state.size)]

    def num_keys(self, token_ids: "array[int]") -> int:
        """Maximum number of full blocks that a lookup of these tokens returns. They end before the
        last token, which is always computed because its logits are needed.
        """
        return 0 if self.hasher is None else (len(token_ids) - 1) // self.block_size

    def key(self, token_ids: "array[int]", place: int) -> bytes | None:
        if self.hasher is None or place >= self.num_keys(token_ids):
            return None
        return self.hasher.extend(token_ids, len(token_ids) - 1)[place]

    def keys_after(self, token_ids: "array[int]", place: int) -> list[bytes]:
        """The keys of these tokens from a place on that a lookup may use."""
        if self.hasher is None:
            return []
        keys = self.hasher.extend(token_ids, len(token_ids) - 1)
        return keys[place : self.num_keys(token_ids)]

    def find(self, token_ids: "array[int]") -> list[int]:
        """The cached blocks for these tokens that follow the blocks in the table. With a recurrent
        state, they end at a checkpoint.
        """
        keys = self.keys_after(token_ids, len(self.blocks))
        found = self.pool.find(keys)
        while self.state.size and found and keys[len(found) - 1] not in self.pool.checkpoints:
            found.pop()
        return found

    def match(self, token_ids: "array[int]", spare: int) -> None:
        """Extend the table by all blocks that the prefix cache finds, and by a copy of a part of
        the next one. At most `spare` of these blocks may be cached, i.e. held by no table, or new.
        """
        self.match_part(token_ids, self.match_blocks(token_ids, spare))

    def match_blocks(self, token_ids: "array[int]", spare: int) -> int:
        """Extend the table by all blocks that the prefix cache finds, if its last block is full.

        At most `spare` of these blocks may be cached; return how many more may be. Tables with a
        recurrent state use `match_checkpoint` instead.
        """
        assert self.state.size == 0, "the state of a prefix is missing"
        if not self.blocks:
            self.epoch = self.pool.num_resets
        place = len(self.blocks)
        if place * self.block_size != self.num_computed:
            return spare
        for block in self.find(token_ids):
            is_cached = self.pool.counts[block] == 0
            if is_cached and spare <= 0:
                break
            spare -= is_cached
            self.pool.hold(block)
            self.blocks.append(block)
        if len(self.blocks) > place:
            self.num_published = len(self.blocks)
            self.num_computed = self.num_published * self.block_size
        return spare

    def match_part(self, token_ids: "array[int]", spare: int) -> None:
        """Extend the table by a new block with the first tokens of a cached one, which the next
        launch copies, if its last block is full and a block may be taken.

        The last equal token is left out, because the KV of a draft head depends on the next token,
        too. A table that ends within a block finds and loads no more blocks, so do these first.
        """
        begin = self.num_computed
        if spare <= 0 or self.hasher is None or len(self.blocks) * self.block_size != begin:
            return
        parent = self.hasher.parent(token_ids, len(self.blocks))
        next_tokens = token_ids[begin : begin + self.block_size]
        source, num_equal = self.pool.tokens.find(parent, next_tokens, self.pool.counts)
        size = num_equal - 1
        if size * LEAST_PART < self.block_size:
            return
        self.pool.cached.move_to_end(source)  # a hit is a use
        blocks = self.pool.try_allocate(1, self.owner)
        if blocks is not None:
            if blocks[0] != source:  # else the cached block was evicted for this
                self.pool.updates.copy(source, blocks[0])
            self.blocks.extend(blocks)
            self.num_computed += size

    def fork(self, other: "BlockTable", num_tokens: int, takes_state: bool = False) -> None:
        """Share the blocks of another table's first tokens. The first holder that writes to a
        partly full block copies it.

        The next launch copies a recurrent state, which must have `num_tokens` tokens. Without
        blocks for the copy, the table stays empty. `takes_state`: the other table gives up its own.
        """
        assert not self.blocks, "only an empty table can fork another"
        assert num_tokens <= other.num_computed
        if self.state.size and num_tokens:
            assert num_tokens == other.num_computed, "the state has other tokens"
            if not self.fork_state(other.state, takes_state):
                return
        self.blocks = other.blocks[: -(-num_tokens // self.block_size)]
        for block in self.blocks:
            self.pool.hold(block)
        self.num_computed, self.epoch = num_tokens, other.epoch
        self.num_published = min(other.num_published, num_tokens // self.block_size)

    def fork_state(self, other: RequestState, takes_state: bool) -> bool:
        """Take or copy a state. Return False if blocks for the copy are missing."""
        if takes_state:
            self.state.blocks, other.blocks = other.blocks, []
            return True
        blocks = self.pool.try_allocate(self.state.size, self.owner)
        if blocks is None:
            return False
        for pair in zip(other.blocks, blocks, strict=True):
            self.pool.updates.copy(*pair)
        self.state.blocks = blocks
        return True

    @property
    def is_publishing(self) -> bool:
        """Whether the blocks get keys: not without a prefix cache, and not after a cache reset."""
        return self.hasher is not None and self.epoch == self.pool.num_resets

    def publish(self, token_ids: "array[int]") -> None:
        """Give keys to the blocks that are full of computed tokens, so that requests find them."""
        full = self.num_computed // self.block_size
        if full == self.num_published or self.hasher is None or not self.is_publishing:
            return
        keys, size = self.hasher.extend(token_ids, self.num_computed), self.block_size
        for i in range(self.num_published, full):
            own = keys[i], self.hasher.parent(token_ids, i)
            tokens = token_ids[i * size : (i + 1) * size]
            self.blocks[i] = self.pool.publish(self.blocks[i], *own, tokens)
        self.num_published = full

    def publish_end(self, token_ids: "array[int]") -> None:
        """Let requests find the last block of a text that has ended, which is partly full. Copies
        of a part of it need no recurrent state, so there must be none.
        """
        place, number = divmod(self.num_computed, self.block_size)
        if self.hasher is None or not self.is_publishing or self.state.size:
            return
        if number * LEAST_PART < self.block_size or self.is_copy_due:
            return
        begin = place * self.block_size
        parent, tokens = self.hasher.parent(token_ids, place), token_ids[begin : begin + number]
        key = hashlib.sha256(parent + b"end" + tokens.tobytes()).digest()
        block = self.pool.publish(self.blocks[place], key, parent, tokens)
        self.pool.ends.add(block)
        self.blocks[place] = block

    def slot(self, place: int) -> int:
        """The arena slot with the KV of the request's token at index `place`."""
        block, offset = divmod(place, self.block_size)
        return self.blocks[block] * self.block_size + offset

    def slots(self, begin: int, end: int) -> list[int]:
        """The arena slots of the token indices [begin, end)."""
        slots, size = list[int](), self.block_size
        while begin < end:
            block, offset = divmod(begin, size)
            first, count = self.blocks[block] * size + offset, min(size - offset, end - begin)
            slots += range(first, first + count)
            begin += count
        return slots

    def keep_nodes(self, root: int, nodes: Sequence[int]) -> None:
        """Count the KV of accepted nodes as computed; the next launch moves it behind the root's.

        Node k was written at index root + k, and accepted node j belongs at root + j, with j <= k.
        No move overwrites the source of a later one, so moves in order need no scratch memory.
        """
        moved = [(j, k) for j, k in enumerate(nodes, 1) if k != j]
        if moved:
            slots = [(self.slot(root + k), self.slot(root + j)) for j, k in moved]
            self.pool.updates.move(self.owner, slots)
        self.num_computed += len(nodes)

    def trim(self) -> None:
        """Release the blocks without a computed token, the last one first. Then the end of a prefix
        is evicted before its beginning.
        """
        kept = -(-self.num_computed // self.block_size)
        if kept < len(self.blocks):
            given_back = self.blocks[kept:]
            del self.blocks[kept:]
            self.pool.release(reversed(given_back))

    def clear(self) -> None:
        """Release all blocks; the KV must be found or computed again."""
        self.num_computed = self.num_published = 0
        self.trim()
        if self.state.size:
            self.pool.release(self.state.take())


class KVTables:
    """Creates the block tables of requests, and the keys of their prompts.

    formats  by model ("target", "draft"): the KV format, for models with a prefix cache
    """

    def __init__(
        self,
        pool: BlockPool,
        block_sizes: Mapping[str, int],
        names: Mapping[str, str] | None = None,
        is_per_tenant: bool = False,
        tenants: tuple[str, ...] = (),
        state_size: int = 0,
        state_interval: int = 0,
        draft_state_size: int = 0,
    ) -> None:
        """`block_sizes` is in tokens, by model. `names` identifies each model's KV; a model without
        a name has no prefix cache. `is_per_tenant`: a tenant finds only KV of its own requests.
        `tenants` identifies them, if KV is used after a restart. `state_size` and `state_interval`:
        see RequestState; the former is the target model's, and `draft_state_size` the draft
        model's.
        """
        self.pool, self.block_sizes, self.tenants = pool, block_sizes, tenants
        self.state_size, self.state_interval = state_size, state_interval
        self.draft_state_size = draft_state_size
        has_state = {"target": state_size > 0, "draft": draft_state_size > 0}
        self.formats = {
            model: KVFormat(
                name, block_sizes[model], is_per_tenant, tenants, has_state.get(model, False)
            )
            for model, name in (names or {}).items()
            if model in block_sizes
        }

    def prompt_keys(
        self, token_ids: Sequence[int], salt: str, adapter: str = "", tenant: int = 0
    ) -> Keys:
        """The keys of a prompt's full blocks for every model; thread-safe."""
        return prompt_keys(self.formats, token_ids, salt, adapter, tenant)

    def table(
        self, model: str, salt: str, keys: Keys | None = None, adapter: str = "", tenant: int = 0
    ) -> BlockTable:
        """An empty table for a model's KV. `keys` are the keys of the request's prompt, `adapter`
        is the digest of its LoRA adapter.
        """
        format = self.formats.get(model)
        hasher = None if format is None else format.hasher(salt, adapter, tenant)
        if format is not None and hasher is not None and keys:
            hasher.keys = list(keys.get(format.name, ()))
        size = self.block_sizes.get(model, self.block_sizes["target"])
        state_size = self.draft_state_size if model == "draft" else self.state_size
        state = RequestState(state_size, self.state_interval) if state_size else None
        return BlockTable(self.pool, size, model, hasher, state)
