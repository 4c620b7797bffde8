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


class Emission(msgspec.Struct, frozen=True, array_like=True):
    """What a step brought one request. Plain data: it is sent to other processes as it stands."""

    id: int
    tokens: list[int]
    finish_reason: str | None  # "stop" | "length" where these tokens end it
    is_verified: bool  # the step had a root, so that it counts for the acceptance length
    num_drafted: int
    num_accepted: int
    admitted_at: float  # seconds, perf_counter: when it left the queue


class Stats(msgspec.Struct):
    """Sums over all steps; seconds are wall time."""

    num_steps: int = 0
    num_rows: int = 0
    num_drafted: int = 0  # rows of guesses
    num_accepted: int = 0
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
        self.requests: dict[int, Request] = {}  # all that have not ended
        self.stats = Stats()
        self.ids = count()

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.pool

    @property
    def is_idle(self) -> bool:
        return not self.requests

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
        return [self.append(work, path) for work, path in zip(sampled, paths, strict=True)]

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

    def append(self, work: Work, path: Path) -> Emission:
        """The tokens of a path join their request, which may end with them."""
        request, draft = work.request, work.draft
        emission = Emission(
            id=request.id,
            tokens=path.tokens,
            finish_reason=finish_reason(request, path.tokens),
            is_verified=work.is_root,
            num_drafted=len(draft),
            num_accepted=len(path.nodes),
            admitted_at=request.admitted_at,
        )
        request.token_ids.extend(path.tokens)
        self.stats.num_drafted += emission.num_drafted
        self.stats.num_accepted += emission.num_accepted
        if draft.tokens:
            self.tell("observe", request.id, draft, path.nodes)
        if emission.finish_reason is not None:
            self.finish(request.id)
        else:
            request.table.trim()
            request.draft_table.trim()
        return emission

    def add(self, token_ids: Sequence[int], sampling: Sampling, id: int | None = None) -> Request:
        """Queue a request; its prompt and parameters have been checked, its id is unused."""
        draft_kv = (self.draft_model.runner if self.draft_model else self.target).kv
        request = Request(
            id=next(self.ids) if id is None else id,
            token_ids=array("i", token_ids),
            sampling=sampling,
            table=BlockTable(self.pool, self.target.kv.block_size),
            draft_table=BlockTable(self.pool, draft_kv.block_size),
        )
        self.requests[request.id] = request
        self.scheduler.add(request)
        return request

    def finish(self, id: int) -> None:
        """End a request, wherever it is; one that has ended already is left alone."""
        request = self.requests.pop(id, None)
        if request is None:
            return
        self.scheduler.remove(request)
        self.tell("forget", id)
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
        """Inside the handler of its exception: a line, ever more rarely; at first where from."""
        self.stats.drafter_errors += 1
        count = self.stats.drafter_errors
        if count & (count - 1) == 0:  # 1, 2, 4, ...: a log that nobody reads must not fill up
            message = "the drafter failed in %s (%s), %d times so far; guesses are lost, no text is"
            log.error(message, where, sys.exception(), count, exc_info=count == 1)

    def check(self) -> None:
        """Assert the pool's invariant: every block is free, or held by exactly whom it counts."""
        tables = [t.blocks for r in self.requests.values() for t in (r.table, r.draft_table)]
        self.pool.check(tables)

    def memory(self) -> dict[str, int]:
        """Blocks by holder."""
        requests = self.scheduler.running  # nobody else holds any
        return {
            "target": sum(len(r.table.blocks) for r in requests),
            "draft": sum(len(r.draft_table.blocks) for r in requests),
            "free": self.pool.num_free,
        }


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
