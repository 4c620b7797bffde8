"""The n-gram source in C++, or in Python if the machine cannot compile it; both give equal
results.
"""

import weakref
from array import array
from collections.abc import Sequence
from ctypes import byref
from itertools import repeat
from typing import ClassVar

from specserve_drafters import lookup
from specserve_drafters.base import DraftRequest, DraftSource
from specserve_drafters.candidates import MAX_NODES, Candidate
from specserve_drafters.tenants import PerTenantSource


def ngram_sources() -> PerTenantSource:
    """Return the n-gram source of `auto`, whose statistics are kept per tenant scope."""
    return PerTenantSource(ngram_source, lookup.NgramSource.name)


def ngram_source() -> DraftSource:
    from specserve_kernels.cpu import BuildError

    try:
        return NativeSource()
    except BuildError:
        return lookup.NgramSource()


class NativeSource(DraftSource):
    """`lookup.NgramSource` in C++."""

    name = lookup.NgramSource.name
    is_estimating: ClassVar[bool] = True

    def __init__(self) -> None:
        # A process that only checks a drafter's name and options needs no kernels.
        from specserve_kernels.cpu.ngrams import Settings, functions

        settings = Settings(
            lookup.MAX_TOKENS,
            lookup.AT_ONCE,
            lookup.LEAST_SIZE,
            lookup.MAX_MATCHES,
            lookup.MAX_VISITS,
            lookup.ENOUGH,
            lookup.SUM_EVERY,
            lookup.MIX,
            lookup.PRIOR,
            lookup.MEMORY,
            tuple(lookup.LIKELY),
            tuple(lookup.SURE),
        )
        new, free, self.follow_text, self.propose, self.forget_text, self.forget_all = functions()
        self.source = new(byref(settings))
        weakref.finalize(self, free, self.source)
        room = 2 * MAX_NODES
        self.tokens, self.parents = array("i", [0] * room), array("i", [0] * room)
        self.scores = array("d", [0.0] * room)
        self.out = [out.buffer_info()[0] for out in (self.tokens, self.parents, self.scores)]

    def expected_accepted(self, id: int, text: "array[int]") -> float:
        return self.follow_text(self.source, id, *text.buffer_info())

    def candidates(self, items: Sequence[DraftRequest]) -> list[list[Candidate]]:
        return [self.look_up(item.id, item.known, item.limit) for item in items]

    def look_up(self, id: int, text: "array[int]", limit: int) -> list[Candidate]:
        assert 0 <= limit <= MAX_NODES, "the limit exceeds the buffers"
        n = self.propose(self.source, id, *text.buffer_info(), limit, *self.out)
        rows = zip(self.tokens[:n], self.parents, self.scores, repeat(self.name), repeat(0))
        return [*map(Candidate._make, rows)]

    def forget(self, id: int) -> None:
        self.forget_text(self.source, id)

    def reset(self) -> None:
        self.forget_all(self.source)
