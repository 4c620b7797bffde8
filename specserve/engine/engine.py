"""The step loop: plan, draft, forward, walk, commit."""

import logging
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from time import perf_counter

import torch

from specserve.engine.batch import RowGroup
from specserve.engine.draft_model import DraftModel
from specserve.engine.runner import Runner
from specserve.engine.sampler import Sampler
from specserve.engine.verify import Answer, Path, walk
from specserve.exchange.sampling_params import Sampling
from specserve.exchange.step_output import Stats, StepOutput
from specserve.memory import BlockHasher, BlockPool, BlockTable, root_key
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve_drafters import Draft, Drafter, DraftItem

log = logging.getLogger("specserve")


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
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.target, self.scheduler = target, scheduler
        self.drafter, self.draft_model = drafter, draft_model
        self.names = names  # whose KV a block of each model's is; None keeps no prefixes
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
    def step(self) -> list[StepOutput]:
        """One forward of the target for everyone; the new tokens of those who were due some."""
        start = perf_counter()
        scheduled = self.scheduler.plan()
        if not scheduled:
            return []
        self.draft([w for w in scheduled if w.draft_limit])
        scheduled.sort(key=lambda w: not w.draft.is_chain)  # rows with masks come last
        try:
            answer = self.verify(scheduled)
        except torch.OutOfMemoryError as e:
            return self.give_up(scheduled, str(e))
        sampled = [w for w in scheduled if w.is_sampled]
        paths = self.walk(sampled, answer)
        outputs = self.commit(scheduled, sampled, paths)
        self.stats.num_steps += 1
        self.stats.step_seconds += perf_counter() - start
        return outputs

    def draft(self, scheduled: list[ScheduledRequest]) -> None:
        """A draft for every root that may have one; a drafter's failure costs the drafts only."""
        if self.drafter is None or not scheduled:
            return
        start = perf_counter()
        if self.draft_model is not None:
            self.draft_model.lend([w.request for w in scheduled])
        try:
            drafts = self.drafter.propose([draft_item(w) for w in scheduled])
            vocab_size = self.target.decoder.config.vocab_size
            for work, draft in zip(scheduled, drafts, strict=True):
                work.draft = Draft.cut(draft, work.draft_limit, vocab_size)
        except BaseException:  # anybody's code runs here, and no text may depend on what it does
            self.drafter_failed("propose")
        finally:
            if self.draft_model is not None:
                self.draft_model.take_back()
        self.stats.draft_seconds += perf_counter() - start

    def verify(self, scheduled: list[ScheduledRequest]) -> Answer:
        """Run the rows of all scheduled; what the target says after a node, root or guess."""
        start = perf_counter()
        groups = [rows_of(w) for w in scheduled]
        sampler = sampler_for([w for w in scheduled if w.is_sampled])
        if self.target.ops.samples_ahead and sampler.requests:
            tokens = self.target.answers(groups, sampler.params([*sampler.nodes()]))
            answer: Answer = partial(sampler.look_up, tokens)
        else:
            answer = partial(sampler.draw, self.target.ops, self.target.forward(groups))
        self.stats.num_rows += sum(len(g.token_ids) for g in groups)
        self.stats.verify_seconds += perf_counter() - start
        return answer

    def walk(self, sampled: list[ScheduledRequest], answer: Answer) -> list[Path]:
        """Node by node down each tree."""

        def is_last(i: int, tokens: list[int]) -> bool:
            return finish_reason(sampled[i].request, tokens) is not None

        return walk([w.draft for w in sampled], answer, is_last)

    def commit(
        self, scheduled: list[ScheduledRequest], sampled: list[ScheduledRequest], paths: list[Path]
    ) -> list[StepOutput]:
        """Keep the accepted path's KV, give the rest back; the tokens join their request."""
        for work in scheduled:
            work.request.table.num_computed = work.end
        self.keep_kv(sampled, paths)
        for work in scheduled:
            if not work.is_sampled:
                work.request.publish()
        return [self.append(work, path) for work, path in zip(sampled, paths, strict=True)]

    def keep_kv(self, sampled: list[ScheduledRequest], paths: list[Path]) -> None:
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

    def append(self, work: ScheduledRequest, path: Path) -> StepOutput:
        """The tokens of a path join their request, which may end with them."""
        request, draft = work.request, work.draft
        output = StepOutput(
            id=request.id,
            tokens=path.tokens,
            finish_reason=finish_reason(request, path.tokens),
            is_verified=work.is_root,
            num_drafted=len(draft),
            num_accepted=len(path.nodes),
            admitted_at=request.admitted_at,
            num_cached=request.num_cached,
            is_fallback=self.draft_model is not None and self.draft_model.is_behind(work),
        )
        if request.num_output == 0 and request.first is None:
            self.stats.num_looked_up += request.num_prompt
            self.stats.num_cached += request.num_cached
        request.token_ids.extend(path.tokens)
        request.publish()
        request.share_prompt()
        self.stats.num_drafted += output.num_drafted
        self.stats.num_accepted += output.num_accepted
        self.stats.num_fallbacks += output.is_fallback
        if draft.tokens:
            self.tell("observe", request.id, draft, path.nodes)
        if output.finish_reason is not None:
            self.finish(request.id)
        else:
            request.table.trim()
            request.draft_table.trim()
        return output

    def add(self, token_ids: Sequence[int], sampling: Sampling, id: int | None = None) -> Request:
        """Queue a request; its prompt and parameters have been checked, its id is unused."""
        return self.add_choices(token_ids, [sampling], id)[0]

    def add_choices(
        self, token_ids: Sequence[int], samplings: Sequence[Sampling], id: int | None = None
    ) -> list[Request]:
        """Queue requests with one prompt, which is computed once; ids count on from `id`."""
        ids = [next(self.ids) if id is None else id + i for i in range(len(samplings))]
        choices = [
            Request(
                id=own,
                token_ids=array("i", token_ids),
                sampling=sampling,
                table=self.table("target", sampling.cache_salt),
                draft_table=self.table("draft", sampling.cache_salt),
            )
            for own, sampling in zip(ids, samplings, strict=True)
        ]
        first, *others = choices
        first.behind = others
        for request in choices:
            request.first = None if request is first else first
            self.requests[request.id] = request
            self.scheduler.add(request)
        return choices

    def table(self, owner: str, salt: str) -> BlockTable:
        """An empty one for the target's KV, or for the draft model's."""
        draft = self.draft_model if owner == "draft" else None
        size = (draft.runner if draft is not None else self.target).kv.block_size
        chain = BlockHasher(root_key(self.names[owner], salt), size) if self.names else None
        return BlockTable(self.pool, size, owner, chain)

    def reset_cache(self) -> None:
        """Forget all prefixes; who runs goes on."""
        self.pool.reset_cache()
        self.stats.num_resets += 1

    def finish(self, id: int) -> None:
        """End a request, wherever it is; one that has ended already is left alone."""
        request = self.requests.pop(id, None)
        if request is None:
            return
        self.scheduler.remove(request)
        self.tell("forget", id)
        assert not self.is_idle or self.pool.is_whole, "blocks are held, and nobody is there"

    def give_up(self, scheduled: list[ScheduledRequest], reason: str) -> list[StepOutput]:
        """End the requests of a step that could not be run; what was written is nobody's."""
        failure = (
            "the device ran out of memory in a step of this request: try again later; its operator "
            "should lower memory.kv_fraction, memory.kv_bytes or scheduler.max_batched_tokens"
        )
        log.error("%d requests ended, as the device ran out of memory: %s", len(scheduled), reason)
        for work in scheduled:
            self.finish(work.request.id)
        return [
            StepOutput(
                w.request.id, [], "error", False, 0, 0, w.request.admitted_at, failure=failure
            )
            for w in scheduled
        ]

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
        """Assert that every block is free, cached, or held by exactly those whom it counts."""
        tables = [t.blocks for r in self.requests.values() for t in (r.table, r.draft_table)]
        self.pool.check(tables)

    def memory(self) -> dict[str, int]:
        """Blocks by holder; what several requests share counts once."""
        return self.pool.holders()


def draft_item(work: ScheduledRequest) -> DraftItem:
    r = work.request
    # A copy: what a drafter does to it changes no text.
    return DraftItem(
        r.id, r.token_ids[:], work.draft_limit, r.sampling.temperature, r.sampling.seed
    )


def sampler_for(sampled: list[ScheduledRequest]) -> Sampler:
    requests = [w.request for w in sampled]
    lengths = [len(r.token_ids) for r in requests]
    return Sampler([r.sampling for r in requests], lengths, [w.draft for w in sampled])


def rows_of(work: ScheduledRequest) -> RowGroup:
    """A work's rows for the target, causal ones or a root and its tree."""
    r, draft = work.request, work.draft
    tokens = r.token_ids[work.start : work.end]
    if not draft.tokens:
        return RowGroup(r.table, tokens, work.start, int(work.is_sampled))
    nodes = tokens.tolist() + draft.tokens
    if draft.is_chain:
        return RowGroup(r.table, nodes, work.start, len(nodes))
    return RowGroup(r.table, nodes, work.start, len(nodes), work.start, draft.masks())


def finish_reason(request: Request, tokens: Sequence[int]) -> str | None:
    """Whether a request ends with the last of these new tokens, and why."""
    if tokens[-1] in request.sampling.stop_ids:
        return "stop"
    return "length" if len(tokens) >= request.num_left else None
