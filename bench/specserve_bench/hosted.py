"""Requests to a server of the OpenAI API, specserve or any other, over HTTP."""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPException
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from specserve.errors import SpecserveError
from specserve.remote import Remote, events
from specserve_bench.arrivals import due_times
from specserve_bench.results import Answer, Load, Round, Speculation, gaps, output_hash, spread
from specserve_bench.workloads import Ask, Workload

MOST_AT_ONCE = 256  # threads, one for each request that is out


class Told(msgspec.Struct, frozen=True):
    """specserve's statistics of one request, on its last chunk."""

    num_spec_steps: int
    num_draft_tokens: int
    acceptance_histogram: list[int]
    mean_acceptance_length: float | None = None


class Statistics(msgspec.Struct, frozen=True):
    speculative_decoding: Told | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: Delta = Delta()
    finish_reason: str | None = None


class Failure(msgspec.Struct, frozen=True):
    message: str = ""


class Chunk(msgspec.Struct, frozen=True):
    """As much of an event as is measured."""

    choices: list[Choice] = []
    usage: Usage | None = None
    metrics: Statistics | None = None
    error: Failure | None = None


class Heard(msgspec.Struct):
    """What came of one request."""

    number: int
    due_at: float
    moments: list[float] = []  # of events with text
    text: str = ""
    finish_reason: str | None = None
    usage: Usage = Usage()
    told: Told | None = None
    error: str | None = None


class Hosted:
    """A server at a URL; it is asked by one thread for each request that is out."""

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        self.remote = Remote(url, key, {"model": model})

    def run(self, workload: Workload, load: Load) -> Round:
        due = due_times(load, len(workload.asks))
        at_once = MOST_AT_ONCE if load.concurrency is None else load.concurrency
        before = self.series()
        started_at = time.perf_counter()
        waiting: list[Future[Heard]] = []
        with ThreadPoolExecutor(at_once) as threads:
            for number, (ask, at) in enumerate(zip(workload.asks, due, strict=True)):
                time.sleep(max(0.0, started_at + at - time.perf_counter()))
                due_at = None if load.rate is None else at
                waiting.append(threads.submit(self.ask, number, ask, due_at, started_at))
            heard = [future.result() for future in waiting]
        return finished(heard, before, self.series())

    def ask(self, number: int, ask: Ask, due_at: float | None, started_at: float) -> Heard:
        """One request from its beginning to its end; a failure is kept, not raised."""
        now = time.perf_counter() - started_at
        heard = Heard(number, now if due_at is None else due_at)
        is_text = isinstance(ask.prompt, str)
        path = "/completions" if is_text else "/chat/completions"
        body = {
            **self.remote.fields,
            "prompt" if is_text else "messages": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "top_p": 1.0,
            "seed": ask.seed,
        }
        came: list[tuple[float, bytes]] = []
        try:
            with self.remote.request("POST", path, json.dumps(body).encode()) as response:
                for data in events(response):
                    came.append((time.perf_counter() - started_at, data))
            read(heard, came)
        except (SpecserveError, msgspec.MsgspecError) as e:
            heard.error = str(e)
        return heard

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
            if "le" not in sample.labels:
                position = sample.labels.get("position")
                name = sample.name + (f"[{position}]" if position else "")
                series[name] = series.get(name, 0.0) + sample.value
        return series


def read(heard: Heard, came: Sequence[tuple[float, bytes]]) -> None:
    """Events, after the fact: what reads them must not delay the next."""
    for at, data in came:
        if data == b"[DONE]":
            return
        chunk = msgspec.json.decode(data, type=Chunk)
        if chunk.error is not None:
            heard.error = chunk.error.message
        for choice in chunk.choices[:1]:
            text = choice.text or choice.delta.content or ""
            heard.finish_reason = choice.finish_reason or heard.finish_reason
            if text:
                heard.moments.append(at)
                heard.text += text
        heard.usage = chunk.usage or heard.usage
        if chunk.metrics is not None:
            heard.told = chunk.metrics.speculative_decoding
    heard.error = heard.error or "the stream broke off before [DONE]"


def finished(
    heard: Sequence[Heard], before: Mapping[str, float], after: Mapping[str, float]
) -> Round:
    ends = [h.moments[-1] for h in heard if h.moments]
    first = min(h.due_at for h in heard)

    def grown(name: str) -> float | None:
        return after[name] - before.get(name, 0.0) if name in after else None

    return Round(
        seconds=max(ends, default=first) - first,
        answers=[answer(h) for h in heard],
        itl_ms=spread([gap for h in heard for gap in gaps(h.moments)]),
        output_hash=output_hash([(h.text, h.finish_reason) for h in heard]),
        speculation=told(heard) or counted(grown),
        draft_seconds=grown("specserve_draft_seconds_sum"),
        verify_seconds=grown("specserve_verify_seconds_sum"),
        step_seconds=grown("specserve_step_seconds_sum"),
    )


def answer(heard: Heard) -> Answer:
    return Answer(
        number=heard.number,
        arrived_at=heard.due_at,
        first_at=heard.moments[0] if heard.moments else None,
        last_at=heard.moments[-1] if heard.moments else None,
        num_events=len(heard.moments),
        longest_stall_ms=max(gaps(heard.moments), default=None),
        prompt_tokens=heard.usage.prompt_tokens,
        completion_tokens=heard.usage.completion_tokens,
        error=heard.error,
    )


def told(heard: Sequence[Heard]) -> Speculation | None:
    """From specserve's statistics of each request."""
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
    """From vLLM's series, whose steps are those with a draft."""
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
