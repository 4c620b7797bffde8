"""The offline API: runs the engine in this process."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from numbers import Integral
from pathlib import Path
from threading import Lock, RLock
from types import TracebackType
from typing import Any, NamedTuple, Self

from msgspec.structs import replace

from specserve.api.base import BaseLLM, Lora, Prompt, Resolved, chat_options
from specserve.api.beam_search import BeamSearchOutput, BeamSearchParams, beams_of
from specserve.api.beam_search import checked as checked_beams
from specserve.api.input_processor import (
    GrammarCheck,
    load_text_files,
    make_input_processor,
    one_of,
    unwrapped,
)
from specserve.api.lora import asked_adapters, modules_of
from specserve.api.outputs import Generation, Output, output
from specserve.api.poolers import Poolers, poolers_of
from specserve.api.pooling import (
    EmbeddingRequestOutput,
    ScoringRequestOutput,
    check_dimensions,
    check_instruction,
    embedder_of,
    embedding_output,
    pair_ids,
    paired,
    prompt_of,
    ranker_of,
    scoring_output,
)
from specserve.api.progress import LoadProgress, show_phases, track
from specserve.api.vllm_arguments import check_call
from specserve.config import Config
from specserve.engine.build import build
from specserve.engine.loading import Model, Weights, check_device
from specserve.engine.process import Control
from specserve.errors import ConfigError, RequestError, Sleeping, of_failure
from specserve.exchange.messages import AdapterRef, Caller, SpeculationState, StepDetails
from specserve.exchange.phases import Phases
from specserve.exchange.sampling_params import (
    Pooling,
    SamplingParams,
    choices_of,
    for_prompt,
    pooled,
)
from specserve.exchange.sleep import check_sleep, checked_tags
from specserve.models.folder import resolve
from specserve.process import interrupts_held
from specserve.scheduling.processors import LogitsProcessor
from specserve.text.chat_template import ChatOptions
from specserve.text.template_messages import Message
from specserve.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None
Loras = Lora | Sequence[Lora]  # one for all prompts, or one per prompt
DetailedSteps = Generator[tuple[str, list[int], list[StepDetails]], None, Output]


class Checked(NamedTuple):
    """A checked prompt and its parameters."""

    ids: list[int]
    resolved: Resolved
    text: str | None
    adapter: AdapterRef | None


class LLM(BaseLLM[None]):
    """A model and a drafter, loaded once. Close it, or use it as a context manager.

    `drafter` defaults to "auto", which chooses draft tokens of all sources; "none" turns
    speculation off. `draft_model` can be an EAGLE-3 head of the model; `draft_head` adds a head to
    a draft model. Arguments override `set` ("section.key" -> value), which overrides the file
    `config`. `weights` are the attributes `weights` of other LLMs, whose loaded models are reused.
    `quantize` and `draft_quantize`, "w8a8", "w8" or "w4", round weights while loading. `seed`
    derives the seeds of requests without a seed, in order. `lora_modules`, name -> folder or hub
    id, are adapters for prompts. `vllm` are other arguments of vLLM; those with an equivalent
    setting, or without effect, are accepted. Errors: ConfigError for these arguments, RequestError
    for a prompt or its parameters.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft_model: str | Path | None = None,
        drafter: str | None = None,
        dtype: str = "auto",
        config: str | Path | Sequence[str | Path] | None = None,
        set: Mapping[str, Any] | None = None,
        progress: bool = True,
        weights: Iterable[Model | None] = (),
        quantize: str | None = None,
        draft_quantize: str | None = None,
        draft_head: str | Path | None = None,
        *,
        seed: int | None = None,
        lora_modules: Mapping[str, str | Path] | None = None,
        **vllm: Any,
    ) -> None:
        arguments = {
            "model": model,
            "dtype": dtype,
            "quantize": quantize,
            "draft_model": draft_model,
            "draft_head": draft_head,
            "draft_quantize": draft_quantize,
            "drafter": drafter,
            "lora_modules": lora_modules,
        }
        super().__init__(arguments, vllm, config, set, seed)
        self.progress = progress
        phases = Phases()
        check_device(self.config)
        self.folders = self.check_files()
        modules = modules_of(self.config, self.adapters.model)
        with phases.phase("tokenizer"):
            paths = self.folders.target, self.folders.draft, self.config.model.chat_template
            files = load_text_files(*paths)
        with LoadProgress(progress) as bar:
            self.loaded = build(self.config, bar, phases, weights)
        self.engine = self.loaded.engine
        limits = self.loaded.vocab_size, self.loaded.max_model_len
        self.input_processor = make_input_processor(files, *limits, self.engine.sources)
        self.tokenizer = self.input_processor.tokenizer
        self.grammars = GrammarCheck(self.input_processor)
        if progress:
            show_phases(self.loaded.phases)
        self.control = Control(self.loaded)
        self.changes = Lock()  # one at a time
        self.live: dict[int, Generation] = {}
        self.lock = RLock()  # threads can share an LLM; a step of any thread advances all requests
        self.is_stepping = False  # true during a step, which can call user code
        for name, folder in modules.items():
            self.load_lora_adapter(name, folder)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        logits_processors: Sequence[LogitsProcessor] | None = (),
        lora: Loras = None,
        lora_request: Loras = None,
        **vllm: Any,
    ) -> list[Output]:
        """Run all prompts as a batch, and return outputs in order. Checks all before running any.

        `sampling_params` is vLLM's name of `params`. `use_tqdm` false hides the progress bar.
        `logits_processors` are functions (see `LogitsProcessors`) that change the logits of every
        token, one after the other; they turn speculation off for these prompts. `lora` is the name
        of a loaded adapter, or one per prompt, or None; `lora_request` is vLLM's name of it. `vllm`
        are other arguments of vLLM, which are accepted if they have no effect.
        """
        check_call("LLM.generate", vllm)
        processors = read_processors(logits_processors)
        asked = each_prompt(prompts)
        each = self.resolve_each(one_of(params, sampling_params), len(asked))
        refs = self.adapters_of(lora, lora_request, len(asked))
        checked = [
            Checked(self.read(prompt, its.params), its, text, ref)
            for (prompt, text), its, ref in zip(asked, each, refs, strict=True)
        ]
        return self.run(checked, use_tqdm, processors)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora: Loras = None,
        lora_request: Loras = None,
    ) -> list[BeamSearchOutput]:
        """Return the best beams of each prompt, in order. Drafting is off. Beams share the KV of
        their common prefix. `generate` describes the other arguments.
        """
        sampling = checked_beams(params).sampling
        outputs = self.generate(
            prompts, sampling, use_tqdm=use_tqdm, lora=lora, lora_request=lora_request
        )
        return [beams_of(output, self.tokenizer) for output in outputs]

    def run(
        self,
        checked: Sequence[Checked],
        is_shown: bool,
        processors: Sequence[LogitsProcessor] = (),
    ) -> list[Output]:
        """Run prompts as a batch, and return outputs in order."""
        if processors and any(asked.resolved.params.use_beam_search for asked in checked):
            message = "logits_processors: not supported with use_beam_search. Omit one of them"
            raise RequestError(message, "logits_processors")
        each_choices: list[list[Generation]] = []
        generations: list[Generation] = []
        try:
            for asked in checked:
                call = each_choices[0][0].id if each_choices else None
                ids, resolved, _, adapter = asked
                each_choices.append(self.start(ids, resolved, call, processors, adapter))
                generations += each_choices[-1]
            is_shown = is_shown and self.progress and len(generations) > 1
            for _ in track(generations, enabled=is_shown):
                self.step()
        finally:
            self.end(generations)
        refuse_failed(generations)
        each = zip(each_choices, checked, strict=True)
        return [output(c, self.loaded.drafter, of.resolved.params, of.text) for c, of in each]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        logits_processors: Sequence[LogitsProcessor] | None = (),
        lora: Lora = None,
    ) -> Generator[tuple[str, list[int]], None, Output]:
        """Yield (text, token_ids) for every step that emits tokens.

        The generator returns the Output, with details of speculation if they were requested. This
        call checks the prompt; the first iteration starts it.
        """
        steps = self.watch(prompt, one_of(params, sampling_params), logits_processors, lora)

        def without_details() -> Generator[tuple[str, list[int]], None, Output]:
            with closing(steps):
                while True:
                    try:
                        text, token_ids, _ = next(steps)
                    except StopIteration as end:
                        done: Output = end.value
                        return done
                    yield text, token_ids

        return without_details()

    def watch(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        logits_processors: Sequence[LogitsProcessor] | None = (),
        lora: Lora = None,
    ) -> DetailedSteps:
        """Do the same as `stream`, with the details of each step if they were requested."""
        asked, text = unwrapped(prompt)
        ids, resolved = self.check(asked, params)
        if resolved.params.num_choices != 1 or resolved.params.use_beam_search:
            is_search, n = resolved.params.use_beam_search, resolved.params.n
            name = "use_beam_search" if is_search else "n" if n != 1 else "best_of"
            message = f"{name}: a stream returns one choice. Omit it, or call generate"
            raise RequestError(message, name)
        [ref] = self.adapters_of(lora, None, 1)
        checked = Checked(ids, resolved, text, ref)
        return self.watch_checked(checked, read_processors(logits_processors))

    def watch_checked(
        self, checked: Checked, processors: Sequence[LogitsProcessor]
    ) -> DetailedSteps:
        ids, resolved, prompt, adapter = checked
        [generation] = self.start(ids, resolved, None, processors, adapter)
        num_characters = num_tokens = num_steps = 0  # yielded so far
        is_done = False
        try:
            while not is_done:
                with self.lock:  # another thread's step may have added tokens
                    if not generation.is_done and num_tokens == len(generation.token_ids):
                        self.step()
                    text = generation.text[num_characters:]
                    token_ids = generation.token_ids[num_tokens:]
                    steps = generation.details[num_steps:]
                    is_done = generation.is_done
                num_characters += len(text)
                num_tokens += len(token_ids)
                num_steps += len(steps)
                if token_ids:
                    yield text, token_ids, steps
        finally:
            self.end([generation])
        refuse_failed([generation])
        return output([generation], self.loaded.drafter, resolved.params, prompt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        logits_processors: Sequence[LogitsProcessor] | None = (),
        lora: Loras = None,
        lora_request: Loras = None,
        **vllm: Any,
    ) -> list[Output]:
        """Return the responses to one or several conversations, with the model's chat template.

        `continue_final_message` continues the assistant's last message. The template reads
        `chat_template_kwargs` by name, and describes `tools` to the model; tool calls stay text in
        the output. `generate` describes `logits_processors`, `lora` and `vllm`.
        """
        check_call("LLM.chat", vllm)
        processors = read_processors(logits_processors)
        asked = add_generation_prompt, continue_final_message, chat_template_kwargs, tools
        options = chat_options(*asked)
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(f"messages: not a list of messages: {messages!r:.50}")
        is_single = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_single else messages
        each = self.resolve_each(one_of(params, sampling_params), len(conversations))
        refs = self.adapters_of(lora, lora_request, len(conversations))
        checked = list[Checked]()
        for conversation, its, ref in zip(conversations, each, refs, strict=True):
            ids, text = self.render(conversation, options, its.params)
            its = self.with_history(its, conversation, text, ids)
            checked.append(Checked(ids, its, text, ref))
        return self.run(checked, use_tqdm, processors)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        use_tqdm: bool = True,
        **vllm: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of prompts, in order: `outputs.embedding` of each output.

        `dimensions` cuts and normalizes them again. `prompt_name` is one of the model's prompts;
        "" is none, and None is the model's default. `truncate` cuts the end of a prompt that
        exceeds the context, which is an error otherwise. RequestError if the model has none.
        """
        check_call("LLM.embed", vllm)
        embedder = embedder_of(self.poolers, "LLM.score")
        check_dimensions(embedder, dimensions)
        before = prompt_of(embedder, prompt_name)
        read = self.input_processor.read_beginning if truncate else self.input_processor.read
        asked = [prompt for prompt, _ in each_prompt(prompts)]
        ids = [read(before + each if isinstance(each, str) else each) for each in asked]
        done = self.pool(ids, embedder.pooling, use_tqdm)
        return [embedding_output(each, embedder, dimensions) for each in done]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_tqdm: bool = True,
        **vllm: Any,
    ) -> list[ScoringRequestOutput]:
        """Return the scores of pairs, in order: `outputs.score` of each output.

        `data_1` is the query, or one per document of `data_2`. `instruction` describes relevance to
        models that read it. RequestError if the model is no ranker.
        """
        check_call("LLM.score", vllm)
        ranker = ranker_of(self.poolers)
        check_instruction(ranker, instruction)
        ones, twos = ([each] if isinstance(each, str) else each for each in (data_1, data_2))
        pairs = paired(ones, twos, ("data_1", "data_2"))
        ids = [pair_ids(self.input_processor, ranker, each, instruction) for each in pairs]
        return [scoring_output(g, ranker) for g in self.pool(ids, ranker.pooling, use_tqdm)]

    @cached_property
    def poolers(self) -> Poolers:
        return poolers_of(self.config, self.folders.target, self.tokenizer)

    def pool(
        self, prompts: Sequence[list[int]], pooling: Pooling, is_shown: bool
    ) -> list[Generation]:
        """Run prompts that are pooled, and return them in order."""
        resolved = Resolved(SamplingParams(seed=0), pooled(pooling))
        generations = list[Generation]()
        try:
            for ids in prompts:
                call = generations[0].id if generations else None
                generations += self.start(ids, resolved, call)
            is_shown = is_shown and self.progress and len(generations) > 1
            for _ in track(generations, enabled=is_shown):
                self.step()
        finally:
            self.end(generations)
        refuse_failed(generations)
        return generations

    def load_lora_adapter(self, name: str, path: str | Path, *, load_inplace: bool = False) -> None:
        """Load an adapter in peft's format, from a folder or hub id, under a name for prompts.

        `load_inplace` replaces the adapter with this name; running prompts keep the old one. Other
        threads can step meanwhile. ConfigError, with nothing changed, if it cannot be used.
        """
        self.adapters.check_new(name, load_inplace)
        folder, adapters = resolve(str(path)), self.engine.adapters
        assert adapters is not None, "check_new refuses all names without slots"
        adapter = adapters.read(folder)
        with self.lock, interrupts_held():
            self.check_awake()
            unnamed = self.adapters.put(name, adapters.welcome(str(folder), adapter), str(path))
            if unnamed is not None:
                adapters.forget(unnamed)

    def unload_lora_adapter(self, name: str) -> None:
        """Remove an adapter's name. Its memory is freed when its last running prompt ends."""
        with self.lock, interrupts_held():
            unnamed = self.adapters.remove(name)
            if unnamed is not None and self.engine.adapters is not None:
                self.engine.adapters.forget(unnamed)

    def adapters_of(self, lora: Any, lora_request: Any, number: int) -> list[AdapterRef | None]:
        """Return the adapter of each of `number` prompts. RequestError for an unknown name."""
        found: list[AdapterRef | None] = [None] * number
        for i, asked in enumerate(asked_adapters(lora, lora_request, number)):
            if asked is not None and self.adapters.is_to_be_loaded(asked):
                self.load_lora_adapter(asked.lora_name, asked.lora_path, load_inplace=True)
            found[i] = None if asked is None else self.adapters.find(asked.lora_name)
        return found

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer.

        It has `encode`, `decode`, `get_vocab` and `apply_chat_template`.
        """
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's defaults, which also apply to unset fields of a SamplingParams."""
        return self.input_processor.default_params()

    @property
    def weights(self) -> Weights:
        return self.loaded.weights

    def memory(self) -> dict[str, int]:
        """Return the number of KV blocks by holder; a shared block counts once."""
        return self.engine.pool.holders()

    def speculation(self) -> SpeculationState:
        """Return the costs and gains of draft tokens and rows, and the limits on draft tokens."""
        with self.lock:
            return self.engine.speculation()

    def change(self, find: Callable[[], Config]) -> None:
        with self.changes:
            self.check_awake()
            config = self.changed_to(find)
            prepared = self.control.prepare(config)
            with self.lock, interrupts_held():
                self.control.put(prepared)
                self.speculation_control.settle(config)
                self.loaded = self.control.loaded
                self.input_processor = replace(self.input_processor, sources=self.engine.sources)

    def reset_cache(self) -> None:
        """Empty the prefix cache."""
        with self.lock, interrupts_held():
            self.engine.reset_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release memory until `wake_up`; all KV is lost. Requests raise Sleeping meanwhile.

        Level 1 keeps the weights in host memory: from a GPU they move there, and on a CPU they
        stay. Level 2 drops the weights, and `wake_up` reads them again. `mode` is for running
        requests of other threads: "abort" ends them, "wait" completes them. ConfigError if another
        LLM shares the weights.
        """
        check_sleep(level, mode)
        if mode == "keep":
            message = "mode: 'keep' is for AsyncLLM and the server. Use 'abort' or 'wait'"
            raise RequestError(message, "mode")
        with self.changes, self.lock, interrupts_held():
            while mode == "wait" and not self.engine.is_idle:
                self.step()
            self.end(list(self.live.values()))
            self.control.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore the memory of "weights", "kv_cache" or, by default, of both.

        Requests run again once both are awake. ConfigError if memory or files are missing.
        """
        asked = checked_tags(tags)
        with self.changes, self.lock, interrupts_held():
            self.control.wake_up(asked)

    def is_sleeping(self) -> bool:
        return self.control.is_asleep

    def check_awake(self) -> None:
        if self.control.is_asleep:
            raise Sleeping("the LLM sleeps. Call wake_up() first")

    def save_cache(self) -> None:
        """Write the prefix cache to `memory.disk_path`, for the next start. ConfigError if that is
        unset, or cannot be written.
        """
        scheduler = self.engine.scheduler
        tiers = scheduler.tiers
        if tiers is None or tiers.disk is None:
            raise ConfigError("save_cache() needs a folder. Set memory.disk_path")
        with self.lock, interrupts_held():
            keys = scheduler.pool.tier_keys
            scheduler.save(keys, self.engine.target.run_updates)
        if failure := tiers.write_failure(keys):
            raise ConfigError(f"memory.disk_path: {failure}")

    def close(self) -> None:
        """Abort all running requests, and close the engine."""
        self.end(list(self.live.values()))
        self.engine.close()
        for model in filter(None, self.weights):
            model.engines.discard(self.engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def resolve_each(self, params: Params, number: int) -> list[Resolved]:
        """Return the parameters of `number` prompts. RequestError if any are invalid.

        Callers do this before tokenizing, because it costs less.
        """
        if not isinstance(params, list | tuple):
            return [self.resolve(params)] * number if number else []
        if len(params) != number:
            message = f"{number} prompts and {len(params)} SamplingParams. Pass one per prompt"
            raise RequestError(message)
        return [self.resolve(each) for each in params]

    def resolve(self, params: Any) -> Resolved:
        """Check and resolve parameters. None stands for the model's defaults."""
        asked = SamplingParams() if params is None else params
        sampling = self.input_processor.resolve(asked)
        self.grammars.check(sampling)
        return Resolved(asked, sampling)

    def read(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Return the prompt's ids. RequestError if they are invalid."""
        return self.input_processor.read(prompt, self.input_processor.num_kept(params))

    def check(self, prompt: Prompt, params: SamplingParams | None) -> tuple[list[int], Resolved]:
        """Return the prompt's ids and the parameters. RequestError if they are invalid."""
        resolved = self.resolve(params)
        return self.read(prompt, resolved.params), resolved

    def render(
        self, messages: Sequence[Message], options: ChatOptions, params: SamplingParams
    ) -> tuple[list[int], str]:
        """Return the ids of a conversation and its text. RequestError if they are invalid."""
        text = self.input_processor.written(messages, options)
        ids = self.input_processor.encode(text, False, self.input_processor.num_kept(params))
        self.input_processor.check_length(ids)
        return ids, text

    def with_history(
        self, resolved: Resolved, messages: Sequence[Message], text: str, ids: list[int]
    ) -> Resolved:
        """Return the parameters with the tokens before the newest message of a conversation, if the
        model's prefix cache needs them.
        """
        if not self.engine.tables.state_size:
            return resolved
        found = self.input_processor.num_history(messages, text, ids)
        return resolved._replace(sampling=replace(resolved.sampling, num_history=found))

    def start(
        self,
        ids: list[int],
        resolved: Resolved,
        call: int | None = None,
        processors: Sequence[LogitsProcessor] = (),
        adapter: AdapterRef | None = None,
    ) -> list[Generation]:
        """Queue a prompt's choices. `call` is the first id of the same call; None starts a call."""
        params, sampling = resolved
        room = self.input_processor.max_model_len - len(ids)
        sampling = for_prompt(sampling, self.seed_of(params), room)
        samplings = choices_of(sampling, params.num_choices)
        # Outside the lock, so that other threads can step meanwhile.
        digest = "" if adapter is None else adapter.digest
        keys = self.engine.tables.prompt_keys(ids, samplings[0].cache_salt, digest)
        caller = None if call is None else Caller(call)
        with self.lock, interrupts_held():
            self.check_awake()
            requests = self.engine.add_choices(
                ids, samplings, keys=keys, caller=caller, processors=processors, adapter=adapter
            )
            choices = [Generation(r.id, ids, r.sampling, self.tokenizer) for r in requests]
            for generation in choices:
                if processors:
                    generation.disabled_by = "logits_processors"
            self.live.update({generation.id: generation for generation in choices})
        return choices

    def step(self) -> None:
        """Run one step of the engine, and add its outputs to their generations."""
        with self.lock, interrupts_held():
            if self.control.is_asleep:
                return  # the caller's requests have ended
            if self.is_stepping:
                raise RuntimeError("code that a step calls cannot use the same LLM")
            self.is_stepping = True
            try:
                outputs = self.engine.step()
            finally:
                self.is_stepping = False
            for output in outputs:
                generation = self.live[output.id]
                generation.push(output)
                if generation.is_done:  # e.g. at a stop string, which the engine does not know
                    self.engine.finish(output.id)

    def end(self, generations: Iterable[Generation]) -> None:
        """Remove generations. Running ones are aborted, and their blocks freed."""
        with self.lock, interrupts_held():
            for generation in generations:
                self.engine.finish(generation.id)
                generation.finish_reason = generation.finish_reason or "abort"
                self.live.pop(generation.id, None)


def each_prompt(given: Any) -> list[tuple[Any, str | None]]:
    """Return each of one or several prompts, and its text, if that is known."""
    is_text = isinstance(given, str | bytes) or not isinstance(given, Sequence)
    is_one = is_text or (len(given) > 0 and isinstance(given[0], Integral))  # a prompt's ids
    return [unwrapped(prompt) for prompt in ([given] if is_one else given)]


def read_processors(given: Sequence[LogitsProcessor] | None) -> Sequence[LogitsProcessor]:
    if given is not None and not isinstance(given, list | tuple):
        raise RequestError(
            f"logits_processors: {given!r:.50} is not a list of functions. Pass [f]",
            "logits_processors",
        )
    return given or ()


def refuse_failed(generations: Iterable[Generation]) -> None:
    for generation in generations:
        if generation.failure and generation.disabled_by:
            raise RequestError(generation.failure, generation.disabled_by)
        if generation.failure:
            raise of_failure(generation.failure, generation.blamed)
