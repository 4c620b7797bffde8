"""The draft model as drafters use it: catching up with known tokens, running guesses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specserve.engine.runner import Runner
from specserve.engine.step_input import RowGroup, build_step_input
from specserve.memory import BlockTable
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve_drafters import ROOT, Draft, DraftItem, Nodes
from specserve_drafters.tree import MAX_NODES, TREE_SLOTS

# Known tokens that a step usually leaves to the draft model: the bonus token, and the last accepted
# guess if the draft model had not run it.
USUAL_LAG = 2


class DraftModel:
    """An Executor: gives a drafter access to the draft model for the requests of a step.

    Slots [0, T) of a request's draft table hold the KV of its known tokens; node e of the step has
    slot T + e - 1.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner, self.ops, self.scheduler = runner, runner.ops, scheduler
        room = len(runner.decoder.rotary.cos) - TREE_SLOTS
        self.max_len = min(runner.decoder.config.max_positions, room)
        self.requests: dict[int, Request] = {}  # of this step
        self.masks: dict[int, list[int]] = {}  # by request; of its nodes in this step
        self.nodes: dict[int, list[tuple[int, int]]] = {}  # their tokens and parents
        self.spare = 0  # blocks that draft KV may take in this step

    def lend(self, requests: Sequence[Request]) -> None:
        """Begin a step in which the drafter may run these requests.

        Draft KV takes only blocks that are not reserved for running requests, and leaves one more
        free for each of them.
        """
        self.requests = {r.id: r for r in requests}
        self.masks, self.nodes = {}, {}
        self.spare = self.scheduler.num_unreserved - len(self.scheduler.running)

    def take_back(self) -> None:
        """End executor access: a later `extend` or `expand` of a request raises KeyError."""
        self.requests = {}

    def extend(self, items: Sequence[DraftItem]) -> tuple[list[int], Tensor]:
        groups, ready = [], []
        rows = self.scheduler.budget.prefill_chunk
        lent = [self.requests[item.id] for item in items]
        if len({r.id for r in lent}) < len(lent):
            raise ValueError("a request was given twice: its KV would be counted twice")
        for request in lent:
            self.begin(request)
        gaps = [r.draft_gap for r in lent]
        ahead: list[Request] = []
        for i in sorted(range(len(items)), key=gaps.__getitem__):
            token_ids, table = lent[i].token_ids, lent[i].draft_table
            if self.waits(lent[i]) or self.is_shared(lent[i], ahead):
                continue
            known = len(token_ids)
            size = gaps[i] if gaps[i] <= USUAL_LAG else min(gaps[i], rows)
            start = table.num_computed
            if size == 0 or known > self.max_len or not self.try_reserve(table, start + size):
                continue
            rows -= size if gaps[i] > USUAL_LAG else 0
            is_ready = start + size == known
            tokens = token_ids[start : start + size]
            groups.append(RowGroup(table, tokens, start, num_read=int(is_ready)))
            if is_ready:
                ready.append(i)
            ahead.append(lent[i])
        logits = self.forward(groups)
        for group in groups:
            group.table.num_computed += len(group.token_ids)
        for i in ready:
            self.masks[lent[i].id], self.nodes[lent[i].id] = [], []
        return ready, logits

    def begin(self, request: Request) -> None:
        """Take the cached draft KV of the request's known tokens, within the spare blocks."""
        if request.draft_gap > USUAL_LAG and not self.waits(request):
            before = self.scheduler.pool.num_available
            request.find_draft_prefix(self.spare)
            self.spare -= before - self.scheduler.pool.num_available

    def expand(self, nodes: Sequence[Nodes]) -> tuple[list[int], Tensor]:
        groups, fit = [], []
        for i, (id, tokens, parents) in enumerate(nodes):
            self.check_ids(tokens)
            masks, table = self.masks[id], self.requests[id].draft_table
            known, first = table.num_computed, len(masks)
            end = known + first + len(tokens)
            is_full = first + len(tokens) > MAX_NODES or end > self.max_len
            if is_full or not self.try_reserve(table, end):
                continue
            for parent in parents:
                above = masks[parent - 1] if parent != ROOT else 0
                masks.append(above | 1 << len(masks))
            size, start = len(tokens), known + first
            groups.append(RowGroup(table, tokens, start, size, known, masks[first:]))
            fit.append(i)
        logits = self.forward(groups)
        for id, tokens, parents in (nodes[i] for i in fit):
            self.nodes[id] += zip(tokens, parents, strict=True)
        return fit, logits

    def check_ids(self, tokens: Sequence[int]) -> None:
        """IndexError for a token that the draft model's embedding does not have."""
        vocab_size = self.runner.decoder.config.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise IndexError(f"a node's token is no id: ids lie in [0, {vocab_size})")

    def forward(self, groups: list[RowGroup]) -> Tensor:
        """The logits of the rows that are read, in order. An error ends executor access: after it
        the slots of further nodes would not be those that were written.
        """
        if not groups:
            return torch.empty(0, 0)
        try:
            step = build_step_input(groups, self.scheduler.pool.updates)
            return self.runner.launch(step).logits
        except BaseException:
            self.take_back()
            raise

    def try_reserve(self, table: BlockTable, num_slots: int) -> bool:
        missing = table.missing(num_slots)
        if missing > max(0, self.spare) or not table.try_reserve(num_slots):
            return False
        self.spare -= missing
        return True

    def waits(self, request: Request) -> bool:
        """Whether the leader, lent as well, is still computing the draft KV of their prompt."""
        leader = request.leader
        if leader is None or leader.id not in self.requests:
            return False
        if request.draft_table.num_computed > 0 or len(leader.token_ids) > self.max_len:
            return False  # it has draft KV itself, or the leader exceeds the draft model's length
        return leader.draft_table.num_computed < min(request.num_prompt, len(request.token_ids) - 1)

    def is_shared(self, request: Request, ahead: Sequence[Request]) -> bool:
        """Whether a request `ahead` in this forward computes the block that this one needs next."""
        table = request.draft_table
        place, offset = divmod(table.num_computed, table.block_size)
        key = table.key(request.token_ids, place)
        if offset or key is None or request.draft_gap <= USUAL_LAG:
            return False
        return any(
            r.draft_table.is_publishing
            and r.draft_table.num_computed // table.block_size <= place
            and r.draft_table.key(r.token_ids, place) == key
            for r in ahead
        )

    def is_catching_up(self, item: ScheduledRequest) -> bool:
        """Whether a root had no guesses of the draft model, as its draft KV was incomplete."""
        return item.draft_limit > 0 and item.request.id not in self.masks

    def keep(self, request: Request, draft: Draft, nodes: Sequence[int]) -> None:
        """Keep the draft KV of the accepted nodes that the draft model has run; the next launch
        moves it.

        Stops at the first node whose `expanded` number belongs to another token or parent: the
        draft model computes the rest again, and no block gets a key that its KV does not match.
        """
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
