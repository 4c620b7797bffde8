"""One request's blocks of one model, in order."""

from array import array
from collections.abc import Iterator
from itertools import islice

from specserve.memory.pool import BlockPool
from specserve.memory.prefix_cache import Chain


class BlockTable:
    """The slots 0, 1, .. of a request; the KV of its first `num_computed` tokens stands in them.

    Blocks may be held by several tables. Only full ones have keys, and a block is written by none
    but its only holder, so what is shared stays as it is.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        owner: str = "target",
        chain: Chain | None = None,
    ) -> None:
        self.pool, self.block_size, self.owner = pool, block_size, owner
        self.chain = chain  # None where nothing is to be found again
        self.blocks = array("i")
        self.num_computed = 0
        self.num_published = 0  # blocks
        self.epoch = pool.num_resets  # of the cache

    @property
    def is_copy_due(self) -> bool:
        """The next slot lies in a block that others hold as well."""
        place = self.num_computed // self.block_size
        return place < len(self.blocks) and self.pool.counts[self.blocks[place]] > 1

    def missing(self, num_slots: int) -> int:
        """Blocks still to be had before so many slots can be written from `num_computed` on."""
        new = max(0, -(-num_slots // self.block_size) - len(self.blocks))
        return new + (num_slots > self.num_computed and self.is_copy_due)

    def try_reserve(self, num_slots: int) -> bool:
        """Own at least so many slots; False, and nothing changed, where blocks are short."""
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
        """Go on in a copy of a block, which the others keep."""
        shared = self.blocks[place]
        self.pool.copy(shared, block)
        self.blocks[place] = block
        self.pool.release([shared])

    def reserve_some(self, num_slots: int, spare: int) -> int:
        """Own as many of so many slots as so many more blocks allow; how many that is."""
        spare = max(0, spare)
        if self.missing(num_slots) > spare:
            more = spare - self.is_copy_due
            num_slots = max(self.num_computed, (len(self.blocks) + more) * self.block_size)
        reserved = self.try_reserve(num_slots)
        assert reserved, "fewer blocks than were said to be there"
        return num_slots

    def keys(self, token_ids: "array[int]", start: int = 0) -> Iterator[bytes]:
        """Those of the blocks from `start` on that may be found for these tokens: the last token is
        always computed, for what is said after it.
        """
        if self.chain is None:
            return iter(())
        num_tokens = len(token_ids) - 1
        keys = self.chain.extend(token_ids, num_tokens)
        return islice(keys, start, num_tokens // self.block_size)

    def match(self, token_ids: "array[int]") -> None:
        """Go on with the longest continuation that is cached, at the end of a block."""
        if not self.blocks:
            self.epoch = self.pool.num_resets
        place = len(self.blocks)
        if place * self.block_size != self.num_computed:
            return
        for block in self.pool.find(self.keys(token_ids, place)):
            self.pool.hold(block)
            self.blocks.append(block)
        if len(self.blocks) > place:
            self.num_published = len(self.blocks)
            self.num_computed = self.num_published * self.block_size

    def fork(self, other: "BlockTable", num_tokens: int) -> None:
        """Begin with another's first tokens. A half full block is copied by who next writes it."""
        assert not self.blocks, "what has been begun is not begun again"
        assert num_tokens <= other.num_computed
        self.blocks = other.blocks[: -(-num_tokens // self.block_size)]
        for block in self.blocks:
            self.pool.hold(block)
        self.num_computed, self.epoch = num_tokens, other.epoch
        self.num_published = min(other.num_published, num_tokens // self.block_size)

    def publish(self, token_ids: "array[int]") -> None:
        """Let others find the blocks that are full of computed tokens."""
        full = self.num_computed // self.block_size
        is_old = self.epoch != self.pool.num_resets  # begun with what must not be found again
        if self.chain is None or full == self.num_published or is_old:
            return
        keys = self.chain.extend(token_ids, self.num_computed)
        for i in range(self.num_published, full):
            self.blocks[i] = self.pool.publish(self.blocks[i], keys[i])
        self.num_published = full

    def trim(self) -> None:
        """Give back the blocks that hold no computed token, the last one first: what is cached
        loses its end before its beginning.
        """
        kept = -(-self.num_computed // self.block_size)
        if kept < len(self.blocks):
            given_back = self.blocks[kept:]
            del self.blocks[kept:]
            self.pool.release(reversed(given_back))

    def clear(self) -> None:
        """Give everything back: it has to be found again, or computed again."""
        self.num_computed = self.num_published = 0
        self.trim()
