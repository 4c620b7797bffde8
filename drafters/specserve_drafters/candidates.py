"""All sources' guesses of one request in one tree, before it is decided which are verified."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

from specserve_drafters.calibration import CalibratedScore, Calibration
from specserve_drafters.tree import MAX_NODES, ROOT, TREE_SLOTS, Draft, as_index

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DROPPED = -1  # in the place of a node, for a candidate that the request's rules forbid
MOST = 4 * MAX_NODES  # candidates of a source in a step: more cannot be of use
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
    """At most MOST candidates, ending before the first invalid one, as their source's own.

    They may be anything, as a source is user code; the result has plain numbers.
    """
    valid: list[Candidate] = []
    for one in islice(candidates, MOST):
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
