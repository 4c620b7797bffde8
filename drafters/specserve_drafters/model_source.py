"""A model as one of several sources: it adds children to the likeliest candidates.

Each level is a forward of the draft model over the candidates that are worth it. Its children are
ranked with the noise that the target will draw with.
"""

from collections.abc import Sequence
from itertools import repeat
from math import exp
from typing import TYPE_CHECKING, NamedTuple, Protocol

from specserve_drafters import base
from specserve_drafters.candidates import MAX_NODES, ROOT, Trie
from specserve_drafters.grammar import GrammarSource
from specserve_drafters.model import coupling

if TYPE_CHECKING:  # see base.py
    from torch import Tensor

LEAST_VALUE = 1e-3  # of a child: a less likely one is not added


class LevelPlanner(Protocol):
    """Decides how far a draft model runs in a step. Each answer is followed by `ran`."""

    def first(self, reach: Sequence[float]) -> list[int]:
        """Places of the requests that the first level is run for, given the reach of each root."""
        ...

    def next(self, reach: Sequence[float]) -> int:
        """How many nodes the next level runs, the best first; `reach` falls."""
        ...

    def ran(self, values: Sequence[float], before: Sequence[float]) -> None:
        """A level has been run: the values of the children that its nodes have, and those of the
        children that they had before.
        """
        ...


class RequestTrie(NamedTuple):
    """A request to guess for: its candidates so far, and how many of them each source proposed."""

    item: base.DraftRequest
    trie: Trie
    proposed: dict[str, int]


class ModelSource:
    """A model's guesses, added level by level to what other sources have proposed."""

    def __init__(
        self,
        name: str,
        executor: base.Executor,
        max_depth: int,
        width: int,
        tau: float,
        is_kept: bool = True,
    ) -> None:
        """`width` is the most nodes run of a request and level, and the most children of a node;
        `tau` see Ops.top_children; `is_kept`: the model keeps the KV of accepted nodes, so drafts
        have its numbers.
        """
        self.name, self.executor, self.is_kept = name, executor, is_kept
        self.max_depth, self.width, self.tau = max_depth, width, tau
        # The model's own numbers of nodes that it has run, by the request's place in the step.
        self.numbers: dict[tuple[int, int], int] = {}

    def grow(
        self,
        request_tries: Sequence[RequestTrie],
        levels: LevelPlanner,
        grammar: GrammarSource | None = None,
    ) -> None:
        """Add levels to requests' tries for as long as `levels` says so. After each of them comes
        what grammars force then.
        """
        chosen = levels.first([trie.reach(ROOT, self.name) for _, trie, _ in request_tries])
        if not chosen:
            return
        ready, logits = self.executor.extend([request_tries[i].item for i in chosen])
        rows: list[tuple[int, int]] = [(chosen[i], ROOT) for i in ready]
        run = dict.fromkeys(chosen, 0)  # nodes that the model has run
        self.numbers = {}
        for depth in range(1, self.max_depth + 1):
            before = self.branch(rows, request_tries, logits) if rows else []
            ends = children(rows, request_tries)
            values = [
                request_tries[i].trie.values[node] for i, nodes in ends.items() for node in nodes
            ]
            if grammar is not None:
                for i, nodes in ends.items():
                    item, trie, proposed = request_tries[i]
                    size = len(trie) + 1
                    grammar.extend(trie, item, proposed)
                    values += trie.values[size:]
                    ends[i] = [forced_end(trie, node) for node in nodes]
            levels.ran(values, before)
            ends = {i: nodes for i, nodes in ends.items() if request_tries[i].item.limit > depth}
            if not ends or depth == self.max_depth:
                return
            rows = self.best(ends, request_tries, levels, run)
            if not rows:
                return
            rows, logits = self.expand(rows, request_tries, run)

    def branch(
        self,
        rows: Sequence[tuple[int, int]],
        request_tries: Sequence[RequestTrie],
        logits: "Tensor",
    ) -> list[float]:
        """Add the likeliest children of every node that was run; the values of children that there
        were before. logits [rows, V].
        """
        k = min(self.width, logits.shape[1])
        items = [request_tries[i].item for i, _ in rows]
        index = [
            len(request_tries[i].item.known) + request_tries[i].trie.depths[node]
            for i, node in rows
        ]
        before: list[float] = []
        ids, weights = self.executor.ops.top_children(logits, coupling(items, index), k, self.tau)
        for (i, node), tokens, scores in zip(rows, ids.tolist(), weights.tolist(), strict=True):
            _, trie, proposed = request_tries[i]
            least = LEAST_VALUE / max(trie.values[node], LEAST_VALUE)
            trie.ask(node, self.name)
            scored = zip(tokens, map(exp, scores), strict=True)
            likely = [(token, p) for token, p in scored if p >= least]
            before += trie.branch(node, likely, self.name)
            proposed[self.name] = proposed.get(self.name, 0) + len(likely)
        return before

    def best(
        self,
        ends: dict[int, list[int]],
        request_tries: Sequence[RequestTrie],
        levels: LevelPlanner,
        run: dict[int, int],
    ) -> list[tuple[int, int]]:
        """The nodes that the next level runs."""
        fit = []
        for i, nodes in ends.items():
            reach = request_tries[i].trie.reaches(nodes, self.name)
            ranked = sorted(zip(reach, repeat(i), nodes), reverse=True)
            fit += ranked[: min(self.width, MAX_NODES - run[i])]
        fit.sort(reverse=True)
        size = levels.next([reach for reach, _, _ in fit])
        return [(i, node) for _, i, node in fit[:size]]

    def with_those_above(self, i: int, trie: Trie, nodes: Sequence[int]) -> list[int]:
        """Nodes and, before each, those above it that the model has not run."""
        found: dict[int, None] = {}
        for node in nodes:
            path = []
            while node != ROOT and (i, node) not in self.numbers and node not in found:
                path.append(node)
                node = trie.parents[node]
            found |= dict.fromkeys(reversed(path))
        return [*found]

    def expand(
        self,
        rows: Sequence[tuple[int, int]],
        request_tries: Sequence[RequestTrie],
        run: dict[int, int],
    ) -> "tuple[list[tuple[int, int]], Tensor]":
        """Run nodes, and what above them was not run yet; those that had room, and the logits after
        each of them.
        """
        by_request: dict[int, list[int]] = {}
        for i, node in rows:
            by_request.setdefault(i, []).append(node)
        asked, every = list[base.Nodes](), list[list[int]]()
        for i, nodes in by_request.items():
            item, trie, _ = request_tries[i]
            every.append(self.with_those_above(i, trie, nodes))
            numbers = {node: k for k, node in enumerate(every[-1], run[i] + 1)}
            above = [trie.parents[node] for node in every[-1]]
            parents = [numbers.get(node, self.numbers.get((i, node), ROOT)) for node in above]
            asked.append(base.Nodes(item.id, [trie.tokens[node] for node in every[-1]], parents))
        fit, logits = self.executor.expand(asked)
        requests, ran, read = [*by_request], list[tuple[int, int]](), list[bool]()
        for place in fit:
            i = requests[place]
            for node in every[place]:
                run[i] += 1
                self.numbers[i, node] = run[i]
                if self.is_kept:
                    request_tries[i].trie.expanded[node] = run[i]
                read.append(node in by_request[i])
                ran += [(i, node)] if read[-1] else []
        return ran, logits if all(read) else logits[
            [k for k, is_read in enumerate(read) if is_read]
        ]


def forced_end(trie: Trie, node: int) -> int:
    """Where the tokens end that a grammar forces after a node."""
    while len(trie.children[node]) == 1:
        [child] = trie.children[node].values()
        if GrammarSource.name not in trie.sources(child):
            break
        node = child
    return node


def children(
    rows: Sequence[tuple[int, int]], request_tries: Sequence[RequestTrie]
) -> dict[int, list[int]]:
    """Those of nodes that were run, whichever source has proposed them, by request."""
    found: dict[int, list[int]] = {}
    for i, node in rows:
        below = request_tries[i].trie.children[node].values()
        if below:
            found.setdefault(i, []).extend(below)
    return found
