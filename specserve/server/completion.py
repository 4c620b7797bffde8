"""Completions: admits requests, collects the outputs of their choices, and ends them."""

import asyncio
import hashlib
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from specserve.api.input_processor import InputProcessor
from specserve.api.lora import AdapterNames, NamedAdapter
from specserve.api.outputs import Generation
from specserve.api.poolers import NO_POOLERS, Poolers
from specserve.config import Config
from specserve.errors import Overloaded, RequestError, Sleeping, SpecserveError, of_failure
from specserve.exchange.client import EngineClient
from specserve.exchange.fair_queue import FairThreads, current_tenant, has_room
from specserve.exchange.messages import (
    AdapterRef,
    Caller,
    DraftHeadCard,
    Ready,
    StepDetails,
    StepOutput,
)
from specserve.exchange.sampling_params import Sampling, SamplingParams, choices_of
from specserve.exchange.sleep_control import SleepControl
from specserve.exchange.speculation_control import (
    SpeculationControl,
)
from specserve.logs import request_id
from specserve.memory.blocks import Keys
from specserve.models.folder import Scaled
from specserve.models.selection import (
    resolve_drafters,
    resolve_model,
    scaled_models,
    served_name,
)
from specserve.models.source import open_source
from specserve.models.weight_forms import WeightForms
from specserve.server.body import BodyReader
from specserve.server.history import History
from specserve.server.limits import Account, Deadline
from specserve.server.metrics import Metrics
from specserve.server.prompt import PromptProcessor
from specserve.server.refusal import DeadlineExceeded, StatusError, cut
from specserve.text.answer.formats import AnswerReader, Formats
from specserve.text.chat_template import ChatTemplate
from specserve.text.tokenizer import Tokenizer
from specserve.version import VERSION

TENANT, ASKED = "specserve.tenant", "specserve.asked"  # keys of the ASGI scope
ACCOUNT = "specserve.account"
ENDS = "specserve.ends"  # functions to call once the response has ended, the last one first
HUNG_SECONDS = 300  # seconds without a due report after which an engine process counts as hung


class Arrival(NamedTuple):
    at: float  # seconds, perf_counter
    tenant: int = 0  # index of the API key in the key file; 0 without keys
    asked: "list[LiveCompletion] | None" = None  # receives its completions, for the log
    deadline: Deadline | None = None
    account: Account | None = None  # of its API key, if keys have limits
    adapter: NamedAdapter | None = None  # chosen by the request
    session: str = ""  # its prompt_cache_key


def tenant_of(scope: Scope) -> int:
    tenant: int = scope.get(TENANT, 0)
    return tenant


def arrival(request: Request) -> Arrival:
    """Return the arrival of a request that was just received."""
    scope = request.scope
    known = tenant_of(scope), scope.get(ASKED)
    return Arrival(perf_counter(), *known, account=scope.get(ACCOUNT))


@contextmanager
def at_end(scope: Scope, end: Callable[[], None]) -> Iterator[None]:
    """Call `end` once the response has ended.

    This is after the block or, for an event stream that a `Connection` took over, later.
    """
    ends: list[Callable[[], None]] | None = scope.get(ENDS)
    if ends is not None:
        ends.append(end)
        yield
        return
    try:
        yield
    finally:
        end()


class ChoiceDelta(NamedTuple):
    """Tokens and text that a step, a part of it, or several steps added to one choice."""

    choice: int
    text: str
    begin: int  # number of earlier tokens
    token_ids: list[int]
    is_last: bool
    details: Sequence[StepDetails] = ()  # if the request asked for them
    ends: Sequence[int] = ()  # ends of its tokens in the text


class LiveCompletion:
    """The choices of one or several prompts, in the order of the prompts.

    Always call `release`, which frees their blocks.
    """

    def __init__(
        self, engine: EngineClient, live: "set[LiveCompletion]", metrics: Metrics, arrived: Arrival
    ) -> None:
        self.engine, self.live, self.metrics, self.arrived = engine, live, metrics, arrived
        origin = arrived.tenant, request_id.get(), arrived.session
        self.caller = Caller(engine.next_id, *origin)
        self.generations: list[Generation] = []
        self.firsts: list[Generation] = []  # the first choice of each prompt
        self.num_tokens = 0  # of all choices
        self.num_ended = 0  # choices
        self.deltas: list[ChoiceDelta] = []  # not yet taken
        self.error: SpecserveError | None = None
        self.has_left = False  # the client has disconnected
        self.response_id = ""  # in the response; set by its formatter
        # Called after each turn of the event loop that brought output.
        self.on_output: Callable[[], None] | None = None
        self.is_due = False  # on_output will be called
        self.deadline = arrived.deadline and arrived.deadline.call(self.end)
        live.add(self)  # until it is released
        if arrived.asked is not None:
            arrived.asked.append(self)

    def add_prompt(
        self,
        prompt: Sequence[int],
        keys: Keys,
        samplings: Sequence[Sampling],
        tokenizer: Tokenizer,
        has_starts: bool = False,
    ) -> None:
        """Queue the choices of one more prompt. `keys` are the keys of its blocks.

        If `has_starts` is set, generations record the starts of tokens in the text.
        """
        begin, prompt = len(self.generations), array("i", prompt)  # far smaller than a list
        listeners = [SequenceListener(self, begin + i) for i in range(len(samplings))]
        adapter = None if self.arrived.adapter is None else self.arrived.adapter.ref
        ids = self.engine.add(prompt, samplings, listeners, keys, self.caller, adapter)
        for id, sampling in zip(ids, samplings, strict=True):
            generation = Generation(id, prompt, sampling, tokenizer)
            generation.arrived = self.arrived.at
            generation.has_starts |= has_starts
            self.generations.append(generation)
        self.firsts.append(self.generations[begin])

    @property
    def is_over(self) -> bool:
        """Whether the completion has finished or failed, or the client has disconnected."""
        is_done = self.num_ended == len(self.generations)
        return is_done or self.has_left or self.error is not None

    def end(self, error: SpecserveError) -> None:
        """Abort with an error for the client."""
        if not self.is_over:
            self.error = error
            self.wake()
            self.release()

    def leave(self) -> None:
        """Abort after the client has disconnected."""
        self.has_left = True
        self.wake()
        self.release()

    def release(self) -> None:
        """End running choices, and count all choices in the metrics. Can be called again."""
        if self not in self.live:
            return
        self.live.discard(self)
        if self.deadline is not None:
            self.deadline.cancel()
        for generation in self.generations:
            self.engine.finish(generation.id)
            self.metrics.on_end(generation, self.reason(generation), generation in self.firsts)

    def reason(self, generation: Generation) -> str:
        """Return the reason for the end of a choice."""
        if isinstance(self.error, DeadlineExceeded):
            return generation.finish_reason or "timeout"
        aborted = "error" if self.error is not None else "abort"
        return generation.finish_reason or aborted

    def wake(self) -> None:
        """Call `on_output` once, after this turn of the event loop."""
        if self.on_output is not None and not self.is_due:
            self.is_due = True
            asyncio.get_running_loop().call_soon(self.notify)

    def notify(self) -> None:
        self.is_due = False
        if self.on_output is not None and (self.deltas or self.is_over):
            self.on_output()

    def taken(self) -> list[ChoiceDelta]:
        """Return the deltas since the last call."""
        deltas, self.deltas = self.deltas, []
        return deltas

    async def over(self) -> None:
        """Wait for the end. The generations have all of the text."""
        ended = asyncio.Event()

        def look() -> None:
            self.deltas = []
            if self.is_over:
                ended.set()

        self.on_output = look
        look()
        try:
            await ended.wait()
        finally:
            self.on_output = None

    @property
    def has_tokens(self) -> bool:
        return self.num_tokens > 0

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of all prompts; a prompt with several choices counts once."""
        return sum(len(g.prompt) for g in self.firsts)

    @property
    def log_fields(self) -> dict[str, Any]:
        """Fields of the log line of a released completion: tokens, TTFT, reasons of the end."""
        firsts = [g.first_token_at for g in self.generations]
        first = min(filter(None, firsts), default=None)
        ttft = {} if first is None else {"ttft_ms": round(1e3 * (first - self.arrived.at), 1)}
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            **ttft,
            "finish_reason": "/".join(dict.fromkeys(map(self.reason, self.generations))),
            "client_left": self.has_left,
        }


class EndedRequest(msgspec.Struct):
    """A request that has ended, for observers."""

    scope: Scope
    asked: list[LiveCompletion]
    received_at: float  # seconds, perf_counter
    request_id: str
    status: int = 500  # the default applies to errors outside of our middleware


class SequenceListener:
    """Receives the engine's outputs for one choice of a completion."""

    def __init__(self, completion: LiveCompletion, index: int) -> None:
        self.completion, self.index = completion, index

    def push(self, output: StepOutput) -> None:
        completion = self.completion
        if output.failure:
            completion.end(of_failure(output.failure, output.blamed))
            return
        generation = completion.generations[self.index]
        before = len(generation.token_ids), generation.last_token_at
        text = generation.push(output)
        if output.is_of_prompt:
            return
        num_new = len(generation.token_ids) - before[0]
        completion.num_tokens += num_new
        if generation.pooled:  # a prompt's vector has no first token to measure
            completion.num_ended += 1
            completion.wake()
            return
        if completion.arrived.account is not None:
            completion.arrived.account.take(num_new)
        completion.metrics.on_tokens(generation, *before)
        if generation.is_done:
            completion.num_ended += 1  # e.g. at a stop string, which the engine does not know
            completion.engine.finish(generation.id)
        details, new = generation.details[-1:], generation.token_ids[before[0] :]
        is_last, ends = generation.is_done, generation.ends
        delta = ChoiceDelta(self.index, text, before[0], new, is_last, details, ends)
        completion.deltas.append(delta)
        completion.wake()

    def fail(self, error: SpecserveError) -> None:
        self.completion.end(error)


class ServedModel(NamedTuple):
    """The data about the served model in responses."""

    model: str
    fingerprint: str  # equal fingerprints and seeds return equal texts
    drafter: str
    max_nodes: int
    scaled: list[Scaled]  # scaled demos among the target and draft models
    kv_dtype: str
    weights: WeightForms = WeightForms()
    draft_weights: WeightForms | None = None
    draft_head: DraftHeadCard | None = None
    sources: tuple[str, ...] = ()  # of draft tokens
    formats: Formats = Formats()
    implementation: str = "native"
    row_invariant: bool | None = None  # as in Ready
    has_head: bool = True  # as in Ready
    is_demo: bool = False  # whether the model is specserve's demo model
    # All sources so far, by their bits in details. The list grows while responses are sent.
    known_sources: list[str] = []  # noqa: RUF012


class Service:
    """Admits requests, from `open` until a drain begins or the engine process ends."""

    def __init__(self, config: Config, engine: EngineClient) -> None:
        self.config, self.limits, self.engine = config, config.server, engine
        self.name, self.started_at = served_name(config), int(time.time())
        self.completions: set[LiveCompletion] = set()
        self.metrics = Metrics(self.name, config.max_nodes, config.lora.num_slots, self.adapters_of)
        self.history = History(self.metrics)
        self.bodies = BodyReader(self.limits, self.reject)
        self.prompts = PromptProcessor(self.limits, config.min_tpot_ms)
        self.poolers = NO_POOLERS  # set by `open`
        # Separate from the threads for prompts, so that prompts do not wait for long responses.
        self.writing_threads = FairThreads(2, "writing")
        self.speculation = SpeculationControl(config)
        self.adapters = AdapterNames(config, self.name)
        self.sleep_control = SleepControl(engine, self.metrics.on_sleep)
        self.adapter_changes = asyncio.Lock()  # one at a time
        self.is_draining = False
        self.loaded: ServedModel | None = None
        engine.on_report = self.metrics.on_report
        engine.on_restart = self.metrics.on_restart
        engine.on_change = self.take_change

    @property
    def served(self) -> ServedModel:
        assert self.loaded is not None, "routes call check_open first"
        return self.loaded

    @property
    def is_ready(self) -> bool:
        return self.loaded is not None and not self.is_draining and not self.engine.died.is_set()

    @property
    def is_asleep(self) -> bool:
        return self.engine.sleep_state.level > 0

    @property
    def unready_because(self) -> str:
        """Why it is not ready: a word for probes and their logs."""
        if self.is_draining:
            return "shutting down"
        return "engine dead" if self.engine.died.is_set() else "loading"

    @property
    def is_alive(self) -> bool:
        """Whether the engine process runs, and sent its due messages in time."""
        return not self.engine.died.is_set() and self.engine.silence < HUNG_SECONDS

    def open(
        self,
        processor: InputProcessor,
        served: ServedModel,
        ready: Ready,
        poolers: Poolers = NO_POOLERS,
    ) -> None:
        """Accept requests, after everything is loaded.

        Call this in the event loop's thread: processes end with the thread that started them.
        """
        self.prompts.open(processor, ready.kv_formats)
        self.metrics.on_ready(ready)
        self.loaded, self.poolers = served, poolers

    def take_change(self, config: Config | None, ready: Ready) -> None:
        """Store the engine's new config of speculation; None: the config of the start."""
        current = self.config if config is None else config
        self.speculation.settle(current)
        self.prompts.change(ready)
        self.metrics.make_room(current.max_nodes)
        self.metrics.on_drafter(ready.drafter)
        self.served.known_sources[:] = ready.known_sources
        self.loaded = self.served._replace(
            drafter=ready.drafter,
            max_nodes=current.max_nodes,
            sources=ready.sources,
            draft_weights=ready.draft_weights,
            draft_head=ready.draft_head,
            scaled=demos(current, ready),
        )

    def check_open(self) -> None:
        """Refuse a request that needs the engine."""
        self.check_loaded()
        try:
            self.engine.check_awake()
        except Sleeping:
            self.reject("sleeping")
            raise

    def check_loaded(self) -> None:
        if self.is_draining or self.engine.died.is_set():
            self.reject("draining" if self.is_draining else "engine_died")
            raise Overloaded("the server is shutting down. Use another server", retry_after=None)
        if self.loaded is None:
            self.reject("loading")
            raise Overloaded("the model is still loading. Retry in a moment")

    def check_model(self, name: str | None) -> NamedAdapter | None:
        """Return the adapter that a request names as `model`; None for the model itself.

        StatusError 404 for any other name.
        """
        if name is None or name == self.name:
            return None
        if name in self.adapters.known:
            return NamedAdapter(name, self.adapters.known[name])
        if name in self.limits.model_aliases or self.ignored_fields(name):
            return None
        adapters = f" and the adapters {cut(', '.join(self.adapters.known))}"
        known = f"{self.name!r}{adapters if self.adapters.known else ''}"
        message = f"the model {cut(name)!r} is not served. This server has {known}"
        raise StatusError(404, message, "model_not_found", "model")

    def ignored_fields(self, model: str | None) -> tuple[str, ...]:
        """Return the field `model` if the name is unknown, and the server accepts any name."""
        known = self.name, *self.adapters.known, *self.limits.model_aliases
        is_other = model is not None and model not in known
        return ("model",) if is_other and self.limits.any_model_name else ()

    def name_adapter(self, name: str, ref: AdapterRef) -> None:
        """Let requests choose an adapter by this name."""
        if (unnamed := self.adapters.put(name, ref)) is not None:
            self.engine.forget_adapter(unnamed)

    def forget_adapter(self, name: str) -> None:
        if (unnamed := self.adapters.remove(name)) is not None:
            self.engine.forget_adapter(unnamed)

    def adapters_of(self, has_tokens: bool) -> set[str]:
        """Return the adapters of completions with output tokens, or of completions without."""
        each = (c.arrived.adapter for c in self.completions if c.has_tokens == has_tokens)
        return {adapter.name for adapter in each if adapter is not None}

    def served_to(self, arrived: Arrival) -> ServedModel:
        """Return the data about the model with the adapter of a request."""
        if arrived.adapter is None:
            return self.served
        name, ref = arrived.adapter
        own = fingerprint_with(self.served.fingerprint, ref.digest)
        return self.served._replace(model=name, fingerprint=own)

    @asynccontextmanager
    async def timed(self, arrived: Arrival, asked: float | None) -> AsyncIterator[Arrival]:
        """Limit a block that prepares a completion to the request's deadline.

        Yields the arrival with this deadline, which also limits the completion.
        """
        if asked is None and self.limits.timeout_ms is None:
            yield arrived
            return
        deadline = Deadline.after(arrived.at, asked, self.limits.timeout_ms)
        try:
            async with deadline.holding():
                yield arrived._replace(deadline=deadline)
        except DeadlineExceeded:
            self.reject("timeout")
            raise

    async def check_params(
        self, params: SamplingParams, num_prompts: int, field: str, form_field: str
    ) -> Sampling:
        """Check and resolve parameters before tokenizing.

        Errors of structured output name `form_field`; errors of the prompts name `field`.
        """
        if not self.served.has_head:
            raise RequestError(
                "this model was saved without a head for text, so it cannot generate. Use "
                "/v1/embeddings, /v1/rerank or /v1/score"
            )
        sampling = await self.prompts.resolve(params)
        self.check_choices(num_prompts, params, field)
        if sampling.grammar:
            await self.prompts.check_grammar(sampling.grammar, form_field, params.cache_salt)
        return sampling

    async def admit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        resolved: Sampling,
        arrived: Arrival,
        field: str,
        grammar: str = "",
        reader: AnswerReader | None = None,
    ) -> LiveCompletion:
        """Queue all prompts, or refuse all. Errors name `field`.

        `grammar` is a grammar of tools for the texts, which keep the special tokens that `reader`
        needs.
        """
        lengths = [*map(len, prompts)]
        if grammar:
            resolved = await self.prompts.with_grammar(resolved, grammar)
        samplings = self.prompts.processor.for_prompts(resolved, params.own_seed, lengths)
        digest = "" if arrived.adapter is None else arrived.adapter.ref.digest
        keys = await self.prompts.hash(prompts, params.cache_salt, digest, arrived.tenant)
        self.check_open()  # again: a drain may have begun while the body was read
        self.check_choices(len(prompts), params, field)
        self.check_tokens(sum(lengths), field)
        if arrived.account is not None:  # last, because refused requests use no tokens
            arrived.account.admit(sum(lengths), field)
        completion = LiveCompletion(self.engine, self.completions, self.metrics, arrived)
        tokenizer = self.prompts.processor.tokenizer
        if reader is not None:
            tokenizer = tokenizer.keeping(reader.markers)
        read = tokenizer, reader is not None and reader.has_reasoning
        for prompt, its_keys, sampling in zip(prompts, keys, samplings, strict=True):
            choices = choices_of(sampling, params.num_choices)
            completion.add_prompt(prompt, its_keys, choices, *read)
        return completion

    def check_choices(self, num_prompts: int, params: SamplingParams, field: str) -> None:
        """Refuse requests above the limit of waiting requests, because their TTFT would be long."""
        more = [name for name in ("best_of", "n") if (getattr(params, name) or 1) > 1]
        queued = self.queued(lambda c: sum(g.is_queued for g in c.generations))
        for each in self.prompts.processes:
            queued += each.asked
        number, most = num_prompts * params.num_choices, self.limits.max_queued_requests
        self.check_room("requests", queued, number, most, more[0] if more else field)

    def check_tokens(self, number: int, field: str) -> None:
        queued = self.queued(lambda c: sum(len(g.prompt) for g in c.firsts if g.is_queued))
        most = max(self.limits.max_queued_tokens, self.prompts.processor.max_model_len)
        self.check_room("tokens", queued, number, most, field)

    def queued(self, number: Callable[[LiveCompletion], int]) -> Counter[Hashable]:
        """Return the sum of `number` over completions, by tenant."""
        found = Counter[Hashable]()
        for completion in self.completions:
            found[completion.caller.tenant] += number(completion)
        return found

    def check_room(
        self, what: str, waiting: Counter[Hashable], asked: int, most: int, field: str
    ) -> None:
        if asked > most:
            raise RequestError(
                f"{field}: {asked} {what} exceed the queue limit of {most}. Send fewer at once",
                field,
            )
        if not has_room(asked, waiting[current_tenant()], waiting.total(), most):
            self.reject(f"queued_{what}")
            message = f"{waiting.total()} {what} are waiting; the limit is {most}. Retry later"
            raise Overloaded(message)

    def reject(self, reason: str) -> None:
        self.metrics.on_rejection(reason)

    async def close(self) -> None:
        await self.prompts.close()
        self.writing_threads.close()

    async def drained(self) -> None:
        """Wait until no completion is left."""
        while self.completions:
            await asyncio.sleep(0.02)


def demos(config: Config, ready: Ready) -> list[Scaled]:
    """Return the scaled demos among the served models."""
    if config.model.demo_compute is None:
        return []
    drafters = resolve_drafters(config)
    used = {drafters.draft: ready.draft_weights, drafters.head: ready.draft_head}
    folders = [Path(folder) for folder, card in used.items() if folder and card is not None]
    return scaled_models([resolve_model(config), *folders])


def fingerprint(folder: Path, ready: Ready, template: ChatTemplate | None = None) -> str:
    """Return a hash of everything that determines texts, except the request. Drafters do not."""
    resolved = f"{VERSION} {ready.dtype} {ready.weights} {ready.kv_dtype} {ready.arithmetic}"
    if ready.implementation == "transformers":
        resolved += f" transformers {version('transformers')}"
    digest = hashlib.sha256(resolved.encode())
    for source in template.sources if template is not None else ():
        digest.update(source.encode())
    for part in open_source(folder).identity():
        digest.update(part)
    return f"fp_{digest.hexdigest()[:12]}"


def fingerprint_with(fingerprint: str, digest: str) -> str:
    """Return the fingerprint of the model with an adapter of this digest."""
    return f"fp_{hashlib.sha256(f'{fingerprint} {digest}'.encode()).hexdigest()[:12]}"
