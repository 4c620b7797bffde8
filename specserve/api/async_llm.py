"""The API for an event loop: outputs are streamed, and the engine runs in another process."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, Self

from msgspec.structs import replace

from specserve.api.base import BaseLLM, Lora, Prompt, Resolved, chat_options
from specserve.api.beam_search import BeamSearchParams
from specserve.api.beam_search import checked as checked_beams
from specserve.api.input_processor import (
    GrammarCheck,
    InputProcessor,
    load_text_files,
    make_input_processor,
    one_of,
    unwrapped,
)
from specserve.api.lora import LoRARequest, asked_adapters, modules_of
from specserve.api.outputs import Generation, Output, output
from specserve.api.vllm_arguments import EngineArgs, check_call
from specserve.config import Config
from specserve.errors import EngineDied, RequestError, SpecserveError, of_failure
from specserve.exchange.client import EngineClient
from specserve.exchange.messages import AdapterRef, Ready, SpeculationState, StepOutput
from specserve.exchange.sampling_params import Sampling, SamplingParams, choices_of, for_prompt
from specserve.exchange.sleep import check_sleep, checked_tags
from specserve.exchange.sleep_control import SleepControl
from specserve.exchange.spawn import ForkServer
from specserve.memory.blocks import Keys, prompt_keys
from specserve.models.folder import resolve
from specserve.text.template_messages import Message
from specserve.text.tokenizer import Tokenizer

# Reads a prompt: number of its last tokens to keep -> ids and text.
ReadPrompt = Callable[[InputProcessor, int | None], tuple[list[int], str | None]]


class ReadInput(NamedTuple):
    """A prompt, its text, the keys of its blocks, and `Sampling.num_history`."""

    ids: list[int]
    text: str | None
    keys: Keys
    num_history: int


class ReadyEngine:
    """A loaded engine process."""

    def __init__(
        self,
        client: EngineClient,
        ready: Ready,
        processor: InputProcessor,
        release_shared: Callable[[], None],
    ) -> None:
        self.client, self.ready, self.input_processor = client, ready, processor
        self.grammars = GrammarCheck(processor)
        self.sleep_control = SleepControl(client, release_shared=release_shared)

    def take_change(self, ready: Ready) -> None:
        """Store the state after a change of drafters."""
        self.ready = ready
        self.input_processor = replace(self.input_processor, sources=ready.sources)

    def resolve(self, params: SamplingParams) -> Resolved:
        """Check and resolve the parameters. RequestError if they are invalid."""
        sampling = self.input_processor.resolve(params)
        self.grammars.check(sampling)
        return Resolved(params, sampling)

    def read(
        self,
        read: ReadPrompt,
        params: SamplingParams,
        adapter: str,
        messages: Sequence[Message] | None = None,
    ) -> ReadInput:
        """Return a prompt and the keys of its blocks for an adapter's digest. `messages` are the
        conversation that it has.
        """
        processor, formats = self.input_processor, self.ready.kv_formats
        ids, text = read(processor, processor.num_kept(params))
        processor.check_length(ids)
        num_history = 0
        if messages is not None and text is not None and any(f.has_state for f in formats.values()):
            num_history = processor.num_history(messages, text, ids)
        keys = prompt_keys(formats, ids, params.cache_salt, adapter)
        return ReadInput(ids, text, keys, num_history)


class AsyncLLM(BaseLLM[Coroutine[Any, Any, None]]):
    """A model and a drafter in a separate process, for one event loop.

    `start`, `async with` or the first request loads it. Close it, or use it as an async context
    manager. `LLM` describes the arguments and errors.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft_model: str | Path | None = None,
        drafter: str | None = None,
        dtype: str = "auto",
        config: str | Path | Sequence[str | Path] | None = None,
        set: Mapping[str, Any] | None = None,
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
        self.adapter_changes = asyncio.Lock()  # one at a time
        self.starting: asyncio.Task[ReadyEngine] | None = None
        self.live: dict[str, AsyncRequest] = {}
        self.num_asked = 0
        self.is_closed = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        return cls(**vars(engine_args))

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        lora: Lora = None,
        lora_request: Lora = None,
        **vllm: Any,
    ) -> AsyncGenerator[Output, None]:
        """Yield an output for each step, with all of the text so far; the last one is `finished`.

        Leaving the iteration aborts the request. `LLM.generate` describes `lora`, `lora_request`
        and `vllm`.
        """
        check_call("AsyncLLM.generate", vllm)
        plain, text = unwrapped(prompt)

        def read(processor: InputProcessor, kept: int | None) -> tuple[list[int], str | None]:
            return processor.read(plain, kept), text

        [chosen] = asked_adapters(lora, lora_request, 1)
        return self.answer(read, one_of(params, sampling_params), request_id, chosen)

    def beam_search(
        self,
        prompt: Prompt,
        request_id: str | None,
        params: BeamSearchParams,
        *,
        lora: Lora = None,
        lora_request: Lora = None,
    ) -> AsyncGenerator[Output, None]:
        """Yield one output with the best beams, once the search is over. The order of arguments is
        vLLM's. `LLM.beam_search` describes the search.
        """
        sampling = checked_beams(params).sampling
        plain, text = unwrapped(prompt)

        def read(processor: InputProcessor, kept: int | None) -> tuple[list[int], str | None]:
            return processor.read(plain, kept), text

        [chosen] = asked_adapters(lora, lora_request, 1)
        return self.answer(read, sampling, request_id, chosen, is_whole=True)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        lora: Lora = None,
        lora_request: Lora = None,
        **vllm: Any,
    ) -> AsyncGenerator[Output, None]:
        """Yield outputs as `generate`, for a conversation and the model's chat template."""
        check_call("AsyncLLM.chat", vllm)
        given = add_generation_prompt, continue_final_message, chat_template_kwargs, tools
        options = chat_options(*given)

        def read(processor: InputProcessor, kept: int | None) -> tuple[list[int], str | None]:
            text = processor.written(messages, options)
            return processor.encode(text, False, kept), text

        [chosen] = asked_adapters(lora, lora_request, 1)
        asked = one_of(params, sampling_params)
        return self.answer(read, asked, request_id, chosen, messages=messages)

    async def answer(
        self,
        read: ReadPrompt,
        params: SamplingParams | None,
        request_id: str | None,
        lora: LoRARequest | None,
        is_whole: bool = False,
        messages: Sequence[Message] | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Yield outputs as they grow; `is_whole`: only the last one. `messages` are the
        conversation of the prompt.
        """
        arrived = perf_counter()
        engine = await self.start()
        asked = SamplingParams() if params is None else params
        is_long = isinstance(asked, SamplingParams) and asked.structured_outputs is not None
        resolve = partial(engine.resolve, asked)
        resolved = await asyncio.to_thread(resolve) if is_long else resolve()
        if asked.is_ranked and not is_whole:
            name = "use_beam_search" if asked.use_beam_search else "best_of"
            other = "beam_search" if asked.use_beam_search else "LLM.generate"
            raise RequestError(
                f"{name}: not supported for streamed outputs. Omit it, or call {other}", name
            )
        seed = self.seed_of(asked)
        adapter = None
        if lora is not None:
            if self.adapters.is_to_be_loaded(lora):
                await self.load_lora_adapter(lora.lora_name, lora.lora_path, load_inplace=True)
            adapter = self.adapters.find(lora.lora_name)
        digest = "" if adapter is None else adapter.digest
        ids, text, keys, num_history = await asyncio.to_thread(
            engine.read, read, asked, digest, messages
        )
        self.check_open(engine)
        id = self.new_id(request_id)
        room = engine.input_processor.max_model_len - len(ids)
        sampling = replace(for_prompt(resolved.sampling, seed, room), num_history=num_history)
        samplings = choices_of(sampling, asked.num_choices)
        request = self.live[id] = AsyncRequest(engine, ids, samplings, keys, adapter)
        for generation in request.generations:
            generation.arrived = arrived
        try:
            is_finished = False
            while not is_finished:
                await request.news()
                so_far = output(request.generations, engine.ready.drafter, asked, text, id)
                is_finished = so_far.finished
                if is_finished or not is_whole:
                    yield so_far
        finally:
            del self.live[id]
            request.abort()

    def new_id(self, asked: str | None) -> str:
        if asked is not None and asked in self.live:
            message = f"request_id {asked!r:.100} belongs to a running request. Choose another one"
            raise RequestError(message, "request_id")
        while asked is None or asked in self.live:
            asked, self.num_asked = str(self.num_asked), self.num_asked + 1
        return asked

    async def abort(self, request_id: str) -> None:
        """End a request, if it still runs. Its last output has all tokens so far."""
        if request_id in self.live:
            self.live[request_id].abort()

    async def get_tokenizer(self) -> Tokenizer:
        return (await self.start()).input_processor.tokenizer

    async def speculation(self) -> SpeculationState:
        """Return the costs and gains of draft tokens and rows, and the limits on draft tokens."""
        return await (await self.start()).client.speculation()

    async def change(self, find: Callable[[], Config]) -> None:
        checked = partial(asyncio.to_thread, self.changed_to, find)
        await (await self.start()).client.change(checked)

    async def load_lora_adapter(
        self, name: str, path: str | Path, *, load_inplace: bool = False
    ) -> None:
        """Do the same as `LLM.load_lora_adapter`. Steps continue while it is loaded."""
        await self.name_adapter(await self.start(), name, path, load_inplace)

    async def name_adapter(
        self, engine: ReadyEngine, name: str, path: str | Path, in_place: bool = False
    ) -> None:
        async with self.adapter_changes:
            self.adapters.check_new(name, in_place)
            folder = await asyncio.to_thread(resolve, str(path))
            ref = await engine.client.load_adapter(str(folder))
            unnamed = self.adapters.put(name, ref, str(path))
            if unnamed is not None:
                engine.client.forget_adapter(unnamed)

    async def unload_lora_adapter(self, name: str) -> None:
        """Do the same as `LLM.unload_lora_adapter`."""
        engine = await self.start()
        async with self.adapter_changes:
            unnamed = self.adapters.remove(name)
            if unnamed is not None:
                engine.client.forget_adapter(unnamed)

    async def reset_cache(self) -> None:
        """Empty the prefix cache."""
        await (await self.start()).client.reset_cache()

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release memory until `wake_up`, as `LLM.sleep`. Requests raise Sleeping meanwhile.

        `mode` is for running requests: "abort" ends them, "wait" waits for their end, and "keep"
        continues them after `wake_up`, with the same text.
        """
        check_sleep(level, mode)
        engine = await self.start()
        for request in [*self.live.values()] if mode == "abort" else ():
            request.abort()
        await engine.sleep_control.sleep(level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do the same as `LLM.wake_up`."""
        asked = checked_tags(tags)
        await (await self.start()).sleep_control.wake_up(asked)

    async def is_sleeping(self) -> bool:
        return (await self.start()).client.sleep_state.level > 0

    async def start(self) -> ReadyEngine:
        """Load the models if they are not loaded yet, and return the engine."""
        self.check_open()
        if self.starting is None:
            self.starting = asyncio.create_task(self.load())
        return await asyncio.shield(self.starting)

    async def load(self) -> ReadyEngine:
        folders = await asyncio.to_thread(self.check_files)
        modules = modules_of(self.config, self.adapters.model)
        # In the loop's thread, because the process ends with the thread that started it.
        engines = ForkServer(self.config, folders.drafters)
        saves_blocks = self.config.memory.disk_path is not None
        client = EngineClient(engines.start(), engines.start, saves_blocks)
        try:
            await client.connect()
            paths = folders.target, folders.draft, self.config.model.chat_template
            files = await asyncio.to_thread(load_text_files, *paths)
            ready = await client.ready
            limits = ready.vocab_size, ready.max_model_len
            processor = make_input_processor(files, *limits, ready.sources)
            engine = ReadyEngine(client, ready, processor, engines.release)
            for name, folder in modules.items():
                await self.name_adapter(engine, name, folder)
        except BaseException:
            client.close()
            raise

        def take_change(config: Config | None, ready: Ready) -> None:
            self.speculation_control.settle(self.config if config is None else config)
            engine.take_change(ready)

        client.on_change, client.begin_with = take_change, engines.begin_with
        return engine

    def check_open(self, engine: ReadyEngine | None = None) -> None:
        if self.is_closed:
            raise EngineDied("this AsyncLLM is closed. Create a new one")
        if engine is not None and engine.client.died.is_set():
            raise EngineDied("the engine process has ended. Create a new AsyncLLM")
        if engine is not None:
            engine.client.check_awake()

    async def close(self) -> None:
        """Abort all running requests, and end the engine process."""
        starting = self.stop()
        if starting is not None:
            with suppress(asyncio.CancelledError, SpecserveError):
                engine = await starting
                await engine.client.leave()

    def shutdown(self) -> None:
        """Do the same as `close` outside of a coroutine. Blocks while the engine process ends."""
        starting = self.stop()
        if starting is not None and starting.done() and not starting.cancelled():
            with suppress(SpecserveError):
                starting.result().client.close()

    def stop(self) -> asyncio.Task[ReadyEngine] | None:
        """Abort all requests and the loading; return the task that loads, if there is one."""
        self.is_closed = True
        for request in self.live.values():
            request.abort()
        starting, self.starting = self.starting, None
        if starting is not None:
            starting.cancel()
        return starting

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


class AsyncRequest:
    """The running sequences of one prompt. It receives the engine's outputs."""

    def __init__(
        self,
        engine: ReadyEngine,
        ids: list[int],
        samplings: Sequence[Sampling],
        keys: Keys,
        adapter: AdapterRef | None,
    ) -> None:
        self.client, self.changed = engine.client, asyncio.Event()
        self.error: SpecserveError | None = None
        listeners = [self] * len(samplings)
        numbers = self.client.add(ids, samplings, listeners, keys, adapter=adapter)
        tokenizer = engine.input_processor.tokenizer
        both = zip(numbers, samplings, strict=True)
        self.generations = [Generation(number, ids, its, tokenizer) for number, its in both]

    async def news(self) -> None:
        """Wait for new tokens, the end or an error since the last call."""
        await self.changed.wait()
        self.changed.clear()
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        for generation in self.generations:
            self.client.finish(generation.id)
            generation.finish_reason = generation.finish_reason or "abort"
        self.changed.set()

    def push(self, output: StepOutput) -> None:
        generation = self.generations[output.id - self.generations[0].id]
        if output.failure:
            self.fail(of_failure(output.failure, output.blamed))
            return
        generation.push(output)
        if output.is_of_prompt:
            generation.prompt_logprob_tables()
            return
        if generation.is_done:  # the engine does not look for stop strings
            self.client.finish(generation.id)
        self.changed.set()

    def fail(self, error: SpecserveError) -> None:
        self.error = error
        self.changed.set()
