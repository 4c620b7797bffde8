"""A source that proposes the target's most likely successors of each token.

Implements Token Recycling (Luo et al. 2024, arXiv:2408.08696). The most likely successors of a
token, with their probabilities, come from the target's logits at its last position. A tree of draft
tokens consists of successors, their successors, and so on. Earlier tokens are not considered.
"""

from array import array
from bisect import bisect
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count, pairwise
from math import isfinite
from typing import ClassVar

from specserve_drafters.base import DraftRequest, DraftSource, SourceRequest
from specserve_drafters.candidates import ROOT, Candidate
from specserve_drafters.tenants import PerTenant
from specserve_drafters.trie import BOUNDS, LEAST, MOST, CalibrationBin

NUM_SLOTS, WAYS = 1 << 16, 8  # slots of all scopes, and slots that a token's successors may use
NUM_SUCCESSORS = 8  # successors per token
ONE = (1 << 16) - 1  # stored value of probability 1
AGES = 1 << 16  # tokens after which ages wrap: an old entry then counts as new
OLD = 1 << 10  # tokens after which successors are renewed
LEAST_VALUE = 1e-3  # least value of a draft token that is proposed
DEPTH = 4  # depth of the estimate of accepted tokens
MIX = 0x9E3779B97F4A7C15


class Successors:
    """A table of tokens' most likely successors with a fixed size: new entries replace old ones. A
    number above 0 identifies the entries of a tenant scope.
    """

    def __init__(self) -> None:
        self.keys = array("q", bytes(8 * NUM_SLOTS))  # a scope's number and a token; 0: free
        self.ids = array("i", bytes(4 * NUM_SLOTS * NUM_SUCCESSORS))  # the most likely first
        self.p = array("H", bytes(2 * NUM_SLOTS * NUM_SUCCESSORS))
        self.entered = array("H", bytes(2 * NUM_SLOTS))  # time of entry, in tokens of all scopes
        self.renewed = array("H", bytes(2 * NUM_SLOTS))  # time of entry, in tokens of its scope
        self.now = 0

    @property
    def num_bytes(self) -> int:
        arrays = self.keys, self.ids, self.p, self.entered, self.renewed
        return sum(x.itemsize * len(x) for x in arrays)

    def first(self, key: int) -> int:
        """Return the first of the slots that a key may use."""
        mixed = key * MIX >> 32 & 0xFFFFFFFF
        return mixed % (NUM_SLOTS // WAYS) * WAYS

    def find(self, number: int, token: int) -> int | None:
        """Return the slot of a token's successors."""
        key = number << 32 | token
        first = self.first(key)
        for slot in range(first, first + WAYS):
            if self.keys[slot] == key:
                return slot
        return None

    def best(self, slot: int) -> tuple[int, float]:
        """Return the most likely successor, and its probability."""
        return self.ids[slot * NUM_SUCCESSORS], self.p[slot * NUM_SUCCESSORS] / ONE

    def enter(
        self, number: int, token: int, ids: Sequence[int], p: Sequence[float], now: int
    ) -> None:
        """Enter a token's successors, at most NUM_SUCCESSORS, most likely first. `now` counts the
        tokens of its scope.
        """
        key = number << 32 | token
        slot = self.find(number, token)
        if slot is None:
            first = self.first(key)
            slot = max(range(first, first + WAYS), key=self.rank)
        more = [0] * (NUM_SUCCESSORS - len(ids))
        begin, end = slot * NUM_SUCCESSORS, (slot + 1) * NUM_SUCCESSORS
        self.keys[slot], self.entered[slot], self.renewed[slot] = key, self.now % AGES, now % AGES
        self.ids[begin:end] = array("i", [*ids, *more])
        self.p[begin:end] = array("H", [*(round(x * ONE) for x in p), *more])

    def rank(self, slot: int) -> tuple[bool, int]:
        """Return the slot's rank for replacement: a free slot first, then the oldest."""
        return self.keys[slot] == 0, (self.now - self.entered[slot]) % AGES


class TenantSuccessors:
    """A scope's number in the table, its token count, and the accuracy of first successors, by
    their probability.
    """

    def __init__(self, number: int) -> None:
        self.number, self.now = number, 0
        self.kinds = [CalibrationBin() for _ in range(len(BOUNDS) + 1)]

    def learn(self, p: float, is_right: bool) -> None:
        p = min(max(p, LEAST), MOST)
        self.kinds[bisect(BOUNDS, p)].count(p, is_right)

    def chance(self, p: float) -> float:
        """Return the probability that a first successor of such a probability is accepted."""
        p = min(max(p, LEAST), MOST)
        right = self.kinds[bisect(BOUNDS, p)].factor * p
        return right / (right + 1 - p)


class RecycleSource(DraftSource):
    """Proposes the target's most likely successors of the last token, from requests of the same
    tenant scope.
    """

    name = "recycle"
    is_estimating: ClassVar[bool] = True
    num_successors: ClassVar[int] = NUM_SUCCESSORS

    def __init__(self) -> None:
        self.table = Successors()
        self.numbers = count(1)  # unique, so that scopes do not find each other's entries
        self.scopes = PerTenant(lambda: TenantSuccessors(next(self.numbers)))
        self.is_learnt: dict[int, bool] = {}  # by request

    def begin(self, request: SourceRequest) -> None:
        self.scopes.begin(request.id, request.scope)
        self.is_learnt[request.id] = request.is_learnt

    def expected_accepted(self, id: int, text: "array[int]") -> float:
        """Return the expected number of accepted first successors in a row."""
        known, token, value, expected = self.scopes.of(id), text[-1], 1.0, 0.0
        for _ in range(DEPTH):
            slot = self.table.find(known.number, token)
            if slot is None:
                break
            token, p = self.table.best(slot)
            value *= known.chance(p)
            expected += value
        return expected

    def candidates(self, items: Sequence[DraftRequest]) -> list[list[Candidate]]:
        return [self.tree(self.scopes.of(i.id).number, i.known[-1], i.limit) for i in items]

    def tree(self, number: int, token: int, limit: int) -> list[Candidate]:
        """Return the most likely paths of successors. Each draft token is looked up once, which
        bounds the time.
        """
        table, draft_tokens = self.table, list[Candidate]()
        # Value, parent, place in the table, value of the parent.
        heap = list[tuple[float, int, int, float]]()

        def consider(place: int, parent: int, before: float) -> None:
            value = before * table.p[place] / ONE
            if value >= LEAST_VALUE:
                heappush(heap, (-value, parent, place, before))

        def branch(token: int, parent: int, value: float) -> None:
            if (slot := table.find(number, token)) is not None:
                consider(slot * NUM_SUCCESSORS, parent, value)

        branch(token, ROOT, 1.0)
        while heap and len(draft_tokens) < limit:
            value, parent, place, before = heappop(heap)
            draft_tokens.append(
                Candidate(table.ids[place], parent, table.p[place] / ONE, self.name)
            )
            branch(table.ids[place], len(draft_tokens), -value)
            if (place + 1) % NUM_SUCCESSORS:
                consider(place + 1, parent, before)
        return draft_tokens

    def wanted_successors(self, id: int, tokens: Sequence[int]) -> list[int]:
        """Learn from consecutive tokens of a text which successors are right. Return the places
        whose successors should be entered.
        """
        if not self.is_learnt.get(id):
            return []
        known, table, wanted = self.scopes.of(id), self.table, list[int]()
        for place, (token, after) in enumerate(pairwise(tokens)):
            known.now += 1
            table.now += 1
            slot = table.find(known.number, token)
            if slot is not None:
                first, p = table.best(slot)
                known.learn(p, first == after)
            if slot is None or (known.now - table.renewed[slot]) % AGES >= OLD:
                wanted.append(place)
        return wanted

    def enter_successors(self, id: int, token: int, ids: Sequence[int], p: Sequence[float]) -> None:
        """Enter a token's most likely successors, unless their probabilities are not finite."""
        if all(map(isfinite, p)):
            known = self.scopes.of(id)
            self.table.enter(known.number, token, ids, p, known.now)

    def forget(self, id: int) -> None:
        self.is_learnt.pop(id, None)
        self.scopes.forget(id)

    def reset(self) -> None:
        """Drop all successors and statistics."""
        self.table = Successors()
        self.scopes.reset()
