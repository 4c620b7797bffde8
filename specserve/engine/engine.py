"""The step loop: plan, draft, build, launch, collect, walk, commit."""

import logging
import sys
from array import array
from collections.abc import Mapping, Sequence
from itertools import count
from time import perf_counter

import torch

from specserve.block_keys import Keys, KVFormat, prompt_keys
from specserve.engine.draft_model import DraftModel
from specserve.engine.runner import Answers, KVLost, Runner
from specserve.engine.step_input import RowGroup, StepInput, build_step_input, draws_of
from specserve.engine.verify import Node, Path, walk
from specserve.errors import RequestError
from specserve.exchange.caller import Caller
from specserve.exchange.sampling_params import Sampling
from specserve.exchange.step_output import Stats, StepOutput
from specserve.memory import BlockPool, BlockTable
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve_drafters import Draft, Drafter, DraftItem
from specserve_kernels import is_out_of_memory

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
        """`names` tells whose KV a block of each model's is; without it no prefix is kept."""
        self.target, self.scheduler = target, scheduler
        self.drafter, self.draft_model = drafter, draft_model
        self.formats = self.kv_formats(names or {})  # of the models whose prefixes are kept
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
        try:
            with self.target.ops.lock:  # engines on one device share what a forward uses
                self.draft([s for s in scheduled if s.draft_limit])
                scheduled.sort(key=lambda s: not s.draft.is_chain)  # rows with masks come last
                sampled = [s for s in scheduled if s.is_sampled]
                answers = self.verify(self.build(scheduled, sampled))
                paths = self.walk(sampled, answers)
        except Exception as e:
            return self.give_up(scheduled, e)
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
            self.draft_model.lend([s.request for s in scheduled])
        try:
            drafts = self.drafter.propose([draft_item(s) for s in scheduled])
            vocab_size = self.target.decoder.config.vocab_size
            for item, draft in zip(scheduled, drafts, strict=True):
                item.draft = Draft.cut(draft, item.draft_limit, vocab_size)
        except KVLost:
            raise
        except BaseException:  # anybody's code runs here, and no text may depend on what it does
            self.drafter_failed("propose")
        finally:
            if self.draft_model is not None:
                self.draft_model.take_back()
        self.stats.draft_seconds += perf_counter() - start

    def build(
        self, scheduled: list[ScheduledRequest], sampled: list[ScheduledRequest]
    ) -> StepInput:
        """The step as data; it takes the KV updates that are pending, and so has to be launched."""
        requests = [s.request for s in sampled]
        draws = draws_of(
            [r.sampling for r in requests],
            [len(r.token_ids) for r in requests],
            [s.draft for s in sampled],
        )
        groups = [rows_of(s) for s in scheduled]
        return build_step_input(groups, self.pool.updates, draws)

    def verify(self, step: StepInput) -> Answers:
        """Run the step; what the target says after the rows that are read."""
        start = perf_counter()
        answers = self.target.collect(step, self.target.launch(step))
        self.stats.num_rows += len(step.token_ids)
        self.stats.verify_seconds += perf_counter() - start
        return answers

    def walk(self, sampled: list[ScheduledRequest], answers: Answers) -> list[Path]:
        """Node by node down each tree."""
        drafts, roots, rows = [s.draft for s in sampled], [], 0
        for draft in drafts:
            roots.append(rows)
            rows += 1 + len(draft)

        def tokens_after(at: list[Node]) -> list[int]:
            return answers.after([roots[i] + node for i, node in at])

        def is_last(i: int, tokens: list[int]) -> bool:
            return finish_reason(sampled[i].request, tokens) is not None

        return walk(drafts, tokens_after, is_last)

    def commit(
        self,
        scheduled: list[ScheduledRequest],
        sampled: list[ScheduledRequest],
        paths: list[Path],
    ) -> list[StepOutput]:
        """Keep the accepted path's KV, give the rest back; the tokens join their request."""
        for item in scheduled:
            item.request.table.num_computed = item.end
        for item, path in zip(sampled, paths, strict=True):
            self.keep_kv(item, path)
        for item in scheduled:
            if not item.is_sampled:
                item.request.publish()
        return [self.append(item, path) for item, path in zip(sampled, paths, strict=True)]

    def keep_kv(self, item: ScheduledRequest, path: Path) -> None:
        """Leave the accepted nodes' KV to the next launch to move.

        Node k was written at slot root + k, the j-th accepted one belongs at root + j: never
        further down than any later source, so that moving in order needs no scratch.
        """
        table, root = item.request.table, item.end - 1
        moved = [(j, k) for j, k in enumerate(path.nodes, 1) if k != j]
        if moved:
            slots = [(table.slot(root + k), table.slot(root + j)) for j, k in moved]
            self.pool.updates.move("target", slots)
        table.num_computed += len(path.nodes)
        if self.draft_model is not None and any(item.draft.expanded):
            self.draft_model.keep(item.request, item.draft, path.nodes)

    def append(self, item: ScheduledRequest, path: Path) -> StepOutput:
        """The tokens of a path join their request, which may end with them."""
        request, draft = item.request, item.draft
        output = StepOutput(
            id=request.id,
            tokens=path.tokens,
            finish_reason=finish_reason(request, path.tokens),
            is_verified=item.is_root,
            num_drafted=len(draft),
            num_accepted=len(path.nodes),
            admitted_at=request.admitted_at,
            num_cached=request.num_cached,
            is_fallback=self.draft_model is not None and self.draft_model.is_catching_up(item),
        )
        if request.num_output == 0 and request.leader is None:
            self.stats.num_looked_up += request.num_prompt
            self.stats.num_cached += request.num_cached
        request.token_ids.extend(path.tokens)
        request.publish()
        self.scheduler.share_prompt(request)
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
        self,
        token_ids: Sequence[int],
        samplings: Sequence[Sampling],
        id: int | None = None,
        keys: Keys | None = None,
        caller: Caller | None = None,
    ) -> list[Request]:
        """Queue requests with one prompt, which is computed once; ids count on from `id`.

        `keys` are the prompt's, by `prompt_keys`, which else is called here: no step hashes it.
        Without a caller they are a call of their own. RequestError for a prompt that the model
        cannot read, whoever made its token ids.
        """
        prompt = self.checked(token_ids)
        ids = [next(self.ids) if id is None else id + i for i in range(len(samplings))]
        salt = samplings[0].cache_salt
        known = keys or self.prompt_keys(prompt, salt)
        choices = [
            Request(
                id=own,
                token_ids=prompt[:],
                sampling=sampling,
                table=self.table("target", salt, known),
                draft_table=self.table("draft", salt, known),
                caller=caller or Caller(ids[0]),
            )
            for own, sampling in zip(ids, samplings, strict=True)
        ]
        leader, *followers = choices
        leader.followers = followers
        for request in choices:
            request.leader = None if request is leader else leader
            self.requests[request.id] = request
            self.scheduler.add(request)
        return choices

    def checked(self, token_ids: Sequence[int]) -> "array[int]":
        """The prompt as requests hold it: an id beyond the embedding would end the process."""
        vocab_size = self.target.decoder.config.vocab_size
        try:
            prompt = array("i", token_ids)
        except OverflowError as e:
            raise RequestError(
                f"the prompt has an id outside of [0, {vocab_size})", "prompt"
            ) from e
        if not prompt:
            raise RequestError("the prompt has no tokens: give at least one", "prompt")
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"prompt token {token} is no id: ids lie in [0, {vocab_size})", "prompt"
                )
        return prompt

    def kv_formats(self, names: Mapping[str, str]) -> dict[str, KVFormat]:
        runners = {"target": self.target}
        if self.draft_model is not None:
            runners["draft"] = self.draft_model.runner
        return {m: KVFormat(names[m], r.kv.block_size) for m, r in runners.items() if m in names}

    def prompt_keys(self, token_ids: Sequence[int], salt: str) -> Keys:
        """The keys that `add_choices` takes; any thread may ask, while another one steps."""
        return prompt_keys(self.formats, token_ids, salt)

    def table(self, model: str, salt: str, keys: Keys | None = None) -> BlockTable:
        """An empty one for the KV of "target" or "draft"; `keys` are those of a prompt."""
        draft = self.draft_model if model == "draft" else None
        size = (draft.runner if draft is not None else self.target).kv.block_size
        hasher = self.formats[model].hasher(salt) if model in self.formats else None
        if hasher is not None and keys:
            hasher.keys = list(keys[model])
        return BlockTable(self.pool, size, model, hasher)

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

    def give_up(self, scheduled: list[ScheduledRequest], error: Exception) -> list[StepOutput]:
        """End the requests of a step that ran out of memory; anything else is ours, and raised.

        What the step wrote has no owner then. Where accepted KV was lost on its way, all requests
        end and nothing that was cached is found again.
        """
        requests = [s.request for s in scheduled]
        cause = error.__cause__ if isinstance(error, KVLost) else error
        if cause is None or not is_out_of_memory(cause):
            raise error
        if isinstance(error, KVLost):
            self.reset_cache()
            requests = list(self.requests.values())
        failure = (
            "the device ran out of memory in a step of this request: try again later; its operator "
            "should lower memory.kv_fraction, memory.kv_bytes or scheduler.max_batched_tokens"
        )
        log.error("%d requests ended, as the device ran out of memory: %s", len(requests), cause)
        for request in requests:
            self.finish(request.id)
        return [
            StepOutput(r.id, [], "error", False, 0, 0, r.admitted_at, failure=failure)
            for r in requests
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


def draft_item(item: ScheduledRequest) -> DraftItem:
    r = item.request
    # A copy: what a drafter does to it changes no text.
    return DraftItem(
        r.id, r.token_ids[:], item.draft_limit, r.sampling.temperature, r.sampling.seed
    )


def rows_of(item: ScheduledRequest) -> RowGroup:
    """A request's rows for the target, causal ones or a root and its tree."""
    r, draft = item.request, item.draft
    tokens = r.token_ids[item.start : item.end]
    if not draft.tokens:
        return RowGroup(r.table, tokens, item.start, int(item.is_sampled))
    nodes = tokens.tolist() + draft.tokens
    if draft.is_chain:
        return RowGroup(r.table, nodes, item.start, len(nodes))
    return RowGroup(r.table, nodes, item.start, len(nodes), item.start, draft.masks())


def finish_reason(request: Request, tokens: Sequence[int]) -> str | None:
    """Whether a request ends with the last of these new tokens, and why."""
    if tokens[-1] in request.sampling.stop_ids:
        return "stop"
    return "length" if len(tokens) >= request.num_left else None
