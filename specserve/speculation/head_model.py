"""Executor of a draft head: it reads the target's hidden states and proposes tokens between
steps.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate, chain
from time import perf_counter
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from specserve.engine.runner import KVLost, RowGroup, Runner, StepInput, build_step_input
from specserve.exchange.messages import SourceStats, Stats
from specserve.memory.blocks import BlockTable
from specserve.models.draft_head import DraftHead
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve.speculation.costs import StepCosts
from specserve.speculation.executor import ModelExecutor
from specserve.speculation.verify import AcceptedPath, count_error
from specserve_drafters import ROOT, DraftRequest, Nodes
from specserve_drafters.base import EAGLE
from specserve_kernels import tensor_of

TOKENS = 200  # number of tokens that a check compares
LEAST = 0.2  # least share of tokens that match; matching heads reach 0.4 to 0.8

log = logging.getLogger("specserve")


class AuxLayerWatch:
    """Compares a head's most likely next token with the target's, for the first TOKENS tokens."""

    def __init__(self, words: str) -> None:
        """`words` describe the head's input."""
        self.words = words
        self.expected: dict[int, int] = {}  # expected token, by request
        self.num_tokens = self.num_right = 0

    @property
    def is_over(self) -> bool:
        return self.num_tokens >= TOKENS

    def expect(self, ids: Iterable[int], tokens: Iterable[int]) -> None:
        """Set the expected tokens of the next step."""
        self.expected = dict(zip(ids, tokens, strict=True))

    def see(self, id: int, token: int) -> None:
        """Compare the target's token with the expected one, if there is any."""
        if id in self.expected:
            self.compare([self.expected.pop(id)], [token])

    def compare(self, expected: Iterable[int], tokens: Iterable[int]) -> None:
        """Compare tokens with the target's. Log a warning after the last one if too few match."""
        for one, token in zip(expected, tokens, strict=True):
            if self.is_over:
                return
            self.num_tokens += 1
            self.num_right += one == token
            if self.is_over and self.num_right < LEAST * TOKENS:
                self.warn()

    def warn(self) -> None:
        log.warning(
            "The draft head's most likely next token matched %d of %d tokens; matching heads reach "
            "80 to 160. The head reads %s. Check that it was trained for this target, these layers "
            "and similar texts. An EAGLE-3 head lists its layers as "
            "eagle_aux_hidden_state_layer_ids in its config.json.",
            *(self.num_right, TOKENS, self.words),
        )


def aux_layer_words(aux_layer_ids: Sequence[int], num_layers: int) -> str:
    """Describe the head's input for a log message; the target has `num_layers` layers."""
    if [*aux_layer_ids] == [num_layers]:
        return "the output of the target's last layer"
    return f"the inputs of the target's layers {', '.join(map(str, aux_layer_ids))}"


MANY = 32  # number of rows above which a head writes only their KV
WATCHED = 64  # most rows of a launch whose logits are compared: they take memory
# If only one request runs: the most rows that wait, and the fewest that are written at a time.
KEPT, PIECE = 512, 128


class TargetRows(NamedTuple):
    """Rows of a request in the target's last step.

    table  the table of their KV at the time of the step: the request may have ended since
    start  position of the first row
    rows   row numbers in the step, in order of position
    """

    request: Request
    table: BlockTable
    start: int
    rows: list[int]


class Backlog(msgspec.Struct):
    """Rows of a request that the head has not run: their positions, and their auxiliary hidden
    states.
    """

    request: Request
    start: int
    aux_hidden_states: list[Tensor]
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


# A request, rows of its backlog, and the auxiliary hidden states of these rows.
UnrunRows = tuple[Request, RowGroup, list[Tensor]]


class LastHidden(NamedTuple):
    """The head's hidden state after the last of `num_tokens` known tokens, [1, hidden]."""

    num_tokens: int
    hidden: Tensor


class HeadModel(ModelExecutor):
    """An Executor whose model is a head of the target.

    The head's layers follow the target's layers in the target's blocks. The head's row at position
    i takes the auxiliary hidden states of token i and the id of token i + 1. So T known tokens have
    KV in the slots [0, T - 1), and node e of a step has slot T + e - 2.

    The target cannot recompute auxiliary hidden states, so they are kept until the head runs their
    rows. Before the next step is planned, the head runs prompt rows, and all rows once a block is
    full or a request has ended. Other rows run when the head proposes. The rows of a single request
    may wait until it ends or another request starts.

    Known rows overwrite the KV of draft tokens, which depends on the head's own states. The last
    slot of a cached block may depend on another next token, which lowers acceptance.
    """

    def __init__(
        self, runner: Runner, head: DraftHead, target: Runner, scheduler: Scheduler
    ) -> None:
        super().__init__(runner, scheduler)
        self.head, self.target = head, target
        scheduler.has_head = True
        self.first_costs = StepCosts(scheduler.budget.max_batched_tokens)  # known tokens
        words = aux_layer_words(head.aux_layer_ids, target.decoder.config.num_layers)
        self.watch: AuxLayerWatch | None = AuxLayerWatch(words)
        self.seen: list[TargetRows] = []
        self.backlogs: dict[int, Backlog] = {}  # by request
        self.last: dict[int, LastHidden] = {}  # by request
        # Block tables of requests that ended since the last step
        self.ended: dict[int, BlockTable] = {}
        # State of this step: hidden states of nodes, [N, hidden], and the rows by request and node.
        self.features = torch.empty(0, 0)
        self.rows: dict[int, dict[int, int]] = {}  # the root is one of the nodes
        # If the head's vocabulary has only some of the target's tokens, all others get -inf.
        self.is_whole = head.draft_vocab_size == target.decoder.config.vocab_size
        self.targets = head.target_ids(torch.arange(head.draft_vocab_size))
        self.wide = torch.empty(0, 0)

    def table(self, request: Request) -> BlockTable:
        return request.table

    def usual_rows(self, request: Request) -> int:
        return min(max(self.num_late(request), 1), MANY)

    def missing(self, request: Request) -> int:
        return max(0, self.num_late(request) - MANY)

    def num_late(self, request: Request) -> int:
        backlog = self.backlogs.get(request.id)
        return 0 if backlog is None else backlog.size

    @property
    def has_work(self) -> bool:
        """Return whether `follow` must be called before the next step is planned."""
        return bool(self.seen or self.ended)

    def see(self, scheduled: Sequence[ScheduledRequest], paths: Mapping[int, AcceptedPath]) -> None:
        """Record a step's rows of known tokens and of accepted paths, by request. Call it before
        blocks are freed or shared.
        """
        sizes = [s.end - s.start + len(s.draft) for s in scheduled]
        for item, begin in zip(scheduled, accumulate(sizes, initial=0), strict=False):
            request, end = item.request, begin + item.end - item.start
            path = paths.get(request.id)
            nodes = [] if path is None else path.nodes
            table = copy_of(request.table)
            rows = [*range(begin, end), *(end - 1 + node for node in nodes)]
            self.seen.append(TargetRows(request, table, item.start, rows))
            if self.watch is not None and path is not None and path.tokens:
                self.watch.see(request.id, path.tokens[0])

    def drop(self) -> None:
        """Drop all rows that have not run, after a failed step. Unpublish their blocks: the head's
        KV is missing.
        """
        lost = [(each.table, each.start, each.start + len(each.rows)) for each in self.seen]
        for id, backlog in self.backlogs.items():
            table = self.ended.get(id, backlog.request.table)
            lost.append((table, backlog.start, backlog.end))
        for table, start, end in lost:
            size = table.block_size
            self.scheduler.pool.unpublish(table.blocks[start // size : -(-end // size)])
        self.seen, self.backlogs, self.last = [], {}, {}
        self.ended.clear()
        if self.watch is not None:
            self.watch.expect([], [])

    def follow(self) -> None:
        """Keep the auxiliary hidden states of the target's last step, and run the rows that cannot
        wait. Call it before blocks are reused, and call `drop` after an error.
        """
        seen = self.seen
        if seen:
            self.keep_aux_hidden_states(seen)
        self.seen = []
        every = [*self.backlogs.values()]
        if self.is_alone:
            for backlog in every:
                if backlog.size > KEPT:
                    self.write(backlog, backlog.request.table, max(backlog.size - KEPT, PIECE))
        elif self.ended or any(map(self.is_due, every)):
            tables = {each.request.id: each.table for each in seen} | self.ended
            self.run(every, tables, self.watch)
        for id in self.ended:
            self.backlogs.pop(id, None)
            self.last.pop(id, None)
        self.ended.clear()
        if self.watch is not None and self.watch.is_over:
            self.watch = None

    def follow_timed(self, stats: Stats) -> None:
        """Call `follow`, and count its time as drafting. An error other than KVLost only loses
        draft tokens.
        """
        start = perf_counter()
        try:
            with self.ops.lock:  # engines on one device share the buffers of a forward
                self.follow()
        except KVLost:
            raise
        except Exception:  # for example too little memory
            self.drop()
            stats.sources.setdefault(EAGLE, SourceStats())
            count_error(stats, EAGLE)
        seconds = perf_counter() - start
        stats.draft_seconds += seconds
        if (sums := stats.sources.get(EAGLE)) is not None:
            sums.seconds += seconds
            sums.saved_seconds -= seconds

    def keep_aux_hidden_states(self, seen: Sequence[TargetRows]) -> None:
        kept = [
            (each, min(len(each.rows), len(each.request.token_ids) - each.start - 1))
            for each in seen
        ]
        aux_hidden_states = self.aux_hidden_states(
            [row for each, size in kept for row in each.rows[:size]]
        )
        for (request, _, start, _), size in kept:
            own, aux_hidden_states = aux_hidden_states[:size], aux_hidden_states[size:]
            backlog = self.backlogs.get(request.id)
            if backlog is None or backlog.end != start:  # the request was preempted
                backlog = self.backlogs[request.id] = Backlog(request, start, [], start)
            backlog.aux_hidden_states.append(own)
            backlog.end += size

    @property
    def is_alone(self) -> bool:
        """Return whether rows may wait: a single request runs, and no waiting request goes first or
        has blocks. Later requests run after it.
        """
        if len(self.scheduler.running) != 1 or self.ended:
            return False
        [request] = self.scheduler.running
        waiting = self.scheduler.waiting
        return all(r.rank > request.rank and not r.table.blocks for r in waiting)

    def is_due(self, backlog: Backlog) -> bool:
        """Return whether a block with rows of the backlog is full, or prompt rows are left."""
        size, request = self.runner.kv.block_size, backlog.request
        is_full = backlog.start // size < backlog.end // size
        return is_full or backlog.start < request.num_prompt

    def aux_hidden_states(self, rows: Sequence[int]) -> Tensor:
        """Return the auxiliary hidden states of rows of the last step, concatenated."""
        outputs = self.target.outputs
        assert outputs is not None, "no step has been run"
        at = torch.tensor(rows, dtype=torch.int64, device=outputs.residual.device)
        every = (
            outputs.aux_hidden_states.get(layer, outputs.residual)
            for layer in self.head.aux_layer_ids
        )
        return torch.cat([aux[at] for aux in every], dim=1)

    def run(
        self,
        backlogs: Sequence[Backlog],
        tables: Mapping[int, BlockTable],
        watch: AuxLayerWatch | None = None,
    ) -> None:
        """Run rows of backlogs, in launches of at most a step's rows. `tables` holds the tables of
        requests that may have ended. `watch` compares the tokens after the rows.
        """
        most, part, rows = self.scheduler.budget.max_batched_tokens, list[UnrunRows](), 0
        for backlog in backlogs:
            request, end = backlog.request, backlog.end
            table = tables.get(request.id, request.table)
            if backlog.size == 0 or table.num_computed < end:  # the request failed or was preempted
                del self.backlogs[request.id]
                continue
            # Most rows need only their KV. The last row and the compared rows are also read.
            first = end - 1
            if watch is not None:
                first = min(first, max(request.num_prompt - 2, end - min(WATCHED, most)))
            if first - backlog.start >= min(MANY, most):
                self.write(backlog, table, first - backlog.start)
            if part and rows + backlog.size > most:
                self.run_together(part, watch)
                part, rows = [], 0
            start = backlog.start
            group = RowGroup(table, request.token_ids[start + 1 : end + 1], start, 0)
            part.append((request, group, backlog.aux_hidden_states))
            rows += backlog.size
        if part:
            self.run_together(part, watch)

    def run_together(self, rest: Sequence[UnrunRows], watch: AuxLayerWatch | None) -> None:
        requests, groups, aux_hidden_states = zip(*rest, strict=True)
        features = self.head.fuse(torch.cat([*chain.from_iterable(aux_hidden_states)]))
        step = self.step_of(groups)  # last: it takes the updates
        self.runner.launch(step, features)
        assert self.runner.outputs is not None, "rows were run"
        self.num_rows += step.num_rows
        ends = tensor_of(step.columns.qo_indptr)[1:].long() - 1
        hidden = self.runner.outputs.residual[ends.to(self.runner.outputs.residual.device)]
        for request in requests:
            del self.backlogs[request.id]
        for row, (request, group) in enumerate(zip(requests, groups, strict=True)):
            num_known = group.start + len(group.token_ids) + 1
            self.last[request.id] = LastHidden(num_known, hidden[row : row + 1])
        if watch is not None:
            self.compare(watch, requests, groups, self.runner.outputs.residual)

    def write(self, backlog: Backlog, table: BlockTable, size: int) -> None:
        """Write the KV of the backlog's first `size` rows; nothing else of them is read."""
        most = self.scheduler.budget.max_batched_tokens
        aux_hidden_states = torch.cat(backlog.aux_hidden_states)
        for at in range(0, size, most):
            n, start = min(most, size - at), backlog.start
            ids = backlog.request.token_ids[start + 1 : start + n + 1]
            features = self.head.fuse(aux_hidden_states[at : at + n])
            self.write_rows(RowGroup(table, ids, start, 0), features)
            backlog.start, backlog.aux_hidden_states = start + n, [aux_hidden_states[at + n :]]

    def step_of(self, groups: Sequence[RowGroup]) -> StepInput:
        """The step of these rows. A head does not read the states that the tables may have."""
        return build_step_input(groups, self.scheduler.pool.updates, has_states=False)

    def write_rows(self, group: RowGroup, features: Tensor) -> None:
        step, kv = self.step_of([group]), self.runner.kv
        if step.updates:
            self.runner.update(step.updates)

        def write() -> None:
            plan = self.head.plan(step.rows(), kv, [tensor_of(step.columns.token_ids)])
            self.head.write(features, kv, plan)

        self.runner.on_threads(len(features), write)
        self.num_rows += len(features)

    def compare(
        self,
        watch: AuxLayerWatch,
        requests: Sequence[Request],
        groups: Sequence[RowGroup],
        residual: Tensor,
    ) -> None:
        """Compare the head's tokens with the target's after rows that were just run."""
        rows, tokens, before = list[int](), list[int](), 0
        for request, (_, ids, start, *_) in zip(requests, groups, strict=True):
            first = max(start, request.num_prompt - 2)
            target_tokens = request.token_ids[first + 2 : start + len(ids) + 2]
            if is_estimating(request):
                tokens += target_tokens
                rows += range(before + first - start, before + first - start + len(target_tokens))
            before += len(ids)
        if rows:
            rows, tokens = rows[:WATCHED], tokens[:WATCHED]
            likeliest = self.likeliest(self.logits(residual[torch.tensor(rows)]))
            watch.compare(likeliest, tokens)

    def likeliest(self, logits: Tensor) -> list[int]:
        """Return the target ids of the most likely tokens, for logits [n, draft V]."""
        ids: list[int] = self.head.target_ids(logits.argmax(dim=1)).tolist()
        return ids

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits after hidden states of rows, [n, draft V]."""
        return self.head.logits(hidden, torch.arange(len(hidden), device=hidden.device))

    def forget(self, request: Request) -> None:
        super().forget(request)
        self.ended[request.id] = copy_of(request.table)

    def extend(self, items: Sequence[DraftRequest]) -> tuple[list[int], Tensor]:
        """Run known tokens, see Executor.extend. A request is left out if the target's last step
        had no row of it, or if the head lacks its last hidden state.
        """
        requests = [self.requests[item.id] for item in items]
        asked = [request for request in requests if request.num_output > 0]
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
        logits = self.logits(self.features)
        if self.watch is not None:
            likeliest = zip(ready, self.likeliest(logits), strict=True)
            watched = {id: token for id, token in likeliest if is_estimating(self.requests[id])}
            self.watch.expect(watched, watched.values())
        logits = self.of_target(logits)
        place = {item.id: i for i, item in enumerate(items)}
        return [place[id] for id in ready], self.masked(logits, [(id, ROOT) for id in ready])

    def expand(self, nodes: Sequence[Nodes]) -> tuple[list[int], Tensor]:
        """Run nodes, see Executor.expand. A node below another one of the same call runs after
        it.
        """
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
        except BaseException:  # later nodes would lack hidden states of these
            self.take_back()
            raise
        if len(pieces) > 1:
            number = {each: row for row, each in enumerate(order)}
            logits = torch.cat(pieces)[[number[each] for each in every]]
        return places, self.masked(logits, every) if every else torch.empty(0, 0)

    def parent(self, id: int, node: int) -> int:
        return self.nodes[id][node - 1][1]

    def launch(self, nodes: Sequence[tuple[int, int]]) -> Tensor:
        """Run nodes whose parents were run, in order of request and number. Return logits [n,
        V].
        """
        groups, parents = list[RowGroup](), list[int]()
        for id, run in runs(nodes):
            table, first = self.requests[id].table, run[0]
            known, size = table.num_computed, len(run)
            tokens, above = zip(*self.nodes[id][first - 1 : first - 1 + size], strict=True)
            masks = self.masks[id][first - 1 : first - 1 + size]
            groups.append(RowGroup(table, [*tokens], known + first - 1, size, known, masks))
            parents += [self.rows[id][parent] for parent in above]
        features = self.features[torch.tensor(parents, device=self.features.device)]
        step = self.step_of(groups)  # last: it takes the updates
        launched = self.runner.launch(step, features)
        for row, (id, node) in enumerate(nodes, len(self.features)):
            self.rows[id][node] = row
        assert self.runner.outputs is not None, "rows were run"
        self.features = torch.cat([self.features, self.runner.outputs.residual])
        self.num_rows += len(nodes)
        return self.of_target(launched.logits)

    def of_target(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary, valid until the next call. Missing tokens are
        -inf.
        """
        if self.is_whole:
            return logits
        n = len(logits)
        if len(self.wide) < n:
            size = n, self.target.decoder.config.vocab_size
            self.wide = torch.full(size, float("-inf"), dtype=logits.dtype, device=logits.device)
        return self.wide[:n].index_copy_(1, self.targets, logits)


def copy_of(table: BlockTable) -> BlockTable:
    """Return a copy of a table in its current state."""
    copied = copy(table)
    copied.blocks = table.blocks[:]
    return copied


def is_estimating(request: Request) -> bool:
    """Return whether the head can be expected to match the request's tokens."""
    return request.sampling.temperature <= 1


def runs(nodes: Sequence[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """Group nodes with consecutive numbers of one request."""
    begin = 0
    for end, (id, node) in enumerate(nodes, 1):
        if end == len(nodes) or nodes[end] != (id, node + 1):
            yield id, [number for _, number in nodes[begin:end]]
            begin = end
