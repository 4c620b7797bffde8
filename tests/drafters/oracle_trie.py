"""Calibrations, tries and plans of a step in Python: the slow form of tries.cpp, which defines its
results.
"""

from array import array
from bisect import bisect, bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import reduce
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate
from math import exp, inf
from operator import add, itemgetter
from typing import NamedTuple, Self

import msgspec

from specserve.speculation.constants import FEW, FINE
from specserve.speculation.costs import Step, StepCosts
from specserve_drafters.candidates import (
    MAX_NODES,
    ROOT,
    Draft,
    Rules,
    Size,
)
from specserve_drafters.trie import (
    BOUNDS,
    CHILDREN_BY,
    DEPTHS,
    FINDS,
    LEAST,
    LEAST_VALUE,
    MAX_SHIFT,
    MOST,
    NUM_BINS,
    SHIFT_MEMORY,
    SHIFT_PRIOR,
    UNSCORED,
    WORTH,
    WORTH_RATE,
    AcceptancePrior,
    BaseTrie,
    BinCounts,
    CalibrationBin,
    table,
)
from tests.speculation.oracle_costs import allowed_with_draft, are_known, without_prompts
from tests.speculation.oracle_depth import prefill_value

# One source's score of a draft token: calibrator, bin, score, calibrated probability. A plain
# tuple, because a step creates hundreds.
CalibratedScore = tuple["AcceptanceCalibrator", int, float, float]


class AcceptanceCalibrator:
    """Calibrates one source's scores in one request: by the bins of all requests, and by a
    shift.
    """

    __slots__ = ("bit", "factor", "kinds", "logit_shift", "source", "weight")

    def __init__(self, source: str, bit: int, kinds: list[CalibrationBin]) -> None:
        self.source, self.bit, self.kinds = source, bit, kinds
        self.logit_shift = self.weight = 0.0
        self.factor = 1.0  # factor on the odds: exp(shift)

    def weigh(self, score: float | None, depth: int) -> CalibratedScore:
        """Return the calibrated probability of a score; NaN and None count as UNSCORED."""
        if score is None or score != score:
            score = UNSCORED
        score = LEAST if score < LEAST else MOST if score > MOST else score
        kind = bisect(BOUNDS, score) * DEPTHS + (depth if depth < DEPTHS else DEPTHS) - 1
        right = self.kinds[kind].factor * self.factor * score
        p = right / (right + 1 - score)
        return self, kind, score, LEAST if p < LEAST else MOST if p > MOST else p

    def learn(self, calibrated: CalibratedScore, is_right: bool) -> None:
        """Count a draft token whose parent was accepted."""
        _, kind, score, p = calibrated
        self.kinds[kind].count(score, is_right)
        # A Newton step of a logistic regression with decay, whose only weight is the shift. The
        # bins' part of p changes meanwhile; the step uses the error of both together.
        self.weight = weight = self.weight + p * (1 - p)
        shift = self.logit_shift + (is_right - p) / (weight + SHIFT_PRIOR)
        self.logit_shift = (
            -MAX_SHIFT if shift < -MAX_SHIFT else MAX_SHIFT if shift > MAX_SHIFT else shift
        )

    def fade(self) -> None:
        """Start another step: an unconfirmed shift decays to the bins' calibration."""
        left = self.weight * SHIFT_MEMORY
        self.logit_shift *= SHIFT_MEMORY * (self.weight + SHIFT_PRIOR) / (left + SHIFT_PRIOR)
        self.weight = left

    def use(self) -> None:
        """Use the learned shift from now on."""
        self.factor = exp(self.logit_shift)


class Calibrators(dict[str, AcceptanceCalibrator]):
    """The calibrators of one request, by source; each is created at its first use."""

    def __init__(self, calibration: "Calibration") -> None:
        super().__init__()
        self.calibration = calibration

    def __missing__(self, source: str) -> AcceptanceCalibrator:
        sources = self.calibration.sources
        if source not in sources:
            kinds = [CalibrationBin() for _ in range(NUM_BINS)]
            for known in self.calibration.prior.get(source, ()):
                kinds[known.kind].begin_with(known)
            sources[source] = 1 << len(sources), kinds
        bit, kinds = sources[source]
        calibrator = self[source] = AcceptanceCalibrator(source, bit, kinds)
        return calibrator


class Calibration:
    """The bins of all sources, the gain of their agreement, and every request's calibrators."""

    def __init__(self, prior: AcceptancePrior | None = None) -> None:
        self.prior = prior or {}
        self.sources: dict[str, tuple[int, list[CalibrationBin]]] = {}  # a bit, and the bins
        self.worth: dict[int, float] = {}  # learned gain, by the bits of the sources that agree
        self.requests: dict[int, Calibrators] = {}

    def calibrators(self, id: int) -> Calibrators:
        """Return the request's calibrators; they are kept until `forget`."""
        found = self.requests.get(id)
        if found is None:
            found = self.requests[id] = Calibrators(self)
        return found

    def trie(self, id: int, rules: Rules | None = None, num_ids: int | None = None) -> "Trie":
        """Return an empty trie of a request, see `Trie`."""
        return Trie(self, id, rules, num_ids)

    def combine(self, each: list[CalibratedScore]) -> float:
        """Return the probability of a draft token that several sources share. Errors count as
        independent, but the learned gain of agreement limits the result.
        """
        bits, wrong, best = 0, 1.0, 0.0
        for calibrator, _, _, p in each:
            bits |= calibrator.bit
            wrong *= 1 - p
            best = p if p > best else best
        return min(1 - wrong, best + self.worth.get(bits, WORTH), MOST)

    def agreed(self, each: list[CalibratedScore], is_right: bool) -> None:
        """Count a draft token of several sources whose parent was accepted."""
        bits, best = 0, 0.0
        for calibrator, _, _, p in each:
            bits |= calibrator.bit
            best = max(best, p)
        worth = self.worth.get(bits, WORTH)
        self.worth[bits] = max(0.0, worth + WORTH_RATE * (is_right - best - worth))

    def forget(self, id: int) -> None:
        self.requests.pop(id, None)

    def drop(self, source: str) -> None:
        """Drop the bins of a source: another source has its name now."""
        if source in self.sources:
            kinds = self.sources[source][1]
            kinds[:] = [CalibrationBin() for _ in kinds]
        for calibrators in self.requests.values():
            calibrators.pop(source, None)

    def counts(self) -> dict[str, list[BinCounts]]:
        """Return the counts of all bins with draft tokens, by source."""
        found = {}
        for source, (_, kinds) in self.sources.items():
            bins = [BinCounts(i, k.tries, k.hits, k.scores) for i, k in enumerate(kinds) if k.tries]
            if bins:
                found[source] = bins
        return found

    def table(self) -> dict[str, list[dict[str, float]]]:
        """See `table`."""
        return table(self.counts())


class Trie(BaseTrie):
    """A trie in Python, slow and plain."""

    def __init__(
        self,
        calibration: Calibration,
        id: int,
        rules: Rules | None = None,
        num_ids: int | None = None,
    ) -> None:
        self.calibration, self.calibrators = calibration, calibration.calibrators(id)
        self.rules, self.num_ids = rules, num_ids
        self.clear()

    def clear(self) -> None:
        self.num_continued = 0
        self.tokens, self.parents, self.depths, self.expanded = [0], [ROOT], [0], [0]
        self.p, self.values, self.is_settled = [1.0], [1.0], True
        self.children: list[dict[int, int]] = [{}]  # token -> node
        self.scores: list[list[CalibratedScore]] = [[]]
        # See `childless`; by source and depth.
        self.no_child: dict[tuple[str, int], CalibratedScore] = {}
        # Sources that were asked for a node's children, and the existing tokens, by node.
        self.asked: dict[int, list[tuple[str, frozenset[int], CalibratedScore]]] = {}

    def __len__(self) -> int:
        return len(self.tokens) - 1

    def child(self, node: int, token: int) -> int | None:
        return self.children[node].get(token)

    def children_of(self, node: int) -> list[int]:
        return [*self.children[node].values()]

    def set_number(self, node: int, number: int) -> None:
        self.expanded[node] = number

    def add(self, parent: int, token: int, p: float | None, source: str) -> int:
        scored = self.calibrators[source].weigh(p, self.depths[parent] + 1)
        node = self.children[parent].get(token)
        if node is None:
            return self.put(parent, token, scored)
        self.agree(node, scored)
        return node

    def put(self, parent: int, token: int, scored: CalibratedScore) -> int:
        node = self.children[parent][token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.expanded.append(0)
        self.p.append(scored[3])
        self.values.append(self.values[parent] * scored[3])
        self.children.append({})
        self.scores.append([scored])
        return node

    def branch(self, node: int, scored: Iterable[tuple[int, float]], source: str) -> list[float]:
        weigh, depth = self.calibrators[source].weigh, self.depths[node] + 1
        children = self.children[node]
        scored = self.allowed(node, scored)
        if not children:
            for token, p in scored:
                self.put(node, token, weigh(p, depth))
            return []
        before = [self.values[child] for child in children.values()]
        for token, p in scored:
            calibrated, child = weigh(p, depth), children.get(token)
            if child is None:
                self.put(node, token, calibrated)
            else:
                self.agree(child, calibrated)
        value = self.values[node]
        for child in children.values():
            self.values[child] = value * self.p[child]
        return before

    def agree(self, node: int, scored: CalibratedScore) -> None:
        """Add another source's score of a node; a second score of the same source counts only if
        higher.
        """
        scores = self.scores[node]
        for i, (calibrator, _, _, p) in enumerate(scores):
            if calibrator is scored[0]:
                scores[i] = scored if scored[3] > p else scores[i]
                break
        else:
            scores.append(scored)
        self.p[node] = scores[0][3] if len(scores) == 1 else self.calibration.combine(scores)
        self.values[node] = self.values[self.parents[node]] * self.p[node]
        self.is_settled &= not self.children[node]

    def settle(self) -> list[float]:
        values, p = self.values, self.p
        if not self.is_settled:
            for node, parent in enumerate(self.parents[1:], 1):
                values[node] = values[parent] * p[node]
            self.is_settled = True
        return values

    def reaches(self, nodes: Sequence[int], source: str) -> list[float]:
        values, children = self.values, self.children
        none = self.childless(source, self.depths[nodes[0]] + 1)[3] if nodes else 0.0
        return [
            values[node] * (self.children_by(source, node)[3] if children[node] else none)
            for node in nodes
        ]

    def childless(self, source: str, depth: int) -> CalibratedScore:
        score = self.no_child.get((source, depth))
        if score is None:
            calibrator = self.calibrators[CHILDREN_BY + source]
            score = self.no_child[source, depth] = calibrator.weigh(FINDS, depth)
        return score

    def children_by(self, source: str, node: int) -> CalibratedScore:
        depth, children = self.depths[node] + 1, self.children[node]
        if not children:
            return self.childless(source, depth)
        total = reduce(add, [self.p[child] for child in children.values()])
        return self.calibrators[CHILDREN_BY + source].weigh(FINDS * (1 - min(total, 1.0)), depth)

    def ask(self, node: int, source: str) -> None:
        existing = frozenset(self.children[node])
        self.asked.setdefault(node, []).append((source, existing, self.children_by(source, node)))

    def sources(self, node: int) -> list[str]:
        return [calibrator.source for calibrator, _, _, _ in self.scores[node]]

    def observe(self, tokens: Sequence[int]) -> int | None:
        calibrators = self.calibrators.values()
        for calibrator in calibrators:
            calibrator.fade()
        node = ROOT
        for token in tokens:
            accepted = self.children[node].get(token)
            self.learn(node, accepted)
            if accepted is None:
                break
            node = accepted
        for calibrator in calibrators:
            calibrator.use()
        return self.child(ROOT, tokens[0]) if tokens else None

    def learn(self, node: int, accepted: int | None) -> None:
        """Learn which child of a node was accepted, if any."""
        for source, existing, score in self.asked.get(node, ()):
            is_found = accepted is not None and source in self.sources(accepted)
            score[0].learn(score, is_found and self.tokens[accepted or 0] not in existing)
        for child in self.children[node].values():
            scores = self.scores[child]
            for score in scores:
                score[0].learn(score, child == accepted)
            if len(scores) > 1:
                self.calibration.agreed(scores, child == accepted)

    def draft(self, chosen: Sequence[int]) -> "ChosenDraft":
        path, rest, end = [ROOT], [], ROOT
        for node in chosen:
            if self.parents[node] == end:
                path.append(node)
                end = node
            else:
                rest.append(node)
        order = path + rest
        number = {node: k for k, node in enumerate(order)}
        del order[0]
        tokens = [self.tokens[node] for node in order]
        parents = [number[self.parents[node]] for node in order]
        expanded = [self.expanded[node] for node in order]
        draft = Draft(tokens, parents, expanded if any(expanded) else [])
        return ChosenDraft(draft, order, [tuple(self.sources(node)) for node in order])


class ChosenDraft(NamedTuple):
    """A draft, and the node and the sources of each of its tokens. The source that proposed a token
    first is the first of its sources.
    """

    draft: Draft
    nodes: list[int]
    sources: list[tuple[str, ...]]


class Selection(NamedTuple):
    """Selected draft tokens of a step, in order: each comes after its parent.

    A draft token's value is the probability of its path.
    """

    values: "array[float]"
    places: "array[int]"  # of the requests
    nodes: "array[int]"

    @classmethod
    def of(cls, found: Sequence[tuple[float, int, int]]) -> Self:
        """Create it from rows."""
        columns = zip(*found, strict=True) if found else ((), (), ())
        values, places, nodes = map(array, "dii", columns)
        return cls(values, places, nodes)

    def by_request(self, size: int, num_requests: int) -> list[list[int]]:
        """Return the first `size` nodes of the selection, by request."""
        if num_requests == 1:
            return [self.nodes[:size].tolist()]
        found: list[list[int]] = [[] for _ in range(num_requests)]
        for place, node in zip(self.places[:size], self.nodes, strict=False):
            found[place].append(node)
        return found


class RequestCandidates(msgspec.Struct, eq=False):
    """A request with a root: its candidates and limits."""

    trie: BaseTrie
    limit: int  # most draft tokens of the request
    max_depth: int = MAX_NODES
    behind: float = 0.0  # tokens beyond the next that it needs in this step to meet its target


def best(asks: Sequence[RequestCandidates], most: int) -> Selection:
    """Select up to `most` draft tokens of a step's requests, by falling value. Tokens that a late
    request needs to meet its target come first; the latest request leads.
    """
    if any(ask.behind > 0 for ask in asks):
        return Selection.of(most_urgent(asks, most))
    found = list[tuple[float, int, int]]()
    for i, ask in enumerate(asks):
        values = ask.trie.settle()
        found += [(values[node], i, node) for node in ranked(ask)]
    return Selection.of(sorted(found, key=itemgetter(0), reverse=True)[:most])


def ranked(ask: RequestCandidates) -> list[int]:
    """Return the draft tokens that a request may have, by falling value, so that parents come
    first.
    """
    values, deepest = ask.trie.settle(), ask.max_depth
    nodes = [node for node, value in enumerate(values) if value >= LEAST_VALUE]
    if deepest < MAX_NODES:
        depths = ask.trie.depths
        nodes = [node for node in nodes if depths[node] <= deepest]
    nodes.sort(key=values.__getitem__, reverse=True)
    return nodes[1 : ask.limit + 1]  # the root is the most likely node


def most_urgent(asks: Sequence[RequestCandidates], most: int) -> list[tuple[float, int, int]]:
    """Do the same if any request is behind its target."""
    tries, room = [ask.trie for ask in asks], [ask.limit for ask in asks]
    deepest = [ask.max_depth for ask in asks]
    behind = [ask.behind for ask in asks]
    heap = [
        (-urgency(trie.p[node], behind[i]), i, node, trie.p[node])
        for i, trie in enumerate(tries)
        if room[i] > 0
        for node in trie.children_of(ROOT)
    ]
    heapify(heap)
    found: list[tuple[float, int, int]] = []
    while heap and len(found) < most:
        key, i, node, value = heap[0]
        if value < LEAST_VALUE or room[i] == 0:
            heappop(heap)
            continue
        if behind[i] <= 0 and key < -value:  # its request was behind when it was added
            heapreplace(heap, (-value, i, node, value))
            continue
        found.append((value, i, node))
        room[i] -= 1
        behind[i] -= value
        heappop(heap)
        p = tries[i].p
        if tries[i].depths[node] == deepest[i]:
            continue
        lacks = behind[i]
        for child in tries[i].children_of(node):
            if (of_path := value * p[child]) >= LEAST_VALUE:
                key = -urgency(of_path, lacks) if lacks > 0 else -of_path
                heappush(heap, (key, i, child, of_path))
    return found


def urgency(value: float, behind: float) -> float:
    """Return the sort key of draft tokens: tokens of late requests come before all others."""
    return value + 1 + behind if behind > 0 else value


def weigh(
    asks: Sequence[RequestCandidates], step: Step, costs: StepCosts, most: int
) -> tuple[Selection, Size, Size]:
    """Select draft tokens, and find the best number of them, by the known costs and by the least
    possible ones.

    Only right edges of row buckets, and all tokens, are compared: rows up to an edge are free. A
    step that exceeds the allowed time gets none.
    """
    found = best(asks, most)
    num, sums = len(found.values), [*accumulate(found.values, initial=0.0)]
    first, last = bisect_right(costs.edges, step.rows), len(costs.edges)
    last = bisect_left(costs.edges, step.rows + num, hi=last)
    sizes = [0, *(edge - step.rows for edge in costs.edges[first:last])]
    if step.rows >= FINE:
        sizes += [size for size in FEW if size < num]
    if num:
        sizes.append(num)
    gains = [sums[size] for size in sizes]
    known = best_of(step, sizes, gains, costs, is_hopeful=False)
    if are_known(costs, step, sizes):
        return found, known, known
    return found, known, best_of(step, sizes, gains, costs, is_hopeful=True)


def best_of(
    step: Step, sizes: Sequence[int], gains: Sequence[float], costs: StepCosts, is_hopeful: bool
) -> Size:
    """Return the size with the highest rate; `gains` holds each size's expected draft tokens."""
    spent, worth, allowed = step.spent, 0.0, inf
    tokens = [step.root_tokens + gain for gain in gains]
    none = costs.of(step, 0, is_hopeful)  # exactly: of several sizes, it may differ by rounding
    each_size = none, *costs.of_each(step, sizes[1:], is_hopeful)
    takes = [spent + seconds for seconds in each_size]
    if step.prompt_rows or step.allowed < inf:
        roots = costs.of(without_prompts(step), 0, is_hopeful)
        allowed = allowed_with_draft(step, roots)
        if step.prompt_rows and step.num_roots:
            worth = prefill_value(none - roots, tokens, takes)
    each = zip(tokens, takes, strict=True)
    rates = [(t + worth) / s if s <= allowed else 0.0 for t, s in each]
    best = rates.index(max(rates))  # no draft token, if nothing is allowed
    return Size(sizes[best], gains[best], takes[best], tokens[best] / takes[best])
