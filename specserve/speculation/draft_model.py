"""The executor that gives drafters access to the draft model: it runs known tokens and draft
tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specserve.engine.runner import RowGroup, Runner, build_step_input
from specserve.memory.blocks import BlockTable
from specserve.memory.checkpoints import (
    begin_snapshot,
    chunk_end,
    due_checkpoints,
    publish_snapshot,
)
from specserve.scheduling import Request, Scheduler
from specserve.speculation.executor import ModelExecutor
from specserve_drafters import ROOT, Draft, DraftRequest, Nodes

# Most known tokens that a step usually leaves to the draft model. They are the bonus token, and the
# last accepted draft token if the draft model has not run it.
USUAL_LAG = 2
# The same for a model with recurrent layers, which runs accepted draft tokens again
RECURRENT_LAG = 16


class DraftModel(ModelExecutor):
    """Executor of the draft model for the requests of a step.

    Slots [0, T) of a request's draft table hold the KV of its known tokens; node e of the step has
    slot T + e - 1.

    The table may have a recurrent state, of known tokens only. A level then runs all nodes of its
    tree from this state, because states of nodes are not stored. Accepted draft tokens are run
    again as known tokens.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, num_ids: int) -> None:
        """Ids below `num_ids` are the same tokens as the target's, and the draft model's embedding
        has them.
        """
        super().__init__(runner, scheduler)
        self.vocab_size, self.num_ids = self.num_ids, num_ids
        self.max_len = min(runner.decoder.config.max_positions, self.max_len)
        self.is_rerunning = bool(runner.kv.states)
        self.usual_lag = RECURRENT_LAG if self.is_rerunning else USUAL_LAG

    def table(self, request: Request) -> BlockTable:
        return request.draft_table

    def usual_rows(self, request: Request) -> int:
        return min(request.draft_gap, self.usual_lag)

    def missing(self, request: Request) -> int:
        return max(0, request.draft_gap - self.usual_lag)

    def extend(self, items: Sequence[DraftRequest]) -> tuple[list[int], Tensor]:
        """Run known tokens, see Executor.extend. A request is left out until its first token is
        known, so the draft model does not delay it. Shorter gaps come first, and a gap may take
        several steps.
        """
        requests = [self.requests[item.id] for item in items]
        if len({r.id for r in requests}) < len(requests):
            raise ValueError("items list a request twice. List each request once.")
        requests = [r for r in requests if r.num_output > 0]
        self.asked |= {r.id for r in requests}
        for request in requests:
            self.begin(request)
        groups, rows = [], self.scheduler.catch_up_rows
        ahead: list[Request] = []
        for request in sorted(requests, key=lambda r: r.draft_gap):
            if self.waits(request) or self.is_loading(request) or self.is_shared(request, ahead):
                continue
            if request.draft_gap > self.usual_lag and request.draft_table.state.size == 0:
                request.draft_table.match_part(request.token_ids, self.spare)
            group = self.known_rows(request, rows)
            if group is None:
                continue
            groups.append(group)
            ahead.append(request)
            rows -= len(group.token_ids) if request.draft_gap > self.usual_lag else 0
        logits = self.forward(split(groups, self.scheduler.budget.max_batched_tokens))
        for group in groups:
            group.table.num_computed += len(group.token_ids)
        if self.is_rerunning:
            for request in ahead:
                publish_snapshot(request.draft_table, request.token_ids)
        ready = [r.id for r in ahead if r.draft_gap == 0]
        self.begin_nodes(ready)
        place = {item.id: i for i, item in enumerate(items)}
        return [place[id] for id in ready], self.masked(logits, [(id, ROOT) for id in ready])

    def known_rows(self, request: Request, rows: int) -> RowGroup | None:
        """Return rows of known tokens that the draft model lacks: at most `rows`, or the usual
        ones. Only the last row is read. None if there are no such rows or no blocks.

        The rows end before a token that the draft model's embedding lacks: it proposes nothing
        then. Rows before the last due checkpoint are run here, because a launch writes only one.
        """
        table, gap, known = request.draft_table, request.draft_gap, len(request.token_ids)
        start, size = table.num_computed, gap if gap <= self.usual_lag else min(gap, rows)
        tokens = request.token_ids[start : start + size]
        if tokens and max(tokens) >= self.vocab_size:
            size = next(i for i, token in enumerate(tokens) if token >= self.vocab_size)
            tokens = tokens[:size]
        if size == 0 or known > self.max_len or not self.try_reserve(table, start + size):
            return None
        if table.state.size == 0:
            return RowGroup(table, tokens, start, num_read=int(size == gap))
        end = start + size
        while (begin := chunk_end(table, request.token_ids, end)) < end:
            self.begin_checkpoint(request, begin)
            rows_before = RowGroup(table, request.token_ids[start:begin], start, 0)
            self.forward(split([rows_before], self.scheduler.budget.max_batched_tokens))
            table.num_computed = start = begin
            publish_snapshot(table, request.token_ids)
        self.begin_checkpoint(request, end)
        return RowGroup(table, request.token_ids[start:end], start, num_read=int(size == gap))

    def begin_checkpoint(self, request: Request, end: int) -> None:
        """Let the launch that runs the known tokens up to `end` copy the state, if a checkpoint is
        due. A checkpoint of output replaces the last one.
        """
        table, state = request.draft_table, request.draft_table.state
        if table.num_computed // table.block_size == end // table.block_size:
            return
        due = due_checkpoints(table, request.token_ids, end)
        is_output = len(due) > 0 and due[0] > request.num_prompt
        if is_output:
            table.pool.drop_checkpoint(state.latest)
        begin_snapshot(table, request.token_ids, end, self.spare)
        if is_output and state.snapshot:
            key = table.key(request.token_ids, due[0] // table.block_size - 1)
            assert key is not None, "checkpoints end at blocks with a key"
            state.latest = key

    def begin(self, request: Request) -> None:
        """Reuse the cached draft KV of the request's known tokens, within the spare blocks."""
        if request.draft_gap > self.usual_lag and not self.waits(request):
            request.find_draft_prefix(self.spare)

    def is_loading(self, request: Request) -> bool:
        """Return whether draft KV of the request comes back from a tier; begin this if possible."""
        if request.draft_gap <= self.usual_lag:
            return False
        return self.scheduler.begin_draft_load(request, self.spare, self.costs)

    def expand(self, nodes: Sequence[Nodes]) -> tuple[list[int], Tensor]:
        fit, groups, rows_of = self.number(nodes), list[RowGroup](), list[tuple[int, int]]()
        for i, before in fit:
            id, tokens, _ = nodes[i]
            table, size = self.requests[id].draft_table, len(tokens)
            first = 0 if self.is_rerunning else before
            tokens = [token for token, _ in self.nodes[id][first : before + size]]
            known, masks = table.num_computed, self.masks[id][first : before + size]
            group = RowGroup(table, tokens, known + first, size, known, masks)
            if self.is_rerunning:
                kept = sum(len(other.token_ids) for other in groups)
                group = group._replace(num_known=0, first_kept=kept)
            groups.append(group)
            rows_of += [(id, before + k) for k in range(1, size + 1)]
        return [i for i, _ in fit], self.masked(self.forward([groups]), rows_of)

    def forward(self, launches: list[list[RowGroup]]) -> Tensor:
        """Run launches; return the logits of the rows that are read, in order. All of these rows
        are in the last launch. An error ends executor access, because the slots of further nodes
        would be wrong.
        """
        logits = torch.empty(0, 0)
        try:
            for groups in filter(None, launches):
                step = build_step_input(groups, self.scheduler.pool.updates)
                logits = self.runner.launch(step).logits
                self.num_rows += step.num_rows
        except BaseException:
            if self.is_rerunning:  # the launch may have changed states, and no snapshot is written
                for request in self.requests.values():
                    request.draft_table.clear()
            self.take_back()
            raise
        return logits

    def waits(self, request: Request) -> bool:
        """Return whether the leader, a request of this step, still computes the draft KV of their
        prompt.
        """
        leader = request.leader
        if leader is None or leader.id not in self.requests:
            return False
        if request.draft_table.num_computed > 0 or len(leader.token_ids) > self.max_len:
            return False  # the request has draft KV, or the leader exceeds the draft model's length
        return leader.draft_table.num_computed < min(request.num_prompt, len(request.token_ids) - 1)

    def is_shared(self, request: Request, ahead: Sequence[Request]) -> bool:
        """Return whether a request of `ahead` computes the block that this one needs next."""
        table = request.draft_table
        place, offset = divmod(table.num_computed, table.block_size)
        key = table.key(request.token_ids, place)
        if offset or key is None or request.draft_gap <= self.usual_lag or table.state.size:
            return False
        return any(
            r.draft_table.is_publishing
            and r.draft_table.num_computed // table.block_size <= place
            and r.draft_table.key(r.token_ids, place) == key
            for r in ahead
        )

    def keep(self, request: Request, draft: Draft, nodes: Sequence[int]) -> None:
        """Keep the draft KV of the accepted nodes that the draft model has run; the next launch
        moves it.

        Stops at the first node whose `expanded` number belongs to another token or parent. The
        draft model computes the rest again, so each block's KV matches its key.
        """
        if self.is_rerunning:
            return
        table, kept, slots, parent = request.draft_table, 0, [], ROOT
        run = self.nodes.get(request.id, [])
        for k in nodes:
            e = draft.expanded[k - 1]
            if not kept < e <= len(run) or run[e - 1] != (draft.tokens[k - 1], parent):
                break
            parent = e
            kept += 1
            if e != kept:
                known = table.num_computed
                slots.append((table.slot(known + e - 1), table.slot(known + kept - 1)))
        table.num_computed += kept
        if slots:
            self.scheduler.pool.updates.move("draft", slots)


def split(groups: Sequence[RowGroup], most: int) -> list[list[RowGroup]]:
    """Split causal rows into launches of at most `most` rows. The last launch has all rows that are
    read: at most one per group, and fewer than `most`. A launch overwrites the logits of the one
    before.
    """
    excess = sum(len(g.token_ids) for g in groups) - most
    launches: list[list[RowGroup]] = []
    last: list[RowGroup] = []
    for group in reversed(groups):
        cut = max(0, min(excess, len(group.token_ids) - group.num_read))
        excess -= cut
        launches += [[part(group, i, min(i + most, cut))] for i in range(0, cut, most)]
        if cut < len(group.token_ids):
            last.insert(0, part(group, cut, len(group.token_ids)))
    return [*launches, last]


def part(group: RowGroup, begin: int, end: int) -> RowGroup:
    """Return the rows [begin, end) of a group of causal rows; the last row of the group may be
    read.
    """
    return group._replace(
        token_ids=group.token_ids[begin:end],
        start=group.start + begin,
        num_read=group.num_read if end == len(group.token_ids) else 0,
    )
