"""The step loop: plan, draft, build, launch, collect, walk, commit."""

import logging
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, count
from time import perf_counter

import torch
from msgspec.structs import replace

from specserve.engine.adapters import Adapters
from specserve.engine.grammar_state import GrammarState
from specserve.engine.grammars import Grammars
from specserve.engine.kept_costs import KeptCosts
from specserve.engine.logprobs import asked_logprobs, tell_drawn, tell_prompts
from specserve.engine.processors import LogitsProcessor, LogitsProcessors
from specserve.engine.runner import Answers, KVLost, Runner
from specserve.engine.step_input import (
    AskedLogprobs,
    Processor,
    RowGroup,
    StepInput,
    build_step_input,
    draws_of,
)
from specserve.engine.text_state import TextState
from specserve.errors import WEIGHTS, RequestError
from specserve.exchange.messages import (
    NOT_BEGUN,
    AdapterRef,
    Begun,
    Caller,
    SourceStats,
    SpeculationState,
    Stats,
    StepOutput,
)
from specserve.exchange.sampling_params import Sampling, SpeculationParams
from specserve.memory.block_keys import Keys, KVFormat, prompt_keys
from specserve.memory.pool import BlockPool, BlockTable
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve.scheduling.cost import PlainSteps
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.executor import ModelExecutor
from specserve.speculation.guesses import Guesses
from specserve.speculation.head_model import HeadModel
from specserve.speculation.ledger import Told
from specserve.speculation.source import UserCode
from specserve.speculation.state import cost_state
from specserve.speculation.verify import Node, Path, walk
from specserve_drafters.auto import EAGLE
from specserve_kernels import NOT_FINITE, is_out_of_memory

log = logging.getLogger("specserve")

NOTHING_LEFT = (
    "the grammar leaves no token that could come next: ask for less, or leave out other parameters "
    "that rule tokens out"
)
ALL_RULED_OUT = (
    "no token is left: allowed_token_ids, bad_words, logit_bias, min_tokens and logits processors "
    "rule out all of them together. Relax one of these"
)
LOGITS_NOT_FINITE = (
    "the model's logits are not finite: its checkpoint or its LoRA adapter is damaged, or its "
    "numbers overflow. Replace it, or set model.dtype to fp32"
)
MOMENT = 2e-3  # seconds that a step waits for a grammar or adapter where nothing else is due
LESS_MEMORY = "lower memory.kv_fraction, memory.kv_bytes or scheduler.max_batched_tokens"
NO_GUESSES = SpeculationParams(enabled=False)


class Engine:
    """`add` queues requests, and `step` returns their new tokens, until `is_idle`.

    A step must not be interrupted: the caller holds back signals meanwhile, as `LLM.step` does.
    """

    def __init__(
        self,
        target: Runner,
        scheduler: Scheduler,
        draft_model: DraftModel | None = None,
        names: Mapping[str, str] | None = None,
        is_per_tenant: bool = False,
    ) -> None:
        """`names` identifies each model's KV in block keys; without it there is no prefix cache.
        `is_per_tenant`: no tenant finds KV of another one's requests.
        """
        self.is_per_tenant = is_per_tenant
        self.target, self.scheduler = target, scheduler
        self.draft_model = draft_model
        self.head: HeadModel | None = None  # set where the target has one
        self.guesses: Guesses | None = None  # set where there is a drafter
        self.formats = self.kv_formats(names or {})  # of the models with a prefix cache
        self.requests: dict[int, Request] = {}  # all that have not ended
        self.changing: set[int] = set()  # those whose text changes their logits
        self.states: dict[int, TextState] = {}  # of those, from the first token on
        self.processors: dict[int, LogitsProcessors] = {}  # callers' own, by request
        self.grammars: Grammars | None = None  # set where requests may have one
        self.adapters: Adapters | None = None  # likewise
        self.telling: set[int] = set()  # of those that asked for logprobs
        self.stats = Stats()
        self.plain_steps = PlainSteps()
        self.kept: list[KeptCosts] = []  # of the models
        self.is_replaceable = False  # another process can go on with the requests
        self.ids = count()

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of those that may guess."""
        return () if self.guesses is None else self.guesses.names

    @property
    def known_sources(self) -> tuple[str, ...]:
        """All that could ever guess, in the order of the bits in `VerifiedTree.sources`."""
        return tuple(self.stats.sources)

    @property
    def draft_models(self) -> list[ModelExecutor]:
        """What runs guesses: the draft model and the target's head, where there are such."""
        return [model for model in (self.draft_model, self.head) if model is not None]

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.pool

    @property
    def is_compiling(self) -> bool:
        """Whether requests wait for their grammar."""
        return self.grammars is not None and len(self.grammars.waiting) > 0

    @property
    def is_loading(self) -> bool:
        """Whether an adapter is read that requests will name."""
        return self.adapters is not None and len(self.adapters.loading) > 0

    @property
    def is_idle(self) -> bool:
        return not self.requests

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Run one forward of the target; the outputs of all requests that have new tokens."""
        start, drafting = perf_counter(), self.stats.draft_seconds
        refused = self.admit_compiled() if self.is_compiling else []
        if self.adapters is not None and self.adapters.waiting:
            refused += self.admit_adapted(self.adapters)
        if self.head is not None and self.head.has_work:
            try:
                self.run_head(self.head)
            except KVLost as e:
                return refused + self.give_up([], e)
        scheduled = self.scheduler.plan()
        if not scheduled:
            self.wait_a_moment()
            return refused
        try:
            with self.target.ops.lock:  # engines on one device share the buffers of a forward
                self.draft(scheduled)
                scheduled.sort(key=lambda s: not s.draft.is_chain)  # rows with masks come last
                sampled = [s for s in scheduled if s.is_sampled]
                step = self.build(scheduled, sampled)
                answers = self.verify(step)
                paths = self.walk(sampled, answers)
                if self.guesses is not None:
                    self.guesses.harvest(sampled, paths, answers)
                if step.logprobs is not None:
                    self.tell(step.logprobs, scheduled, paths, answers)
        except Exception as e:
            return refused + self.give_up(scheduled, e)
        outputs = self.commit(scheduled, sampled, paths)
        self.stats.num_steps += 1
        seconds = perf_counter() - start
        self.stats.step_seconds += seconds
        drafting = self.stats.draft_seconds - drafting
        self.plain_steps.observe(self.scheduler.step, len(step.token_ids), seconds - drafting)
        return refused + outputs

    def admit_compiled(self) -> list[StepOutput]:
        """Queue the requests whose grammar is ready by now; error outputs where it is none."""
        refused: list[StepOutput] = []
        for choices, state in () if self.grammars is None else self.grammars.ready():
            if isinstance(state, str):
                refused += [self.fail(request, f"the grammar: {state}") for request in choices]
                continue
            first = self.text_state(choices[0], state)
            for request in choices:  # each has its own, as any of them may end before the others
                self.states[request.id] = first if request is choices[0] else first.fork()
                self.obey(request)
            self.queue(choices)
        return refused

    def queue(self, choices: list[Request]) -> None:
        """Queue a prompt's choices, at once or when their adapter is there."""
        if choices[0].adapter is not None:
            assert self.adapters is not None, "this engine takes no adapters"
            self.adapters.ask(choices)
            return
        for request in choices:
            self.scheduler.add(request)

    def admit_adapted(self, adapters: Adapters) -> list[StepOutput]:
        """Queue the requests whose adapter is there by now; error outputs where it cannot be."""
        refused: list[StepOutput] = []
        for choices, failure in adapters.ready():
            if failure:
                refused += [self.fail(request, failure, "model") for request in choices]
                continue
            for request in choices:
                self.scheduler.add(request)
        return refused

    def wait_a_moment(self) -> None:
        """For what requests wait for before they can be planned."""
        if self.grammars is not None and self.is_compiling:
            self.grammars.wait(MOMENT)
        elif self.adapters is not None and (self.adapters.waiting or self.adapters.loading):
            self.adapters.wait(MOMENT)

    def run_head(self, head: HeadModel) -> None:
        """Have a head follow the step before: its tokens have been told, and no block was given to
        another request since. It may raise KVLost; any other error costs guesses only.
        """
        start = perf_counter()
        try:
            with self.target.ops.lock:
                head.follow()
        except KVLost:
            raise
        except Exception:  # as there is too little memory
            head.drop()
            self.stats.sources.setdefault(EAGLE, SourceStats())
            UserCode(self.stats).failed(EAGLE)
        seconds = perf_counter() - start
        self.stats.draft_seconds += seconds
        if (sums := self.stats.sources.get(EAGLE)) is not None:
            sums.seconds += seconds
            sums.saved_seconds -= seconds

    def obey(self, request: Request) -> None:
        """Have guesses obey a request's grammar."""
        grammar = self.states[request.id].grammar
        if grammar is not None and self.guesses is not None:
            self.guesses.follow(request, grammar)
        if grammar is not None:
            for model in self.draft_models:
                model.rules[request.id] = grammar

    def draft(self, scheduled: list[ScheduledRequest]) -> None:
        """Give the step's roots their drafts."""
        if self.guesses is None:
            return
        start = perf_counter()
        self.guesses.draft(scheduled)
        seconds = perf_counter() - start
        self.stats.draft_seconds += seconds
        self.scheduler.drafted(seconds)

    def build(
        self, scheduled: list[ScheduledRequest], sampled: list[ScheduledRequest]
    ) -> StepInput:
        """The step as data. It includes the pending KV updates, so it has to be launched."""
        requests = [s.request for s in sampled]
        draws = draws_of(
            [r.sampling for r in requests],
            [len(r.token_ids) for r in requests],
            [s.draft for s in sampled],
            [self.state_of(r) for r in requests] if self.changing else (),
        )
        if self.processors:
            draws = draws._replace(processors=self.processors_of(sampled))
        groups, size = [rows_of(s) for s in scheduled], self.target.decoder.config.vocab_size
        logprobs = asked_logprobs(scheduled, sampled, size) if self.telling else None
        num_slots = 0 if self.adapters is None else self.adapters.num_slots
        return build_step_input(groups, self.pool.updates, draws, logprobs, num_slots)

    def state_of(self, request: Request) -> TextState | None:
        """What a request's text makes of its logits. It is made once the prompt is computed, as
        many prompts may come between two steps.
        """
        if request.id in self.changing and request.id not in self.states:
            self.states[request.id] = self.text_state(request)
        return self.states.get(request.id)

    def text_state(self, request: Request, grammar: GrammarState | None = None) -> TextState:
        size = self.target.decoder.config.vocab_size
        prompt, output = request.token_ids[: request.num_prompt], request.output
        state = TextState(request.sampling, prompt, size, grammar)
        if output:  # of a request that has begun elsewhere
            state.extend(output)
        return state

    def processors_of(self, sampled: list[ScheduledRequest]) -> dict[int, Processor]:
        """By row that is read: none of these requests has guesses."""
        roots = accumulate([1 + len(s.draft) for s in sampled], initial=0)
        found = dict[int, Processor]()
        for item, root in zip(sampled, roots, strict=False):
            request, processors = item.request, self.processors.get(item.request.id)
            if processors is not None:
                found[root] = partial(processors, request.output)
        return found

    def verify(self, step: StepInput) -> Answers:
        """Run the step's forward; the target's tokens after the rows that are read."""
        start = perf_counter()
        answers = self.target.collect(step, self.target.launch(step))
        self.stats.num_rows += len(step.token_ids)
        seconds = perf_counter() - start
        self.stats.verify_seconds += seconds
        self.scheduler.timed(len(step.token_ids), seconds)
        if self.guesses is not None:
            self.guesses.timed(seconds)
        return answers

    def tell(
        self,
        asked: AskedLogprobs,
        scheduled: list[ScheduledRequest],
        paths: list[Path],
        answers: Answers,
    ) -> None:
        """Tell requests what the target says of their tokens."""
        tell_drawn([s for s in scheduled if s.is_sampled], paths, answers, asked.k)
        if len(asked.rows):
            tell_prompts(scheduled, self.target.score(asked))

    def walk(self, sampled: list[ScheduledRequest], answers: Answers) -> list[Path]:
        """The new tokens of each sampled request, and the accepted nodes of its tree."""
        drafts = [s.draft for s in sampled]
        roots = [0, *accumulate([1 + len(draft.tokens) for draft in drafts])]

        def tokens_after(at: list[Node]) -> list[int]:
            return answers.after([roots[i] + node for i, node in at])

        def is_last(i: int, tokens: list[int]) -> bool:
            return finish_reason(sampled[i].request, tokens) is not None

        paths = walk(drafts, tokens_after, is_last)
        for path in paths:
            path.cut_failure()
        return paths

    def commit(
        self,
        scheduled: list[ScheduledRequest],
        sampled: list[ScheduledRequest],
        paths: list[Path],
    ) -> list[StepOutput]:
        """Keep the KV of accepted nodes, append the tokens to requests, release unused blocks."""
        for item in scheduled:
            item.request.table.num_computed = item.end
        for item, path in zip(sampled, paths, strict=True):
            if path.nodes:
                self.keep_kv(item, path)
        if self.head is not None:
            by_request = {s.request.id: path for s, path in zip(sampled, paths, strict=True)}
            self.head.see(scheduled, by_request)
        for item in scheduled:
            if not item.is_sampled:
                item.request.publish()
        for item in scheduled:
            item.request.num_scored += len(item.scores)
        scored = [part_of_prompt(item) for item in scheduled if item.scores and not item.is_sampled]
        return scored + [self.append(item, path) for item, path in zip(sampled, paths, strict=True)]

    def keep_kv(self, item: ScheduledRequest, path: Path) -> None:
        """Note the moves of accepted nodes' KV, which the next launch does.

        Node k was written at slot root + k, and the j-th accepted one belongs at root + j, with
        j <= k: no move overwrites the source of a later one, so in order they need no scratch.
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
        """Append a path's tokens to its request, and end the request if it is complete."""
        request, draft = item.request, item.draft
        processors, state = self.processors.get(request.id), self.states.get(request.id)
        if processors is not None and processors.error is not None:
            log.error("a logits processor failed", exc_info=processors.error)
            return self.fail(request, f"logits_processors: {processors.failure}")
        if not path.tokens:
            return self.fail(request, *no_token(path.failure, state, processors is not None))
        is_fallback = self.draft_model is not None and self.draft_model.is_catching_up(item)
        reason, is_root = finish_reason(request, path.tokens), item.is_root
        if request.num_output == 0:
            request.first_token_at = perf_counter()
        if request.num_output == 0 and request.leader is None:
            self.stats.num_looked_up += request.num_prompt
            self.stats.num_cached += request.num_cached
        request.token_ids.extend(path.tokens)
        if state is not None:
            for follower in request.followers:
                if follower.id not in self.states:
                    self.states[follower.id] = state.fork()
            state.extend(path.tokens)
        request.publish()
        if request.followers:
            self.scheduler.share_prompt(request)
        self.stats.num_fallbacks += is_fallback
        self.stats.num_roots += is_root
        self.stats.num_drafted += len(draft.tokens)
        self.stats.num_accepted += len(path.nodes)
        told = Told() if self.guesses is None else self.guesses.learn(item, path.tokens, path.nodes)
        if reason is not None:
            self.finish(request.id)
        else:
            request.table.trim()
            request.draft_table.trim()
        return StepOutput(
            id=request.id,
            tokens=path.tokens,
            finish_reason=reason,
            is_verified=is_root,
            num_drafted=len(draft.tokens),
            num_accepted=len(path.nodes),
            admitted_at=request.admitted_at,
            num_cached=request.num_cached,
            is_fallback=is_fallback,
            sources=told.sources,
            tree=told.tree,
            logprobs=path.logprobs,
            prompt_logprobs=item.scores,
        )

    def add(self, token_ids: Sequence[int], sampling: Sampling, id: int | None = None) -> Request:
        """Queue a request with checked parameters and an unused id; as `add_choices` for one."""
        return self.add_choices(token_ids, [sampling], id)[0]

    def add_choices(
        self,
        token_ids: Sequence[int],
        samplings: Sequence[Sampling],
        id: int | None = None,
        keys: Keys | None = None,
        caller: Caller | None = None,
        processors: Sequence[LogitsProcessor] = (),
        begun: Begun = NOT_BEGUN,
        adapter: AdapterRef | None = None,
    ) -> list[Request]:
        """Queue requests with one prompt, which is computed once; ids count up from `id`.

        `keys` are the prompt's block keys from `prompt_keys`. They are computed here if missing, so
        that no step hashes a prompt. Without a `caller` the requests count as a call of their own.
        `processors` change the logits: their requests have no guesses. A single request that has
        `begun` elsewhere goes on here, with the text that it would have had there. An `adapter` is
        waited for. RequestError for a prompt that is empty or has an id outside of the vocabulary.
        """
        assert not begun.output or len(samplings) == 1, "each choice has an output of its own"
        prompt = self.checked(token_ids)
        ids = [next(self.ids) if id is None else id + i for i in range(len(samplings))]
        salt, digest = samplings[0].cache_salt, "" if adapter is None else adapter.digest
        tenant = 0 if caller is None else caller.tenant
        known = keys or self.prompt_keys(prompt, salt, digest, tenant)
        if processors:
            samplings = [replace(s, speculation=NO_GUESSES) for s in samplings]
            self.processors |= {id: LogitsProcessors(processors, prompt) for id in ids}
        now, budget = perf_counter(), self.scheduler.budget
        choices = [
            Request(
                id=own,
                token_ids=prompt + self.checked(begun.output) if begun.output else prompt[:],
                num_prompt=len(prompt),
                num_scored=begun.num_scored,
                first_token_at=now if begun.output else 0.0,
                sampling=sampling,
                table=self.table("target", salt, known, digest, tenant),
                draft_table=self.table("draft", salt, known, tenant=tenant),
                caller=caller or Caller(ids[0]),
                arrived_at=now,
                ttft=seconds(sampling.slo.ttft_ms, budget.ttft),
                tpot=seconds(sampling.slo.tpot_ms, budget.tpot),
                adapter=adapter,
            )
            for own, sampling in zip(ids, samplings, strict=True)
        ]
        leader, *followers = choices
        leader.followers = followers
        for request in choices:
            request.leader = None if request is leader else leader
            self.requests[request.id] = request
            asked = request.sampling
            if asked.changes_logits:
                self.changing.add(request.id)
            if self.guesses is not None:
                self.guesses.begin(request)
            if asked.logprobs is not None or asked.prompt_logprobs is not None:
                self.telling.add(request.id)
        if leader.sampling.grammar:
            assert self.grammars is not None, "this engine takes no grammars"
            self.grammars.ask([*choices])
        else:
            self.queue([*choices])
        return choices

    def checked(self, token_ids: Sequence[int]) -> "array[int]":
        """The prompt as an array; RequestError for ids whose embedding look-up would crash."""
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
        return {
            model: KVFormat(names[model], runner.kv.block_size, self.is_per_tenant)
            for model, runner in runners.items()
            if model in names
        }

    def prompt_keys(
        self, token_ids: Sequence[int], salt: str, adapter: str = "", tenant: int = 0
    ) -> Keys:
        """A prompt's block keys for `add_choices`; safe in any thread, also during a step."""
        return prompt_keys(self.formats, token_ids, salt, adapter, tenant)

    def table(
        self,
        model: str,
        salt: str,
        keys: Keys | None = None,
        adapter: str = "",
        tenant: int = 0,
    ) -> BlockTable:
        """An empty block table for the KV of "target" or "draft"; `keys` are its prompt's, and
        `adapter` is the digest of what changes the model.
        """
        draft = self.draft_model if model == "draft" else None
        size = (draft.runner if draft is not None else self.target).kv.block_size
        of = self.formats.get(model)
        hasher = None if of is None else of.hasher(salt, adapter, tenant)
        if of is not None and hasher is not None and keys:
            hasher.keys = list(keys.get(of.name, ()))
        return BlockTable(self.pool, size, model, hasher)

    def reset_cache(self) -> None:
        """Empty the prefix cache; running requests go on."""
        self.pool.reset_cache()
        self.stats.num_resets += 1

    def reset_learned(self) -> None:
        """Forget what steps have shown of costs and guesses; running requests go on."""
        self.scheduler.costs.reset()
        self.plain_steps.reset()
        for model in self.draft_models:
            model.costs.reset()
            model.first_costs.reset()
        if self.guesses is not None:
            self.guesses.reset()

    def change_draft_model(self, draft_model: DraftModel | None, names: Mapping[str, str]) -> None:
        """Have another draft model, or none, from the next step on. All draft KV is given back, and
        that of requests which run is computed again; it gets no keys, as no step hashes a prompt.
        """
        requests = [*self.requests.values()]
        for request in requests:
            request.draft_table.clear()
        self.pool.drop("draft")
        self.pool.updates.moves.pop("draft", None)
        self.draft_model = draft_model
        if draft_model is not None:
            self.target.arena.views["draft"] = draft_model.runner.kv
            states = {id: state.grammar for id, state in self.states.items()}
            draft_model.rules = {id: rules for id, rules in states.items() if rules is not None}
        self.formats = self.kv_formats(names)
        for request in requests:
            request.draft_table = self.table("draft", request.sampling.cache_salt)
            request.draft_table.hasher = None

    def change_guesses(self, guesses: Guesses | None) -> None:
        """Have others guess from the next step on, for the requests that run as well."""
        self.guesses = guesses
        if guesses is None:
            return
        for request in self.requests.values():
            guesses.begin(request)
            state = self.states.get(request.id)
            if state is not None and state.grammar is not None:
                guesses.follow(request, state.grammar)

    def finish(self, id: int) -> None:
        """End a running or waiting request and release its blocks; no effect if it has ended."""
        request = self.requests.pop(id, None)
        if request is None:
            return
        self.changing.discard(id)
        self.states.pop(id, None)
        self.processors.pop(id, None)
        self.telling.discard(id)
        if self.grammars is not None and self.is_compiling:
            self.grammars.drop(request)
        if self.adapters is not None:
            self.adapters.release(request)
        for model in self.draft_models:
            model.forget(request)
        self.scheduler.remove(request)
        if self.guesses is not None:
            self.guesses.forget(id)
        assert not self.is_idle or self.pool.is_whole, "no request is left, but blocks are held"

    def give_up(self, scheduled: list[ScheduledRequest], error: Exception) -> list[StepOutput]:
        """End the requests of a step that ran out of memory. Any other error is raised again, and
        this one, too, where another process can go on with them.

        Their blocks are released, with whatever the step wrote. Where KV updates failed, blocks of
        any request may be damaged: all requests end, and the prefix cache is emptied.
        """
        requests = [s.request for s in scheduled]
        if self.head is not None:
            self.head.drop()
        cause = error.__cause__ if isinstance(error, KVLost) else error
        if cause is None or not is_out_of_memory(cause):
            raise error
        if self.is_replaceable:
            log.error("a step ran out of memory; if that happens often: %s", LESS_MEMORY)
            raise error
        if isinstance(error, KVLost):
            self.reset_cache()
            requests = list(self.requests.values())
        failure = (
            "the device ran out of memory in a step of this request: try again later; its operator "
            f"should {LESS_MEMORY}"
        )
        log.error("%d requests ended, as the device ran out of memory: %s", len(requests), cause)
        return [self.fail(request, failure) for request in requests]

    def fail(self, request: Request, failure: str, blamed: str = "") -> StepOutput:
        """End a request that cannot continue, for a parameter that is to blame or for none."""
        self.finish(request.id)
        at = request.admitted_at
        return StepOutput(request.id, [], "error", False, 0, 0, at, failure=failure, blamed=blamed)

    def rest(self) -> None:
        """Do what takes a moment, as no request waits for a step."""
        if self.head is not None and self.head.has_work:
            with torch.inference_mode():
                self.run_head(self.head)
        for costs in self.kept:
            costs.keep()

    def close(self) -> None:
        """Keep what steps have cost, for the next start, and compile no more grammars."""
        for costs in self.kept:
            costs.write()
        if self.grammars is not None:
            self.grammars.close()
        if self.adapters is not None:
            self.adapters.close()

    def check(self) -> None:
        """Assert that every block is free, cached, or held by as many tables as it counts."""
        tables = [t.blocks for r in self.requests.values() for t in (r.table, r.draft_table)]
        self.pool.check(tables)

    def speculation(self, tenant: int = 0) -> SpeculationState:
        """What guesses for a tenant's requests without a salt are chosen by at present."""
        budget, costs = self.scheduler.budget, {"target": self.scheduler.costs}
        if self.draft_model is not None:
            costs["draft"] = self.draft_model.costs
        if self.head is not None:
            costs["head"] = self.head.costs
        state = SpeculationState(
            sources=self.sources,
            known_sources=self.known_sources,
            max_nodes=budget.max_nodes,
            max_step_nodes=budget.max_step_nodes,
            costs={model: cost_state(of_model) for model, of_model in costs.items()},
            plain_steps=self.plain_steps.state,
            tenant=tenant,
        )
        return state if self.guesses is None else self.guesses.tell(state)

    def memory(self) -> dict[str, int]:
        """Number of blocks by holder; a shared block counts once."""
        return self.pool.holders()


def no_token(failure: int, state: TextState | None, has_processors: bool) -> tuple[str, str]:
    """Why a row gave no token, and the parameter that is to blame."""
    if failure == NOT_FINITE or not (state or has_processors):
        log.error(LOGITS_NOT_FINITE)
        return LOGITS_NOT_FINITE, WEIGHTS
    if state is not None and state.grammar is not None:
        return f"{NOTHING_LEFT}{state.grammar.why}", "structured_outputs"
    return ALL_RULED_OUT, "logits_processors" if has_processors else "allowed_token_ids"


def rows_of(item: ScheduledRequest) -> RowGroup:
    """A request's rows for the target, causal ones or a root and its tree."""
    r, draft = item.request, item.draft
    tokens = r.token_ids[item.start : item.end]
    if not draft.tokens:
        return RowGroup(r.table, tokens, item.start, int(item.is_sampled), slot=r.slot)
    nodes = tokens.tolist() + draft.tokens
    if draft.is_chain:
        return RowGroup(r.table, nodes, item.start, len(nodes), slot=r.slot)
    return RowGroup(r.table, nodes, item.start, len(nodes), item.start, draft.masks(), r.slot)


def part_of_prompt(item: ScheduledRequest) -> StepOutput:
    """What a step tells of a prompt that is not computed to its end."""
    r = item.request
    return StepOutput(r.id, [], None, False, 0, 0, r.admitted_at, prompt_logprobs=item.scores)


def seconds(asked_ms: float | None, usual: float | None) -> float | None:
    """A request's target in seconds; the server's where it gives none."""
    return usual if asked_ms is None else asked_ms / 1000


def finish_reason(request: Request, tokens: Sequence[int]) -> str | None:
    """Why a request ends with the last of these new tokens; None if it goes on."""
    if tokens[-1] in request.sampling.stop_ids:
        return "stop"
    return "length" if len(tokens) >= request.num_left else None
