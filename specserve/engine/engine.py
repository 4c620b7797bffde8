"""The step loop: plan, draft, forward, walk, commit."""

import logging
import sys
from array import array
from collections.abc import Sequence
from itertools import count
from time import perf_counter

import msgspec
import torch
from torch import Tensor

from specserve.engine.batch import RowGroup
from specserve.engine.draft_model import DraftModel
from specserve.engine.runner import Runner
from specserve.engine.verify import Path, walk
from specserve.memory import BlockPool, BlockTable
from specserve.sampling import Sampler, Sampling
from specserve.scheduling import Request, Scheduler, Work
from specserve_drafters import Draft, Drafter, DraftItem

log = logging.getLogger("specserve")


class Emission(msgspec.Struct, frozen=True):
    """What a step brought one request."""

    request: Request
    tokens: list[int]


class Stats(msgspec.Struct):
    """Sums over all steps; seconds are wall time."""

    num_steps: int = 0
    num_rows: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # the target's forward
    step_seconds: float = 0.0
    drafter_errors: int = 0


class Engine:
    """Requests go in by `add`, and their tokens come out of `step`, until `is_idle`.

    A step is whole or it is nothing: its caller keeps signals out of it, as `LLM.step` does.
    """

    def __init__(
        self,
        target: Runner,
        scheduler: Scheduler,
        drafter: Drafter | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.target, self.scheduler = target, scheduler
        self.drafter, self.draft_model = drafter, draft_model
        self.stats = Stats()
        self.ids = count()

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.pool

    @property
    def is_idle(self) -> bool:
        return not (self.scheduler.running or self.scheduler.waiting)

    @torch.inference_mode()
    def step(self) -> list[Emission]:
        """One forward of the target for everyone; the new tokens of those who were due some."""
        start = perf_counter()
        works = self.scheduler.plan()
        if not works:
            return []
        self.guess([w for w in works if w.draft_limit])
        logits = self.verify(works)
        sampled = [w for w in works if w.is_sampled]
        paths = self.walk(sampled, logits)
        emissions = self.commit(works, sampled, paths)
        self.stats.num_steps += 1
        self.stats.step_seconds += perf_counter() - start
        return emissions

    def guess(self, works: list[Work]) -> None:
        """A draft for every root that may have one; a drafter's failure costs the drafts only."""
        if self.drafter is None or not works:
            return
        start = perf_counter()
        if self.draft_model is not None:
            self.draft_model.lend([w.request for w in works])
        try:
            drafts = self.drafter.propose([draft_item(w) for w in works])
            vocab_size = self.target.decoder.config.vocab_size
            for work, draft in zip(works, drafts, strict=True):
                work.draft = Draft.cut(draft, work.draft_limit, vocab_size)
        except BaseException:  # anybody's code runs here, and no text may depend on what it does
            self.drafter_failed("propose")
        finally:
            if self.draft_model is not None:
                self.draft_model.take_back()
        self.stats.draft_seconds += perf_counter() - start

    def verify(self, works: list[Work]) -> Tensor:
        """The target's logits after every row that is sampled, root and guesses."""
        start = perf_counter()
        groups = [rows_of(w) for w in works]
        logits = self.target.forward(groups)
        self.stats.num_rows += sum(len(g.token_ids) for g in groups)
        self.stats.verify_seconds += perf_counter() - start
        return logits

    def walk(self, sampled: list[Work], logits: Tensor) -> list[Path]:
        """The ordinary sampler, node by node down each tree."""
        if not sampled:
            return []
        requests = [w.request for w in sampled]
        sampler = Sampler(self.target.ops, logits, [r.sampling for r in requests])
        root_rows, depths = [], [0] * len(sampled)
        row = 0
        for work in sampled:
            root_rows.append(row)
            row += 1 + len(work.draft)

        def answer(at: list[tuple[int, int]]) -> list[int]:
            who = [i for i, _ in at]
            index = [len(requests[i].token_ids) + depths[i] for i in who]
            for i in who:
                depths[i] += 1
            return sampler.draw(who, [root_rows[i] + node for i, node in at], index)

        def is_last(i: int, tokens: list[int]) -> bool:
            return finish_reason(requests[i], tokens) is not None

        return walk([w.draft for w in sampled], answer, is_last)

    def commit(self, works: list[Work], sampled: list[Work], paths: list[Path]) -> list[Emission]:
        """Keep the accepted path's KV, give the rest back; the tokens join their request."""
        for work in works:
            work.request.table.num_computed = work.end
        self.keep_kv(sampled, paths)
        now = perf_counter()
        for work, path in zip(sampled, paths, strict=True):
            self.append(work, path, now)
        return [Emission(w.request, p.tokens) for w, p in zip(sampled, paths, strict=True)]

    def keep_kv(self, sampled: list[Work], paths: list[Path]) -> None:
        moves: list[tuple[BlockTable, int, int]] = []
        draft_moves: list[tuple[BlockTable, int, int]] = []
        for work, path in zip(sampled, paths, strict=True):
            # Node k was written at slot root + k, the j-th accepted one belongs at root + j: never
            # further down than any later source, so that copying in order needs no scratch.
            table, root = work.request.table, work.end - 1
            moves += [(table, root + k, root + j) for j, k in enumerate(path.nodes, 1) if k != j]
            table.num_computed += len(path.nodes)
            if self.draft_model is not None and any(work.draft.expanded):
                draft_moves += self.draft_model.keep(work.request, work.draft, path.nodes)
        self.target.move(moves)
        if self.draft_model is not None:
            self.draft_model.runner.move(draft_moves)

    def append(self, work: Work, path: Path, now: float) -> None:
        request = work.request
        request.finish_reason = finish_reason(request, path.tokens)
        request.first_token_at = request.first_token_at or now
        request.last_token_at = now
        if work.is_root:
            request.num_steps += 1
            request.num_step_tokens += len(path.tokens)
            request.num_drafted += len(work.draft)
            request.num_accepted += len(path.nodes)
        request.token_ids.extend(path.tokens)
        if work.draft.tokens:
            self.tell("observe", request.id, work.draft, path.nodes)
        if request.finish_reason is not None:
            self.remove(request)
        else:
            request.table.trim()
            request.draft_table.trim()

    def add(self, token_ids: Sequence[int], sampling: Sampling) -> Request:
        """Queue a request; its prompt and parameters have been checked."""
        draft_kv = (self.draft_model.runner if self.draft_model else self.target).kv
        request = Request(
            id=next(self.ids),
            token_ids=array("i", token_ids),
            sampling=sampling,
            table=BlockTable(self.pool, self.target.kv.block_size),
            draft_table=BlockTable(self.pool, draft_kv.block_size),
        )
        self.scheduler.add(request)
        return request

    def finish(self, request: Request, reason: str) -> None:
        """End a request from outside, at a stop string or because nobody listens any more."""
        if request.finish_reason is None:
            self.remove(request)
        request.finish_reason = reason

    def remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.tell("forget", request.id)
        assert not self.is_idle or self.pool.is_whole, "blocks are held, and nobody is there"

    def tell(self, what: str, *args: object) -> None:
        """Let the drafter know; what it does with that is its own affair."""
        listen = getattr(self.drafter, what, None)  # a drafter need not care
        if listen is None:
            return
        try:
            listen(*args)
        except BaseException:  # half a step must not be lost, either
            self.drafter_failed(what)

    def drafter_failed(self, where: str) -> None:
        """Inside the handler of its exception: one line each, and the first time where from."""
        self.stats.drafter_errors += 1
        is_first = self.stats.drafter_errors == 1
        message = "the drafter failed in %s (%s); its guesses are lost, no text is"
        log.error(message, where, sys.exception(), exc_info=is_first)

    def check(self) -> None:
        """Assert the pool's invariant: every block is free, or held by exactly whom it counts."""
        requests = self.scheduler.requests()
        tables = [t.blocks for r in requests for t in (r.table, r.draft_table)]
        self.pool.check(tables)


def draft_item(work: Work) -> DraftItem:
    r = work.request
    # A copy: what a drafter does to it changes no text.
    return DraftItem(
        r.id, r.token_ids[:], work.draft_limit, r.sampling.temperature, r.sampling.seed
    )


def rows_of(work: Work) -> RowGroup:
    """A work's rows for the target, causal ones or a root and its tree."""
    r, draft = work.request, work.draft
    tokens = r.token_ids[work.start : work.end]
    if not draft.tokens:
        return RowGroup(r.table, tokens, work.start, int(work.is_sampled))
    nodes = tokens.tolist() + draft.tokens
    return RowGroup(r.table, nodes, work.start, len(nodes), work.start, draft.masks())


def finish_reason(request: Request, tokens: Sequence[int]) -> str | None:
    """Whether a request ends with the last of these new tokens, and why."""
    if tokens[-1] in request.sampling.stop_ids:
        return "stop"
    return "length" if len(tokens) >= request.num_left else None
