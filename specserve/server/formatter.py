"""Formats chats and completions as chunks or whole responses, with statistics."""

import secrets
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from specserve.api.outputs import Generation, best, proposing, sums_of
from specserve.server.body import FormattedBody
from specserve.server.completion import ChoiceDelta, LiveCompletion, ServedModel
from specserve.server.logprobs import (
    Namer,
    ScoredTokens,
    prompt_logprobs,
    prompt_starts,
    sealed,
)
from specserve.server.protocol import (
    ChunkChoiceFields,
    ChunkFields,
    CompletionLogprobs,
    CompletionTokensDetails,
    CompletionUsage,
    PromptTokensDetails,
    RequestMetrics,
    ResponseHead,
    SpeculationDetails,
    SpeculativeDecoding,
    Timings,
)
from specserve.server.refusal import error_body
from specserve.server.stream import COMMENT, event, json_text
from specserve.text.answer.events import Answer, AnswerParser, CallBegin, Content, Event, answer_of
from specserve.text.answer.formats import AnswerReader

DONE = b"data: [DONE]\n\n"


class RouteSchema(NamedTuple):
    """The differences between the JSON of chats and completions.

    Functions take the common fields as keyword arguments.
    """

    prefix: str  # of ids
    chunk: Callable[..., ChunkFields]
    whole: Callable[..., ResponseHead]
    chunk_choice: Callable[..., ChunkChoiceFields]  # from an event, and whether it is the first
    choice: Callable[..., msgspec.Struct]  # from an answer
    logprobs: Callable[[ScoredTokens, Namer], Any]
    choices_have_prompts: bool  # prompt ids and logprobs are in choices, else in the response


class CompletionFormatter:
    """A `Formatter` for the JSON of chats or completions."""

    keep_alive = COMMENT

    def __init__(
        self,
        schema: RouteSchema,
        served: ServedModel,
        asked: FormattedBody,
        completion: LiveCompletion,
        echoed: Sequence[str] = (),
        reader: AnswerReader | None = None,
    ) -> None:
        self.schema, self.served, self.completion = schema, served, completion
        self.reader = None if reader is None or reader.is_plain else reader
        self.parsers: dict[int, tuple[AnswerParser, Generation]] = {}  # by choice
        self.calling: set[int] = set()  # choices with a tool call
        options = asked.stream_options
        self.has_usage = bool(options and options.include_usage)
        self.has_running_usage = bool(options and options.continuous_usage_stats)
        self.has_ids = asked.return_token_ids
        self.num_prompt_top = asked.prompt_logprobs
        self.echoed, self.params = echoed, asked.params  # echoed: texts of the prompts
        self.tokenizer = completion.firsts[0].stream.tokenizer
        self.namer: Namer | None = None  # None without logprobs
        if self.params.num_top is not None:
            has_ids = asked.return_tokens_as_token_ids
            self.namer = Namer(self.tokenizer, self.params.num_top, has_ids)
        self.is_long = self.namer is not None or self.num_prompt_top is not None
        # Each step has a chunk, also without text.
        self.has_step_chunks = self.has_ids or self.is_long
        self.echoed_logprobs: dict[int, CompletionLogprobs] = {}  # by id of a prompt's first choice
        self.prompt_logprobs: dict[int, list[Any]] = {}  # likewise
        self.started: set[int] = set()  # choices with a chunk
        self.around: dict[int, tuple[bytes, bytes]] = {}  # by choice: event before and after text
        self.is_plain = not (self.reader or self.has_step_chunks or self.has_running_usage)
        self.num_ended = self.num_sent = 0  # ended choices; sent tokens
        self.head: dict[str, Any] = {
            "id": f"{schema.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": served.model,
            "system_fingerprint": served.fingerprint,
        }
        completion.response_id = self.head["id"]

    def beginning(self) -> list[bytes]:
        return []

    def step(self, deltas: Sequence[ChoiceDelta]) -> list[bytes]:
        return [event for delta in deltas for event in self.events_of(delta)]

    def events_of(self, delta: ChoiceDelta) -> list[bytes]:
        """Return the events of one choice's step. Most events only differ in their text."""
        if (
            self.is_plain
            and delta.choice in self.started
            and delta.text
            and not (delta.is_last or delta.details)
        ):
            before, after = self.around.get(delta.choice) or self.find_around(delta.choice)
            return [before + json_text(delta.text) + after]
        return [event(chunk) for chunk in self.chunks(delta)]

    def find_around(self, index: int) -> tuple[bytes, bytes]:
        """Return the parts of a choice's event before and after its text."""
        mark = secrets.token_hex(16)
        whole = event(self.chunk(self.chunk_choice(index, Content(mark))))
        before, after = whole.split(b'"%b"' % mark.encode())
        self.around[index] = before, after
        return before, after

    def chunks(self, delta: ChoiceDelta) -> Iterator[ChunkFields]:
        """Yield the chunks of one choice's step: one per parsed event.

        The first step always has a chunk, because clients measure TTFT by it; its text can be held
        back. Steps with details, ids or logprobs also have one.
        """
        self.num_sent += len(delta.token_ids)
        index, generation = delta.choice, self.completion.generations[delta.choice]
        is_first = index not in self.started
        events = self.parsed(delta, is_first)
        if events or delta.details or self.has_step_chunks or (is_first and not delta.is_last):
            has_prompt = is_first if self.schema.choices_have_prompts else not self.started
            prompt = self.prompt_fields(index) if has_prompt else {}
            its, whole = (prompt, {}) if self.schema.choices_have_prompts else ({}, prompt)
            new = slice(delta.begin, delta.begin + len(delta.token_ids))
            its = its | self.step_fields(index, generation, new, is_first)
            if delta.details:
                its["speculation"] = SpeculationDetails(self.served.known_sources, [*delta.details])
            first, *rest = events or [Content("")]
            yield self.chunk(self.chunk_choice(index, first, **its), **whole)
            for each in rest:
                yield self.chunk(self.chunk_choice(index, each))
        if delta.is_last:
            self.num_ended += 1
            reason = self.reason(index, generation)
            choice = self.chunk_choice(index, Content(""), reason, **ending(generation))
            is_final = self.num_ended == len(self.completion.generations) and not self.has_usage
            yield self.chunk(choice, **(self.statistics() if is_final else {}))

    def parsed(self, delta: ChoiceDelta, is_first: bool) -> list[Event]:
        """Parse a step's text into events."""
        if self.reader is None:
            text = self.echo(delta.choice) + delta.text if is_first else delta.text
            return [Content(text)] if text else []
        parser = self.parser(delta.choice, self.completion.generations[delta.choice])
        events = parser.push(delta.text) if delta.text else []
        if delta.is_last:
            events += parser.finish()
        if any(isinstance(event, CallBegin) for event in events):
            self.calling.add(delta.choice)
        return events

    def parser(self, index: int, generation: Generation) -> AnswerParser:
        assert self.reader is not None, "plain text is not parsed"
        if index not in self.parsers:
            self.parsers[index] = self.reader.parser(), generation
        return self.parsers[index][0]

    def chunk_choice(
        self, index: int, event: Event, reason: str | None = None, **fields: Any
    ) -> ChunkChoiceFields:
        is_first = index not in self.started
        self.started.add(index)
        given = {"index": index, "logprobs": None, "finish_reason": reason} | fields
        return self.schema.chunk_choice(event, is_first, **given)

    def chunk(self, *choices: ChunkChoiceFields, **fields: Any) -> ChunkFields:
        if self.has_running_usage and choices:
            total = self.completion.num_prompt_tokens + self.num_sent
            counts = {"completion_tokens": self.num_sent, "total_tokens": total}
            # The completion can have more tokens than were sent.
            fields["usage"] = msgspec.structs.replace(self.usage(), **counts)
        elif self.has_usage and choices:
            fields["usage"] = None
        return self.schema.chunk(**self.head, choices=[*choices], **fields)

    def idle(self, choice: int) -> bytes:
        given = {"index": choice, "logprobs": None, "finish_reason": None}
        return event(self.chunk(self.schema.chunk_choice(Content(""), False, **given)))

    def ending(self, error: Exception | None) -> list[bytes]:
        """Return [DONE], after an error or the requested usage chunk."""
        if error is not None:
            return [event(error_body(error)), DONE]
        if not self.has_usage:
            return [DONE]
        return [event(self.chunk(usage=self.usage(), **self.statistics())), DONE]

    def whole(self) -> msgspec.Struct:
        choices = [self.whole_choice(i, g) for i, g in enumerate(self.given())]
        prompt = {} if self.schema.choices_have_prompts else self.prompt_fields(0)
        fields = prompt | self.statistics()
        return self.schema.whole(**self.head, choices=choices, usage=self.usage(), **fields)

    def given(self) -> list[Generation]:
        """Return all choices, or the best choices of each prompt."""
        all, params = self.completion.generations, self.params
        if not params.is_ranked:
            return all
        each = (all[i : i + params.num_choices] for i in range(0, len(all), params.num_choices))
        return [choice for choices in each for choice in best(choices, params)]

    def whole_choice(self, index: int, generation: Generation) -> msgspec.Struct:
        answer, details = self.answer(index, generation), generation.details
        fields = self.prompt_fields(index) if self.schema.choices_have_prompts else {}
        if details:
            fields["speculation"] = SpeculationDetails(self.served.known_sources, details)
        return self.schema.choice(
            answer,
            index=index,
            finish_reason=self.reason(index, generation),
            **ending(generation),
            **{"logprobs": None} | self.step_fields(index, generation, slice(None), True),
            **fields,
        )

    def answer(self, index: int, generation: Generation) -> Answer:
        """Return the parsed text of a choice."""
        if self.reader is None:
            return Answer(self.echo(index) + generation.text)
        parser = self.parser(index, generation)
        answer = answer_of([*parser.push(generation.text), *parser.finish()])
        if answer.calls:
            self.calling.add(index)
        return answer

    def reason(self, index: int, generation: Generation) -> str | None:
        """Return the finish reason of a choice; "stop" also for a function named by the caller."""
        reason, reader = generation.finish_reason, self.reader
        is_named = reader is None or reader.wanted.is_named
        has_called = reason == "stop" and index in self.calling and not is_named
        return "tool_calls" if has_called else reason

    def echo(self, index: int) -> str:
        """Return the echoed prompt of a choice."""
        return self.echoed[index // self.params.n] if self.echoed else ""

    def first(self, index: int) -> Generation:
        """Return the first choice of the same prompt, which has the prompt's logprobs."""
        return self.completion.firsts[index // self.params.n]

    def step_fields(
        self, index: int, generation: Generation, new: slice, is_first: bool
    ) -> dict[str, Any]:
        """Return requested ids and logprobs of some tokens of a choice.

        Logprobs of an echoed prompt precede the first tokens' logprobs.
        """
        fields: dict[str, Any] = {}
        if self.has_ids:
            fields["token_ids"] = generation.token_ids[new]
        if self.namer is not None:
            offset = len(self.echo(index))
            starts = [offset + start for start in generation.starts[new]]
            scored = ScoredTokens(generation.token_ids[new], generation.logprobs[new], starts)
            own = self.schema.logprobs(scored, self.namer)
            has_echo = self.echoed and is_first
            fields["logprobs"] = self.after_echo(index, own, self.namer) if has_echo else own
        return fields

    def after_echo(self, index: int, own: CompletionLogprobs, namer: Namer) -> CompletionLogprobs:
        first = self.first(index)
        if first.id not in self.echoed_logprobs:
            starts = prompt_starts(first.prompt, self.echo(index), self.tokenizer)
            scored = ScoredTokens(first.prompt, [None, *first.prompt_logprobs], starts)
            self.echoed_logprobs[first.id] = self.schema.logprobs(scored, namer)
        echoed = msgspec.structs.astuple(self.echoed_logprobs[first.id])
        both = zip(echoed, msgspec.structs.astuple(own), strict=True)
        return CompletionLogprobs(*(before + after for before, after in both))

    def prompt_fields(self, index: int) -> dict[str, Any]:
        """Return requested ids and logprobs of a choice's prompt."""
        first = self.first(index)
        fields: dict[str, Any] = {"prompt_token_ids": list(first.prompt)} if self.has_ids else {}
        if self.num_prompt_top is not None:
            if first.id not in self.prompt_logprobs:
                known = first.prompt, first.prompt_logprobs, self.num_prompt_top, self.tokenizer
                self.prompt_logprobs[first.id] = sealed(prompt_logprobs(*known))
            fields["prompt_logprobs"] = self.prompt_logprobs[first.id]
        return fields

    def num_logprobs(self, deltas: Sequence[ChoiceDelta]) -> int:
        if not self.is_long:
            return 0
        firsts = {d.choice for d in deltas} - self.started
        prompts = sum(len(self.first(c).prompt_logprobs) for c in firsts)
        new = sum(len(d.token_ids) for d in deltas) if self.namer is not None else 0
        top = max(self.params.num_top or 0, self.params.prompt_logprobs or 0)
        return (prompts + new) * (1 + top)

    def usage(self) -> CompletionUsage:
        usage = usage_of(self.completion)
        if self.reader is not None and self.reader.has_reasoning:
            counts = [bisect_left(g.starts, p.num_reasoning) for p, g in self.parsers.values()]
            details = usage.completion_tokens_details
            if isinstance(details, UnsetType):
                details = CompletionTokensDetails()
            details.reasoning_tokens = sum(counts)
            usage.completion_tokens_details = details
        return usage

    def statistics(self) -> dict[str, Any]:
        return statistics(self.completion, self.served)


def ending(generation: Generation) -> dict[str, Any]:
    """Return the fields of an ended choice that OpenAI lacks."""
    return {"stop_reason": generation.stop_reason, "seed": generation.sampling.seed}


def usage_of(completion: LiveCompletion) -> CompletionUsage:
    prompt, generations = completion.num_prompt_tokens, completion.generations
    usage = CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=completion.num_tokens,
        total_tokens=prompt + completion.num_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(g.num_cached for g in completion.firsts)),
    )
    if predicted := sum(len(g.sampling.prediction) for g in generations):
        came = sum(g.num_predicted for g in generations)
        usage.completion_tokens_details = CompletionTokensDetails(
            accepted_prediction_tokens=came, rejected_prediction_tokens=predicted - came
        )
    return usage


def statistics(completion: LiveCompletion, served: ServedModel) -> dict[str, Any]:
    """Return the fields `metrics` and `timings` of a response.

    Times range from the first to the last token of all choices.
    """
    each, usage = completion.generations, usage_of(completion)
    admitted_at, first_at = min(g.admitted_at for g in each), min(g.first_token_at for g in each)
    seconds = max(g.last_token_at for g in each) - first_at
    num_tokens = sum(len(g.token_ids) - 1 for g in each)  # without the first of each choice
    per_second = num_tokens / seconds if num_tokens > 0 and seconds > 0 else None
    gaps = sum(g.num_gaps for g in each)
    spread = sum(g.last_token_at - g.first_token_at for g in each)
    has_drafter, cached = served.drafter != "none", usage.prompt_tokens_details.cached_tokens
    metrics = RequestMetrics(
        time_to_first_token_ms=1e3 * (first_at - completion.arrived.at),
        generation_time_ms=1e3 * seconds,
        queue_time_ms=1e3 * (admitted_at - completion.arrived.at),
        mean_itl_ms=1e3 * spread / gaps if gaps else None,
        tokens_per_second=per_second,
        speculative_decoding=speculation_of(completion, served) if has_drafter else None,
        row_invariant=UNSET if served.row_invariant is None else served.row_invariant,
    )
    timings = Timings(
        prompt_n=usage.prompt_tokens - cached,
        prompt_ms=1e3 * (first_at - admitted_at),
        predicted_n=usage.completion_tokens,
        predicted_ms=1e3 * seconds,
        predicted_per_second=per_second,
        cache_n=cached,
        draft_n=sum(g.num_drafted for g in each),
        draft_n_accepted=sum(g.num_accepted for g in each),
    )
    return {"metrics": metrics, "timings": timings}


def speculation_of(completion: LiveCompletion, served: ServedModel) -> SpeculativeDecoding:
    """Return the statistics of speculation. Steps without draft tokens count, too."""
    each = completion.generations
    steps = [step for g in each for step in g.steps]
    drafted, accepted = sum(d for d, _ in steps), sum(a for _, a in steps)
    num_tokens, histogram = sum(g.num_step_tokens for g in each), Counter(a for _, a in steps)
    asked = completion.firsts[0].sampling.speculation
    return SpeculativeDecoding(
        drafter=served.drafter,
        mean_acceptance_length=num_tokens / len(steps) if steps else None,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        acceptance_histogram=[histogram[n] for n in range(max(histogram, default=-1) + 1)],
        num_spec_steps=len(steps),
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=asked.most_nodes(served.max_nodes),
        max_depth=asked.deepest(served.max_nodes),
        num_draft_fallbacks=sum(g.num_fallbacks for g in each),
        sources=proposing(sums_of(g.sources for g in each)),
    )
