"""Trees of draft tokens, and the candidates of which they are chosen."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat
from operator import index
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, SupportsIndex, overload

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROOT = 0  # the last committed token: node 0 of every tree, not a draft token
TREE_SLOTS = 64  # nodes of the largest tree, root included: the bits of one mask word
MAX_NODES = TREE_SLOTS - 1  # most draft tokens of a tree


class Draft(msgspec.Struct, frozen=True):
    """A tree of draft tokens: `tokens[k - 1]` is node k, below node `parents[k - 1]` < k.

    The most probable path has the lowest numbers: accepting it moves no KV. If a draft model ran
    nodes, `expanded[k - 1]` is its number for node k, counted from 1 in run order, or 0 for others.
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
        """Return whether every node is below the one before it, so that the rows need no mask."""
        return self.parents == [*range(len(self.parents))]

    def trunk(self) -> list[int]:
        """Return the tokens of the path that has the lowest numbers."""
        ends = (k for k, parent in enumerate(self.parents) if parent != k)
        return self.tokens[: next(ends, len(self.tokens))]

    def head(self, size: int) -> "Draft":
        """Return the first draft tokens only: each comes after its parent."""
        return Draft(self.tokens[:size], self.parents[:size], self.expanded[:size])

    def shallow(self, max_depth: int | None) -> "Draft":
        """Return only the draft tokens of at most this depth."""
        if max_depth is None or len(self.tokens) <= max_depth:
            return self
        _, *depths = self.depths()
        return self.only([k for k, depth in enumerate(depths, 1) if depth <= max_depth])

    def only(self, kept: Sequence[int]) -> "Draft":
        """Return some of the draft tokens, in order; the parent of each is among them."""
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
        """Return the depths of the root, which is 0, and of every draft token."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def masks(self) -> list[int]:
        """Return the bits of each node's ancestors and the node, for the root and every draft
        token.
        """
        masks = [1]
        for k, parent in enumerate(self.parents, 1):
            masks.append(masks[parent] | 1 << k)
        return masks

    def cut(self, limit: int, vocab_size: int) -> "Draft":
        """Return at most `limit` draft tokens, ending before the first invalid one: numbers stay
        valid.

        The fields may hold anything, because a drafter is user code; the result holds plain
        integers.
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
    """Return an integer in [0, limit), of any library's type, as an int; None for anything else."""
    if type(x) is int:
        return x if 0 <= x < limit else None
    if isinstance(x, bool) or not isinstance(x, SupportsIndex):
        return None
    return as_index(index(x), limit)


MAX_CANDIDATES = 4 * MAX_NODES  # most candidates of a source in a step


class Candidate(NamedTuple):
    """A draft token with a score.

    `parent` is its parent's place in its source's list, counted from 1, or ROOT. `p` is the
    source's estimate that the token is accepted if its parent is, or None.
    """

    token: int
    parent: int
    p: float | None
    source: str
    expanded: int = 0  # the draft model's number for it, see Draft; 0 if it has not run it


class CandidateColumns(Sequence[Candidate]):
    """Candidates of one source, by column, for sources in C++."""

    __slots__ = ("p", "parents", "source", "tokens")

    def __init__(
        self, tokens: "array[int]", parents: "array[int]", p: "array[float]", source: str
    ) -> None:
        """tokens, parents: of C's int; p: of C's double."""
        self.tokens, self.parents, self.p, self.source = tokens, parents, p, source

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[Candidate]:
        rows = zip(self.tokens, self.parents, self.p, repeat(self.source), repeat(0))
        return map(Candidate._make, rows)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> list[Candidate]: ...
    def __getitem__(self, at: int | slice) -> Candidate | list[Candidate]:
        return [*self][at]


def of_draft(draft: Draft, source: str) -> list[Candidate]:
    """Return a draft's tokens as candidates without scores."""
    expanded = draft.expanded or [0] * len(draft)
    each = zip(draft.tokens, draft.parents, expanded, strict=True)
    return [Candidate(token, parent, None, source, e) for token, parent, e in each]


def checked(candidates: Iterable[object], source: str, vocab_size: int) -> list[Candidate]:
    """Return at most MAX_CANDIDATES, ending before the first invalid one, with `source` as their
    source.

    They may be anything, because a source is user code; the result has plain numbers.
    """
    valid: list[Candidate] = []
    for one in islice(candidates, MAX_CANDIDATES):
        if not isinstance(one, Candidate):
            break
        token, parent = as_index(one.token, vocab_size), as_index(one.parent, len(valid) + 1)
        if token is None or parent is None:
            break
        p = float(one.p) if isinstance(one.p, int | float) else None
        valid.append(Candidate(token, parent, p, source, as_index(one.expanded, TREE_SLOTS) or 0))
    return valid


class Size(msgspec.Struct, frozen=True):
    """A number of draft tokens for a step."""

    size: int
    gain: float  # sum of the values of so many draft tokens
    seconds: float  # expected of the step
    rate: float  # expected tokens per second


class WeighedSizes(NamedTuple):
    """The number of a step's selected draft tokens with the highest expected rate: by the known
    costs, and by the least possible ones.
    """

    known: Size
    hoped: Size


class Rules(Protocol):
    """The tokens that may follow a path of draft tokens, which begins at the root."""

    def allows(self, path: Sequence[int], token: int) -> bool: ...

    def forced(self, path: Sequence[int]) -> list[int]:
        """Return the tokens of the only text that may come next; none if several may."""
        ...

    def mask(self, path: Sequence[int]) -> "NDArray[np.int32]":
        """Return which ids may come next, as in kernels' Masks: none after a forbidden path."""
        ...
