"""A draft model's most likely tree, level by level, coupled with the target's noise.

Prompt lookup adds one more path. The probability of its tokens is the recent share of such tokens
that were accepted for the request.
"""

from collections.abc import Sequence
from math import exp, log
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from specserve_drafters import base
from specserve_drafters.candidates import MAX_NODES, ROOT, Draft
from specserve_drafters.ngram import NgramDrafter

if TYPE_CHECKING:  # see base.py
    from torch import Tensor

    from specserve_kernels import SampleParams

# Initial and least probability of a looked-up token, and the weight of a new result in it.
FIRST_TRUST, LEAST_TRUST, TRUST_RATE = 0.5, 0.02, 0.125


class ModelOptions(base.Options, frozen=True):
    max_depth: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 8
    width: Annotated[int, Meta(ge=1, le=16)] = 4  # most nodes per level, and children per node
    tau: Annotated[float, Meta(gt=0, le=4)] = 1.0  # see Ops.top_children
    # Least expected accepted tokens of a level that runs
    min_gain: Annotated[float, Meta(ge=0)] = 0.3
    # Least probability of a draft token's path
    min_value: Annotated[float, Meta(ge=0, le=1)] = 0.03
    ngrams: bool = True  # add the path of a prompt lookup


class ModelDrafter:
    """Best-first trees after EAGLE-2 (Li et al. 2406.16858), ranked by coupled probabilities.

    A request whose draft KV is incomplete gets only the path of the prompt lookup.
    """

    needs_executor: ClassVar[bool] = True
    Options = ModelOptions

    def __init__(self, options: ModelOptions, executor: base.Executor) -> None:
        self.options, self.executor = options, executor
        self.lookup = NgramDrafter(NgramDrafter.Options())
        # Probability that an n-gram's next token is accepted, by request.
        self.trust: dict[int, float] = {}
        self.looked_up: dict[int, list[int]] = {}  # nodes of the last draft from the prompt lookup

    def propose(self, items: Sequence[base.DraftRequest]) -> list[Draft]:
        for item in items:
            self.looked_up.pop(item.id, None)  # nodes of a draft that was never verified
        ready, logits = self.executor.extend(items)
        trees = {i: self.plant(items[i]) for i in ready}
        if ready:
            self.branch([(tree, [ROOT]) for tree in trees.values()], logits)
        growing = list(trees.values())
        for _ in range(self.options.max_depth - 1):
            growing = self.grow(growing)
            if not growing:
                break
        return [
            self.harvest(trees[i]) if i in trees else self.lookup.look_up(item.known, item.limit)
            for i, item in enumerate(items)
        ]

    def plant(self, item: base.DraftRequest) -> "DraftTree":
        tree = DraftTree(item)
        if self.options.ngrams:
            trust = self.trust.get(item.id, FIRST_TRUST)
            found = self.lookup.look_up(item.known, item.limit)
            found = found.cut(item.limit, self.executor.num_ids)
            tree.look_up(found.trunk(), -log(trust))
        return tree

    def harvest(self, tree: "DraftTree") -> Draft:
        draft, self.looked_up[tree.item.id] = tree.draft(self.options.min_value)
        return draft

    def grow(self, trees: list["DraftTree"]) -> list["DraftTree"]:
        """Run one more level of the trees that are worth it; return these trees."""
        chosen = [(tree, tree.worth_running(self.options)) for tree in trees]
        chosen = [(tree, nodes) for tree, nodes in chosen if nodes]
        if not chosen:
            return []
        fit, logits = self.executor.expand([tree.run(nodes) for tree, nodes in chosen])
        request_tries = [chosen[i] for i in fit]
        if request_tries:
            self.branch(request_tries, logits)
        return [tree for tree, _ in request_tries]

    def branch(self, chosen: list[tuple["DraftTree", list[int]]], logits: "Tensor") -> None:
        """Add the most likely children of every node that was run; logits [nodes, V], in order."""
        rows = [(tree, node) for tree, nodes in chosen for node in nodes]
        k = min(self.options.width, logits.shape[1])
        index = [len(tree.item.known) + tree.depths[node] for tree, node in rows]
        params = coupling([tree.item for tree, _ in rows], index)
        ids, weights = self.executor.ops.top_children(logits, params, k, self.options.tau)
        for tree, _ in chosen:
            tree.frontier = []
        for (tree, node), tokens, values in zip(rows, ids.tolist(), weights.tolist(), strict=True):
            tree.add(node, tokens, values)

    def observe(self, id: int, draft: Draft, accepted: Sequence[int]) -> None:
        """Update the probability that an n-gram's token is accepted if its parent is."""
        nodes = [n for n in self.looked_up.pop(id, ()) if n <= len(draft)]
        reached, trust = {ROOT, *accepted}, self.trust.get(id, FIRST_TRUST)
        for node in nodes:
            if draft.parents[node - 1] in reached:
                trust += TRUST_RATE * ((node in reached) - trust)
        if nodes:
            self.trust[id] = min(max(trust, LEAST_TRUST), 1 - LEAST_TRUST)

    def forget(self, id: int) -> None:
        self.trust.pop(id, None)
        self.looked_up.pop(id, None)


def coupling(items: Sequence[base.DraftRequest], index: list[int]) -> "SampleParams":
    """Return the temperature and the noise of the target's sampling at each index."""
    from specserve_kernels import SampleParams

    params = SampleParams.greedy(len(items))
    if not any([item.temperature for item in items]):
        return params
    import numpy as np
    import torch

    temperature = np.array([item.temperature for item in items], dtype=np.float32)
    seeds = np.array([item.seed for item in items], dtype=np.int64)
    return params._replace(
        temperature=torch.from_numpy(temperature),
        seeds=torch.from_numpy(seeds),
        token_index=torch.from_numpy(np.array(index, dtype=np.int64)),
    )


class DraftTree:
    """Candidates of one request, numbered from 1; 0 is the root.

    A candidate's cost is minus the log of its path's probability, so never below its parent's.
    """

    def __init__(self, item: base.DraftRequest) -> None:
        self.item = item
        self.tokens, self.parents, self.depths, self.costs = [-1], [-1], [0], [0.0]
        self.expanded = [0]  # the draft model's number of each candidate; 0 if it has not run it
        self.num_expanded = 0
        self.frontier: list[int] = []  # candidates of the last level
        self.looked_up: dict[int, int] = {}  # parent -> its child from the prompt lookup

    def look_up(self, tokens: list[int], cost: float) -> None:
        """Add the path of a prompt lookup; each of its tokens costs `cost`."""
        node = ROOT
        for token in tokens:
            child = self.append(node, token, self.costs[node] + cost)
            self.looked_up[node] = child
            node = child

    def add(self, parent: int, tokens: list[int], log_p: list[float]) -> None:
        """Add the draft model's children of a candidate; a token that the prompt lookup has added
        is the same candidate.
        """
        known = self.looked_up.get(parent, ROOT)
        for token, x in zip(tokens, log_p, strict=True):
            cost = self.costs[parent] - x
            if token == self.tokens[known]:
                self.costs[known] = min(self.costs[known], cost)
                self.frontier.append(known)
            else:
                self.frontier.append(self.append(parent, token, cost))

    def append(self, parent: int, token: int, cost: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.costs.append(cost)
        self.expanded.append(0)
        return len(self.tokens) - 1

    def worth_running(self, options: ModelOptions) -> list[int]:
        """Return the most likely candidates of the last level; none if running them is not
        worth it. Then their children cannot enter the draft, or too few would be accepted.
        """
        if not self.frontier or self.depths[self.frontier[0]] >= self.item.limit:
            return []
        among = set(self.best(self.item.limit))
        room = min(options.width, MAX_NODES - self.num_expanded)
        nodes = sorted((c for c in self.frontier if c in among), key=self.costs.__getitem__)[:room]
        if sum(exp(-self.costs[c]) for c in nodes) < options.min_gain:
            return []
        return nodes

    def run(self, nodes: list[int]) -> base.Nodes:
        """Number the candidates as the draft model will, in order."""
        for c in nodes:
            self.num_expanded += 1
            self.expanded[c] = self.num_expanded
        tokens = [self.tokens[c] for c in nodes]
        return base.Nodes(self.item.id, tokens, [self.expanded[self.parents[c]] for c in nodes])

    def best(self, n: int) -> list[int]:
        """Return the n most likely candidates; a candidate's parent is always among them."""
        order = sorted(range(1, len(self.tokens)), key=self.costs.__getitem__)
        return order[:n]  # the sort is stable: parents first

    def draft(self, min_value: float) -> tuple[Draft, list[int]]:
        """Return the most likely candidates as a draft, the most likely path first, and the draft's
        nodes from the prompt lookup. A draft token below `min_value` is not worth its row.
        """
        best = [c for c in self.best(self.item.limit) if exp(-self.costs[c]) >= min_value]
        path, node = [], ROOT
        for c in best:
            if self.parents[c] == node:
                path.append(c)
                node = c
        order = path + [c for c in best if c not in set(path)]
        number = {c: k for k, c in enumerate(order, 1)} | {ROOT: ROOT}
        draft = Draft(
            [self.tokens[c] for c in order],
            [number[self.parents[c]] for c in order],
            [self.expanded[c] for c in order],
        )
        return draft, [number[c] for c in self.looked_up.values() if c in number]
