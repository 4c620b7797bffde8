"""A tree of guesses."""

from collections.abc import Sequence
from itertools import islice
from operator import index
from typing import Self, SupportsIndex

import msgspec

ROOT = 0  # the last committed token: node 0 of every tree, no guess
TREE_SLOTS = 64  # nodes of the largest tree, root included: the bits of one mask word
MAX_NODES = TREE_SLOTS - 1  # guesses


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

    def copy(self) -> Self:
        return type(self)([*self.tokens], [*self.parents], [*self.expanded])

    @property
    def is_chain(self) -> bool:
        """Whether every guess is below the one before it, so that the rows need no mask."""
        return self.parents == [*range(len(self.parents))]

    def trunk(self) -> list[int]:
        """The tokens of the path that has the lowest numbers."""
        ends = (k for k, parent in enumerate(self.parents) if parent != k)
        return self.tokens[: next(ends, len(self.tokens))]

    def head(self, size: int) -> "Draft":
        """The first guesses alone: each comes after its parent."""
        return Draft(self.tokens[:size], self.parents[:size], self.expanded[:size])

    def shallow(self, max_depth: int | None) -> "Draft":
        """The guesses of at most this depth alone."""
        if max_depth is None or len(self.tokens) <= max_depth:
            return self
        _, *depths = self.depths()
        return self.only([k for k, depth in enumerate(depths, 1) if depth <= max_depth])

    def only(self, kept: Sequence[int]) -> "Draft":
        """Some of the guesses, in order; the parent of each is among them."""
        number = {ROOT: ROOT} | {k: place for place, k in enumerate(kept, 1)}
        return Draft(
            [self.tokens[k - 1] for k in kept],
            [number[self.parents[k - 1]] for k in kept],
            [self.expanded[k - 1] for k in kept] if self.expanded else [],
        )

    def child(self, node: int, token: int) -> int | None:
        for k in range(node + 1, len(self.tokens) + 1):  # children come after their parent
            if self.parents[k - 1] == node and self.tokens[k - 1] == token:
                return k
        return None

    def depths(self) -> list[int]:
        """Of the root, which is 0, and of every guess."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def masks(self) -> list[int]:
        """For the root and every guess, the bits of its ancestors and its own."""
        masks = [1]
        for k, parent in enumerate(self.parents, 1):
            masks.append(masks[parent] | 1 << k)
        return masks

    def cut(self, limit: int, vocab_size: int) -> "Draft":
        """At most `limit` guesses, ending before the first invalid one: numbers stay valid.

        The fields may hold anything, as a drafter is user code; the result holds plain integers.
        """
        tokens: list[int] = []
        parents: list[int] = []
        for token, parent in islice(zip(self.tokens, self.parents, strict=False), limit):
            t, p = as_index(token, vocab_size), as_index(parent, len(tokens) + 1)
            if t is None or p is None:
                break
            tokens.append(t)
            parents.append(p)
        expanded = [as_index(e, TREE_SLOTS) or 0 for e in islice(self.expanded, len(tokens))]
        if expanded:
            return Draft(tokens, parents, expanded + [0] * (len(tokens) - len(expanded)))
        return Draft(tokens, parents)


def as_index(x: object, limit: int) -> int | None:
    """An integer in [0, limit), of any library's type, as an int; None for anything else."""
    if type(x) is int:
        return x if 0 <= x < limit else None
    if isinstance(x, bool) or not isinstance(x, SupportsIndex):
        return None
    return as_index(index(x), limit)
