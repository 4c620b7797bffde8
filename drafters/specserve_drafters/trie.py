"""A trie merges the candidates of all sources of a request. Scores are calibrated by what was
accepted, and the best nodes of a step's tries are selected. `native.py` has the form in C++.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import exp
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from specserve_drafters.candidates import (
    ROOT,
    Candidate,
    Rules,
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
    another source proposes a node again, the values below it are updated only by `branch`.
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

    def reaches(self, nodes: Sequence[int], source: str) -> list[float]:
        """Return the values of asking a source for the children of nodes of equal depth. Each is
        the probability that the node's path is accepted, and that the source adds the accepted
        child.
        """
        raise NotImplementedError

    def ask(self, node: int, source: str) -> None:
        """Record that a source is asked for a node's children, before these are added."""
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
