"""Prompt lookup: if the last few tokens occurred before, propose the tokens that followed them."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, ClassVar

from msgspec import Meta

from specserve_drafters import base
from specserve_drafters.candidates import ROOT, Draft

_MAX_MATCHES = 16  # most matches tried for a second continuation: repeated tokens have many


class NgramOptions(base.Options, frozen=True):
    # Longest n-gram, tried first: its match is more certain
    max_ngram: Annotated[int, Meta(ge=1, le=64)] = 4
    min_ngram: Annotated[int, Meta(ge=1, le=64)] = 2

    def __post_init__(self) -> None:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram={self.min_ngram} exceeds max_ngram={self.max_ngram}")


class NgramDrafter:
    """Proposes at most two continuations: the longest latest match's, and the next one that
    differs.
    """

    needs_executor: ClassVar[bool] = False
    Options = NgramOptions

    def __init__(self, options: NgramOptions) -> None:
        self.sizes = range(options.max_ngram, options.min_ngram - 1, -1)

    def propose(self, items: Sequence[base.DraftRequest]) -> list[Draft]:
        return [self.look_up(i.known, i.limit) for i in items]

    def observe(self, id: int, draft: Draft, accepted: Sequence[int]) -> None:
        pass

    def forget(self, id: int) -> None:
        pass

    def look_up(self, ids: "array[int]", limit: int) -> Draft:
        best: list[int] = []
        for start in islice(self.matches(ids), _MAX_MATCHES):
            follows = continuation(ids, start, limit)
            if not best:
                best = follows
            elif follows != best:
                return merge(best, follows, limit)
        return Draft.chain(best)

    def matches(self, ids: "array[int]") -> Iterator[int]:
        """Yield the ends of earlier copies of the last tokens: longest copies first, then the
        latest.
        """
        history, seen, size = bytes(ids), set[int](), ids.itemsize
        if history.rfind(history[-size * self.sizes[-1] :], 0, -size) < 0:
            return  # the shortest tail has no copy, so longer ones have none
        for n in self.sizes:
            if n >= len(ids):
                continue
            for start in find_back(history, n, size):
                if start not in seen:
                    seen.add(start)
                    yield start


def find_back(history: bytes, n: int, size: int) -> Iterator[int]:
    """Yield the ends of earlier copies of the last n items, the latest first."""
    # bytes.rfind searches at memory speed; hits that do not begin at an item are skipped.
    tail, end = history[-n * size :], len(history) - size
    while (at := history.rfind(tail, 0, end)) >= 0:
        if at % size == 0:
            yield at // size + n
        end = at + len(tail) - 1


def continuation(ids: "array[int]", start: int, limit: int) -> list[int]:
    """Return the tokens after a match; at the end of the text, the continuation is repeated from
    its start.

    So a text that repeats with a period p < limit gets draft tokens for the whole limit.
    """
    follows = ids[start : start + limit].tolist()
    while len(follows) < limit:
        follows += follows[: limit - len(follows)]
    return follows


def merge(first: list[int], second: list[int], limit: int) -> Draft:
    """Merge two continuations: the second adds up to a quarter of the limit from where they
    differ.
    """
    fork = next(j for j, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    room = min(limit // 4, len(second) - fork)
    trunk = first[: limit - room]
    if room == 0 or fork >= len(trunk):
        return Draft.chain(first)
    branch = len(trunk) + 1  # the number of its first node
    parents = [*range(ROOT, len(trunk)), fork, *range(branch, branch + room - 1)]
    return Draft(trunk + second[fork : fork + room], parents)
