"""The completion of one HTTP request: engine outputs go in, pieces of its response come out."""

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from specserve.api.lora import NamedAdapter
from specserve.api.outputs import Generation, proposing, sums_of
from specserve.errors import SpecserveError, of_failure
from specserve.exchange.client import EngineClient
from specserve.exchange.messages import Caller, StepDetails, StepOutput
from specserve.exchange.sampling_params import Sampling
from specserve.logs import request_id
from specserve.memory.block_keys import Keys
from specserve.server.deadline import Deadline
from specserve.server.metrics import Metrics
from specserve.server.refusal import DeadlineExceeded

if TYPE_CHECKING:
    from specserve.server.key_limits import Account

TENANT, ASKED = "specserve.tenant", "specserve.asked"  # keys of the ASGI scope
ACCOUNT = "specserve.account"
ENDS = "specserve.ends"  # what is called once the response has ended, the last one first


class Arrival(NamedTuple):
    at: float  # seconds, perf_counter
    tenant: int = 0  # index of the API key in the key file; 0 without keys
    asked: "list[LiveCompletion] | None" = None  # what is asked for is noted here, for the log
    deadline: Deadline | None = None
    account: "Account | None" = None  # of its API key, where keys have limits
    adapter: NamedAdapter | None = None  # that it chooses


def set_tenant(scope: Scope, tenant: int) -> None:
    scope[TENANT] = tenant


def tenant_of(scope: Scope) -> int:
    tenant: int = scope.get(TENANT, 0)
    return tenant


def set_account(scope: Scope, account: "Account") -> None:
    scope[ACCOUNT] = account


def arrival(request: Request) -> Arrival:
    """The arrival of a request that has just been received."""
    scope = request.scope
    known = tenant_of(scope), scope.get(ASKED)
    return Arrival(perf_counter(), *known, account=scope.get(ACCOUNT))


@contextmanager
def at_end(scope: Scope, end: Callable[[], None]) -> Iterator[None]:
    """Call `end` once the response has ended: after the block or, for a stream of events that our
    own server goes on with when the application has returned, later.
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
    """What one step, or a part of it, or several, added to one choice."""

    choice: int
    text: str
    begin: int  # tokens before
    token_ids: list[int]
    is_last: bool
    details: Sequence[StepDetails] = ()  # where the request asked for them
    ends: Sequence[int] = ()  # of its tokens in the text


class LiveCompletion:
    """The choices of one or several prompts, in order of the prompts. Always call `release`, which
    frees their blocks.
    """

    def __init__(
        self, engine: EngineClient, live: "set[LiveCompletion]", metrics: Metrics, arrived: Arrival
    ) -> None:
        self.engine, self.live, self.metrics, self.arrived = engine, live, metrics, arrived
        self.caller = Caller(engine.next_id, arrived.tenant, request_id.get())
        self.generations: list[Generation] = []
        self.firsts: list[Generation] = []  # the first choice of each prompt
        self.num_tokens = 0  # of all choices
        self.num_ended = 0  # choices
        self.deltas: list[ChoiceDelta] = []  # not yet taken by `wait`
        self.error: SpecserveError | None = None
        self.has_left = False  # the client has disconnected
        self.response_id = ""  # in the answer; its writer sets it
        self.waiter: asyncio.Future[None] | None = None
        self.take: Callable[[], None] | None = None  # is called, in place of `wait`
        self.is_due = False  # it will be called
        self.silence: asyncio.TimerHandle | None = None  # looks whether nothing has come for long
        self.waits_since = 0.0  # by the clock of the event loop
        self.deadline = arrived.deadline and arrived.deadline.call(self.end)
        live.add(self)  # until it is released
        if arrived.asked is not None:
            arrived.asked.append(self)

    def ask(
        self,
        prompt: Sequence[int],
        keys: Keys,
        samplings: Sequence[Sampling],
        tokenizer: Any,
        has_starts: bool = False,
    ) -> None:
        """Queue the choices of one more prompt; `keys` are those of its blocks. `has_starts`: where
        tokens begin in the text is noted.
        """
        begin, prompt = len(self.generations), array("i", prompt)  # far smaller than a list
        listeners = [ChoiceListener(self, begin + i) for i in range(len(samplings))]
        adapter = None if self.arrived.adapter is None else self.arrived.adapter.ref
        ids = self.engine.add(prompt, samplings, listeners, keys, self.caller, adapter)
        for id, sampling in zip(ids, samplings, strict=True):
            generation = Generation(id, prompt, sampling, tokenizer)
            generation.arrived = self.arrived.at
            generation.has_starts |= has_starts
            self.generations.append(generation)
        self.firsts.append(self.generations[begin])

    def keep_no_tokens(self) -> None:
        """Only compute the prompts. To be called before any token has come."""
        for generation in self.generations:
            generation.sampling = msgspec.structs.replace(generation.sampling, max_tokens=0)

    @property
    def is_done(self) -> bool:
        return self.num_ended == len(self.generations)

    @property
    def is_over(self) -> bool:
        """Whether no more text will come: finished, disconnected or failed."""
        return self.is_done or self.has_left or self.error is not None

    def end(self, error: SpecserveError) -> None:
        """Abort with an error, which the response reports to the client."""
        if not self.is_over:
            self.error = error
            self.wake()
            self.release()

    def leave(self) -> None:
        """Abort, as the client has disconnected."""
        self.has_left = True
        self.wake()
        self.release()

    def release(self) -> None:
        """End the choices that still run, and count all in the metrics. May be called again."""
        if self not in self.live:
            return
        self.live.discard(self)
        for timer in (self.deadline, self.silence):
            if timer is not None:
                timer.cancel()
        for generation in self.generations:
            self.engine.finish(generation.id)
            self.metrics.on_end(generation, self.reason(generation), generation in self.firsts)

    def reason(self, generation: Generation) -> str:
        """Why a choice has ended."""
        if isinstance(self.error, DeadlineExceeded):
            return generation.finish_reason or "timeout"
        broken_off = "error" if self.error is not None else "abort"
        return generation.finish_reason or broken_off

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
        elif self.take is not None and not self.is_due:
            self.is_due = True
            asyncio.get_running_loop().call_soon(self.take_soon)

    def call(self, take: Callable[[], None], seconds: float) -> None:
        """Have `take` called when something has come, or when nothing has for `seconds`, in place
        of `wait`: no task has to be kept for it, nor to be woken up.
        """
        loop = asyncio.get_running_loop()
        self.take, self.waits_since = take, loop.time()
        self.silence = loop.call_later(seconds, self.look_for_silence, seconds)

    def take_soon(self) -> None:
        """Have `take` take what came in one turn of the event loop."""
        self.is_due = False
        if self.take is not None and (self.deltas or self.is_over):
            self.take()
            self.waits_since = asyncio.get_running_loop().time()

    async def wait(self, seconds: float | None = None) -> list[ChoiceDelta]:
        """What was added since the last call; empty if nothing comes for `seconds`."""
        if not self.deltas and not self.is_over:
            loop = asyncio.get_running_loop()
            self.waiter, self.waits_since = loop.create_future(), loop.time()
            if seconds is not None and self.silence is None:
                self.silence = loop.call_later(seconds, self.look_for_silence, seconds)
            await self.waiter
        return self.taken()

    def taken(self) -> list[ChoiceDelta]:
        """What was added since the last call."""
        deltas, self.deltas = self.deltas, []
        return deltas

    def look_for_silence(self, seconds: float) -> None:
        """Wake `wait`, or call `take`, if nothing has come for `seconds`, and else look again when
        they have passed.

        So a step, which comes far sooner, sets and cancels no timer of its own.
        """
        loop = asyncio.get_running_loop()
        left = self.waits_since + seconds - loop.time()
        if left <= 0 and self.take is not None:
            self.take()
            self.waits_since, left = loop.time(), seconds
        if left > 0:
            self.silence = loop.call_later(left, self.look_for_silence, seconds)
        else:
            self.silence = None
            self.wake()

    @property
    def has_tokens(self) -> bool:
        return self.num_tokens > 0

    @property
    def told(self) -> dict[str, Any]:
        """For the log, once it is released: tokens, milliseconds to the first, and the end."""
        counts, firsts = self.usage(), [g.first_token_at for g in self.generations]
        first = min(filter(None, firsts), default=None)
        ttft = {} if first is None else {"ttft_ms": round(1e3 * (first - self.arrived.at), 1)}
        return {
            "prompt_tokens": counts["prompt_tokens"],
            "completion_tokens": counts["completion_tokens"],
            **ttft,
            "finish_reason": "/".join(dict.fromkeys(map(self.reason, self.generations))),
            "client_left": self.has_left,
        }

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many choices it has."""
        prompt = sum(len(g.prompt) for g in self.firsts)
        cached = sum(g.num_cached for g in self.firsts)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": prompt + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if predicted := sum(len(g.sampling.prediction) for g in self.generations):
            came = sum(g.num_predicted for g in self.generations)
            details = {"accepted_prediction_tokens": came}
            details["rejected_prediction_tokens"] = predicted - came
            usage["completion_tokens_details"] = details
        return usage

    def timings(self) -> dict[str, float | int | None]:
        """llama.cpp's names. Milliseconds are from the first to the last of all choices."""
        counts = self.usage()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "prompt_n": counts["prompt_tokens"] - cached,
            "prompt_ms": 1e3 * (self.first_token_at - self.admitted_at),
            "predicted_n": counts["completion_tokens"],
            "predicted_ms": 1e3 * (self.last_token_at - self.first_token_at),
            "predicted_per_second": self.tokens_per_second,
            "cache_n": cached,
            "draft_n": sum(g.num_drafted for g in self.generations),
            "draft_n_accepted": sum(g.num_accepted for g in self.generations),
        }

    def statistics(
        self, drafter: str, max_nodes: int, row_invariant: bool | None = None
    ) -> dict[str, Any]:
        """vLLM's names, and row_invariant where it is known. A step counts whether or not anything
        was drafted for it.
        """
        gaps = sum(max(0, len(g.token_ids) - 1) for g in self.generations)
        spread = sum(g.last_token_at - g.first_token_at for g in self.generations)
        return {
            "time_to_first_token_ms": 1e3 * (self.first_token_at - self.arrived.at),
            "generation_time_ms": 1e3 * (self.last_token_at - self.first_token_at),
            "queue_time_ms": 1e3 * (self.admitted_at - self.arrived.at),
            "mean_itl_ms": 1e3 * spread / gaps if gaps else None,
            "tokens_per_second": self.tokens_per_second,
            "speculative_decoding": None
            if drafter == "none"
            else {"drafter": drafter} | self.speculation(max_nodes),
            **({} if row_invariant is None else {"row_invariant": row_invariant}),
        }

    def speculation(self, max_nodes: int) -> dict[str, Any]:
        steps = [step for g in self.generations for step in g.steps]
        drafted, accepted = sum(d for d, _ in steps), sum(a for _, a in steps)
        num_tokens = sum(g.num_step_tokens for g in self.generations)
        histogram = Counter(a for _, a in steps)
        asked = self.firsts[0].sampling.speculation
        return {
            "mean_acceptance_length": num_tokens / len(steps) if steps else None,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "acceptance_histogram": [histogram[n] for n in range(max(histogram, default=-1) + 1)],
            "num_spec_steps": len(steps),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": asked.most_nodes(max_nodes),
            "max_depth": asked.deepest(max_nodes),
            "num_draft_fallbacks": sum(g.num_fallbacks for g in self.generations),
            "sources": proposing(sums_of(g.sources for g in self.generations)),
        }

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of all tokens but the first of each choice."""
        seconds = self.last_token_at - self.first_token_at
        num_tokens = sum(len(g.token_ids) - 1 for g in self.generations)
        return num_tokens / seconds if num_tokens > 0 and seconds > 0 else None

    @property
    def admitted_at(self) -> float:
        return min(g.admitted_at for g in self.generations)

    @property
    def first_token_at(self) -> float:
        return min(g.first_token_at for g in self.generations)

    @property
    def last_token_at(self) -> float:
        return max(g.last_token_at for g in self.generations)


class StepWriter(Protocol):
    def step(self, deltas: Sequence[ChoiceDelta]) -> list[bytes]: ...

    def idle(self, choice: int) -> bytes: ...


class Steps:
    """When the events of a stream go out, as `server.stream_flush` says: for each step, as it
    comes. `flush.py` has the others.
    """

    is_padded = False
    is_behind = False  # nothing is left to write

    def __init__(self, completion: LiveCompletion, comment_seconds: float) -> None:
        self.completion, self.comment_seconds = completion, comment_seconds

    async def wait(self) -> list[ChoiceDelta]:
        """What is to be written next; empty if nothing has come for a while."""
        return await self.completion.wait(self.comment_seconds)

    def write(self, writer: StepWriter, deltas: Sequence[ChoiceDelta]) -> list[bytes]:
        return writer.step(deltas)


class ChoiceListener:
    """Takes the engine's outputs for one of a completion's generations."""

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
        if completion.arrived.account is not None:
            completion.arrived.account.take(num_new)
        completion.metrics.on_tokens(generation, *before)
        if generation.is_done:
            completion.num_ended += 1  # the engine does not look for stop strings
            completion.engine.finish(generation.id)
        details, new = generation.details[-1:], generation.token_ids[before[0] :]
        is_last, ends = generation.is_done, generation.ends
        delta = ChoiceDelta(self.index, text, before[0], new, is_last, details, ends)
        completion.deltas.append(delta)
        completion.wake()

    def fail(self, error: SpecserveError) -> None:
        self.completion.end(error)
