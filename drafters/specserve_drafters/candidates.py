"""Trees of draft tokens: a trie merges the candidates of all sources of a request, and the draft
has the candidates to verify.
"""

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import exp
from operator import index
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol, Self, SupportsIndex

import msgspec
from msgspec import Meta

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


# Counts by source, with which the bins of new requests' scopes begin.
AcceptancePrior = Mapping[str, Sequence[BinCounts]]


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
        """Begin with counts of earlier texts, as at most KNOWN_WEIGHT draft tokens."""
        share = min(1.0, KNOWN_WEIGHT / known.tries)
        self.tries, self.hits = share * known.tries, share * min(known.hits, known.tries)
        self.scores = share * known.scores
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
        return {
            source: [
                BinCounts(i, bin.tries, bin.hits, bin.scores)
                for i, bin in enumerate(kinds)
                if bin.tries
            ]
            for source, (_, kinds) in self.sources.items()
        }

    def table(self) -> dict[str, list[dict[str, float]]]:
        """Return the bins with draft tokens, by source: score, share of accepted tokens, count."""
        return {
            source: [
                {"depth": i % DEPTHS + 1, "tries": k.tries, "score": k.scores / k.tries}
                | {"right": k.hits / k.tries}
                for i, k in enumerate(kinds)
                if k.tries
            ]
            for source, (_, kinds) in self.sources.items()
        }


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DROPPED = -1  # replaces the node of a candidate that the request's rules forbid
MAX_CANDIDATES = 4 * MAX_NODES  # most candidates of a source in a step
CHILDREN_BY = "children by "  # prefix of a source's name, for the calibration of its children
FINDS = 0.7  # initial probability that a source has the accepted child


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


class Rules(Protocol):
    """The tokens that may follow a path of draft tokens, which begins at the root."""

    def allows(self, path: Sequence[int], token: int) -> bool: ...

    def forced(self, path: Sequence[int]) -> list[int]:
        """Return the tokens of the only text that may come next; none if several may."""
        ...

    def mask(self, path: Sequence[int]) -> "NDArray[np.int32]":
        """Return which ids may come next, as in kernels' Masks: none after a forbidden path."""
        ...


class Trie:
    """One request's candidates, merged: equal tokens below equal parents are one node.

    Candidates that the request's rules forbid are dropped, with everything after them. So are
    tokens that are not below `num_ids`.

    Node 0 is the root, and every node comes after its parent. `p` is the calibrated probability
    that a node is accepted if its parent is; `values` holds the probability of the whole path. If
    another source proposes a node again, the values below it are updated only by `settle` or
    `branch`.
    """

    def __init__(
        self,
        calibration: Calibration,
        id: int,
        rules: Rules | None = None,
        num_ids: int | None = None,
    ) -> None:
        self.calibration, self.calibrators, self.rules = (
            calibration,
            calibration.calibrators(id),
            rules,
        )
        self.num_ids = num_ids
        self.tokens, self.parents, self.depths, self.expanded = [0], [ROOT], [0], [0]
        self.p, self.values, self.is_settled = [1.0], [1.0], True
        self.children: list[dict[int, int]] = [{}]  # token -> node
        self.scores: list[list[CalibratedScore]] = [[]]
        self.num_continued = 0  # nodes, in order, whose forced continuations were added
        # See `childless`; by source and depth.
        self.no_child: dict[tuple[str, int], CalibratedScore] = {}
        # Sources that were asked for a node's children, and the existing tokens, by node.
        self.asked: dict[int, list[tuple[str, frozenset[int], CalibratedScore]]] = {}

    def __len__(self) -> int:
        return len(self.tokens) - 1

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
                self.expanded[node] = expanded
            nodes.append(node)
        return nodes[1:]

    def allows(self, parent: int, token: int) -> bool:
        rules = self.rules
        if self.num_ids is not None and token >= self.num_ids:
            return False
        return (
            rules is None
            or token in self.children[parent]
            or rules.allows(self.path(parent), token)
        )

    def path(self, node: int) -> list[int]:
        """Return the tokens of the path from the root to the node, without the root."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def add(self, parent: int, token: int, p: float | None, source: str) -> int:
        """Add a draft token; return its node, which other sources may have added already."""
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
        """Add the children that a source was asked for, each a token and its score; return the
        values of the existing children.
        """
        weigh, depth = self.calibrators[source].weigh, self.depths[node] + 1
        children = self.children[node]
        if self.rules is not None or self.num_ids is not None:
            scored = [(token, p) for token, p in scored if self.allows(node, token)]
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
        """Return the probability of each node's whole path."""
        values, p = self.values, self.p
        if not self.is_settled:
            for node, parent in enumerate(self.parents[1:], 1):
                values[node] = values[parent] * p[node]
            self.is_settled = True
        return values

    def reach(self, node: int, source: str) -> float:
        """Return the value of asking a source for a node's children. It is the probability that the
        node's path is accepted, and that the source adds the accepted child.
        """
        return self.reaches([node], source)[0]

    def reaches(self, nodes: Sequence[int], source: str) -> list[float]:
        """Do the same as `reach` for nodes of equal depth."""
        values, children = self.values, self.children
        none = self.childless(source, self.depths[nodes[0]] + 1)[3] if nodes else 0.0
        return [
            values[node] * (self.children_by(source, node)[3] if children[node] else none)
            for node in nodes
        ]

    def chances(self, source: str, depth: int) -> list[float]:
        """Return the probability that a source adds the accepted child of the root, then of each
        later node on the path, down to a depth.
        """
        below = [self.childless(source, at)[3] for at in range(2, depth + 1)]
        return [self.reach(ROOT, source), *below]

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
        total = sum([self.p[child] for child in children.values()])
        return self.calibrators[CHILDREN_BY + source].weigh(FINDS * (1 - min(total, 1.0)), depth)

    def ask(self, node: int, source: str) -> None:
        """Record that a source is asked for a node's children, before these are added."""
        existing = frozenset(self.children[node])
        self.asked.setdefault(node, []).append((source, existing, self.children_by(source, node)))

    def sources(self, node: int) -> list[str]:
        return [calibrator.source for calibrator, _, _, _ in self.scores[node]]

    def observe(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens that followed the root. Every candidate below a reached node is
        counted, verified or not, because its result is known.
        """
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

    def draft(self, chosen: Sequence[int]) -> tuple[Draft, list[int]]:
        """Return chosen nodes, most likely first and each after its parent, as a draft; also return
        the node of each draft token. The most likely path gets the lowest numbers.
        """
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
        return Draft(tokens, parents, expanded if any(expanded) else []), order
