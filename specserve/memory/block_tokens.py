"""The tokens of cached blocks: finds KV for the beginning of a block."""

from array import array
from collections.abc import Hashable
from itertools import islice

MOST_COMPARED = 64  # blocks after the same block: a lookup compares the latest


class BlockTokens:
    """Blocks with a key and their tokens, grouped by the key of the block before them.

    KV of a token depends on the tokens before it, and on nothing after it. So a request may copy
    the first tokens of a block, if the block before and these tokens are equal.
    """

    def __init__(self) -> None:
        self.by_parent: dict[Hashable, dict[int, array[int]]] = {}
        self.parents: dict[int, Hashable] = {}  # by block

    def add(self, block: int, parent: bytes, tokens: "array[int]") -> None:
        self.parents[block] = parent
        self.by_parent.setdefault(parent, {})[block] = tokens

    def drop(self, block: int) -> None:
        """Drop a block, if it is there."""
        parent = self.parents.pop(block, None)
        if parent is not None:
            blocks = self.by_parent[parent]
            del blocks[block]
            if not blocks:
                del self.by_parent[parent]

    def clear(self) -> None:
        self.by_parent.clear()
        self.parents.clear()

    def find(self, parent: bytes, tokens: "array[int]") -> tuple[int, int]:
        """Return the block that begins with most of the tokens, and their number; 0 for none."""
        best, most = -1, 0
        for block, own in islice(reversed(self.by_parent.get(parent, {}).items()), MOST_COMPARED):
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
