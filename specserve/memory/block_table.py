"""One request's blocks of one model, in order."""

from array import array

from specserve.memory.block_keys import BlockHasher
from specserve.memory.pool import BlockPool


class BlockTable:
    """The slots 0, 1, .. of a request; the KV of its first `num_computed` tokens stands in them.

    Several tables may hold a block. It is written only while a single table holds it and it has no
    key, so that shared KV never changes.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        owner: str = "target",
        hasher: BlockHasher | None = None,
    ) -> None:
        self.pool, self.block_size, self.owner = pool, block_size, owner
        self.hasher = hasher  # None: its blocks get no keys
        self.blocks = array("i")
        self.num_computed = 0
        self.num_published = 0  # blocks
        self.epoch = pool.num_resets  # when its first block was taken

    @property
    def is_copy_due(self) -> bool:
        """Whether the next slot lies in a block that may not be written: shared, or with a key."""
        place = self.num_computed // self.block_size
        if place >= len(self.blocks):
            return False
        block = self.blocks[place]
        return self.pool.counts[block] > 1 or self.pool.keys[block] is not None

    def missing(self, num_slots: int) -> int:
        """Blocks to allocate before the slots [num_computed, num_slots) can be written."""
        new = max(0, -(-num_slots // self.block_size) - len(self.blocks))
        return new + (num_slots > self.num_computed and self.is_copy_due)

    def try_reserve(self, num_slots: int) -> bool:
        """Hold blocks for `num_slots` slots; False, with nothing changed, where too few are
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
        self.blocks.extend(blocks)
        return True

    def replace(self, place: int, block: int) -> None:
        """Hold `block` instead of a shared one; the next launch copies the KV into it."""
        shared = self.blocks[place]
        self.pool.updates.copy(shared, block)
        self.blocks[place] = block
        self.pool.release([shared])

    def reserve_some(self, num_slots: int, spare: int) -> int:
        """Hold blocks for up to `num_slots` slots, `spare` more at most; the slots that fit."""
        missing, spare = self.missing(num_slots), max(0, spare)
        if missing == 0:
            return num_slots
        if missing > spare:
            more = spare - self.is_copy_due
            num_slots = max(self.num_computed, (len(self.blocks) + more) * self.block_size)
        reserved = self.try_reserve(num_slots)
        assert reserved, "fewer blocks are available than the caller said"
        return num_slots

    def num_keys(self, token_ids: "array[int]") -> int:
        """Number of full blocks that a lookup of these tokens may return: those before the last
        token, which is always computed, as its logits are needed.
        """
        return 0 if self.hasher is None else (len(token_ids) - 1) // self.block_size

    def key(self, token_ids: "array[int]", place: int) -> bytes | None:
        if self.hasher is None or place >= self.num_keys(token_ids):
            return None
        return self.hasher.extend(token_ids, len(token_ids) - 1)[place]

    def find(self, token_ids: "array[int]") -> list[int]:
        """The blocks that the prefix cache has for these tokens, from the end of the table on."""
        if self.hasher is None:
            return []
        keys = self.hasher.extend(token_ids, len(token_ids) - 1)
        return self.pool.find(keys[len(self.blocks) : self.num_keys(token_ids)])

    def match(self, token_ids: "array[int]", spare: int) -> None:
        """Extend the table by the longest run of found blocks, if it ends with a full block.

        At most `spare` of them may be cached ones, which no table holds.
        """
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

    def fork(self, other: "BlockTable", num_tokens: int) -> None:
        """Share the blocks of another table's first tokens. A partly full block is copied by the
        first of its holders that writes to it.
        """
        assert not self.blocks, "only an empty table can fork another"
        assert num_tokens <= other.num_computed
        self.blocks = other.blocks[: -(-num_tokens // self.block_size)]
        for block in self.blocks:
            self.pool.hold(block)
        self.num_computed, self.epoch = num_tokens, other.epoch
        self.num_published = min(other.num_published, num_tokens // self.block_size)

    @property
    def is_publishing(self) -> bool:
        """Whether its blocks get keys; not if the cache was reset since the first was taken."""
        return self.hasher is not None and self.epoch == self.pool.num_resets

    def publish(self, token_ids: "array[int]") -> None:
        """Give keys to the blocks full of computed tokens, so that other requests find them."""
        full = self.num_computed // self.block_size
        if full == self.num_published or self.hasher is None or not self.is_publishing:
            return
        keys = self.hasher.extend(token_ids, self.num_computed)
        for i in range(self.num_published, full):
            self.blocks[i] = self.pool.publish(self.blocks[i], keys[i])
        self.num_published = full

    def slot(self, place: int) -> int:
        """The arena slot with the KV of the request's token at this place."""
        block, offset = divmod(place, self.block_size)
        return self.blocks[block] * self.block_size + offset

    def slots(self, begin: int, end: int) -> list[int]:
        """The arena slots of the places [begin, end)."""
        slots, size = list[int](), self.block_size
        while begin < end:
            block, offset = divmod(begin, size)
            first, count = self.blocks[block] * size + offset, min(size - offset, end - begin)
            slots += range(first, first + count)
            begin += count
        return slots

    def trim(self) -> None:
        """Give back the blocks without a computed token, the last one first: then the cache evicts
        the end of a prefix before its beginning.
        """
        kept = -(-self.num_computed // self.block_size)
        if kept < len(self.blocks):
            given_back = self.blocks[kept:]
            del self.blocks[kept:]
            self.pool.release(reversed(given_back))

    def clear(self) -> None:
        """Give all blocks back; the KV has to be found or computed again."""
        self.num_computed = self.num_published = 0
        self.trim()
