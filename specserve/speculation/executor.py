"""Common parts of executors: the requests of a step, and the nodes of their trees."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specserve.engine.runner import Runner
from specserve.memory.blocks import BlockTable
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve.scheduling.grammar_state import GrammarState
from specserve.speculation.costs import StepCosts
from specserve_drafters import ROOT, Nodes
from specserve_drafters.candidates import MAX_NODES, TREE_SLOTS
from specserve_drafters.model_source import ModelSource


class ModelExecutor:
    """The part of an Executor that does not depend on how its model works.

    Node e of a request has the slot `num_computed` + e - 1 of the table with the model's KV.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner, self.ops, self.scheduler = runner, runner.ops, scheduler
        # Costs of the model's levels. A subclass may count the first level separately.
        self.costs = self.first_costs = StepCosts(scheduler.budget.max_batched_tokens)
        self.num_ids = runner.decoder.config.vocab_size  # ids of nodes are below it
        self.max_len = runner.decoder.num_positions - TREE_SLOTS
        self.requests: dict[int, Request] = {}  # requests of this step
        self.grammars: dict[int, GrammarState] = {}  # states of the requests with a grammar
        # Masks of the request's nodes in this step, by request
        self.masks: dict[int, list[int]] = {}
        self.nodes: dict[int, list[tuple[int, int]]] = {}  # tokens and parents of these nodes
        self.num_rows = 0  # rows that the model has run since start-up
        self.asked: set[int] = set()  # requests of this step to run
        # Whether a level also runs the nodes of the levels before it
        self.is_rerunning = False

    def table(self, request: Request) -> BlockTable:
        """Return the block table of the model's KV of a request."""
        raise NotImplementedError

    def usual_rows(self, request: Request) -> int:
        """Return the rows of the first level if no row is missing."""
        raise NotImplementedError

    def missing(self, request: Request) -> int:
        """Return the number of missing rows beyond the usual ones before the first level."""
        return 0

    @property
    def num_rerun(self) -> int:
        """Return the most rows of earlier levels that the next level runs again."""
        return sum(map(len, self.masks.values())) if self.is_rerunning else 0

    def forget(self, request: Request) -> None:
        """Drop the state of a request: it has ended, and its blocks are still reserved."""

    def lend(self, requests: Sequence[Request]) -> None:
        """Begin a step in which the drafter may run these requests."""
        self.requests = {r.id: r for r in requests}
        self.grammars = {r.id: r.grammar for r in requests if r.grammar is not None}
        self.masks, self.nodes, self.asked = {}, {}, set()

    def take_back(self) -> None:
        """End executor access: a later `extend` or `expand` of a request raises KeyError."""
        self.requests = {}

    def is_catching_up(self, item: ScheduledRequest) -> bool:
        """Return whether a root had no draft tokens of the model because its KV was incomplete."""
        return item.request.id in self.asked and item.request.id not in self.masks

    @property
    def spare(self) -> int:
        """Return the blocks that draft tokens may use: unreserved blocks, less one per running
        request.
        """
        return max(0, self.scheduler.num_unreserved - len(self.scheduler.running))

    def try_reserve(self, table: BlockTable, num_slots: int) -> bool:
        missing = table.missing(num_slots)
        return missing == 0 or (missing <= self.spare and table.try_reserve(num_slots))

    def begin_nodes(self, ids: Sequence[int]) -> None:
        """Allow `expand` to run nodes of these requests."""
        for id in ids:
            self.masks[id], self.nodes[id] = [], []

    def number(self, nodes: Sequence[Nodes]) -> list[tuple[int, int]]:
        """Number one level of nodes. Return the places of entries whose KV fits, each with the
        number of earlier nodes of its request.
        """
        fit, rows = list[tuple[int, int]](), self.scheduler.budget.max_batched_tokens
        for i, (id, tokens, parents) in enumerate(nodes):
            self.check_ids(tokens)
            masks, table = self.masks[id], self.table(self.requests[id])
            before = len(masks)
            size = before + len(tokens)
            end = table.num_computed + size
            is_full = size > MAX_NODES or end > self.max_len
            num_rows = size if self.is_rerunning else len(tokens)
            if num_rows > rows or is_full or not self.try_reserve(table, end):
                continue
            rows -= num_rows
            for parent in parents:
                above = masks[parent - 1] if parent != ROOT else 0
                masks.append(above | 1 << len(masks))
            self.nodes[id] += zip(tokens, parents, strict=True)
            fit.append((i, before))
        return fit

    def check_ids(self, tokens: Sequence[int]) -> None:
        """Raise IndexError for a token that the model must not run."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.num_ids:
            raise IndexError(f"a node's token is out of range. Use ids in [0, {self.num_ids}).")

    def masked(self, logits: Tensor, nodes: Sequence[tuple[int, int]]) -> Tensor:
        """Set the logits of impossible ids, and of ids that a request's grammar forbids, to -inf in
        place.
        """
        if self.num_ids < logits.shape[1]:
            logits[:, self.num_ids :] = float("-inf")
        for row, (id, node) in enumerate(nodes) if self.grammars else ():
            if id in self.grammars:
                is_allowed = self.allowed(id, node).to(logits.device)
                logits[row, : self.num_ids].masked_fill_(~is_allowed, float("-inf"))
        return logits

    def allowed(self, id: int, node: int) -> Tensor:
        """Return which ids may follow a node, [num_ids] bool; all ids if none may, since nothing
        follows then.
        """
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
    """The draft model or the target's head, as a source with planned draft tokens."""

    def __init__(self, source: ModelSource, model: ModelExecutor) -> None:
        self.source, self.model = source, model
        self.begin()

    @property
    def name(self) -> str:
        return self.source.name

    def begin(self) -> None:
        """Begin a step."""
        self.seconds = 0.0  # seconds of the model's levels
        self.catching_up = 0.0  # seconds that are not charged to the step
        self.is_trial_alone = False  # levels were run only for the request of a trial
