"""What the models that run guesses have in common: the requests of a step, and nodes of trees."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specserve.engine.runner import Runner
from specserve.memory.blocks import BlockTable
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve.scheduling.cost import StepCosts
from specserve.scheduling.grammar_state import GrammarState
from specserve_drafters import ROOT, Nodes
from specserve_drafters.candidates import MAX_NODES, TREE_SLOTS
from specserve_drafters.model_source import ModelSource


class ModelExecutor:
    """The part of an Executor that does not depend on how its model works.

    Node e of a request's step has the slot `num_computed` + e - 1 of the table that the model's KV
    is in.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner, self.ops, self.scheduler = runner, runner.ops, scheduler
        # Of its levels. The first may be another kind of work, and is counted apart then.
        self.costs = self.first_costs = StepCosts(scheduler.budget.max_batched_tokens)
        self.num_ids = runner.decoder.config.vocab_size  # that nodes may have
        self.max_len = runner.decoder.num_positions - TREE_SLOTS
        self.requests: dict[int, Request] = {}  # of this step
        self.grammars: dict[int, GrammarState] = {}  # of those that have one
        self.masks: dict[int, list[int]] = {}  # by request; of its nodes in this step
        self.nodes: dict[int, list[tuple[int, int]]] = {}  # their tokens and parents
        self.num_rows = 0  # that it has run in all
        self.asked: set[int] = set()  # requests of this step that are to be run

    def table(self, request: Request) -> BlockTable:
        """Where the model's KV of a request is."""
        raise NotImplementedError

    def usual_rows(self, request: Request) -> int:
        """Rows that the first level takes where nothing is missing."""
        raise NotImplementedError

    def missing(self, request: Request) -> int:
        """Rows beyond those that have to be run before the first level."""
        return 0

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request: it has ended, and its blocks are still there."""

    def lend(self, requests: Sequence[Request]) -> None:
        """Begin a step in which the drafter may run these requests."""
        self.requests = {r.id: r for r in requests}
        self.grammars = {r.id: r.grammar for r in requests if r.grammar is not None}
        self.masks, self.nodes, self.asked = {}, {}, set()

    def take_back(self) -> None:
        """End executor access: a later `extend` or `expand` of a request raises KeyError."""
        self.requests = {}

    def is_catching_up(self, item: ScheduledRequest) -> bool:
        """Whether a root had no guesses of the model, as its KV was incomplete."""
        return item.request.id in self.asked and item.request.id not in self.masks

    @property
    def spare(self) -> int:
        """Blocks that guesses may take: those that are not reserved for running requests, less one
        for each of these.
        """
        return max(0, self.scheduler.num_unreserved - len(self.scheduler.running))

    def try_reserve(self, table: BlockTable, num_slots: int) -> bool:
        missing = table.missing(num_slots)
        return missing == 0 or (missing <= self.spare and table.try_reserve(num_slots))

    def begin_nodes(self, ids: Sequence[int]) -> None:
        """From now on these requests' nodes may be run."""
        for id in ids:
            self.masks[id], self.nodes[id] = [], []

    def number(self, nodes: Sequence[Nodes]) -> list[tuple[int, int]]:
        """Number one level of nodes, as far as there is room for their KV: the places of those that
        have it, and how many nodes their requests had before them.
        """
        fit, rows = list[tuple[int, int]](), self.scheduler.budget.max_batched_tokens
        for i, (id, tokens, parents) in enumerate(nodes):
            self.check_ids(tokens)
            masks, table = self.masks[id], self.table(self.requests[id])
            before = len(masks)
            size = before + len(tokens)
            end = table.num_computed + size
            is_full = size > MAX_NODES or end > self.max_len
            if len(tokens) > rows or is_full or not self.try_reserve(table, end):
                continue
            rows -= len(tokens)
            for parent in parents:
                above = masks[parent - 1] if parent != ROOT else 0
                masks.append(above | 1 << len(masks))
            self.nodes[id] += zip(tokens, parents, strict=True)
            fit.append((i, before))
        return fit

    def check_ids(self, tokens: Sequence[int]) -> None:
        """IndexError for a token that the model must not run."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.num_ids:
            raise IndexError(f"a node's token is no id: ids lie in [0, {self.num_ids})")

    def masked(self, logits: Tensor, nodes: Sequence[tuple[int, int]]) -> Tensor:
        """Logits after nodes of requests, in place without ids that no node may have, and without
        those that the request's grammar forbids.
        """
        if self.num_ids < logits.shape[1]:
            logits[:, self.num_ids :] = float("-inf")
        for row, (id, node) in enumerate(nodes) if self.grammars else ():
            if id in self.grammars:
                is_allowed = self.allowed(id, node).to(logits.device)
                logits[row, : self.num_ids].masked_fill_(~is_allowed, float("-inf"))
        return logits

    def allowed(self, id: int, node: int) -> Tensor:
        """[num_ids] bool: which ids may follow a node; all if none may, as nothing follows it."""
        path = list[int]()
        while node != ROOT:
            token, node = self.nodes[id][node - 1]
            path.insert(0, token)
        words = self.grammars[id].mask(path)
        is_allowed = np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)[
            : self.num_ids
        ]
        return torch.from_numpy(is_allowed if is_allowed.any() else ~is_allowed)


class DraftModelSource:
    """The draft model or the target's head, as a source of planned guesses."""

    def __init__(self, source: ModelSource, model: ModelExecutor) -> None:
        self.source, self.model = source, model
        self.begin()

    @property
    def name(self) -> str:
        return self.source.name

    def begin(self) -> None:
        """Begin a step."""
        self.seconds = 0.0  # of its levels
        self.catching_up = 0.0  # seconds that are not charged to the step
        self.is_trial_alone = False  # its levels were run for no other request than a trial's
