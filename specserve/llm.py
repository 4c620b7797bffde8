"""The offline face of the engine: prompts in, outputs or streams out, in this process."""

import signal
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from threading import RLock, current_thread, main_thread
from types import FrameType, TracebackType
from typing import Any, Self

import msgspec

from specserve.config import Config, load_config
from specserve.engine.build import build
from specserve.errors import ConfigError, PromptTooLong, RequestError
from specserve.progress import LoadProgress, show_phases, track
from specserve.sampling import SamplingParams, resolve
from specserve.scheduling import Request
from specserve.text import TextStream

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Timing(msgspec.Struct, frozen=True):
    """Milliseconds, queueing included; see style.md for TTFT and TPOT."""

    ttft_ms: float
    tpot_ms: float | None  # None for a single token
    total_ms: float


class Speculation(msgspec.Struct, frozen=True):
    drafter: str
    steps: int  # target steps that had a root
    drafted: int
    accepted: int
    mean_acceptance_length: float | None  # None where nothing was drafted


class Output(msgspec.Struct, frozen=True):
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str  # "stop" | "length"
    seed: int
    usage: Usage
    timing: Timing
    speculation: Speculation


class Generation:
    """One request on its way: what it has said, and what of that has not been shown."""

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self.request = request
        self.prompt = request.token_ids.tolist()
        self.stream = TextStream(tokenizer, self.prompt, request.sampling.stop)
        self.token_ids: list[int] = []
        self.text = ""
        self.num_dropped = 0  # tokens beyond a stop string
        self.is_done = False

    def push(self, tokens: Sequence[int]) -> tuple[str, list[int], bool]:
        """A step's tokens; the text and ids that they add, and whether a stop string ended it."""
        text, num_tokens, is_stopped = self.stream.push(tokens)
        self.is_done = is_stopped or self.request.finish_reason is not None
        if self.is_done and not is_stopped:
            text += self.stream.finish()
        kept = list(tokens[:num_tokens])
        self.num_dropped = len(tokens) - num_tokens
        self.token_ids += kept
        self.text += text
        return text, kept, is_stopped

    def output(self, drafter: str) -> Output:
        r, n = self.request, len(self.token_ids)
        spread = 1e3 * (r.last_token_at - r.first_token_at)
        emitted = r.num_step_tokens - self.num_dropped if r.num_step_tokens else 0
        return Output(
            prompt_token_ids=self.prompt,
            token_ids=self.token_ids,
            text=self.text,
            finish_reason=r.finish_reason or "abort",
            seed=r.sampling.seed,
            usage=Usage(len(self.prompt), n, len(self.prompt) + n),
            timing=Timing(
                ttft_ms=1e3 * (r.first_token_at - r.arrived),
                tpot_ms=spread / (n - 1) if n > 1 else None,
                total_ms=1e3 * (r.last_token_at - r.arrived),
            ),
            speculation=Speculation(
                drafter=drafter,
                steps=r.num_steps,
                drafted=r.num_drafted,
                accepted=r.num_accepted,
                mean_acceptance_length=emitted / r.num_steps if r.num_drafted else None,
            ),
        )


class LLM:
    """A model and a drafter, loaded once. Close it, or use it as a context manager.

    drafter unset is "model" where a draft model is given, else "ngram"; "none" is off. Arguments
    win over `set` ("section.key" -> value), and `set` wins over the file `config`. Errors:
    ConfigError for anything wrong here, RequestError for a prompt or its parameters.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft_model: str | Path | None = None,
        drafter: str | None = None,
        dtype: str = "auto",
        config: str | Path | None = None,
        set: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> None:
        if set is not None and not isinstance(set, Mapping):
            raise ConfigError(f"set = {set!r} is no mapping: give {{'section.key': value}}")
        given = {
            "model.path": None if model is None else str(model),
            "model.dtype": None if dtype == "auto" else dtype,
            "drafter.model": None if draft_model is None else str(draft_model),
            "drafter.name": drafter,
        }
        overrides = {**(set or {}), **{k: v for k, v in given.items() if v is not None}}
        file = None if config is None else Path(config)
        self.config: Config = load_config(file, overrides)
        self.progress = progress
        with LoadProgress(progress) as bar:
            self.loaded = build(self.config, bar)
        if progress:
            show_phases(self.loaded.phases)
        self.engine, self.tokenizer = self.loaded.engine, self.loaded.tokenizer
        self.live: dict[int, Generation] = {}
        self.lock = RLock()  # threads may share an LLM: any thread's step moves all of them on

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """All prompts together; their outputs in order. All are checked before any is run."""
        asked: list[Any] = [prompts] if is_one(prompts) else list(prompts)
        each: list[Any] = (
            list(params) if isinstance(params, list | tuple) else [params] * len(asked)
        )
        if len(each) != len(asked):
            raise RequestError(
                f"{len(asked)} prompts and {len(each)} SamplingParams: give one each"
            )
        checked = [self.check(p, q) for p, q in zip(asked, each, strict=True)]
        generations = [self.start(*c) for c in checked]
        try:
            for _ in track(generations, enabled=self.progress and len(asked) > 1):
                self.step()
        finally:
            self.end(generations)
        return [g.output(self.loaded.drafter) for g in generations]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[tuple[str, list[int]], None, Output]:
        """(text, token_ids) for every step that has some; the generator's value is the Output.

        The prompt is checked at once, and starts to run when the first step is asked for.
        """
        return self.stream_checked(*self.check(prompt, params))

    def stream_checked(
        self, ids: list[int], params: SamplingParams
    ) -> Generator[tuple[str, list[int]], None, Output]:
        generation = self.start(ids, params)
        shown, num_shown = 0, 0
        try:
            while num_shown < len(generation.token_ids) or not generation.is_done:
                if num_shown == len(generation.token_ids):  # else somebody else's step brought some
                    self.step()
                text, token_ids = generation.text[shown:], generation.token_ids[num_shown:]
                shown, num_shown = len(generation.text), len(generation.token_ids)
                if token_ids:
                    yield text, token_ids
        finally:
            self.end([generation])
        return generation.output(self.loaded.drafter)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """The answers to one conversation, or to several, through the model's chat template."""
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(f"a conversation is a list of messages, not {messages!r:.50}")
        is_single = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_single else messages
        return self.generate([self.render(c) for c in conversations], params)

    def memory(self) -> dict[str, int]:
        """Blocks by holder."""
        requests = list(self.engine.scheduler.requests())
        return {
            "target": sum(len(r.table.blocks) for r in requests),
            "draft": sum(len(r.draft_table.blocks) for r in requests),
            "free": self.engine.pool.num_free,
        }

    def close(self) -> None:
        """End what is running."""
        self.end(list(self.live.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def render(self, messages: Sequence[Message]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise ConfigError(
                "the model's folder has no chat template: use generate, or add chat_template.jinja"
            )
        try:
            ids = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as e:  # a template is the model's own code, and raises what it likes
            raise RequestError(f"the chat template refuses these messages: {e}") from e
        return list(ids)

    def check(
        self, prompt: Prompt, params: SamplingParams | None
    ) -> tuple[list[int], SamplingParams]:
        """The prompt's ids; RequestError where it cannot be served."""
        ids = self.encode(prompt) if isinstance(prompt, str) else self.as_ids(prompt)
        limit = self.loaded.max_model_len - 1
        if not ids:
            raise RequestError("the prompt has no tokens: give at least one")
        if len(ids) > limit:
            raise PromptTooLong(len(ids), limit)
        asked = SamplingParams() if params is None else params
        if not isinstance(asked, SamplingParams):
            raise RequestError(f"params: {asked!r} is not a SamplingParams")
        resolve(asked, self.loaded.defaults, 1, self.vocab_size)
        return ids, asked

    def encode(self, prompt: str) -> list[int]:
        try:
            with self.lock:
                return list(self.tokenizer(prompt)["input_ids"])
        except (TypeError, UnicodeError) as e:
            raise RequestError(f"the prompt is no valid text: {e}") from e

    def as_ids(self, prompt: Any) -> list[int]:
        """Token ids of any integer type, as Python's own."""
        if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
            raise RequestError(f"a prompt is a string or a list of token ids, not {prompt!r:.50}")
        ids, vocab_size = list(prompt), self.vocab_size
        for token in ids:
            is_id = isinstance(token, Integral) and not isinstance(token, bool)
            if not is_id or not 0 <= token < vocab_size:
                raise RequestError(
                    f"prompt token {token!r:.50} is no id: ids lie in [0, {vocab_size})"
                )
        return [int(token) for token in ids]

    @property
    def vocab_size(self) -> int:
        return self.engine.target.decoder.config.vocab_size

    def start(self, ids: list[int], params: SamplingParams) -> Generation:
        room = self.loaded.max_model_len - len(ids)
        sampling = resolve(params, self.loaded.defaults, room, self.vocab_size)
        with self.lock, interrupts_held():
            generation = Generation(self.engine.add(ids, sampling), self.tokenizer)
            self.live[generation.request.id] = generation
        return generation

    def step(self) -> None:
        """One step of the engine; every live generation gets what is its own."""
        with self.lock, interrupts_held():
            for emission in self.engine.step():
                generation = self.live[emission.request.id]
                _, _, is_stopped = generation.push(emission.tokens)
                if is_stopped:
                    self.engine.finish(emission.request, "stop")

    def end(self, generations: Iterable[Generation]) -> None:
        """Forget generations; one that is still running is given up, and its blocks go back."""
        with self.lock, interrupts_held():
            for generation in generations:
                request = generation.request
                self.engine.finish(request, request.finish_reason or "abort")
                generation.is_done = True
                self.live.pop(request.id, None)


def is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """A string, or one list of token ids."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], Integral)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait for the end of a step: half a step done is a state nobody can go on from."""
    if current_thread() is not main_thread():
        yield  # only the main thread is ever interrupted
        return
    came: list[FrameType | None] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
    if came and callable(before):
        before(signal.SIGINT, came[0])
