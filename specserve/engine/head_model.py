"""A draft head as drafters use it: it follows the target's steps, and runs guesses between them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specserve.engine.executor import ModelExecutor
from specserve.engine.runner import KVLost, Runner
from specserve.engine.step_input import RowGroup, build_step_input
from specserve.engine.tap_watch import TapWatch, tap_words
from specserve.engine.verify import Path
from specserve.memory import BlockTable
from specserve.models.draft_head import DraftHead
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve.scheduling.cost import StepCosts
from specserve_drafters import ROOT, DraftItem, Nodes

log = logging.getLogger("specserve")


class Followed(NamedTuple):
    """Rows of a request in the target's last step that the head has to run.

    table  that the rows' KV is in, as it was then: the request may have ended since
    start  position of the first row
    rows   theirs in the step, in order of position
    """

    request: Request
    table: BlockTable
    start: int
    rows: list[int]


class HeadModel(ModelExecutor):
    """An Executor whose model is a head of the target.

    The head's layers lie in the target's own blocks, behind the target's. Its row at position i
    has what the target's layers had of token i and the id of token i + 1: so of T known tokens it
    has KV in the slots [0, T - 1), and node e of a step is in slot T + e - 2. The target cannot be
    asked for its taps again: so `follow` runs all rows of the step before, whoever guesses. That
    writes over the KV of guesses, which was made of the head's own rows. The last slot of a block
    that is found in the cache may have been made with another next token, which costs guesses.
    """

    def __init__(
        self, runner: Runner, head: DraftHead, target: Runner, scheduler: Scheduler
    ) -> None:
        super().__init__(runner, scheduler)
        self.head, self.target = head, target
        self.first_costs = StepCosts(scheduler.budget.max_batched_tokens)  # logits alone
        words = tap_words(head.taps, target.decoder.config.num_layers)
        self.watch: TapWatch | None = TapWatch(words)
        self.steps: list[Followed] = []  # what `follow` is to run
        self.last: dict[int, int] = {}  # by request: the row that `follow` ran of its last token
        # Of this step: what nodes left behind them, [N, hidden], and the rows of each request's.
        self.features = torch.empty(0, 0)
        self.rows: dict[int, dict[int, int]] = {}  # by request and node; the root is one
        # Where the head knows some of the target's tokens only, all others are impossible.
        self.is_whole = head.draft_vocab_size == target.decoder.config.vocab_size
        self.targets = head.target_ids(torch.arange(head.draft_vocab_size))
        self.wide = torch.empty(0, 0)

    def table(self, request: Request) -> BlockTable:
        return request.table

    def usual_rows(self, request: Request) -> int:
        return 1

    def note(self, scheduled: Sequence[ScheduledRequest], paths: Mapping[int, Path]) -> None:
        """Note which rows of a step the head has to run: those of known tokens and, by request,
        those of the paths. Before blocks are given back or shared.
        """
        sizes = [s.end - s.start + len(s.draft) for s in scheduled]
        for item, begin in zip(scheduled, accumulate(sizes, initial=0), strict=False):
            request, end = item.request, begin + item.end - item.start
            path = paths.get(request.id)
            nodes = [] if path is None else path.nodes
            table = copy(request.table)
            table.blocks = table.blocks[:]
            rows = [*range(begin, end), *(end - 1 + node for node in nodes)]
            self.steps.append(Followed(request, table, item.start, rows))
            if path is not None and path.tokens and self.watch is not None:
                self.watch.see(request.id, path.tokens[0])

    def drop(self) -> None:
        """Forget the last step, which has failed."""
        self.steps, self.last = [], {}

    def follow(self) -> None:
        """Run the rows of the target's last step. Whatever fails costs guesses only, unless it is
        KVLost.
        """
        steps, self.steps, self.last = self.steps, [], {}
        try:
            if steps:
                self.run(steps)
        except KVLost:
            raise
        except Exception:  # as there is too little memory
            log.exception("a draft head could not follow a step; the text does not change")

    def run(self, steps: Sequence[Followed]) -> None:
        groups, rows = list[RowGroup](), list[int]()
        for request, table, start, of_step in steps:
            tokens = request.token_ids[start + 1 : start + 1 + len(of_step)]
            if not tokens:  # the request has failed
                continue
            groups.append(RowGroup(table, tokens, start, 0))
            rows += of_step[: len(tokens)]
            if start + 1 + len(tokens) == len(request.token_ids):
                self.last[request.id] = len(rows) - 1
        if groups:
            step = build_step_input(groups, self.scheduler.pool.updates)
            self.runner.launch(step, self.head.fuse(self.taps(rows)))
            if self.watch is not None:
                self.expect(self.watch)

    def taps(self, rows: Sequence[int]) -> Tensor:
        """What the target's layers had in some rows of its last step, side by side."""
        outputs = self.target.outputs
        assert outputs is not None, "no step has been run"
        at = torch.tensor(rows, device=outputs.residual.device)
        every = (outputs.taps.get(layer, outputs.residual) for layer in self.head.taps)
        return torch.cat([tap[at] for tap in every], dim=1)

    def expect(self, watch: TapWatch) -> None:
        """Note the likeliest next token of each request, to be compared with the target's."""
        likeliest = self.head.target_ids(self.logits([*self.last.values()]).argmax(dim=1))
        watch.expect(self.last, likeliest.tolist())
        if watch.is_over:
            self.watch = None

    def logits(self, rows: Sequence[int]) -> Tensor:
        """After rows that `follow` ran, which ascend: [n, draft V], until the next launch."""
        at, most = torch.tensor(rows, dtype=torch.int64), self.runner.head_rows
        if len(rows) <= most:
            return self.runner.program.logits(at)
        parts = torch.split(at, most)
        return torch.cat([self.runner.program.logits(part).clone() for part in parts])

    def forget(self, id: int) -> None:
        super().forget(id)
        self.last.pop(id, None)

    def extend(self, items: Sequence[DraftItem]) -> tuple[list[int], Tensor]:
        """Executor.extend. A request is left out where the target's last step had none of it, or
        nothing that the head could go on from.
        """
        lent = [self.requests[item.id] for item in items]
        self.asked |= {r.id for r in lent if r.num_output > 0}
        at = {r.id: self.last[r.id] for r in lent if r.id in self.asked and r.id in self.last}
        ready = sorted(at, key=at.__getitem__)
        if not ready:
            return [], torch.empty(0, 0)
        self.begin_nodes(ready)
        rows = [at[id] for id in ready]
        logits = self.of_target(self.logits(rows))
        self.num_rows += len(rows)
        self.rows = {id: {ROOT: row} for row, id in enumerate(ready)}
        assert self.runner.outputs is not None, "rows were run"
        residual = self.runner.outputs.residual
        self.features = residual[torch.tensor(rows, device=residual.device)]
        place = {item.id: i for i, item in enumerate(items)}
        return [place[id] for id in ready], self.masked(logits, [(id, ROOT) for id in ready])

    def expand(self, nodes: Sequence[Nodes]) -> tuple[list[int], Tensor]:
        """Executor.expand. A node below another one of the same call is run after it."""
        places, every = [], list[tuple[int, int]]()
        for i, before in self.number(nodes):
            places.append(i)
            every += [(nodes[i].id, before + k) for k in range(1, len(nodes[i].tokens) + 1)]
        pieces, order, left = list[Tensor](), list[tuple[int, int]](), every
        try:
            while left:
                ready = [each for each in left if self.parent(*each) in self.rows[each[0]]]
                logits = self.launch(ready)
                left = [each for each in left if each[1] not in self.rows[each[0]]]
                pieces.append(logits.clone() if left or pieces else logits)
                order += ready
        except BaseException:  # the nodes that follow would lack what those have left
            self.take_back()
            raise
        if len(pieces) > 1:
            number = {each: row for row, each in enumerate(order)}
            logits = torch.cat(pieces)[[number[each] for each in every]]
        return places, self.masked(logits, every) if every else torch.empty(0, 0)

    def parent(self, id: int, node: int) -> int:
        return self.nodes[id][node - 1][1]

    def launch(self, nodes: Sequence[tuple[int, int]]) -> Tensor:
        """Run nodes whose parents have been run, in order of request and number; [n, V]."""
        groups, parents = list[RowGroup](), list[int]()
        for id, run in runs(nodes):
            table, first = self.requests[id].table, run[0]
            known, size = table.num_computed, len(run)
            tokens, above = zip(*self.nodes[id][first - 1 : first - 1 + size], strict=True)
            masks = self.masks[id][first - 1 : first - 1 + size]
            groups.append(RowGroup(table, [*tokens], known + first - 1, size, known, masks))
            parents += [self.rows[id][parent] for parent in above]
        step = build_step_input(groups, self.scheduler.pool.updates)
        at = torch.tensor(parents, device=self.features.device)
        launched = self.runner.launch(step, self.features[at])
        for row, (id, node) in enumerate(nodes, len(self.features)):
            self.rows[id][node] = row
        assert self.runner.outputs is not None, "rows were run"
        self.features = torch.cat([self.features, self.runner.outputs.residual])
        self.num_rows += len(nodes)
        return self.of_target(launched.logits)

    def of_target(self, logits: Tensor) -> Tensor:
        """Logits of all of the target's tokens, until the next call; impossible ones are -inf."""
        if self.is_whole:
            return logits
        n = len(logits)
        if len(self.wide) < n:
            size = n, self.target.decoder.config.vocab_size
            self.wide = torch.full(size, float("-inf"), dtype=logits.dtype, device=logits.device)
        return self.wide[:n].index_copy_(1, self.targets, logits)


def runs(nodes: Sequence[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """Nodes of one request whose numbers follow each other, together."""
    begin = 0
    for end, (id, node) in enumerate(nodes, 1):
        if end == len(nodes) or nodes[end] != (id, node + 1):
            yield id, [number for _, number in nodes[begin:end]]
            begin = end
