"""One request's blocks of one model, in order."""

from array import array

from specserve.memory.pool import BlockPool


class BlockTable:
    """The slots 0, 1, .. of a request; the KV of its first `num_computed` tokens stands in them."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool, self.block_size = pool, block_size
        self.blocks = array("i")
        self.num_computed = 0

    def missing(self, num_slots: int) -> int:
        """Blocks still to be had before the table has so many slots."""
        return max(0, -(-num_slots // self.block_size) - len(self.blocks))

    def try_reserve(self, num_slots: int) -> bool:
        """Own at least so many slots; False, and nothing changed, where blocks are short."""
        missing = self.missing(num_slots)
        if missing == 0:
            return True
        blocks = self.pool.try_allocate(missing)
        if blocks is None:
            return False
        self.blocks.extend(blocks)
        return True

    def reserve_some(self, num_slots: int) -> int:
        """Own as many of so many slots as there are free blocks for; how many that is."""
        missing = min(self.missing(num_slots), self.pool.num_free)
        self.blocks.extend(self.pool.try_allocate(missing) or [])
        return min(num_slots, len(self.blocks) * self.block_size)

    def trim(self) -> None:
        """Give back the blocks that hold no computed token."""
        kept = -(-self.num_computed // self.block_size)
        if kept < len(self.blocks):
            given_back = self.blocks[kept:]
            del self.blocks[kept:]
            self.pool.release(given_back)

    def clear(self) -> None:
        """Give everything back: the KV is gone."""
        self.num_computed = 0
        self.trim()
