"""Trees of draft tokens: the candidates of all sources of one request in one trie, and the draft,
which has those candidates that are verified.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import islice
from math import exp
from operator import index
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, SupportsIndex

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


BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # between buckets of scores
DEPTHS = 8  # guesses at this depth and deeper ones are of one kind
LEAST, MOST = 0.002, 0.998  # of a probability: more is never certain
UNSCORED = 0.5  # the score of a guess whose source gives none

PRIOR = 4.0  # guesses that a kind's own score counts for
MEMORY = 1 - 1 / 256  # what is left of a kind's counts after another guess of it
SHIFT_PRIOR = 1.0  # of a request's shift, in units of p (1 - p): four guesses of p = 1/2
SHIFT_MEMORY = 1 - 1 / 32  # what is left of a shift's guesses after another step
MAX_SHIFT = 4.0
WORTH, WORTH_RATE = 0.05, 1 / 64  # what agreement is worth at first, and how fast that changes


class CalibrationBin:
    """Decayed counts of the guesses of one source, bucket of score and depth."""

    __slots__ = ("factor", "hits", "scores", "tries")

    def __init__(self) -> None:
        self.tries = self.hits = self.scores = 0.0
        self.factor = 1.0  # from the odds of a score to those of the share that was right

    def count(self, score: float, is_right: bool) -> None:
        self.tries = tries = self.tries * MEMORY + 1
        self.hits = hits = self.hits * MEMORY + is_right
        self.scores = scores = self.scores * MEMORY + score
        # A Beta prior around the source's own score: without guesses nothing changes.
        score = scores / tries
        right = (hits + PRIOR * score) / (tries + PRIOR)
        right = LEAST if right < LEAST else MOST if right > MOST else right
        self.factor = right * (1 - score) / ((1 - right) * score)


# One source's word on a guess: who weighed it, the kind, the score, and what it is worth here. A
# plain tuple: hundreds are made in a step.
CalibratedScore = tuple["AcceptanceCalibrator", int, float, float]


class AcceptanceCalibrator:
    """Calibrates one source's scores in one request: as in all requests, and by its own shift."""

    __slots__ = ("bit", "factor", "kinds", "logit_shift", "source", "weight")

    def __init__(self, source: str, bit: int, kinds: list[CalibrationBin]) -> None:
        self.source, self.bit, self.kinds = source, bit, kinds
        self.logit_shift = self.weight = 0.0
        self.factor = 1.0  # of the odds: exp(shift)

    def weigh(self, score: float | None, depth: int) -> CalibratedScore:
        """A score of any value as a probability: NaN and None count as UNSCORED."""
        if score is None or score != score:
            score = UNSCORED
        score = LEAST if score < LEAST else MOST if score > MOST else score
        kind = bisect(BOUNDS, score) * DEPTHS + (depth if depth < DEPTHS else DEPTHS) - 1
        right = self.kinds[kind].factor * self.factor * score
        p = right / (right + 1 - score)
        return self, kind, score, LEAST if p < LEAST else MOST if p > MOST else p

    def learn(self, said: CalibratedScore, is_right: bool) -> None:
        """Count a guess whose parent was right."""
        _, kind, score, p = said
        self.kinds[kind].count(score, is_right)
        # A Newton step of a logistic regression with forgetting, whose only weight is the shift.
        # The kinds' share in p changes meanwhile; the step uses the error of both together.
        self.weight = weight = self.weight + p * (1 - p)
        shift = self.logit_shift + (is_right - p) / (weight + SHIFT_PRIOR)
        self.logit_shift = (
            -MAX_SHIFT if shift < -MAX_SHIFT else MAX_SHIFT if shift > MAX_SHIFT else shift
        )

    def fade(self) -> None:
        """Another step begins: a shift that nothing confirms goes back to what holds for all."""
        left = self.weight * SHIFT_MEMORY
        self.logit_shift *= SHIFT_MEMORY * (self.weight + SHIFT_PRIOR) / (left + SHIFT_PRIOR)
        self.weight = left

    def use(self) -> None:
        """Weigh by what was learnt, from here on."""
        self.factor = exp(self.logit_shift)


class Calibrators(dict[str, AcceptanceCalibrator]):
    """The calibrators of one request, by source; each is made when it is first asked for."""

    def __init__(self, calibration: "Calibration") -> None:
        super().__init__()
        self.calibration = calibration

    def __missing__(self, source: str) -> AcceptanceCalibrator:
        sources = self.calibration.sources
        if source not in sources:
            kinds = [CalibrationBin() for _ in range((len(BOUNDS) + 1) * DEPTHS)]
            sources[source] = 1 << len(sources), kinds
        bit, kinds = sources[source]
        calibrator = self[source] = AcceptanceCalibrator(source, bit, kinds)
        return calibrator


class Calibration:
    """The kinds of all sources, what their agreement is worth, and every request's calibrators."""

    def __init__(self) -> None:
        self.sources: dict[str, tuple[int, list[CalibrationBin]]] = {}  # a bit and the kinds
        self.worth: dict[int, float] = {}  # by the bits of the sources that agree
        self.requests: dict[int, Calibrators] = {}

    def calibrators(self, id: int) -> Calibrators:
        """The request's; they are kept until `forget`."""
        found = self.requests.get(id)
        if found is None:
            found = self.requests[id] = Calibrators(self)
        return found

    def combine(self, said: list[CalibratedScore]) -> float:
        """The probability of a guess that several sources share: as if they erred independently,
        but no more above the best of them than agreement has been worth.
        """
        bits, wrong, best = 0, 1.0, 0.0
        for calibrator, _, _, p in said:
            bits |= calibrator.bit
            wrong *= 1 - p
            best = p if p > best else best
        return min(1 - wrong, best + self.worth.get(bits, WORTH), MOST)

    def agreed(self, said: list[CalibratedScore], is_right: bool) -> None:
        """Count a guess of several sources whose parent was right."""
        bits, best = 0, 0.0
        for calibrator, _, _, p in said:
            bits |= calibrator.bit
            best = max(best, p)
        worth = self.worth.get(bits, WORTH)
        self.worth[bits] = max(0.0, worth + WORTH_RATE * (is_right - best - worth))

    def forget(self, id: int) -> None:
        self.requests.pop(id, None)

    def drop(self, source: str) -> None:
        """Forget what was learnt of a source: another one has its name."""
        if source in self.sources:
            kinds = self.sources[source][1]
            kinds[:] = [CalibrationBin() for _ in kinds]
        for calibrators in self.requests.values():
            calibrators.pop(source, None)

    def table(self) -> dict[str, list[dict[str, float]]]:
        """By source, the kinds of which there were guesses: score, share that was right, count."""
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

DROPPED = -1  # in the place of a node, for a candidate that the request's rules forbid
MAX_CANDIDATES = 4 * MAX_NODES  # candidates of a source in a step: more cannot be of use
CHILDREN_BY = "children by "  # and a source: the name of how often it has the right child
FINDS = 0.7  # how often a source that is asked has the right child, until steps have shown it


class Candidate(NamedTuple):
    """A guess with a score.

    `parent` is its parent's place in its source's list, counted from 1, or ROOT. `p` is the
    source's estimate that the token is right given that its parent was, None where it has none.
    """

    token: int
    parent: int
    p: float | None
    source: str
    expanded: int = 0  # the draft model's number for it, see Draft; 0 where it has not run it


def of_draft(draft: Draft, source: str) -> list[Candidate]:
    """A draft's guesses as candidates that have no scores."""
    expanded = draft.expanded or [0] * len(draft)
    each = zip(draft.tokens, draft.parents, expanded, strict=True)
    return [Candidate(token, parent, None, source, e) for token, parent, e in each]


def checked(candidates: Iterable[object], source: str, vocab_size: int) -> list[Candidate]:
    """At most MAX_CANDIDATES, ending before the first invalid one, as their source's own.

    They may be anything, as a source is user code; the result has plain numbers.
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
    """What may come after a path of guesses, which begins at the root."""

    def allows(self, path: Sequence[int], token: int) -> bool: ...

    def forced(self, path: Sequence[int]) -> list[int]:
        """The tokens of the only text that may come next; none where several may."""
        ...

    def mask(self, path: Sequence[int]) -> "NDArray[np.int32]":
        """Which ids may come next, as in kernels' Masks: none after a path that is forbidden."""
        ...


class Trie:
    """One request's candidates, merged: equal tokens below equal parents are one node. What the
    request's rules forbid is no candidate, nor is what comes after it. The same holds for tokens
    that are not below `num_ids`.

    Node 0 is the root, and every node comes after its parent. `p` is the calibrated probability
    that a node is right given that its parent was, `values` that of its whole path: but nodes below
    one that another source has guessed, too, keep what they had, until `settle` or `branch`.
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
        self.said: list[list[CalibratedScore]] = [[]]
        self.num_continued = 0  # nodes, in order, that rules have continued where that was due
        self.no_child: dict[
            tuple[str, int], CalibratedScore
        ] = {}  # see childless, by source and depth
        # By node: who was asked for its children, and the tokens that were there.
        self.asked: dict[int, list[tuple[str, frozenset[int], CalibratedScore]]] = {}

    def __len__(self) -> int:
        return len(self.tokens) - 1

    def merge(self, candidates: Iterable[Candidate], below: int = ROOT) -> list[int]:
        """Add one source's list of candidates; the node of each, or DROPPED. They may continue from
        a node.
        """
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
        """The tokens from the root's to the node's, the root's left out."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def add(self, parent: int, token: int, p: float | None, source: str) -> int:
        """Add a guess; the node, which other sources may have added already."""
        said = self.calibrators[source].weigh(p, self.depths[parent] + 1)
        node = self.children[parent].get(token)
        if node is None:
            return self.put(parent, token, said)
        self.agree(node, said)
        return node

    def put(self, parent: int, token: int, said: CalibratedScore) -> int:
        node = self.children[parent][token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.expanded.append(0)
        self.p.append(said[3])
        self.values.append(self.values[parent] * said[3])
        self.children.append({})
        self.said.append([said])
        return node

    def branch(self, node: int, scored: Iterable[tuple[int, float]], source: str) -> list[float]:
        """Add the children that a source was asked for, each a token and its score; the values of
        those that there were before.
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
            said, child = weigh(p, depth), children.get(token)
            if child is None:
                self.put(node, token, said)
            else:
                self.agree(child, said)
        value = self.values[node]
        for child in children.values():
            self.values[child] = value * self.p[child]
        return before

    def agree(self, node: int, said: CalibratedScore) -> None:
        """Another word on a node; a source's own second word counts only if it is the better."""
        words = self.said[node]
        for i, (calibrator, _, _, p) in enumerate(words):
            if calibrator is said[0]:
                words[i] = said if said[3] > p else words[i]
                break
        else:
            words.append(said)
        self.p[node] = words[0][3] if len(words) == 1 else self.calibration.combine(words)
        self.values[node] = self.values[self.parents[node]] * self.p[node]
        self.is_settled &= not self.children[node]

    def settle(self) -> list[float]:
        """The probability of each node's whole path."""
        values, p = self.values, self.p
        if not self.is_settled:
            for node, parent in enumerate(self.parents[1:], 1):
                values[node] = values[parent] * p[node]
            self.is_settled = True
        return values

    def reach(self, node: int, source: str) -> float:
        """The value of asking a source for a node's children: the probability of the node's path,
        and that the source has the right child, where no candidate is it yet.
        """
        return self.reaches([node], source)[0]

    def reaches(self, nodes: Sequence[int], source: str) -> list[float]:
        """As `reach`, of nodes of the same depth."""
        values, children = self.values, self.children
        none = self.childless(source, self.depths[nodes[0]] + 1)[3] if nodes else 0.0
        return [
            values[node] * (self.children_by(source, node)[3] if children[node] else none)
            for node in nodes
        ]

    def chances(self, source: str, depth: int) -> list[float]:
        """How likely a source is to have the right child of the root where no candidate is it yet,
        and then of each node on the path, down to a depth.
        """
        below = [self.childless(source, at)[3] for at in range(2, depth + 1)]
        return [self.reach(ROOT, source), *below]

    def childless(self, source: str, depth: int) -> CalibratedScore:
        said = self.no_child.get((source, depth))
        if said is None:
            calibrator = self.calibrators[CHILDREN_BY + source]
            said = self.no_child[source, depth] = calibrator.weigh(FINDS, depth)
        return said

    def children_by(self, source: str, node: int) -> CalibratedScore:
        depth, children = self.depths[node] + 1, self.children[node]
        if not children:
            return self.childless(source, depth)
        there = sum([self.p[child] for child in children.values()])
        return self.calibrators[CHILDREN_BY + source].weigh(FINDS * (1 - min(there, 1.0)), depth)

    def ask(self, node: int, source: str) -> None:
        """Note that a source is asked for a node's children, before these are added."""
        there = frozenset(self.children[node])
        self.asked.setdefault(node, []).append((source, there, self.children_by(source, node)))

    def sources(self, node: int) -> list[str]:
        return [calibrator.source for calibrator, _, _, _ in self.said[node]]

    def observe(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens that followed the root. Every candidate below a node that was
        reached is counted, verified or not: whether it was right is known.
        """
        calibrators = self.calibrators.values()
        for calibrator in calibrators:
            calibrator.fade()
        node = ROOT
        for token in tokens:
            right = self.children[node].get(token)
            self.learn(node, right)
            if right is None:
                break
            node = right
        for calibrator in calibrators:
            calibrator.use()

    def learn(self, node: int, right: int | None) -> None:
        """Learn which child of a node was right, if any."""
        for source, there, said in self.asked.get(node, ()):
            is_found = right is not None and source in self.sources(right)
            said[0].learn(said, is_found and self.tokens[right or 0] not in there)
        for child in self.children[node].values():
            words = self.said[child]
            for said in words:
                said[0].learn(said, child == right)
            if len(words) > 1:
                self.calibration.agreed(words, child == right)

    def draft(self, chosen: Sequence[int]) -> tuple[Draft, list[int]]:
        """Chosen nodes, likeliest first and each after its parent, as a draft; and the node of each
        guess. The likeliest path gets the lowest numbers.
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
