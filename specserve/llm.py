"""The offline face of the engine: prompts in, outputs or streams out, in this process."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
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
        given = {
            "model.path": model and str(model),
            "model.dtype": None if dtype == "auto" else dtype,
            "drafter.model": draft_model and str(draft_model),
            "drafter.name": drafter,
        }
        overrides = {**(set or {}), **{k: v for k, v in given.items() if v is not None}}
        self.config: Config = load_config(Path(config) if config else None, overrides)
        self.progress = progress
        with LoadProgress(progress) as bar:
            self.loaded = build(self.config, bar)
        if progress:
            show_phases(self.loaded.phases)
        self.engine, self.tokenizer = self.loaded.engine, self.loaded.tokenizer
        self.live: dict[int, Generation] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """All prompts together; their outputs in order. All are checked before any is run."""
        asked: list[Any] = [prompts] if is_one(prompts) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(asked)
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
        """(text, token_ids) for every step that has some; the generator's value is the Output."""
        generation = self.start(*self.check(prompt, params))
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
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        vocab_size, limit = self.vocab_size, self.loaded.max_model_len - 1
        if not ids:
            raise RequestError("the prompt has no tokens: give at least one")
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise RequestError(f"prompt token {token!r} is no id: ids lie in [0, {vocab_size})")
        if len(ids) > limit:
            raise PromptTooLong(len(ids), limit)
        asked = params or SamplingParams()
        resolve(asked, self.loaded.defaults, 1, vocab_size)
        return ids, asked

    def encode(self, prompt: str) -> list[int]:
        try:
            return list(self.tokenizer(prompt)["input_ids"])
        except (TypeError, UnicodeError) as e:
            raise RequestError(f"the prompt is no valid text: {e}") from e

    @property
    def vocab_size(self) -> int:
        return self.engine.target.decoder.config.vocab_size

    def start(self, ids: list[int], params: SamplingParams) -> Generation:
        room = self.loaded.max_model_len - len(ids)
        sampling = resolve(params, self.loaded.defaults, room, self.vocab_size)
        generation = Generation(self.engine.add(ids, sampling), self.tokenizer)
        self.live[generation.request.id] = generation
        return generation

    def step(self) -> None:
        """One step of the engine; every live generation gets what is its own."""
        for request, tokens in map(msgspec.structs.astuple, self.engine.step()):
            generation = self.live[request.id]
            _, _, is_stopped = generation.push(tokens)
            if is_stopped:
                self.engine.finish(request, "stop")

    def end(self, generations: Iterable[Generation]) -> None:
        """Forget generations; one that is still running is given up, and its blocks go back."""
        for generation in generations:
            self.engine.finish(generation.request, generation.request.finish_reason or "abort")
            self.live.pop(generation.request.id, None)


def is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """A string, or one list of token ids."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
