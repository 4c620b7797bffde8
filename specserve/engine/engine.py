"""The step loop: plan, draft, build, launch, collect, verify, commit."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from time import monotonic, perf_counter

import torch

from specserve.engine.adapters import Adapters
from specserve.engine.admission import Admission
from specserve.engine.beams import BeamRequests
from specserve.engine.grammars import Grammars
from specserve.engine.pooling import is_finite, pool
from specserve.engine.ranks import Followers
from specserve.engine.runner import KVLost, Runner, StepInput, TargetTokens, step_input_of
from specserve.engine.tuning import KeptCosts
from specserve.exchange.messages import (
    NOT_RESUMED,
    AdapterRef,
    Caller,
    ResumeState,
    SpeculationState,
    Stats,
    StepOutput,
)
from specserve.exchange.sampling_params import Sampling
from specserve.memory.blocks import BlockPool, Keys, KVTables
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve.scheduling.processors import LogitsProcessor
from specserve.scheduling.scheduler import StepBudget
from specserve.speculation.costs import PlainSteps
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.executor import ModelExecutor
from specserve.speculation.head_model import HeadModel
from specserve.speculation.speculator import Speculator
from specserve.speculation.verify import (
    NO_COUNTS,
    AcceptedPath,
    StepCounts,
    accepted_paths,
    cost_state,
    give_logprobs,
    pooled_output,
    prompt_output,
    token_output,
)
from specserve_kernels import NOT_FINITE, is_out_of_memory

log = logging.getLogger("specserve")

KEEP_EVERY = 60.0  # least seconds between two writes of step costs while the engine runs
LESS_MEMORY = "lower memory.kv_fraction, memory.kv_bytes or scheduler.max_batched_tokens"


class Engine:
    """Runs requests: `add` queues them, and `step` returns their new tokens, until `is_idle`.

    A step must not be interrupted: callers must delay signals during it, as `LLM.step` does.
    """

    def __init__(
        self,
        target: Runner,
        scheduler: Scheduler,
        tables: KVTables,
        *,
        draft_model: DraftModel | None = None,
        head: HeadModel | None = None,
        speculator: Speculator | None = None,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
        followers: Followers | None = None,
        stats: Stats | None = None,
        kept: Sequence[KeptCosts] = (),
        is_replaceable: bool = False,
    ) -> None:
        """Unused parts are None. `is_replaceable`: another process can continue the requests."""
        self.target, self.scheduler = target, scheduler
        self.draft_model, self.head, self.speculator = draft_model, head, speculator
        self.grammars, self.adapters, self.followers = grammars, adapters, followers
        self.vocab_size = target.decoder.config.vocab_size
        self.num_slots = 0 if adapters is None else adapters.num_slots
        self.admission = Admission(scheduler, self.vocab_size, tables, grammars, adapters)
        self.stats, self.plain_steps = stats or Stats(), PlainSteps()
        self.kept, self.kept_at = [*kept], float("-inf")
        self.is_replaceable = is_replaceable
        self.requests: dict[int, Request] = {}  # all that have not ended
        self.ids = count()

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the names of the draft sources in use."""
        return () if self.speculator is None else self.speculator.names

    @property
    def known_sources(self) -> tuple[str, ...]:
        """Return all known draft sources, in the order of the bits in `VerifiedTree.sources`."""
        return tuple(self.stats.sources)

    @property
    def draft_models(self) -> list[ModelExecutor]:
        """Return the models that draft: the draft model and the target's head, if they exist."""
        return [model for model in (self.draft_model, self.head) if model is not None]

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.pool

    @property
    def tables(self) -> KVTables:
        return self.admission.tables

    @property
    def is_loading(self) -> bool:
        """Return whether an adapter or KV blocks are being read or written for later requests."""
        return self.scheduler.is_busy or bool(self.adapters is not None and self.adapters.loading)

    @property
    def is_idle(self) -> bool:
        return not self.requests

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Run one forward of the target; return the outputs of all requests with new tokens."""
        start, drafting = perf_counter(), self.stats.draft_seconds
        refused = self.admit() if self.admission.has_waiting else []
        if self.head is not None and self.head.has_work:
            try:
                self.head.follow_timed(self.stats)
            except KVLost as e:
                return refused + self.give_up([], e)
        scheduled = self.scheduler.plan()
        try:
            if not scheduled:
                self.admission.wait(self.target)
                return refused
            with self.target.ops.lock:  # engines on one device share the buffers of a forward
                self.draft(scheduled)
                sampled = [s for s in scheduled if s.is_sampled]
                drafted_at = perf_counter()
                step = self.build(scheduled, sampled)
                answers = self.verify(step)
                paths = accepted_paths(sampled, answers)
                if self.speculator is not None:
                    self.speculator.collect_successors(sampled, paths, answers)
                if step.logprobs is not None:
                    drafted_at -= perf_counter()  # other requests' steps lack this time
                    give_logprobs(step.logprobs, self.target, scheduled, paths, answers)
                    drafted_at += perf_counter()
                if len(sampled) < len(scheduled) and any(s.is_pooled for s in scheduled):
                    pool(scheduled, self.target)
        except Exception as e:
            return refused + self.give_up(scheduled, e)
        outputs = self.commit(scheduled, sampled, paths)
        self.stats.num_steps += 1
        self.scheduler.timed(step.num_rows, perf_counter() - drafted_at)
        self.stats.step_seconds += (seconds := perf_counter() - start)
        drafting = self.stats.draft_seconds - drafting
        self.plain_steps.observe(self.scheduler.step, step.num_rows, seconds - drafting)
        return refused + outputs

    def admit(self) -> list[StepOutput]:
        """Queue requests whose grammar and adapter are ready; return outputs of failed ones."""
        refused: list[StepOutput] = []
        for choices, failure, blamed in self.admission.ready():
            for request in choices:
                if failure:
                    refused += self.fail_all(request, failure, blamed)
                else:
                    self.scheduler.add(request)
        return refused

    def draft(self, scheduled: list[ScheduledRequest]) -> None:
        """Set the drafts of the step's roots, and sort the requests: rows with masks come last."""
        if self.speculator is None:
            return
        start = perf_counter()
        self.speculator.draft(scheduled)
        seconds = perf_counter() - start
        self.stats.draft_seconds += seconds
        self.scheduler.drafted(seconds)
        scheduled.sort(key=lambda s: not s.draft.is_chain)

    def build(
        self, scheduled: list[ScheduledRequest], sampled: list[ScheduledRequest]
    ) -> StepInput:
        """Build the step's input. It takes the pending KV updates, so it must be launched."""
        updates, num_slots = self.pool.updates, self.num_slots
        return step_input_of(scheduled, sampled, updates, self.vocab_size, num_slots)

    def verify(self, step: StepInput) -> TargetTokens:
        """Run the step's forward; return the target's tokens after the rows that are read."""
        start = perf_counter()
        answers = self.target.collect(step, self.target.launch(step))
        self.stats.num_rows += step.num_rows
        seconds = perf_counter() - start
        self.stats.verify_seconds += seconds
        if self.speculator is not None:
            self.speculator.timed(seconds)
        return answers

    def commit(
        self,
        scheduled: list[ScheduledRequest],
        sampled: list[ScheduledRequest],
        paths: list[AcceptedPath],
    ) -> list[StepOutput]:
        """Keep the KV of accepted nodes, append the tokens to requests, release unused blocks."""
        for item in scheduled:
            item.count_rows()
        for item, path in zip(sampled, paths, strict=True):
            if path.nodes:
                item.request.table.keep_nodes(item.end - 1, path.nodes)
                if self.draft_model is not None and any(item.draft.expanded):
                    self.draft_model.keep(item.request, item.draft, path.nodes)
        if self.head is not None:
            self.head.see(scheduled, {s.request.id: p for s, p in zip(sampled, paths, strict=True)})
        for item in scheduled:
            item.request.num_scored += len(item.scores)
            if not item.is_sampled:
                item.request.publish()
        outputs = [prompt_output(s) for s in scheduled if s.scores and not s.is_sampled]
        learnt, speculator = [NO_COUNTS] * len(sampled), self.speculator
        learnt = learnt if speculator is None else speculator.learn(sampled, paths)
        each = [*zip(sampled, paths, learnt, strict=True)]
        outputs += [self.append(*one) for one in each if one[0].request.beams is None]
        # Beams come last: new ones copy states, which must not precede other requests' replays.
        for item, path, _ in each:
            outputs += [] if item.request.beams is None else self.search(item.request, path)
        return outputs + [self.end_pooled(item) for item in scheduled if item.pooled]

    def search(self, request: Request, path: AcceptedPath) -> list[StepOutput]:
        """Take a beam's step; return the outputs of all beams once their search is over."""
        if request.id not in self.requests:  # another beam has failed
            return []
        outputs: list[StepOutput] = request.beams.take(request, path, self.scheduler, self.stats)
        if path.failure == NOT_FINITE or request.beams.is_lost:
            return self.fail_all(request, *request.no_token(path.failure))
        if outputs:
            self.finish(request.id)
        return outputs

    def append(self, item: ScheduledRequest, path: AcceptedPath, counts: StepCounts) -> StepOutput:
        """Append a path's tokens to its request, and end the request if it is complete."""
        request, draft = item.request, item.draft
        processors = request.processors
        if processors is not None and processors.error is not None:
            log.error("Logits processor failed", exc_info=processors.error)
            return self.fail(request, f"logits_processors: {processors.failure}")
        if not path.tokens:
            return self.fail(request, *request.no_token(path.failure))
        is_fallback = self.draft_model is not None and self.draft_model.is_catching_up(item)
        reason, is_root = request.finish_reason(path.tokens), item.is_root
        if request.num_output == 0:
            request.begin_output(self.stats)
        request.extend(path.tokens)
        self.scheduler.publish(item, path.nodes)
        if request.followers:
            self.scheduler.share_prompt(request)
        self.stats.num_fallbacks += is_fallback
        self.stats.num_roots += is_root
        self.stats.num_drafted += len(draft.tokens)
        self.stats.num_accepted += len(path.nodes)
        if reason is not None:
            self.finish(request.id)
        else:
            request.table.trim()
            request.draft_table.trim()
        return token_output(item, path, counts, reason, is_root=is_root, is_fallback=is_fallback)

    def end_pooled(self, item: ScheduledRequest) -> StepOutput:
        """End a request whose prompt was pooled; it fails if its vector is not finite."""
        if not is_finite(item.pooled):
            return self.fail(item.request, *item.request.no_token(NOT_FINITE))
        item.request.begin_output(self.stats)
        self.finish(item.request.id)
        return pooled_output(item)

    def add(self, token_ids: Sequence[int], sampling: Sampling, id: int | None = None) -> Request:
        """Queue a request with checked parameters and an unused id; see `add_choices`."""
        return self.add_choices(token_ids, [sampling], id)[0]

    def add_choices(
        self,
        token_ids: Sequence[int],
        samplings: Sequence[Sampling],
        id: int | None = None,
        keys: Keys | None = None,
        caller: Caller | None = None,
        processors: Sequence[LogitsProcessor] = (),
        resume: ResumeState = NOT_RESUMED,
        adapter: AdapterRef | None = None,
    ) -> list[Request]:
        """Queue requests with one prompt, which is computed once; ids count up from `id`.

        `keys` are the prompt's block keys from `tables.prompt_keys`. Missing keys are computed
        here, so that no step hashes a prompt. Requests without a `caller` count as a separate call.
        `processors` change the logits; their requests get no draft tokens. `resume` continues a
        single request of another engine with the same text. Requests wait until their `adapter` is
        in a slot. RequestError for a prompt that is empty or has an id outside the vocabulary.
        """
        ids = [next(self.ids) if id is None else id + i for i in range(len(samplings))]
        choices = self.admission.requests(
            token_ids, samplings, ids, keys, caller, processors, resume, adapter
        )
        for request in choices:
            self.requests[request.id] = request
            if self.speculator is not None:
                self.speculator.begin(request)
        queued = choices
        if samplings[0].beam_search is not None:
            queued = BeamRequests(choices, self.vocab_size).requests[:1]  # others fork the first
        if not self.admission.holds(queued):
            for request in queued:
                self.scheduler.add(request)
        return choices

    def reset_cache(self) -> None:
        """Empty the prefix cache; running requests continue."""
        self.scheduler.reset_cache()
        self.stats.num_resets += 1

    def change_draft_model(
        self, draft_model: DraftModel | None, tables: KVTables, kept: Sequence[KeptCosts]
    ) -> None:
        """Use another draft model, or none, from the next step on. All draft KV is released and
        computed again for running requests. It gets no keys, so that no step hashes a prompt.
        """
        for request in (requests := [*self.requests.values()]):
            request.draft_table.clear()
        self.pool.drop("draft")
        self.pool.updates.moves.pop("draft", None)
        before = None if self.draft_model is None else self.draft_model.costs
        self.kept = [*(each for each in self.kept if each.costs is not before), *kept]
        self.draft_model = draft_model
        if draft_model is not None:
            self.target.arena.views["draft"] = draft_model.runner.kv
        self.admission.tables = tables
        for request in requests:
            request.draft_table = tables.table("draft", request.sampling.cache_salt)
            request.draft_table.hasher = None

    def change_speculator(self, speculator: Speculator | None, budget: StepBudget) -> None:
        """Use another drafter and its limits from the next step on, also for running requests."""
        self.speculator, self.scheduler.budget = speculator, budget
        if speculator is not None:
            for request in self.requests.values():
                speculator.begin(request)

    def finish(self, id: int, has_failed: bool = False) -> None:
        """End a request, unless it has ended. If it has not failed, its KV stays in the cache."""
        request = self.requests.pop(id, None)
        if request is None:
            return
        if not has_failed:
            request.publish_end()
        self.admission.drop(request)
        for model in self.draft_models:
            model.forget(request)
        self.scheduler.remove(request)
        if self.speculator is not None:
            self.speculator.forget(id)
        for other in () if request.beams is None else request.beams.requests:
            self.finish(other.id, has_failed=True)
        assert not self.is_idle or self.pool.is_whole, "no request is left, but blocks are in use"

    def give_up(self, scheduled: list[ScheduledRequest], error: Exception) -> list[StepOutput]:
        """End the requests of a step that ran out of memory. Any other error is raised again, and
        also this error if another process can continue the requests.

        If KV updates failed, blocks of any request may be damaged: all requests end. Blocks in
        memory are then found no more, nor after an error that is raised.
        """
        requests = [s.request for s in scheduled]
        if self.head is not None:
            self.head.drop()
        cause = error.__cause__ if isinstance(error, KVLost) else error
        is_memory = cause is not None and is_out_of_memory(cause)
        if self.is_replaceable or not is_memory:
            if is_memory:
                log.error("A step ran out of memory. If this happens often, %s", LESS_MEMORY)
            with suppress(Exception):  # the device may have failed
                self.scheduler.forget_kv()
            raise error
        if isinstance(error, KVLost):
            self.scheduler.forget_kv()
            requests = list(self.requests.values())
        failure = (
            "the device ran out of memory in a step of this request. Try again later; the server's "
            f"operator should {LESS_MEMORY}"
        )
        log.error("%d requests ended: the device ran out of memory: %s", len(requests), cause)
        return [output for request in requests for output in self.fail_all(request, failure)]

    def fail_all(self, request: Request, failure: str, blamed: str = "") -> list[StepOutput]:
        """End a request that cannot continue, with its other beams."""
        beams = [request] if request.beams is None else request.beams.requests
        return [self.fail(b, failure, blamed) for b in [b for b in beams if b.id in self.requests]]

    def fail(self, request: Request, failure: str, blamed: str = "") -> StepOutput:
        """End a request that cannot continue; `blamed` is the parameter that causes it, if any."""
        self.finish(request.id, has_failed=True)
        at = request.admitted_at
        return StepOutput(request.id, [], "error", False, 0, 0, at, failure=failure, blamed=blamed)

    def rest(self) -> None:
        """Run slow work while no request waits for a step."""
        if self.head is not None and self.head.has_work:
            with torch.inference_mode():
                self.head.follow_timed(self.stats)
        if monotonic() - self.kept_at > KEEP_EVERY:
            self.keep_costs()

    def keep_costs(self) -> None:
        """Store step costs for the next start."""
        self.kept_at = monotonic()
        for costs in self.kept:
            costs.write()

    def close(self) -> None:
        """Store step costs and queued KV blocks; end the engine's threads and its other ranks."""
        self.keep_costs()
        self.scheduler.close(self.target.run_updates)
        for part in (self.grammars, self.adapters, self.followers):
            if part is not None:
                part.close()

    def check(self) -> None:
        """Assert that every block is free, cached, or used by as many tables as its count."""
        each = self.requests.values()
        self.scheduler.check([t.held for r in each for t in (r.table, r.draft_table)])

    def speculation(self, tenant: int = 0) -> SpeculationState:
        """Return the state that decides about draft tokens, for a tenant's requests without a
        salt.
        """
        models = {"target": self.scheduler, "draft": self.draft_model, "head": self.head}
        state = SpeculationState(
            sources=self.sources,
            known_sources=self.known_sources,
            max_nodes=self.scheduler.budget.max_nodes,
            max_step_nodes=self.scheduler.budget.max_step_nodes,
            costs={k: cost_state(m.costs) for k, m in models.items() if m is not None},
            plain_steps=self.plain_steps.state,
            tenant=tenant,
        )
        return state if self.speculator is None else self.speculator.tell(state)
