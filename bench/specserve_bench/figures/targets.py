"""TPOT targets: long prompts arrive while streams with a target run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from specserve import LLM, SamplingParams
from specserve.api.outputs import Generation
from specserve.engine.engine import Engine
from specserve.exchange.sampling_params import Slo
from specserve.scheduling.scheduler import prompt_rows
from specserve.speculation.adaptive_speculator import AdaptiveSpeculator
from specserve.speculation.costs import Step
from specserve_bench.figures.steps import elapsed
from specserve_bench.local import reset_learned
from specserve_bench.pairs import PAIRS
from specserve_bench.report import markdown_table, ratio_words
from specserve_bench.results import gaps, ratio
from specserve_bench.workloads import source_tokens

ROUNDS = 7
STREAMS, STREAM_PROMPT = 4, 300
ARRIVALS, LONG_PROMPT = 3, 2000  # of each round, after one whose steps fill the table
QUIET_STEPS = 30
TIMES_QUIET = 1.5  # the target, as a multiple of a step without prompts and draft tokens
SETTINGS = {"memory.kv_bytes": 3 << 29, "memory.prefix_cache": False}


class LatePrompt(NamedTuple):
    """A long prompt that arrives while the streams run; milliseconds."""

    ttft: float
    predicted: float  # by the table of costs, as it was when the prompt arrived
    gaps: list[float]  # between tokens of each stream, meanwhile


def measure() -> dict[str, Any]:
    """Measure with the demo models, padded to 0.6B compute (same text)."""
    target, draft = PAIRS["0.6b"]()
    with ExitStack() as stack:
        plain = stack.enter_context(LLM(target, drafter="none", set=SETTINGS, progress=False))
        llm = stack.enter_context(
            LLM(target, draft, "auto", set=SETTINGS, progress=False, weights=plain.weights)
        )
        source = source_tokens(plain)
        rounds = [one_round(plain, llm, source) for _ in range(1 + ROUNDS)][1:]
    return summary(rounds)


def one_round(plain: LLM, llm: LLM, source: Sequence[int]) -> dict[str, float]:
    """Steps without drafting set the target of the streams; then prompts arrive."""
    streams = start_streams(plain, source, None)
    times = [elapsed(plain.step) for _ in range(QUIET_STEPS)]
    plain.end(streams)
    quiet = 1e3 * median(times[STREAMS:])  # the first steps compute prompts
    reset_learned(llm.engine)
    streams = start_streams(llm, source, Slo(tpot_ms=TIMES_QUIET * quiet))
    for _ in range(QUIET_STEPS):
        llm.step()
    arrivals = [arrival(llm, streams, source, i, TIMES_QUIET * quiet) for i in range(1 + ARRIVALS)]
    assert not any(s.is_done for s in streams), "a stream ended before the last prompt was computed"
    llm.end(streams)
    counted = arrivals[1:]
    return {
        "quiet_step_ms": quiet,
        "target_ms": TIMES_QUIET * quiet,
        "itl_p99_ms": float(np.percentile([gap for a in counted for gap in a.gaps], 99)),
        "ttft_ms": median(a.ttft for a in counted),
        "predicted_ttft_ms": median(a.predicted for a in counted),
    }


def start_streams(llm: LLM, source: Sequence[int], slo: Slo | None) -> list[Generation]:
    params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True, slo=slo)
    prompts = [source[i * STREAM_PROMPT :][:STREAM_PROMPT] for i in range(STREAMS)]
    return [g for prompt in prompts for g in llm.start(*llm.check(prompt, params))]


def arrival(
    llm: LLM, streams: Sequence[Generation], source: Sequence[int], number: int, target_ms: float
) -> LatePrompt:
    """Add a prompt, and step until its first token."""
    begin = STREAMS * STREAM_PROMPT + number * LONG_PROMPT
    prompt = list(source[begin : begin + LONG_PROMPT])
    predicted = sum(predicted_steps(llm.engine, len(prompt), 1e-3 * target_ms))
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    start = perf_counter()
    [late] = llm.start(*llm.check(prompt, params))
    events: list[list[float]] = [[start] for _ in streams]
    while not late.is_done:
        counts = [len(s.token_ids) for s in streams]
        llm.step()
        now = perf_counter()
        for times, stream, count in zip(events, streams, counts, strict=True):
            times += [now] if len(stream.token_ids) > count else []
    ttft = perf_counter() - start
    llm.end([late])
    for _ in range(QUIET_STEPS):
        llm.step()
    return LatePrompt(1e3 * ttft, 1e3 * predicted, [gap for times in events for gap in gaps(times)])


def predicted_steps(engine: Engine, waiting: int, allowed: float) -> Iterator[float]:
    """Seconds of the steps that compute a prompt while streams run. Each step has as many of its
    rows as are allowed, and no draft tokens.
    """
    scheduler, speculator = engine.scheduler, engine.speculator
    assert isinstance(speculator, AdaptiveSpeculator), "no other drafter has a table of costs"
    costs, roots = speculator.planner.costs, len(scheduler.running)
    context = sum(len(r.token_ids) for r in scheduler.running)
    most, done = scheduler.budget.max_batched_tokens - roots, 0
    while done < waiting:
        step = Step(
            rows=roots,
            context=context,
            requests=roots,
            num_roots=roots,
            attended=context,
            root_context=context,
            allowed=allowed,
        )
        rows = prompt_rows(step, costs, waiting - done, most, done)
        done += rows
        yield costs.of(step.with_prompt(rows, done))


def summary(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    def over(a: str, b: str) -> Any:
        return msgspec.to_builtins(ratio([r[a] for r in rounds], [r[b] for r in rounds]))

    return {
        "streams": STREAMS,
        "prompt_tokens": LONG_PROMPT,
        **{name: round(median(r[name] for r in rounds), 3) for name in rounds[0]},
        "itl_p99_over_target": over("itl_p99_ms", "target_ms"),
        "ttft_over_predicted": over("ttft_ms", "predicted_ttft_ms"),
    }


def table(figures: Mapping[str, Any]) -> str:
    rows = [[name, f"{figures[name]:.1f} ms", ""] for name in figures if name.endswith("_ms")]
    for name, bound in (("itl_p99_over_target", 2.0), ("ttft_over_predicted", 1.1)):
        rows.append([name, ratio_words(figures[name]), f"at most {bound:g}"])
    return markdown_table(["figure", "measured", "goal"], rows)
