"""Outputs for callers: the text and tokens of a request so far, its counts and times."""

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter

import msgspec
from msgspec.structs import replace

from specserve.exchange.messages import (
    SourceCounts,
    StepDetails,
    StepOutput,
    TokenLogprobs,
    VerifiedTree,
)
from specserve.exchange.sampling_params import Sampling, SamplingParams
from specserve.text.tokenizer import TextStream, Tokenizer
from specserve_drafters.prediction import Alignment


class Logprob(msgspec.Struct, frozen=True, gc=False):
    logprob: float  # natural logarithm of the probability
    rank: int  # 1 for the most likely token
    decoded_token: str  # U+FFFD replaces bytes that are not UTF-8 by themselves


class TokenUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    accepted_prediction_tokens: int = 0  # tokens of the predicted text that are in the output
    rejected_prediction_tokens: int = 0  # tokens of the predicted text that are not


class Timing(msgspec.Struct, frozen=True):
    """Milliseconds since the request arrived, including the time in the queue."""

    ttft_ms: float  # 0 before the first token
    tpot_ms: float | None  # mean per output token after the first; None for a single token
    total_ms: float


class RequestSpeculation(msgspec.Struct, frozen=True):
    drafter: str
    steps: int  # target steps that had a root
    drafted: int
    accepted: int
    mean_acceptance_length: float | None  # tokens per step; None without steps
    fallbacks: int  # drafts without the draft model, because it had not caught up
    sources: dict[str, SourceCounts] = {}  # sources that proposed tokens, in the engine's order
    details: list[StepDetails] = []  # of every step, if the request asked for them
    disabled_by: str | None = None  # the parameter that turns speculation off


class CompletionOutput(msgspec.Struct, frozen=True):
    """One sequence of a prompt, with vLLM's field names if vLLM has the field."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None  # "stop" | "length" | "abort"; None while it runs
    stop_reason: str | int | None  # the stop string or stop id of the request; None: another end
    seed: int
    timing: Timing
    speculation: RequestSpeculation
    logprobs: list[dict[int, Logprob]] | None = None  # per token: its own, and the most likely ones
    cumulative_logprob: float | None = None  # sum over all tokens; None without logprobs


class RequestOutput(msgspec.Struct, frozen=True):
    """The output of a prompt. `usage` counts all sequences; other fields describe the first one.

    vLLM's `outputs` is another name of `choices`.
    """

    request_id: str
    prompt: str | None  # the template's text for a chat; None for a prompt of ids
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    seed: int
    usage: TokenUsage
    timing: Timing
    speculation: RequestSpeculation
    choices: list[CompletionOutput]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # the first entry is None

    @property
    def outputs(self) -> list[CompletionOutput]:
        return self.choices

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def metrics(self) -> None:
        """None, as in vLLM without statistics. Use `timing`."""
        return None

    @property
    def num_cached_tokens(self) -> int:
        return self.usage.cached_tokens


Output = RequestOutput


class Generation:
    """Collects the outputs of a sequence, for its text, statistics and timing.

    It searches for stop strings, which the engine does not know. Call the engine's `finish` once
    `is_done`. The engine needs `max_tokens` of at least 1; for 0, its token is dropped here.
    """

    def __init__(
        self, id: int, prompt: Sequence[int], sampling: Sampling, tokenizer: Tokenizer
    ) -> None:
        self.id, self.prompt, self.sampling = id, prompt, sampling
        self.stream = TextStream(
            tokenizer,
            prompt,
            sampling.stop,
            sampling.include_stop_str_in_output,
            sampling.skip_special_tokens,
            sampling.min_tokens,
        )
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.failure = self.blamed = ""
        self.pooled = b""  # the prompt's vector, float32, in pooling
        # The parameter that turns speculation off
        self.disabled_by = None if sampling.beam_search is None else "use_beam_search"
        self.steps: list[tuple[int, int]] = []  # drafted and accepted tokens of each verified step
        self.num_step_tokens = 0  # tokens of these steps
        self.num_cached = self.num_fallbacks = self.num_search_steps = 0
        self.sources: dict[str, SourceCounts] = {}
        self.details: list[StepDetails] = []
        self.ends: list[int] = []  # ends of the latest step's tokens in its text
        self.logprobs: list[TokenLogprobs] = []  # of token_ids, if they were requested
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt, without its first token
        self.has_starts = sampling.logprobs is not None
        self.starts: list[int] = []  # starts of tokens in the text, before a stop string is cut off
        self.tables: list[dict[int, Logprob]] = []  # of the first `logprobs`; extended on use
        self.prompt_tables: list[dict[int, Logprob] | None] = [None]  # likewise
        self.alignment = Alignment(sampling.prediction) if sampling.prediction else None
        self.arrived = perf_counter()
        self.admitted_at = self.first_token_at = self.last_token_at = 0.0

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_queued(self) -> bool:
        """Whether nothing has come so far."""
        return not self.token_ids and not self.is_done

    @property
    def num_predicted(self) -> int:
        """Tokens of the predicted text that are in the output, whether they were drafted or not."""
        return 0 if self.alignment is None else self.alignment.num_came

    def push(self, output: StepOutput) -> str:
        """Add a step's output, and return the text that it adds."""
        self.failure, self.blamed = output.failure, output.blamed
        self.prompt_logprobs += output.prompt_logprobs
        if output.is_of_prompt:
            return ""
        if not self.sampling.max_tokens:  # the step computed the prompt; drop its token
            output = replace(output, tokens=[], logprobs=[], finish_reason="length")
        now = perf_counter()
        if output.pooled:
            self.pooled, self.finish_reason = output.pooled, output.finish_reason
            self.admitted_at, self.num_cached = output.admitted_at, output.num_cached
            self.first_token_at = self.last_token_at = now
            return ""
        if not self.token_ids:  # later values can come from another engine process
            self.admitted_at, self.num_cached = output.admitted_at, output.num_cached
        self.num_fallbacks += output.is_fallback
        self.first_token_at = self.first_token_at or output.first_token_at or now
        self.num_search_steps = output.num_steps
        self.last_token_at = now
        text, num_tokens, ends = self.take(output)
        self.ends = ends
        if self.sampling.return_speculation_details:
            ends[-1:] = [len(text)] if ends else []  # held-back text belongs to the last token
            self.details.append(step_details(output, [len(self.text) + end for end in ends]))
        self.token_ids += output.tokens[:num_tokens]
        if self.alignment is not None:
            self.alignment.follow_all(output.tokens[:num_tokens])
        self.logprobs += output.logprobs[:num_tokens]
        self.text += text
        if output.is_verified:
            self.steps.append((output.num_drafted, output.num_accepted))
            self.num_step_tokens += num_tokens
        if output.sources:
            self.sources = sums_of([self.sources, output.sources])
        return text

    def take(self, output: StepOutput) -> tuple[str, int, list[int]]:
        """Return the text of a step's tokens, the number of tokens that count, and their ends.

        A stop token has no text, unless stop strings are included.
        """
        is_stop = output.finish_reason == "stop"
        is_silent = is_stop and not self.sampling.include_stop_str_in_output
        given = output.tokens[:-1] if is_silent else output.tokens
        text, num_tokens, stop, ends, starts = self.stream.push(given)
        if self.has_starts:
            self.starts += starts
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
            return text, num_tokens, ends
        self.finish_reason = output.finish_reason
        if is_stop and output.tokens[-1] not in self.sampling.eos_ids:
            self.stop_reason = output.tokens[-1]
        if self.is_done:
            rest, stop = self.stream.finish(output.tokens[-1] if is_silent else None)
            text += rest
            if stop is not None and self.finish_reason != "error":
                self.finish_reason, self.stop_reason = "stop", stop
        if is_silent and self.has_starts:
            self.starts.append(self.stream.num_taken)
        return text, len(output.tokens), [*ends, len(text)] if is_silent else ends

    @property
    def num_drafted(self) -> int:
        return sum(drafted for drafted, _ in self.steps)

    @property
    def num_accepted(self) -> int:
        return sum(accepted for _, accepted in self.steps)

    @property
    def num_gaps(self) -> int:
        """Output tokens after the first; with beam search, steps after the first."""
        return max(0, (self.num_search_steps or len(self.token_ids)) - 1)

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first."""
        spread = self.last_token_at - self.first_token_at
        return spread / self.num_gaps if self.num_gaps else None

    def timing(self) -> Timing:
        n, tpot = len(self.token_ids), self.tpot
        return Timing(
            ttft_ms=1e3 * (self.first_token_at - self.arrived) if n else 0.0,
            tpot_ms=None if tpot is None else 1e3 * tpot,
            total_ms=1e3 * (self.last_token_at - self.arrived) if n else 0.0,
        )

    def speculation(self, drafter: str) -> RequestSpeculation:
        return RequestSpeculation(
            drafter=drafter,
            steps=len(self.steps),
            drafted=self.num_drafted,
            accepted=self.num_accepted,
            mean_acceptance_length=self.num_step_tokens / len(self.steps) if self.steps else None,
            fallbacks=self.num_fallbacks,
            sources=proposing(self.sources),
            details=[*self.details],
            disabled_by=self.disabled_by,
        )

    def prompt_logprob_tables(self) -> list[dict[int, Logprob] | None] | None:
        """Return the tables; None until the prompt is computed. Earlier calls prepare them."""
        if self.sampling.prompt_logprobs is None:
            return None
        begin, end = len(self.prompt_tables), 1 + len(self.prompt_logprobs)
        new = self.prompt[begin:end], self.prompt_logprobs[begin - 1 :]
        self.prompt_tables += logprob_tables(*new, self.stream.tokenizer)
        return self.prompt_tables if self.first_token_at else None

    def snapshot(self, index: int, drafter: str, has_logprobs: bool = False) -> CompletionOutput:
        """Return a copy of the current state."""
        if has_logprobs:
            begin = len(self.tables)
            new = self.token_ids[begin:], self.logprobs[begin:]
            self.tables += logprob_tables(*new, self.stream.tokenizer)
        return CompletionOutput(
            index=index,
            token_ids=[*self.token_ids],
            text=self.text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            seed=self.sampling.seed,
            timing=self.timing(),
            speculation=self.speculation(drafter),
            logprobs=[*self.tables] if has_logprobs else None,
            cumulative_logprob=sum(t.logprob for t in self.logprobs) if has_logprobs else None,
        )


def sums_of(each: Iterable[Mapping[str, SourceCounts]]) -> dict[str, SourceCounts]:
    sums = dict[str, SourceCounts]()
    for sources in each:
        for name, counts in sources.items():
            sums[name] = sums.get(name, SourceCounts()) + counts
    return sums


def proposing(sources: Mapping[str, SourceCounts]) -> dict[str, SourceCounts]:
    """Return the sources that proposed tokens."""
    return {name: counts for name, counts in sources.items() if counts.proposed}


def step_details(output: StepOutput, ends: list[int]) -> StepDetails:
    """Return the details of a step, for its tokens up to the end of a stop string.

    `ends` has one entry for each of these tokens.
    """
    tree = output.tree or VerifiedTree([], [], [], [])
    bits = [tree.sources[node - 1] for node in tree.accepted] + [0]  # no source for the bonus token
    return StepDetails(output.tokens[: len(ends)], ends, bits[: len(ends)], tree)


def output(
    choices: Sequence[Generation],
    drafter: str,
    params: SamplingParams,
    prompt: str | None = None,
    request_id: str | None = None,
) -> RequestOutput:
    """Return the output of a prompt from the current state of its sequences."""
    given = best(choices, params) if params.is_ranked else choices
    has_logprobs = params.num_top is not None
    outputs = [g.snapshot(index, drafter, has_logprobs) for index, g in enumerate(given)]
    first, num_prompt = choices[0], len(choices[0].prompt)
    num_output = sum(len(g.token_ids) for g in choices)
    came = sum(g.num_predicted for g in choices)
    missed = sum(len(g.sampling.prediction) for g in choices) - came
    counts = num_prompt, num_output, num_prompt + num_output, first.num_cached
    own = msgspec.structs.asdict(outputs[0])
    del own["index"]
    return RequestOutput(
        request_id=str(first.id) if request_id is None else request_id,
        prompt=prompt,
        prompt_token_ids=list(first.prompt),
        usage=TokenUsage(*counts, came, missed),
        choices=outputs,
        prompt_logprobs=first.prompt_logprob_tables(),
        **own,
    )


def logprob_tables(
    tokens: Iterable[int], logprobs: Iterable[TokenLogprobs], tokenizer: Tokenizer
) -> list[dict[int, Logprob]]:
    """Return a table for each token: first the token, then the most likely tokens."""

    def entry(token: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, tokenizer.token_bytes(token).decode(errors="replace"))

    tables = list[dict[int, Logprob]]()
    for token, its in zip(tokens, logprobs, strict=True):
        table = {token: entry(token, its.logprob, its.rank)}
        for rank, (id, logprob) in enumerate(zip(its.ids, its.top, strict=True), 1):
            table.setdefault(id, entry(id, logprob, rank))
        tables.append(table)
    return tables


def prompt_tables(
    prompt: Sequence[int], logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> list[dict[int, Logprob] | None]:
    """Do the same for a prompt, whose first token has no logprobs."""
    return [None, *logprob_tables(prompt[1:], logprobs, tokenizer)]


def best(choices: Sequence[Generation], params: SamplingParams) -> list[Generation]:
    """Return the `n` sequences with the largest mean logprob of tokens, the best first.

    The earlier of equal sequences comes first. Beams are in this order already.
    """
    if params.use_beam_search:
        return [*choices[: params.n]]

    def mean_logprob(choice: Generation) -> float:
        each = [its.logprob for its in choice.logprobs]
        return sum(each) / len(each) if each else float("-inf")

    return sorted(choices, key=mean_logprob, reverse=True)[: params.n]
