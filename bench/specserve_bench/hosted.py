"""Requests to a server of the OpenAI API, specserve or any other, over HTTP."""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from http.client import HTTPException
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from prometheus_client.parser import text_string_to_metric_families

from specserve.cli.remote import Remote, events
from specserve.errors import ConfigError, SpecserveError
from specserve_bench.results import (
    Load,
    MeasuredRequest,
    Round,
    Speculation,
    gaps,
    output_hash,
    spread,
)
from specserve_bench.workloads import Ask, Workload

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0, lt=2**31)]


class SpecStatistics(msgspec.Struct, frozen=True):
    """specserve's statistics of one request, on its last chunk."""

    num_spec_steps: Count
    num_draft_tokens: Count
    acceptance_histogram: list[Count]
    mean_acceptance_length: Annotated[float, Meta(ge=0, le=1e4)] | None = None


class EventMetrics(msgspec.Struct, frozen=True):
    speculative_decoding: SpecStatistics | None = None


class EventUsage(msgspec.Struct, frozen=True):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class EventDelta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None  # reasoning counts as text
    reasoning: str | None = None


class WireChoice(msgspec.Struct, frozen=True):
    """A choice of an event: of a completion (text) or of a chat (delta)."""

    text: str | None = None
    delta: EventDelta = EventDelta()
    finish_reason: str | None = None


class EventError(msgspec.Struct, frozen=True):
    message: str = ""


class Chunk(msgspec.Struct, frozen=True):
    """The fields of an event that are measured."""

    choices: list[WireChoice] = []
    usage: EventUsage | None = None
    metrics: EventMetrics | None = None
    error: EventError | None = None


class Heard(msgspec.Struct):
    """The events of one request, and what was read from them."""

    number: int
    due_at: float
    data: list[tuple[float, bytes]] = []  # of its events, read once the round is over
    moments: list[float] = []  # of events with text
    ended_at: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    usage: EventUsage | None = None
    told: SpecStatistics | None = None
    error: str | None = None


class Hosted:
    """A server at a URL; each running request has a thread."""

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        self.remote = Remote(url, key, {"model": model})

    def run(self, workload: Workload, load: Load) -> Round:
        due = load.due_times(len(workload.asks))
        before = self.series()
        started_at = time.perf_counter()
        waiting: list[Future[Heard]] = []
        places = threading.Semaphore(load.concurrency or len(due))
        for number, (ask, at) in enumerate(zip(workload.asks, due, strict=True)):
            time.sleep(max(0.0, started_at + at - time.perf_counter()))
            places.acquire()
            due_at = None if load.rate is None else at
            waiting.append(in_thread(places, self.ask, number, ask, due_at, started_at))
        heard = [future.result() for future in waiting]
        after = self.series()
        for each in heard:
            read(each)
        return finished(heard, before, after)

    def check(self, ask: Ask) -> None:
        """Does not check requests: a refusal is the request's error."""

    def record(self, asks: Sequence[Ask]) -> list[str]:
        """The responses of the target model."""
        texts = []
        for heard in (self.ask(0, ask, None, 0.0) for ask in asks):
            read(heard)
            if heard.error is not None:
                url = self.remote.url
                raise ConfigError(f"{url}: could not record its text: {heard.error}")
            texts.append(heard.text)
        return texts

    def ask(self, number: int, ask: Ask, due_at: float | None, started_at: float) -> Heard:
        """One request, to its end; a failure is kept in it, not raised."""
        now = time.perf_counter() - started_at
        heard = Heard(number, now if due_at is None else due_at)
        path = "/completions" if isinstance(ask.prompt, str) else "/chat/completions"
        body = json.dumps(self.body(ask)).encode()
        try:
            with self.remote.request("POST", path, body) as response:
                for data in events(response):
                    heard.data.append((time.perf_counter() - started_at, data))
        except SpecserveError as e:
            heard.error = str(e)
        return heard

    def body(self, ask: Ask) -> dict[str, Any]:
        """The request's fields. Only specserve has speculation settings per request."""
        body = {
            **self.remote.fields,
            "prompt" if isinstance(ask.prompt, str) else "messages": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "top_p": 1.0,
            "seed": ask.seed,
        }
        if ask.prediction is not None:
            body["prediction"] = {"type": "content", "content": ask.prediction}
        if ask.speculation is not None and self.remote.card.drafter is not None:
            body["speculation"] = msgspec.to_builtins(ask.speculation)
        return body

    def series(self) -> dict[str, float]:
        """Counters of /metrics by name (and position); nothing where the server has none."""
        path = self.remote.path.removesuffix("/v1") + "/metrics"
        try:
            with closing(self.remote.connection()) as connection:
                connection.request("GET", path, headers=self.remote.headers)
                response = connection.getresponse()
                text = response.read().decode() if response.status == 200 else ""
            families = list(text_string_to_metric_families(text))
        except (OSError, HTTPException, ValueError):
            return {}
        series: dict[str, float] = {}
        for sample in (s for family in families for s in family.samples):
            if "le" not in sample.labels and math.isfinite(sample.value):
                position = sample.labels.get("position")
                name = sample.name + (f"[{position}]" if position else "")
                series[name] = series.get(name, 0.0) + sample.value
        return series


def in_thread(places: threading.Semaphore, do: Callable[..., T], *args: Any) -> "Future[T]":
    """Run in a daemon thread, as a silent server must not keep the process alive.

    Gives a place back at the end.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(do(*args))
        except BaseException as e:  # a bug of ours
            future.set_exception(e)
        finally:
            places.release()

    threading.Thread(target=run, daemon=True).start()
    return future


def read(heard: Heard) -> None:
    """Decode the events of a request; what is malformed is the request's error."""
    try:
        is_done = any([read_event(heard, at, data) for at, data in heard.data])
    except msgspec.MsgspecError as e:
        heard.error = str(e)
        return
    if not is_done:
        heard.error = heard.error or "the stream broke off before [DONE]"
    elif heard.finish_reason is None:
        heard.error = heard.error or "the stream has ended, and told no finish_reason"
    elif heard.usage is not None and not heard.usage.completion_tokens:
        heard.error = heard.error or "the stream has ended, and its usage tells of no token"
    elif heard.usage is None:
        heard.error = heard.error or "no usage was told: stream_options.include_usage asks for it"


def read_event(heard: Heard, at: float, data: bytes) -> bool:
    """Read one event; whether it is the last one."""
    if data == b"[DONE]":
        return True
    chunk = msgspec.json.decode(data, type=Chunk)
    if chunk.error is not None:
        heard.error = chunk.error.message
    for choice in chunk.choices[:1]:
        delta = choice.delta
        parts = delta.reasoning_content or delta.reasoning, delta.content, choice.text
        text = "".join(part for part in parts if part)
        heard.finish_reason = choice.finish_reason or heard.finish_reason
        heard.text += text
        if text:
            heard.moments.append(at)
        if text or choice.finish_reason:  # a last token may be no text
            heard.ended_at = at
    heard.usage = chunk.usage or heard.usage
    if chunk.metrics is not None:
        heard.told = chunk.metrics.speculative_decoding
    return False


def finished(
    heard: Sequence[Heard], before: Mapping[str, float], after: Mapping[str, float]
) -> Round:
    whole = [h for h in heard if h.error is None]
    first = min(h.due_at for h in heard)

    def grown(name: str) -> float | None:
        return after[name] - before.get(name, 0.0) if name in after else None

    return Round(
        seconds=max((h.ended_at for h in whole), default=first) - first,
        requests=[measured(h) for h in heard],
        itl_ms=spread([gap for h in whole for gap in gaps(h.moments)]),
        output_hash=output_hash([(h.text, h.finish_reason) for h in heard]),
        speculation=told(whole) or counted(grown),
        draft_seconds=grown("specserve_draft_seconds_sum"),
        verify_seconds=grown("specserve_verify_seconds_sum"),
        step_seconds=grown("specserve_step_seconds_sum"),
    )


def measured(heard: Heard) -> MeasuredRequest:
    """The request's figures, without times if it failed."""
    if heard.error is not None or heard.usage is None:
        return MeasuredRequest(number=heard.number, arrived_at=heard.due_at, error=heard.error)
    return MeasuredRequest(
        number=heard.number,
        arrived_at=heard.due_at,
        first_at=heard.moments[0] if heard.moments else heard.ended_at,
        last_at=heard.ended_at,
        num_events=len(heard.moments),
        longest_stall_ms=max(gaps(heard.moments), default=None),
        prompt_tokens=heard.usage.prompt_tokens,
        completion_tokens=heard.usage.completion_tokens,
    )


def told(heard: Sequence[Heard]) -> Speculation | None:
    """Speculation from specserve's statistics of each request."""
    each = [h.told for h in heard if h.told is not None]
    if not each:
        return None
    depths = range(max(len(t.acceptance_histogram) for t in each))
    return Speculation(
        steps=sum(t.num_spec_steps for t in each),
        tokens=sum(round((t.mean_acceptance_length or 0) * t.num_spec_steps) for t in each),
        drafted=sum(t.num_draft_tokens for t in each),
        accepted=[sum(sum(t.acceptance_histogram[n : n + 1]) for t in each) for n in depths],
    )


def counted(grown: Any) -> Speculation | None:
    """Speculation from vLLM's series, which count steps with a draft only."""
    steps = grown("vllm:spec_decode_num_drafts_total")
    if not steps:
        return None
    accepted = int(grown("vllm:spec_decode_num_accepted_tokens_total") or 0)
    reached = [int(steps)]
    while n := grown(f"vllm:spec_decode_num_accepted_tokens_per_pos_total[{len(reached) - 1}]"):
        reached.append(int(n))
    return Speculation(
        steps=int(steps),
        tokens=int(steps) + accepted,
        drafted=int(grown("vllm:spec_decode_num_draft_tokens_total") or 0),
        accepted=[a - b for a, b in zip(reached, [*reached[1:], 0], strict=True)],
    )
