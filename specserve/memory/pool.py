"""Which blocks are free, and how many hold the others."""

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """Invariant: free + held = all blocks, and every block's count equals its holders."""

    def __init__(self, num_blocks: int, block_bytes: int = 0) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        # The last one given back is the next one given out: its memory has been touched.
        self.free = list(range(num_blocks - 1, -1, -1))
        self.counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def is_whole(self) -> bool:
        """Nobody holds anything."""
        return len(self.free) == self.num_blocks

    def try_allocate(self, n: int) -> list[int] | None:
        """n blocks with one holder each, or none at all."""
        if n > len(self.free):
            return None
        blocks = [self.free.pop() for _ in range(n)]
        for block in blocks:
            self.counts[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """One holder of each block lets go of it."""
        for block in blocks:
            self.counts[block] -= 1
            assert self.counts[block] >= 0, f"block {block} was given back twice"
            if self.counts[block] == 0:
                self.free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariant, given the blocks of everyone who holds some."""
        holders = Counter(block for table in tables for block in table)
        free = set(self.free)
        assert len(free) == len(self.free), "a block is free twice"
        for block, count in enumerate(self.counts):
            assert count == holders[block], f"block {block}: {count} != {holders[block]} holders"
            assert (count == 0) == (block in free), f"block {block} is lost, or free and held"
