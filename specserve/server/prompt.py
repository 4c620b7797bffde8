"""Prompts: the chat template, tokens, parameters, grammars and block keys of a request."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from specserve.api.input_processor import InputProcessor, last
from specserve.config import ServerConfig
from specserve.errors import RequestError
from specserve.exchange.fair_queue import FairThreads, owner
from specserve.exchange.messages import Ready
from specserve.exchange.sampling_params import Sampling, SamplingParams, check_ends, ruled
from specserve.memory.blocks import Keys, KVFormat, prompt_keys
from specserve.server.body import BodyKind, is_short
from specserve.server.grammar_process import GrammarSetup
from specserve.server.processes import (
    BodyProcesses,
    GrammarProcesses,
    Processes,
    TemplateProcesses,
)
from specserve.text.chat_template import ChatOptions, ChatTemplate

LONG = 1 << 12  # tokens of prompts from which hashing takes a good part of a millisecond

P = ParamSpec("P")
T = TypeVar("T")


class PromptProcessor:
    """Turns bodies into prompts. Work that may be long runs in threads and bounded processes.

    Processes end with the thread that starts them: call `open` and both `start_` methods in the
    event loop's thread.
    """

    def __init__(self, limits: ServerConfig, min_tpot_ms: float | None) -> None:
        self.limits, self.min_tpot_ms = limits, min_tpot_ms
        # Threads are enough: tokenizing releases the GIL.
        self.threads = FairThreads(2, "text")
        self.readers: BodyProcesses | None = None
        self.templates: TemplateProcesses | None = None
        self.grammars: GrammarProcesses | None = None
        self.loaded: InputProcessor | None = None
        self.kv_formats: Mapping[str, KVFormat] = {}  # of the models with a prefix cache

    @property
    def processor(self) -> InputProcessor:
        assert self.loaded is not None, "a route reads only after check_open"
        return self.loaded

    @property
    def processes(self) -> list[Processes]:
        return [each for each in (self.readers, self.templates, self.grammars) if each is not None]

    def start_templates(self, template: ChatTemplate | None) -> None:
        if template is not None:
            self.templates = TemplateProcesses(template, self.limits.template_seconds)

    def open(self, processor: InputProcessor, kv_formats: Mapping[str, KVFormat]) -> None:
        self.readers = BodyProcesses(self.limits.max_body_items)
        self.loaded, self.kv_formats = processor, kv_formats

    def start_grammars(self, model: Path) -> None:
        """To be called after `open`."""
        ends = self.processor.defaults.eos_token_ids
        if ends:
            setup = GrammarSetup(str(model), self.processor.vocab_size, tuple(ends))
            self.grammars = GrammarProcesses(setup)

    def change(self, ready: Ready) -> None:
        """Note what the engine has from now on."""
        self.kv_formats = ready.kv_formats
        self.loaded = msgspec.structs.replace(self.processor, sources=ready.sources)

    async def in_thread(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work on text in a thread, so that a long prompt does not delay streams."""
        future = self.threads.submit(owner.get(), lambda: do(*args, **kwargs))
        return await asyncio.wrap_future(future)

    async def parse(self, raw: bytes, kind: BodyKind[T]) -> T:
        """Read a body; one that may take long in a process."""
        if is_short(raw):
            return kind.read(raw)
        assert self.readers is not None, "a route reads only after check_open"
        return await self.readers.read(raw, kind)

    async def render(self, messages: Sequence[Mapping[str, object]], options: ChatOptions) -> str:
        """The conversation as text, by the chat template, which has a deadline."""
        with blaming("messages"):
            self.processor.check_chat()
        assert self.templates is not None, "a template has its processes before requests come"
        return await self.templates.render(messages, options)

    async def tokenize(
        self, text: str, field: str, add_special_tokens: bool, kept: int | None = None
    ) -> list[int]:
        """The text's tokens, or the last `kept`, without `check_length`; errors name `field`."""
        encode = self.processor.encode
        with blaming(field):
            return await self.in_thread(encode, text, add_special_tokens, kept)

    async def read_all(
        self,
        prompts: Sequence[str | list[int]],
        kept: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[list[int]]:
        """Every prompt's tokens, or the last `kept` of each; tokenizing stops at the first prompt
        that does not fit.
        """
        read = self.processor.read
        with blaming("prompt"):
            for prompt in prompts:
                if not isinstance(prompt, str):  # before any text is tokenized
                    self.processor.check_length(last(prompt, kept))
            return [await self.in_thread(read, p, kept, add_special_tokens) for p in prompts]

    async def hash(
        self, prompts: Sequence[list[int]], salt: str, adapter: str, tenant: int
    ) -> list[Keys]:
        """The keys of each prompt's blocks; many tokens are hashed in a thread."""

        def hash_all() -> list[Keys]:
            formats = self.kv_formats
            return [prompt_keys(formats, prompt, salt, adapter, tenant) for prompt in prompts]

        is_long = sum(map(len, prompts)) > LONG
        return await self.in_thread(hash_all) if is_long else hash_all()

    async def resolve(self, params: SamplingParams) -> Sampling:
        """The parameters, checked and resolved; RequestError for what the engine or the operator's
        limits exclude. Their grammar is not checked yet.
        """
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
        resolve = self.processor.resolve
        # Bad words are tokenized, and schemas written, which may take long.
        is_long = params.bad_words or params.structured_outputs is not None
        return await self.in_thread(lambda: resolve(params)) if is_long else resolve(params)

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

    async def check_grammar(self, grammar: str, field: str, salt: str = "") -> None:
        """RequestError, which names `field`, for a grammar that cannot be compiled in time."""
        assert self.grammars is not None, "what resolves to a grammar has ends of text"
        await self.grammars.check(grammar, field, salt)

    async def with_grammar(self, sampling: Sampling, grammar: str) -> Sampling:
        """The same parameters for a text that obeys the grammar, which is of tools."""
        ends = self.processor.defaults
        check_ends(sampling.min_tokens, ends, "tools")
        if sampling.grammar:
            raise RequestError(
                "tools: the text has one form: leave out the calls that have to be made, or "
                "strict, or the form of the answer",
                "tools",
            )
        await self.check_grammar(grammar, "tools", sampling.cache_salt)
        return ruled(sampling, grammar, ends.eos_token_ids)

    async def close(self) -> None:
        for processes in self.processes:
            await processes.close()
        self.threads.close()


@contextmanager
def blaming(field: str) -> Iterator[None]:
    """Name `field` in a RequestError that the block raises."""
    try:
        yield
    except RequestError as e:
        e.param = field
        raise
