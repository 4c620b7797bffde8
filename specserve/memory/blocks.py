"""The block table of a request, and the tables of all models."""

from array import array
from collections.abc import Mapping, Sequence

from specserve.memory.keys import BlockHasher, Keys, KVFormat, prompt_keys, state_keys
from specserve.memory.pool import BlockPool
from specserve.memory.states import NO_STATE, RequestState


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
        return new + self.is_copy_due + self.num_state_due

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
        """Extend the table by all blocks that the prefix cache finds, if its last block is full.

        At most `spare` of these blocks may be cached, i.e. held by no table. Tables with a
        recurrent state use `match_checkpoint` instead.
        """
        assert self.state.size == 0, "the state of a prefix is missing"
        if not self.blocks:
            self.epoch = self.pool.num_resets
        place = len(self.blocks)
        if place * self.block_size != self.num_computed:
            return
        for block in self.find(token_ids):
            spare -= self.pool.counts[block] == 0
            if spare < 0:
                break
            self.pool.hold(block)
            self.blocks.append(block)
        if len(self.blocks) > place:
            self.num_published = len(self.blocks)
            self.num_computed = self.num_published * self.block_size

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
        keys = self.hasher.extend(token_ids, self.num_computed)
        for i in range(self.num_published, full):
            self.blocks[i] = self.pool.publish(self.blocks[i], keys[i])
        self.num_published = full

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
