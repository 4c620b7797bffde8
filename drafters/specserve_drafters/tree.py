"""A tree of guesses."""

from typing import Self

import msgspec

ROOT = 0  # the last committed token: node 0 of every tree, no guess
MAX_NODES = 63  # guesses; with the root, the bits of one mask word


class Draft(msgspec.Struct, frozen=True):
    """Guess `tokens[k - 1]` is node k, below node `parents[k - 1]` < k.

    The most probable path has the lowest numbers: accepting it moves no KV. Where a draft model
    guessed, `expanded[k - 1]` is the draft model's own number for node k, counted from 1 in the
    order in which it ran them, or 0 for a node that it did not run.
    """

    tokens: list[int] = []
    parents: list[int] = []
    expanded: list[int] = []

    @classmethod
    def chain(cls, tokens: list[int]) -> Self:
        return cls(tokens, list(range(ROOT, len(tokens))))

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        for k in range(node + 1, len(self.tokens) + 1):  # children come after their parent
            if self.parents[k - 1] == node and self.tokens[k - 1] == token:
                return k
        return None

    def masks(self) -> list[int]:
        """For the root and every guess, the bits of its ancestors and its own."""
        masks = [1]
        for k, parent in enumerate(self.parents, 1):
            masks.append(masks[parent] | 1 << k)
        return masks

    def cut(self, limit: int, vocab_size: int) -> "Draft":
        """At most `limit` guesses, ending before the first that is no node: numbers stay valid."""
        size = min(limit, len(self.tokens), len(self.parents))
        for k in range(size):
            token, parent = self.tokens[k], self.parents[k]
            if not (_is_below(token, vocab_size) and _is_below(parent, k + 1)):
                size = k
                break
        if size == len(self.tokens) == len(self.parents):
            return self
        return Draft(self.tokens[:size], self.parents[:size], self.expanded[:size])


def _is_below(x: object, limit: int) -> bool:
    return type(x) is int and 0 <= x < limit
