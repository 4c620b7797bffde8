"""What the routes share: text processing, admission checks, and the engine client."""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec

from specserve.api.input_processor import InputProcessor, last
from specserve.api.lora import AdapterNames, NamedAdapter
from specserve.config import Config
from specserve.errors import Overloaded, RequestError
from specserve.exchange.client import EngineClient
from specserve.exchange.fair_queue import FairThreads, current_tenant, has_room, owner
from specserve.exchange.guessing import Guesses, Guessing, guesses_of
from specserve.exchange.messages import AdapterRef, DraftHeadCard, Ready
from specserve.exchange.sampling_params import (
    Sampling,
    SamplingParams,
    check_ends,
    choices_of,
    ruled,
)
from specserve.memory.block_keys import Keys, KVFormat, prompt_keys
from specserve.models.folder import Scaled
from specserve.models.selection import (
    resolve_drafters,
    resolve_model,
    scaled_models,
    served_name,
)
from specserve.models.source import open_source
from specserve.models.weight_forms import WeightForms
from specserve.server.adapter_metrics import AdapterMetrics
from specserve.server.body import BodyKind, BodyReader, is_short
from specserve.server.deadline import Deadline
from specserve.server.grammar_process import Tokens
from specserve.server.live_completion import Arrival, LiveCompletion
from specserve.server.metrics import Metrics
from specserve.server.processes import (
    BodyProcesses,
    GrammarProcesses,
    Processes,
    TemplateProcesses,
)
from specserve.server.refusal import DeadlineExceeded, NotFound, cut
from specserve.text.answer.formats import AnswerReader, Formats
from specserve.text.chat_template import ChatOptions, ChatTemplate
from specserve.text.template_messages import Message
from specserve.version import VERSION

LONG = 1 << 12  # tokens of prompts from which hashing takes a good part of a millisecond
HUNG_SECONDS = 300  # an engine process without a report for so long counts as hung

P = ParamSpec("P")
T = TypeVar("T")


class ServedModel(NamedTuple):
    """What responses tell about the served model."""

    model: str
    fingerprint: str  # equal ones, with equal seeds, give equal texts
    drafter: str
    max_nodes: int
    scaled: list[Scaled]  # of target and draft model, those that are scaled demos
    kv_dtype: str
    weights: WeightForms = WeightForms()
    draft_weights: WeightForms | None = None
    draft_head: DraftHeadCard | None = None
    sources: tuple[str, ...] = ()  # of guesses
    formats: Formats = Formats()
    implementation: str = "native"
    row_invariant: bool | None = None  # as in Ready
    # All that there have been, by their bits in details: a list that grows while answers come.
    known_sources: list[str] = []  # noqa: RUF012


class Service:
    """Accepts requests from `open` until a drain begins or the engine process ends."""

    def __init__(self, config: Config, engine: EngineClient) -> None:
        self.config, self.limits, self.engine = config, config.server, engine
        self.min_tpot_ms = config.min_tpot_ms
        self.name, self.started_at = served_name(config), int(time.time())
        self.metrics = Metrics(self.name, config.max_nodes)
        self.bodies = BodyReader(self.limits, self.reject)
        # Threads are enough: tokenizing releases the GIL.
        self.text_threads = FairThreads(2, "text")
        # Others, as no prompt should wait for a long answer to be written.
        self.writing_threads = FairThreads(2, "writing")
        self.readers: BodyProcesses | None = None
        self.templates: TemplateProcesses | None = None
        self.grammars: GrammarProcesses | None = None
        self.completions: set[LiveCompletion] = set()
        adapters = AdapterMetrics(config.lora.num_slots, self.completions)
        self.metrics.registry.register(adapters)
        self.guessing = Guessing(config)
        self.adapters = AdapterNames(config, self.name)
        self.adapter_changes = asyncio.Lock()  # one at a time
        self.is_draining = False
        self.loaded: tuple[InputProcessor, ServedModel] | None = None
        self.kv_formats: dict[str, KVFormat] = {}  # of the models with a prefix cache
        engine.on_report = self.metrics.on_report
        engine.on_restart = self.metrics.on_restart
        engine.on_change = self.take_change

    @property
    def input_processor(self) -> InputProcessor:
        assert self.loaded is not None, "a route reads only after check_open"
        return self.loaded[0]

    @property
    def served(self) -> ServedModel:
        assert self.loaded is not None, "a route answers only after check_open"
        return self.loaded[1]

    @property
    def is_ready(self) -> bool:
        return self.loaded is not None and not self.is_draining and not self.engine.died.is_set()

    @property
    def is_alive(self) -> bool:
        """Whether the engine process runs, and is not silent for long where it owes an answer."""
        return not self.engine.died.is_set() and self.engine.silence < HUNG_SECONDS

    def start_templates(self, template: ChatTemplate | None) -> None:
        """Call this in the event loop's thread: processes end with the thread that starts them."""
        if template is not None:
            self.templates = TemplateProcesses(template, self.limits.template_seconds)

    def start_grammars(self, model: Path) -> None:
        """Call this in the event loop's thread, too, once the service is open."""
        ends = self.input_processor.defaults.eos_token_ids
        if ends:
            tokens = Tokens(str(model), self.input_processor.vocab_size, tuple(ends))
            self.grammars = GrammarProcesses(tokens)

    def open(self, input_processor: InputProcessor, served: ServedModel, ready: Ready) -> None:
        """Accept requests, once everything is loaded. Call this in the event loop's thread, too."""
        self.readers = BodyProcesses(self.limits.max_body_items)
        self.metrics.on_ready(ready)
        self.kv_formats = ready.kv_formats
        self.loaded = input_processor, served

    def take_change(self, config: Config | None, ready: Ready) -> None:
        """The engine guesses by this config from now on; None: by that of the start."""
        asked = self.config if config is None else config
        self.guessing.settle(asked)
        self.kv_formats = ready.kv_formats
        self.metrics.make_room(asked.max_nodes)
        self.metrics.on_drafter(ready.drafter)
        processor, served = self.input_processor, self.served
        served.known_sources[:] = ready.known_sources
        served = served._replace(
            drafter=ready.drafter,
            max_nodes=asked.max_nodes,
            sources=ready.sources,
            draft_weights=ready.draft_weights,
            draft_head=ready.draft_head,
            scaled=demos(asked, ready),
        )
        self.loaded = msgspec.structs.replace(processor, sources=ready.sources), served

    @property
    def guesses(self) -> Guesses:
        """By what the engine guesses."""
        served = self.served
        has_draft_model = served.draft_weights is not None
        return guesses_of(self.guessing.config, served.sources, has_draft_model)

    def check_open(self) -> None:
        if self.is_draining or self.engine.died.is_set():
            self.reject("draining" if self.is_draining else "engine_died")
            raise Overloaded("the server is about to end: ask another one", retry_after=None)
        if self.loaded is None:
            self.reject("loading")
            raise Overloaded("the model is still being loaded: ask again in a moment")

    def check_model(self, name: str | None) -> NamedAdapter | None:
        """The adapter that a request chooses by its `model`; None where it names the model or
        nothing. NotFound for any other name.
        """
        if name is None or name == self.name:
            return None
        if name in self.adapters.known:
            return NamedAdapter(name, self.adapters.known[name])
        known = f", with the adapters {cut(', '.join(self.adapters.known))}"
        known = f"{self.name!r} is{known if self.adapters.known else ''}"
        error = NotFound(f"the model {cut(name)!r} is not served here; {known}", "model")
        error.code = "model_not_found"
        raise error

    def name_adapter(self, name: str, ref: AdapterRef) -> None:
        """Let requests choose it from now on."""
        if (unnamed := self.adapters.put(name, ref)) is not None:
            self.engine.forget_adapter(unnamed)

    def forget_adapter(self, name: str) -> None:
        if (unnamed := self.adapters.remove(name)) is not None:
            self.engine.forget_adapter(unnamed)

    def served_to(self, arrived: Arrival) -> ServedModel:
        """What is told of the model with the adapter that a request chose."""
        if arrived.adapter is None:
            return self.served
        name, ref = arrived.adapter
        own = fingerprint_with(self.served.fingerprint, ref.digest)
        return self.served._replace(model=name, fingerprint=own)

    @asynccontextmanager
    async def timed(self, arrived: Arrival, asked: float | None) -> AsyncIterator[Arrival]:
        """A block that prepares a completion, which ends with an error at the request's deadline;
        with the arrival that the completion is to have, as it has the same deadline.
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

    async def ask(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        arrived: Arrival,
        field: str,
        grammar: str = "",
        reader: AnswerReader | None = None,
    ) -> LiveCompletion:
        """Queue all prompts, or refuse all; errors name `field`. The texts obey the grammar, which
        is of tools, and have the special tokens that the reader needs.
        """
        resolve_all, lengths = self.input_processor.resolve_all, [*map(len, prompts)]
        samplings = await self.resolved(params, lambda: [*resolve_all(params, lengths)])
        if grammar:
            samplings = await self.ruled(samplings, grammar, params)
        digest = "" if arrived.adapter is None else arrived.adapter.ref.digest
        keys = await self.hash(prompts, params.cache_salt, digest, arrived.tenant)
        self.check_open()  # again: a drain may have begun while the body was read
        self.check_choices(len(prompts), params, field)
        self.check_tokens(sum(lengths), field)
        if arrived.account is not None:  # last: what is refused costs nothing
            arrived.account.admit(sum(lengths), field)
        completion = LiveCompletion(self.engine, self.completions, self.metrics, arrived)
        tokenizer = self.input_processor.tokenizer
        if reader is not None:
            tokenizer = tokenizer.keeping(reader.markers)
        read = tokenizer, reader is not None and reader.has_reasoning
        for prompt, its_keys, sampling in zip(prompts, keys, samplings, strict=True):
            completion.ask(prompt, its_keys, choices_of(sampling, params.num_choices), *read)
        return completion

    async def ruled(
        self, samplings: Sequence[Sampling], grammar: str, params: SamplingParams
    ) -> list[Sampling]:
        """The parameters of texts that obey the tools' grammar."""
        defaults = self.input_processor.defaults
        check_ends(params, defaults, "tools")
        if params.structured_outputs is not None:
            raise RequestError(
                "tools: the text has one form: leave out the calls that have to be made, or "
                "strict, or the form of the answer",
                "tools",
            )
        await self.check_grammar(grammar, "tools", params.cache_salt)
        return [ruled(sampling, grammar, defaults.eos_token_ids) for sampling in samplings]

    async def check_asked(
        self, params: SamplingParams, num_prompts: int, field: str, form_field: str
    ) -> None:
        """The checks that need no token ids, so that they come before tokenizing. What is wrong
        with structured output names `form_field`.
        """
        self.check_params(params)
        resolve = self.input_processor.resolve
        sampling = await self.resolved(params, lambda: resolve(params))
        self.check_choices(num_prompts, params, field)
        if sampling.grammar:
            await self.check_grammar(sampling.grammar, form_field, params.cache_salt)

    async def resolved(self, params: SamplingParams, resolve: Callable[[], T]) -> T:
        """In a thread if it takes long: bad words are tokenized, and schemas written."""
        is_long = params.bad_words or params.structured_outputs is not None
        return await self.in_thread(resolve) if is_long else resolve()

    async def check_grammar(self, grammar: str, field: str, salt: str = "") -> None:
        """RequestError, which names `field`, for a grammar that cannot be compiled in time."""
        assert self.grammars is not None, "what resolves to a grammar has ends of text"
        await self.grammars.check(grammar, field, salt)

    def check_params(self, params: SamplingParams) -> None:
        """Refuse parameters that the engine supports but the operator's limits exclude."""
        num_stop, most = len(params.stop_strings), self.limits.max_stop_strings
        if most is not None and num_stop > most:
            raise RequestError(f"stop: {num_stop} strings, and {most} are allowed", "stop")
        if params.priority < self.limits.min_priority:
            raise RequestError(
                f"priority: {params.priority} is below {self.limits.min_priority}, the most urgent "
                "that this server lets clients have: send a larger one, or none; its operator can "
                "lower server.min_priority",
                "priority",
            )
        self.check_tpot(None if params.slo is None else params.slo.tpot_ms)

    def check_tpot(self, asked: float | None) -> None:
        """Refuse a target so tight that other requests would pay for it: their prompts get the rows
        that it leaves.
        """
        least = self.min_tpot_ms
        if asked is None or (least is not None and asked >= least):
            return
        why = (
            "this server lets clients set no such target: leave it out"
            if least is None
            else f"this server allows no tighter target than {least:g}: ask for {least:g} or more"
        )
        raise RequestError(
            f"slo.tpot_ms = {asked:g}: {why}; its operator can set server.min_tpot_ms to the "
            "smallest that may be asked for",
            "slo.tpot_ms",
        )

    async def in_thread(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work on text in a thread, so that a long prompt does not delay streams."""
        future = self.text_threads.submit(owner.get(), lambda: do(*args, **kwargs))
        return await asyncio.wrap_future(future)

    async def write(
        self, is_long: bool, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Write an answer, or a part of it; a long one in a thread, where streams go on."""
        if not is_long:
            return do(*args, **kwargs)
        future = self.writing_threads.submit(owner.get(), lambda: do(*args, **kwargs))
        return await asyncio.wrap_future(future)

    async def parse(self, raw: bytes, kind: BodyKind[T]) -> T:
        """Read a body; one that may take long in a process."""
        if is_short(raw):
            return kind.read(raw)
        assert self.readers is not None, "a route reads only after check_open"
        return await self.readers.read(raw, kind)

    async def hash(
        self, prompts: Sequence[list[int]], salt: str, adapter: str, tenant: int
    ) -> list[Keys]:
        """The keys of each prompt's blocks; many tokens are hashed in a thread."""

        def hash_all() -> list[Keys]:
            formats = self.kv_formats
            return [prompt_keys(formats, prompt, salt, adapter, tenant) for prompt in prompts]

        is_long = sum(map(len, prompts)) > LONG
        return await self.in_thread(hash_all) if is_long else hash_all()

    async def read_all(
        self,
        prompts: Sequence[str | list[int]],
        kept: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[list[int]]:
        """Every prompt's tokens, or the last `kept` of each; tokenizing stops at the first prompt
        that does not fit.
        """
        read = self.input_processor.read
        with blaming("prompt"):
            for prompt in prompts:
                if not isinstance(prompt, str):  # before any text is tokenized
                    self.input_processor.check_length(last(prompt, kept))
            return [await self.in_thread(read, p, kept, add_special_tokens) for p in prompts]

    async def tokenize(
        self, text: str, field: str, add_special_tokens: bool, kept: int | None = None
    ) -> list[int]:
        """The text's tokens, or the last `kept`, without `check_length`; errors name `field`."""
        encode = self.input_processor.encode
        with blaming(field):
            return await self.in_thread(encode, text, add_special_tokens, kept)

    async def render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """The conversation as text, by the chat template, which has a deadline."""
        with blaming("messages"):
            self.input_processor.check_chat()
        assert self.templates is not None, "a template has its processes before requests come"
        return await self.templates.render(messages, options)

    def check_choices(self, num_prompts: int, params: SamplingParams, field: str) -> None:
        more = [name for name in ("best_of", "n") if (getattr(params, name) or 1) > 1]
        self.check_requests(num_prompts * params.num_choices, more[0] if more else field)

    def check_requests(self, number: int, field: str) -> None:
        """Refuse more requests than may wait: their first tokens would come too late."""
        queued = self.queued(lambda c: sum(not g.token_ids for g in c.generations))
        for each in self.processes:
            queued += each.asked
        self.check_room("requests", queued, number, self.limits.max_queued_requests, field)

    def check_tokens(self, number: int, field: str) -> None:
        queued = self.queued(lambda c: sum(len(g.prompt) for g in c.firsts if not g.token_ids))
        most = max(self.limits.max_queued_tokens, self.input_processor.max_model_len)
        self.check_room("tokens", queued, number, most, field)

    def queued(self, number: Callable[[LiveCompletion], int]) -> Counter[Hashable]:
        """The sum over completions, by tenant."""
        found = Counter[Hashable]()
        for completion in self.completions:
            found[completion.caller.tenant] += number(completion)
        return found

    def check_room(
        self, what: str, waiting: Counter[Hashable], asked: int, most: int, field: str
    ) -> None:
        if asked > most:
            raise RequestError(
                f"{field}: {asked} {what}, and {most} may wait: ask for fewer at once", field
            )
        if not has_room(asked, waiting[current_tenant()], waiting.total(), most):
            self.reject(f"queued_{what}")
            raise Overloaded(f"{waiting.total()} {what} wait already, and {most} may: ask later")

    @property
    def processes(self) -> list[Processes]:
        return [each for each in (self.readers, self.templates, self.grammars) if each is not None]

    def reject(self, reason: str) -> None:
        self.metrics.on_rejection(reason)

    async def close(self) -> None:
        for processes in self.processes:
            await processes.close()
        for threads in (self.text_threads, self.writing_threads):
            threads.close()

    async def drained(self) -> None:
        """Wait until no completion is left."""
        while self.completions:
            await asyncio.sleep(0.02)


@contextmanager
def blaming(field: str) -> Iterator[None]:
    """Name `field` in a RequestError that the block raises."""
    try:
        yield
    except RequestError as e:
        e.param = field
        raise


def demos(config: Config, ready: Ready) -> list[Scaled]:
    """Those of the served models that are scaled demos."""
    if config.model.demo_cost is None:
        return []
    drafters = resolve_drafters(config)
    used = {drafters.draft: ready.draft_weights, drafters.head: ready.draft_head}
    folders = [Path(folder) for folder, card in used.items() if folder and card is not None]
    return scaled_models([resolve_model(config), *folders])


def fingerprint(folder: Path, ready: Ready, template: ChatTemplate | None = None) -> str:
    """A hash of all that texts depend on besides the request; equal for every drafter."""
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
    """That of the model with an adapter of this digest."""
    return f"fp_{hashlib.sha256(f'{fingerprint} {digest}'.encode()).hexdigest()[:12]}"
