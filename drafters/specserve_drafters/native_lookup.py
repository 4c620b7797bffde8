"""The n-gram source in C++, or in Python if the machine cannot compile it; both give equal
results.
"""

import weakref
from array import array
from collections.abc import Sequence
from ctypes import byref
from typing import ClassVar

from specserve_drafters import lookup
from specserve_drafters.base import DraftRequest, DraftSource
from specserve_drafters.candidates import MAX_NODES, CandidateColumns
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
        from specserve_kernels.cpu.drafting import NgramSettings, ngram_functions

        settings = NgramSettings(
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
        self.native = ngram_functions()
        self.source = self.native.new(byref(settings))
        weakref.finalize(self, self.native.free, self.source)
        room = 2 * MAX_NODES
        self.tokens, self.parents = array("i", [0] * room), array("i", [0] * room)
        self.scores = array("d", [0.0] * room)
        self.out = [out.buffer_info()[0] for out in (self.tokens, self.parents, self.scores)]

    def expected_accepted(self, id: int, text: "array[int]") -> float:
        return self.native.follow(self.source, id, *text.buffer_info())

    def candidates(self, items: Sequence[DraftRequest]) -> list[CandidateColumns]:
        return [self.look_up(item.id, item.known, item.limit) for item in items]

    def look_up(self, id: int, text: "array[int]", limit: int) -> CandidateColumns:
        assert 0 <= limit <= MAX_NODES, "the limit exceeds the buffers"
        n = self.native.propose(self.source, id, *text.buffer_info(), limit, *self.out)
        return CandidateColumns(self.tokens[:n], self.parents[:n], self.scores[:n], self.name)

    def forget(self, id: int) -> None:
        self.native.forget(self.source, id)

    def reset(self) -> None:
        self.native.reset(self.source)
