"""A draft head as drafters use it: it follows the target's steps, and runs guesses between them."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate, chain
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from specserve.engine.executor import ModelExecutor
from specserve.engine.runner import Runner
from specserve.engine.step_input import RowGroup, build_step_input
from specserve.engine.tap_watch import TapWatch, tap_words
from specserve.engine.verify import Path
from specserve.memory import BlockTable
from specserve.models.draft_head import DraftHead
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve.scheduling.cost import StepCosts
from specserve_drafters import ROOT, DraftItem, Nodes


class Seen(NamedTuple):
    """Rows of a request in the target's last step.

    table  that their KV is in, as it was then: the request may have ended since
    start  position of the first row
    rows   theirs in the step, in order of position
    """

    request: Request
    table: BlockTable
    start: int
    rows: list[int]
    is_prompt: bool


class Backlog(msgspec.Struct):
    """Rows of a request that the head has yet to run: their positions, and the target's taps."""

    request: Request
    start: int
    taps: list[Tensor]
    end: int


Rest = tuple[int, RowGroup, list[Tensor]]  # of a backlog: the request, its rows and their taps


class Last(NamedTuple):
    """What the head has left behind the last token of so many known ones, [1, hidden]."""

    num_tokens: int
    hidden: Tensor


class HeadModel(ModelExecutor):
    """An Executor whose model is a head of the target.

    The head's layers lie in the target's own blocks, behind the target's. Its row at position i
    has what the target's layers had of token i and the id of token i + 1: so of T known tokens it
    has KV in the slots [0, T - 1), and node e of a step is in slot T + e - 2. The target cannot be
    asked for its taps again: so they are kept until the head has run their rows. It runs those of
    prompts, and all others once a block is full, before the next step is planned; else when it is
    to guess. That writes over the KV of guesses, which was made of the head's own rows. The last
    slot of a block that is found in the cache may have been made with another next token, which
    costs guesses.
    """

    def __init__(
        self, runner: Runner, head: DraftHead, target: Runner, scheduler: Scheduler
    ) -> None:
        super().__init__(runner, scheduler)
        self.head, self.target = head, target
        self.first_costs = StepCosts(scheduler.budget.max_batched_tokens)  # of known tokens
        words = tap_words(head.taps, target.decoder.config.num_layers)
        self.watch: TapWatch | None = TapWatch(words)
        self.seen: list[Seen] = []
        self.backlogs: dict[int, Backlog] = {}  # by request
        self.last: dict[int, Last] = {}  # likewise
        self.ended: set[int] = set()  # requests, since the last step
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
        backlog = self.backlogs.get(request.id)
        return 1 if backlog is None else backlog.end - backlog.start

    def see(self, scheduled: Sequence[ScheduledRequest], paths: Mapping[int, Path]) -> None:
        """Note a step's rows of known tokens and, by request, of the paths. Before blocks are given
        back or shared.
        """
        sizes = [s.end - s.start + len(s.draft) for s in scheduled]
        for item, begin in zip(scheduled, accumulate(sizes, initial=0), strict=False):
            request, end = item.request, begin + item.end - item.start
            path = paths.get(request.id)
            nodes = [] if path is None else path.nodes
            table = copy(request.table)
            table.blocks = table.blocks[:]
            rows = [*range(begin, end), *(end - 1 + node for node in nodes)]
            self.seen.append(Seen(request, table, item.start, rows, not item.is_root))
            is_random = request.sampling.temperature > 1  # no head is right about such a text
            if self.watch is not None and path is not None and path.tokens and not is_random:
                self.watch.see(request.id, path.tokens[0])

    def drop(self) -> None:
        """Forget all that was not run: a step has failed."""
        self.seen, self.backlogs, self.last = [], {}, {}
        self.ended.clear()

    def follow(self) -> None:
        """Keep the taps of the target's last step, and run the rows that cannot wait: before its
        blocks are given to others. After an error `drop` has to be called.
        """
        seen, self.seen = self.seen, []
        self.keep_taps(seen)
        if any(self.is_due(each) for each in seen):
            tables = {each.request.id: each.table for each in seen}
            self.run([*self.backlogs.values()], tables)
        for id in self.ended:  # its last block is not full, so that nobody will find it
            self.backlogs.pop(id, None)
            self.last.pop(id, None)
        self.ended.clear()
        if self.watch is not None:
            self.expect(self.watch)

    def keep_taps(self, seen: Sequence[Seen]) -> None:
        kept = [
            (each, min(len(each.rows), len(each.request.token_ids) - each.start - 1))
            for each in seen
        ]
        taps = self.taps([row for each, size in kept for row in each.rows[:size]])
        for (request, _, start, *_), size in kept:
            own, taps = taps[:size], taps[size:]
            backlog = self.backlogs.get(request.id)
            if backlog is None or backlog.end != start:  # it was preempted
                backlog = self.backlogs[request.id] = Backlog(request, start, [], start)
            backlog.taps.append(own)
            backlog.end += size

    def is_due(self, seen: Seen) -> bool:
        """Whether a block with rows of the backlog is full, or others wait for the prompt's."""
        backlog, size = self.backlogs[seen.request.id], seen.table.block_size
        is_full = backlog.start // size < backlog.end // size
        return self.watch is not None or seen.is_prompt or is_full

    def taps(self, rows: Sequence[int]) -> Tensor:
        """What the target's layers had in some rows of its last step, side by side."""
        outputs = self.target.outputs
        assert outputs is not None, "no step has been run"
        at = torch.tensor(rows, dtype=torch.int64, device=outputs.residual.device)
        every = (outputs.taps.get(layer, outputs.residual) for layer in self.head.taps)
        return torch.cat([tap[at] for tap in every], dim=1)

    def run(self, backlogs: Sequence[Backlog], tables: Mapping[int, BlockTable]) -> None:
        """Run rows of backlogs, in launches of no more rows than a step has. `tables` are those of
        requests that may have ended.
        """
        most, part, rows = self.scheduler.budget.max_batched_tokens, list[Rest](), 0
        for backlog in backlogs:
            request, start, taps, end = msgspec.structs.astuple(backlog)
            del self.backlogs[request.id]
            table = tables.get(request.id, request.table)
            if start == end or table.num_computed < end:  # it has failed, or was preempted
                continue
            if part and rows + end - start > most:
                self.run_together(part)
                part, rows = [], 0
            group = RowGroup(table, request.token_ids[start + 1 : end + 1], start, 0)
            part.append((request.id, group, taps))
            rows += end - start
        if part:
            self.run_together(part)

    def run_together(self, rest: Sequence[Rest]) -> None:
        ids, groups, taps = zip(*rest, strict=True)
        features = self.head.fuse(torch.cat([*chain.from_iterable(taps)]))
        step = build_step_input(groups, self.scheduler.pool.updates)  # last: it takes the updates
        self.runner.launch(step, features)
        assert self.runner.outputs is not None, "rows were run"
        self.num_rows += len(step.token_ids)
        ends = torch.from_numpy(step.qo_indptr[1:] - 1).long()
        hidden = self.runner.outputs.residual[ends.to(self.runner.outputs.residual.device)]
        for row, (id, group) in enumerate(zip(ids, groups, strict=True)):
            num_known = group.start + len(group.token_ids) + 1
            self.last[id] = Last(num_known, hidden[row : row + 1])

    def expect(self, watch: TapWatch) -> None:
        """Note the likeliest next token of each request, to be compared with the target's."""
        if watch.is_over:
            self.watch = None
        elif self.last:
            hidden = torch.cat([last.hidden for last in self.last.values()])
            likeliest = self.head.target_ids(self.logits(hidden).argmax(dim=1))
            watch.expect(self.last, likeliest.tolist())

    def logits(self, hidden: Tensor) -> Tensor:
        """After what rows have left, [n, draft V]."""
        return self.head.logits(hidden, torch.arange(len(hidden), device=hidden.device))

    def forget(self, id: int) -> None:
        super().forget(id)
        self.ended.add(id)

    def extend(self, items: Sequence[DraftItem]) -> tuple[list[int], Tensor]:
        """Executor.extend. A request is left out where the target's last step had none of it, or
        nothing that the head could go on from.
        """
        lent = [self.requests[item.id] for item in items]
        asked = [request for request in lent if request.num_output > 0]
        self.asked |= {request.id for request in asked}
        self.run([self.backlogs[r.id] for r in asked if r.id in self.backlogs], {})
        known = {r.id: self.last[r.id] for r in asked if r.id in self.last}
        lengths = {request.id: len(request.token_ids) for request in asked}
        ready = [id for id, last in known.items() if last.num_tokens == lengths[id]]
        if not ready:
            return [], torch.empty(0, 0)
        self.begin_nodes(ready)
        self.features = torch.cat([known[id].hidden for id in ready])
        self.rows = {id: {ROOT: row} for row, id in enumerate(ready)}
        logits = self.of_target(self.logits(self.features))
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
        features = self.features[torch.tensor(parents, device=self.features.device)]
        step = build_step_input(groups, self.scheduler.pool.updates)  # last: it takes the updates
        launched = self.runner.launch(step, features)
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
