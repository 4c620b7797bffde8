"""A model as one of several sources: it adds children to the most likely candidates.

Each level is a forward of the draft model over the candidates that are worth its time. Their
children are ranked with the noise of the target's sampling.
"""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

from specserve_drafters import base
from specserve_drafters.candidates import MAX_NODES, ROOT
from specserve_drafters.model import coupling
from specserve_drafters.trie import BaseTrie, TrieLevel

if TYPE_CHECKING:  # see base.py
    from torch import Tensor


class LevelPlanner(Protocol):
    """Decides how many levels a draft model runs in a step. A call of `ran` follows each
    decision.
    """

    def first(self, reach: Sequence[float]) -> list[int]:
        """Return the places of the requests whose first level runs, given the reach of each
        root.
        """
        ...

    def next(self, reach: Sequence[float]) -> int:
        """Return how many nodes the next level runs, best first; `reach` falls."""
        ...

    def ran(self, values: Sequence[float], before: Sequence[float]) -> None:
        """Record a finished level: `values` of its nodes' children, and values of the children
        `before`.
        """
        ...


class RequestTrie(NamedTuple):
    """A request, its candidates so far, and the number of candidates by source."""

    item: base.DraftRequest
    trie: BaseTrie
    proposed: dict[str, int]


class ModelSource:
    """A model that adds draft tokens, level by level, to the candidates of other sources."""

    def __init__(
        self,
        name: str,
        executor: base.Executor,
        max_depth: int,
        width: int,
        tau: float,
        is_kept: bool = True,
    ) -> None:
        """`width` is the most nodes per request and level, and the most children per node. `tau`:
        see Ops.top_children. `is_kept`: the model keeps the KV of accepted nodes, so drafts have
        its numbers.
        """
        self.name, self.executor, self.is_kept = name, executor, is_kept
        self.max_depth, self.width, self.tau = max_depth, width, tau
        # The model's numbers of nodes that it has run, by the request's place in the step.
        self.numbers: dict[tuple[int, int], int] = {}

    def grow(
        self,
        request_tries: Sequence[RequestTrie],
        levels: LevelPlanner,
        extending: Sequence[base.DraftSource] = (),
    ) -> None:
        """Add levels to requests' tries while `levels` allows it. After each level, `extending`
        sources continue its paths.
        """
        names = {source.name for source in extending}
        chosen = levels.first([trie.reach(ROOT, self.name) for _, trie, _ in request_tries])
        if not chosen:
            return
        ready, logits = self.executor.extend([request_tries[i].item for i in chosen])
        rows: list[tuple[int, int]] = [(chosen[i], ROOT) for i in ready]
        run = dict.fromkeys(chosen, 0)  # number of nodes that the model has run
        self.numbers = {}
        for depth in range(1, self.max_depth + 1):
            level = self.branch(rows, request_tries, logits)
            ends, values = dict[int, list[tuple[int, float]]](), [*chain(*level.values)]
            for (i, _), nodes, reaches in zip(rows, level.nodes, level.reaches, strict=True):
                if nodes:
                    ends.setdefault(i, []).extend(zip(nodes, reaches, strict=True))
            for i, own in ends.items() if extending else ():
                item, trie, proposed = request_tries[i]
                size = len(trie) + 1
                for source in extending:
                    source.extend(trie, item, proposed)
                values += trie.values[size:]
                nodes = [forced_end(trie, node, names) for node, _ in own]
                ends[i] = [*zip(nodes, trie.reaches(nodes, self.name), strict=True)]
            levels.ran(values, level.before)
            ends = {i: nodes for i, nodes in ends.items() if request_tries[i].item.limit > depth}
            if not ends or depth == self.max_depth:
                return
            rows = self.best(ends, levels, run)
            if not rows:
                return
            rows, logits = self.expand(rows, request_tries, run)

    def branch(
        self,
        rows: Sequence[tuple[int, int]],
        request_tries: Sequence[RequestTrie],
        logits: "Tensor",
    ) -> TrieLevel:
        """Add the most likely children of every node that was run. logits [rows, V]."""
        if not rows:
            return TrieLevel([], [], [], [], [])
        k = min(self.width, logits.shape[1])
        items = [request_tries[i].item for i, _ in rows]
        depths = {i: request_tries[i].trie.depths for i in dict(rows)}
        index = [
            len(item.known) + depths[i][node] for item, (i, node) in zip(items, rows, strict=True)
        ]
        ids, weights = self.executor.ops.top_children(logits, coupling(items, index), k, self.tau)
        each = [(request_tries[i].trie, node) for i, node in rows]
        level = each[0][0].branch_each(each, ids.tolist(), weights.tolist(), self.name)
        for (i, _), number in zip(rows, level.num_likely, strict=True):
            proposed = request_tries[i].proposed
            proposed[self.name] = proposed.get(self.name, 0) + number
        return level

    def best(
        self, ends: dict[int, list[tuple[int, float]]], levels: LevelPlanner, run: dict[int, int]
    ) -> list[tuple[int, int]]:
        """Return the nodes that the next level runs, of nodes with their reaches by request."""
        fit = []
        for i, nodes in ends.items():
            ranked = sorted([(reach, i, node) for node, reach in nodes], reverse=True)
            fit += ranked[: min(self.width, MAX_NODES - run[i])]
        fit.sort(reverse=True)
        size = levels.next([reach for reach, _, _ in fit])
        return [(i, node) for _, i, node in fit[:size]]

    def with_those_above(self, i: int, trie: BaseTrie, nodes: Sequence[int]) -> list[int]:
        """Return nodes, each after its ancestors that the model has not run."""
        found: dict[int, None] = {}
        parents = trie.parents
        for node in nodes:
            path = []
            while node != ROOT and (i, node) not in self.numbers and node not in found:
                path.append(node)
                node = parents[node]
            found |= dict.fromkeys(reversed(path))
        return [*found]

    def expand(
        self,
        rows: Sequence[tuple[int, int]],
        request_tries: Sequence[RequestTrie],
        run: dict[int, int],
    ) -> "tuple[list[tuple[int, int]], Tensor]":
        """Run nodes and their ancestors that were not run; return nodes that had room, and the
        logits after each of them.
        """
        by_request: dict[int, list[int]] = {}
        for i, node in rows:
            by_request.setdefault(i, []).append(node)
        wanted, every = list[base.Nodes](), list[list[int]]()
        for i, nodes in by_request.items():
            item, trie, _ = request_tries[i]
            every.append(self.with_those_above(i, trie, nodes))
            numbers = {node: k for k, node in enumerate(every[-1], run[i] + 1)}
            above = map(trie.parents.__getitem__, every[-1])
            parents = [numbers.get(node, self.numbers.get((i, node), ROOT)) for node in above]
            tokens = [*map(trie.tokens.__getitem__, every[-1])]
            wanted.append(base.Nodes(item.id, tokens, parents))
        fit, logits = self.executor.expand(wanted)
        requests, ran, read = [*by_request], list[tuple[int, int]](), list[bool]()
        for place in fit:
            i = requests[place]
            for node in every[place]:
                run[i] += 1
                self.numbers[i, node] = run[i]
                if self.is_kept:
                    request_tries[i].trie.set_number(node, run[i])
                read.append(node in by_request[i])
                ran += [(i, node)] if read[-1] else []
        return ran, logits if all(read) else logits[
            [k for k, is_read in enumerate(read) if is_read]
        ]


def forced_end(trie: BaseTrie, node: int, names: set[str]) -> int:
    """Return the end of the tokens with which the named sources have continued a node."""
    while len(children := trie.children_of(node)) == 1:
        [child] = children
        if names.isdisjoint(trie.sources(child)):
            break
        node = child
    return node
