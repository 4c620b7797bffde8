"""A trie merges the candidates of all sources of a request. Scores are calibrated by what was
accepted, and the best nodes of a step's tries are selected.

`specserve_drafters.native` has the same in C++. This form is slow, and defines the result.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, reduce
from heapq import heapify, heappop, heappush, heapreplace
from math import exp
from operator import add, itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from specserve_drafters.candidates import (
    MAX_NODES,
    ROOT,
    Candidate,
    ChosenDraft,
    Draft,
    Rules,
    Selection,
    WeighedSizes,
)

DROPPED = -1  # replaces the node of a candidate that the request's rules forbid
CHILDREN_BY = "children by "  # prefix of a source's name, for the calibration of its children
FINDS = 0.7  # initial probability that a source has the accepted child
LEAST_VALUE = 1e-3  # least value of a draft token that is selected

BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # bounds between buckets of scores
DEPTHS = 8  # depth from which draft tokens share one bin
NUM_BINS = (len(BOUNDS) + 1) * DEPTHS  # bins of a source
LEAST, MOST = 0.002, 0.998  # bounds of a probability: none is certain
UNSCORED = 0.5  # score of a draft token whose source gives none

PRIOR = 4.0  # number of draft tokens that a bin's score counts for
KNOWN_WEIGHT = 32.0  # most draft tokens of earlier texts that a bin begins with
MEMORY = 1 - 1 / 256  # factor on a bin's counts per counted draft token
SHIFT_PRIOR = 1.0  # weight of the zero shift, in units of p (1 - p): four draft tokens of p = 1/2
SHIFT_MEMORY = 1 - 1 / 32  # factor on a shift's weight per step
MAX_SHIFT = 4.0  # largest absolute shift of log-odds
WORTH, WORTH_RATE = 0.05, 1 / 64  # initial gain of agreement in probability, and its rate of change


class BinCounts(NamedTuple):
    """Counts of one bin, measured with earlier texts."""

    kind: Annotated[int, Meta(ge=0, lt=NUM_BINS)]  # number of the bin
    tries: Annotated[float, Meta(ge=1e-3, le=1e9)]
    hits: Annotated[float, Meta(ge=0, le=1e9)]
    scores: Annotated[float, Meta(ge=0, le=1e9)]

    def plus(self, other: "BinCounts") -> "BinCounts":
        """Return the counts of both, which are of the same kind."""
        added = (a + b for a, b in zip(self[1:], other[1:], strict=True))
        return BinCounts(self.kind, *added)


# Counts by source, with which the bins of new requests' scopes begin.
AcceptancePrior = Mapping[str, Sequence[BinCounts]]
# Counts of real models and the demo models on real prompts: `python -m specserve_bench.priors`.
PRIORS = Path(__file__).with_name("priors.json")


@cache
def shipped_prior() -> AcceptancePrior:
    """Return the acceptance with which a server begins that `specserve tune` knows nothing of."""
    return msgspec.json.decode(PRIORS.read_bytes(), type=dict[str, list[BinCounts]])


def begun_with(known: BinCounts) -> BinCounts:
    """Return counts of earlier texts as those of at most KNOWN_WEIGHT draft tokens."""
    share = min(1.0, KNOWN_WEIGHT / known.tries)
    hits = min(known.hits, known.tries)
    return BinCounts(known.kind, share * known.tries, share * hits, share * known.scores)


def table(counts: Mapping[str, Sequence[BinCounts]]) -> dict[str, list[dict[str, float]]]:
    """Return each bin's depth, count, mean score and share of accepted tokens, by source."""
    return {
        source: [
            {"depth": kind % DEPTHS + 1, "tries": tries}
            | {"score": scores / tries, "right": hits / tries}
            for kind, tries, hits, scores in bins
        ]
        for source, bins in counts.items()
    }


class CalibrationBin:
    """Decayed counts of the draft tokens of one source, bucket of score and depth."""

    __slots__ = ("factor", "hits", "scores", "tries")

    def __init__(self) -> None:
        self.tries = self.hits = self.scores = 0.0
        self.factor = 1.0  # odds of the accepted share, relative to the odds of a score

    def count(self, score: float, is_right: bool) -> None:
        self.tries = self.tries * MEMORY + 1
        self.hits = self.hits * MEMORY + is_right
        self.scores = self.scores * MEMORY + score
        self.settle()

    def begin_with(self, known: BinCounts) -> None:
        """Begin with counts of earlier texts."""
        _, self.tries, self.hits, self.scores = begun_with(known)
        self.settle()

    def settle(self) -> None:
        # A Beta prior around the source's own score: without draft tokens nothing changes.
        tries = self.tries
        score = self.scores / tries
        score = LEAST if score < LEAST else MOST if score > MOST else score
        right = (self.hits + PRIOR * score) / (tries + PRIOR)
        right = LEAST if right < LEAST else MOST if right > MOST else right
        self.factor = right * (1 - score) / ((1 - right) * score)


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


class TrieLevel(NamedTuple):
    """The children of nodes that a model has run: nodes, values and reaches by such a node."""

    before: list[float]  # values of the children that existed before
    num_likely: list[int]  # children that the model proposed, by node
    nodes: list[list[int]]
    values: list[list[float]]
    reaches: list[list[float]]  # see `BaseTrie.reaches`


class BaseTrie:
    """One request's candidates, merged: equal tokens below equal parents are one node.

    Candidates that the request's rules forbid are dropped, with everything after them. So are
    tokens that are not below `num_ids`.

    Node 0 is the root, and every node comes after its parent. `p` is the calibrated probability
    that a node is accepted if its parent is; `values` holds the probability of the whole path. If
    another source proposes a node again, the values below it are updated only by `settle` or
    `branch`.
    """

    rules: Rules | None
    num_ids: int | None
    handle = 0  # address of the trie in C++, if it is there
    number: Callable[[str], int]  # of a source in C++
    num_continued = 0  # nodes, in order, whose forced continuations were added
    # Columns with a value per node, also for the root:
    tokens: list[int]
    parents: list[int]
    depths: list[int]
    p: list[float]
    values: list[float]

    def __len__(self) -> int:
        raise NotImplementedError

    def clear(self) -> None:
        """Drop all nodes below the root, for the request's next step."""
        raise NotImplementedError

    def clear_each(self, tries: "Sequence[BaseTrie]") -> None:
        """Clear several tries of the form of this one."""
        for trie in tries:
            trie.clear()

    def child(self, node: int, token: int) -> int | None:
        """Return the child with this token."""
        raise NotImplementedError

    def children_of(self, node: int) -> list[int]:
        raise NotImplementedError

    def sources(self, node: int) -> list[str]:
        """Return the sources that proposed a node, the first one first."""
        raise NotImplementedError

    def set_number(self, node: int, number: int) -> None:
        """Set the draft model's number of a node, see `Draft`."""
        raise NotImplementedError

    def add(self, parent: int, token: int, p: float | None, source: str) -> int:
        """Add a draft token; return its node, which other sources may have added already."""
        raise NotImplementedError

    def branch(self, node: int, scored: Iterable[tuple[int, float]], source: str) -> list[float]:
        """Add the children that a source was asked for, each a token and its score; return the
        values of the existing children.
        """
        raise NotImplementedError

    def branch_each(
        self,
        rows: "Sequence[tuple[BaseTrie, int]]",
        tokens: Sequence[Sequence[int]],
        log_p: Sequence[Sequence[float]],
        source: str,
    ) -> TrieLevel:
        """Add the likely children of nodes that a source has run, from their tokens and log
        probabilities. All tries have the form of this one.
        """
        before, num_likely = list[float](), list[int]()
        of_path = [trie.values[node] for trie, node in rows]
        for (trie, node), value, own, scores in zip(rows, of_path, tokens, log_p, strict=True):
            least = LEAST_VALUE / max(value, LEAST_VALUE)
            likely = [(t, p) for t, p in zip(own, map(exp, scores), strict=True) if p >= least]
            trie.ask(node, source)
            before += trie.branch(node, likely, source)
            num_likely.append(len(likely))
        nodes = [trie.children_of(node) for trie, node in rows]
        each = [*zip(nodes, [trie for trie, _ in rows], strict=True)]
        values = [[*map(trie.values.__getitem__, own)] for own, trie in each]
        return TrieLevel(before, num_likely, nodes, values, [t.reaches(o, source) for o, t in each])

    def settle(self) -> list[float]:
        """Return the probability of each node's whole path."""
        raise NotImplementedError

    def reaches(self, nodes: Sequence[int], source: str) -> list[float]:
        """Return the values of asking a source for the children of nodes of equal depth. Each is
        the probability that the node's path is accepted, and that the source adds the accepted
        child.
        """
        raise NotImplementedError

    def ask(self, node: int, source: str) -> None:
        """Record that a source is asked for a node's children, before these are added."""
        raise NotImplementedError

    def observe(self, tokens: Sequence[int]) -> int | None:
        """Learn from the tokens that followed the root; return its child that was accepted. Every
        candidate below a reached node is counted, verified or not, because its result is known.
        """
        raise NotImplementedError

    def observe_each(self, tries: "Sequence[BaseTrie]", tokens: Sequence[Sequence[int]]) -> None:
        """Do the same for several tries of the form of this one."""
        for trie, own in zip(tries, tokens, strict=True):
            trie.observe(own)

    def select(self, asks: "Sequence[RequestCandidates]", most: int) -> Selection:
        """Select up to `most` draft tokens of a step's requests, by falling value. Tokens that a
        late request needs to meet its target come first; the latest request leads. All tries have
        the form of this one.
        """
        raise NotImplementedError

    def weigh(
        self,
        asks: "Sequence[RequestCandidates]",
        most: int,
        likely: float,
        step: Any,
        costs: Any,
    ) -> WeighedSizes | None:
        """Select draft tokens, find the best number of them, and cut the drafts; `step` and
        `costs` are those of `specserve_kernels.cpu.drafting`. None: this form of tries cannot, see
        `planner.weigh`.
        """
        return None

    def cut(
        self, asks: "Sequence[RequestCandidates]", found: Selection, size: int, likely: float
    ) -> list[tuple[ChosenDraft, float]]:
        """Return the draft of each request that has the first `size` nodes of a selection, and the
        sum of its values above `likely`.
        """
        expected = [0.0] * len(asks)
        for place, value in zip(found.places[:size], found.values, strict=False):
            expected[place] += value if value > likely else 0.0
        nodes = found.by_request(size, len(asks))
        drafts = [ask.trie.draft(own) for ask, own in zip(asks, nodes, strict=True)]
        return [*zip(drafts, expected, strict=True)]

    def draft(self, chosen: Sequence[int]) -> ChosenDraft:
        """Return chosen nodes, most likely first and each after its parent, as a draft. The most
        likely path gets the lowest numbers.
        """
        raise NotImplementedError

    def reach(self, node: int, source: str) -> float:
        """Do the same as `reaches` for one node."""
        return self.reaches([node], source)[0]

    def path(self, node: int) -> list[int]:
        """Return the tokens of the path from the root to the node, without the root."""
        all_tokens, parents, tokens = self.tokens, self.parents, list[int]()
        while node != ROOT:
            tokens.append(all_tokens[node])
            node = parents[node]
        return tokens[::-1]

    def merge(self, candidates: Iterable[Candidate], below: int = ROOT) -> list[int]:
        """Add one source's list of candidates below a node; return the node of each, or DROPPED."""
        nodes = [below]
        for token, parent, p, source, expanded in candidates:
            at = nodes[parent]
            if at == DROPPED or not self.allows(at, token):
                nodes.append(DROPPED)
                continue
            node = self.add(at, token, p, source)
            if expanded:
                self.set_number(node, expanded)
            nodes.append(node)
        return nodes[1:]

    def allows(self, parent: int, token: int) -> bool:
        rules = self.rules
        if self.num_ids is not None and token >= self.num_ids:
            return False
        return (
            rules is None
            or self.child(parent, token) is not None
            or rules.allows(self.path(parent), token)
        )

    def allowed(
        self, node: int, scored: Iterable[tuple[int, float]]
    ) -> Iterable[tuple[int, float]]:
        """Return the tokens that may follow a node, with their scores."""
        if self.rules is None and self.num_ids is None:
            return scored
        return [(token, p) for token, p in scored if self.allows(node, token)]


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

    def select(self, asks: "Sequence[RequestCandidates]", most: int) -> Selection:
        return best(asks, most)

    def draft(self, chosen: Sequence[int]) -> ChosenDraft:
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


class RequestCandidates(msgspec.Struct, eq=False):
    """A request with a root: its candidates and limits."""

    trie: BaseTrie
    limit: int  # most draft tokens of the request
    max_depth: int = MAX_NODES
    behind: float = 0.0  # tokens beyond the next that it needs in this step to meet its target


def best(asks: Sequence[RequestCandidates], most: int) -> Selection:
    """See `BaseTrie.select`."""
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
