"""The server's figures on the CPU, measured from outside over real HTTP."""

import asyncio
import json
import random
from collections.abc import Coroutine, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from specserve import LLM, SamplingParams
from specserve_bench.figures.steps import elapsed
from specserve_bench.prompts import PROMPTS
from specserve_bench.report import markdown_table
from specserve_bench.results import extremes, extremes_over
from specserve_bench.served import Served, Stream, send, settings, stream

ROUNDS = 7
NUM_STREAMS = 16
NUM_IDLE = 1000
CHUNK = 128
COMPLETIONS = "/v1/completions"


def measure() -> dict[str, Any]:
    """On the demo pair."""
    return {
        "ready_s": sorted(round(ready_seconds(), 2) for _ in range(ROUNDS)),
        "overhead": overhead(),
        "idle": idle_connections(),
        "newcomer": newcomer(),
    }


def table(result: Mapping[str, Any]) -> str:
    return markdown_table(["figure", "measured"], [[k, json.dumps(v)] for k, v in result.items()])


def ready_seconds() -> float:
    """Seconds from the start of the process until it prints that it is ready."""
    with Served() as served:
        return served.ready_seconds


def overhead() -> dict[str, Any]:
    """CPU time of the API process for one step of one of 16 streams, requests included."""
    with Served() as served:
        costs = extremes([one_overhead(served) for _ in range(1 + ROUNDS)][1:], 4)
    return {
        "streams": NUM_STREAMS,
        "api_cpu_ms_per_stream_and_step": costs["median"],
        "min_max": [costs["low"], costs["high"]],
    }


def one_overhead(served: Served) -> float:
    async def all_streams() -> list[Stream]:
        bodies = [body_for(PROMPTS[i % len(PROMPTS)], seed=i) for i in range(NUM_STREAMS)]
        asked = (stream(served.host, served.port, COMPLETIONS, b) for b in bodies)
        return await asyncio.gather(*asked)

    before = served.cpu_seconds()
    streams = asyncio.run(all_streams())
    cost = served.cpu_seconds() - before
    # A prompt's last chunk brings the first token, and counts as a step of its stream as well.
    steps = [1 + s.final["metrics"]["speculative_decoding"]["num_spec_steps"] for s in streams]
    return 1e3 * cost / float(sum(steps))


def body_for(prompt: str, seed: int, max_tokens: int = 200) -> dict[str, Any]:
    options = {"max_tokens": max_tokens, "temperature": 1, "top_p": 1, "ignore_eos": True}
    return {"prompt": prompt, "seed": seed, **options}


def idle_connections() -> dict[str, Any]:
    """Growth of the API process by streams that wait in the queue, once a comment has gone out."""
    bounds = settings(
        scheduler__max_running=1, server__max_queued_requests=2000, server__comment_seconds=1
    )
    with Served(*bounds) as served:
        asyncio.run(stream(served.host, served.port, COMPLETIONS, body_for(PROMPTS[0], 0, 20)))
        before = served.resident_bytes()
        grown = asyncio.run(held_open(served)) - before
    return {"connections": NUM_IDLE, "grown_mb": round(grown / 1e6, 1)}


async def held_open(served: Served) -> int:
    """The memory while all of them wait behind one long answer."""
    writers = []
    for i in range(1 + NUM_IDLE):
        reader, writer = await asyncio.open_connection(served.host, served.port)
        await send(writer, COMPLETIONS, body_for(PROMPTS[0], i, 4000) | {"stream": True})
        writers.append(writer)
        if i >= NUM_IDLE - 1:
            await reader.readuntil(b": waiting")  # the last ones are queued
    resident = served.resident_bytes()
    for writer in writers:
        writer.close()
    return resident


def newcomer() -> dict[str, Any]:
    """A long prompt comes while a stream runs: the stream's longest gap, the newcomer's TTFT.

    Chunk steps grow with their context. So the longest gap is compared with the longest chunk step
    of the same prompt without load, in an engine of this process. Its steps are no larger. Both
    engines have one thread, so that they do the same work.
    """
    options = {"scheduler.prefill_chunk": CHUNK, "model.threads": 1, "memory.kv_bytes": 1 << 28}
    options["memory.prefix_cache"] = False  # the same prompts are repeated
    flags = [f"--set={key}={json.dumps(value)}" for key, value in options.items()]
    steps = {"scheduler.max_batched_tokens": CHUNK}
    with (
        LLM(set=options | steps, progress=False) as llm,
        Served(*flags) as s,
    ):
        rounds = [one_newcomer(s, llm, i) for i in range(1 + ROUNDS)][1:]
    each = {key: [r[key] for r in rounds] for key in rounds[0]}
    gap = extremes_over(each["longest_gap_ms"], each["longest_chunk_step_ms"])
    ttft = extremes_over(each["ttft_ms"], each["unloaded_ttft_ms"])
    return {key: round(median(values), 2) for key, values in each.items()} | {
        "gap_over_chunk_step": gap["median"],
        "gap_over_chunk_step_min_max": [gap["low"], gap["high"]],
        "ttft_over_unloaded": ttft["median"],
        "ttft_over_unloaded_min_max": [ttft["low"], ttft["high"]],
    }


def one_newcomer(served: Served, llm: LLM, seed: int) -> dict[str, float]:
    long = random.Random(seed).choices(range(300, 8000), k=2000)
    chunk_step = longest_step(llm, long)
    unloaded, late, during = asyncio.run(with_a_stream(served, long, seed))
    end = late.said_at[0]
    assert during.said_at[-1] > end, "the stream had ended before the newcomer was served"
    gaps = [b - a for a, b in pairwise(during.said_at) if b > late.sent_at and a < end]
    return {
        "longest_chunk_step_ms": 1e3 * chunk_step,
        "longest_gap_ms": 1e3 * max(gaps),
        "unloaded_ttft_ms": 1e3 * unloaded.ttft,
        "ttft_ms": 1e3 * late.ttft,
    }


def longest_step(llm: LLM, prompt: list[int]) -> float:
    """The longest step that computes a prompt, without other requests."""
    [generation] = llm.start(*llm.check(prompt, SamplingParams(max_tokens=1)))
    seconds = []
    while not generation.is_done:
        seconds.append(elapsed(llm.step))
    llm.end([generation])
    return max(seconds)


async def with_a_stream(served: Served, long: list[int], seed: int) -> list[Stream]:
    """The long prompt without load, then another one while a stream runs, and that stream."""

    def ask(prompt: Any, max_tokens: int) -> Coroutine[Any, Any, Stream]:
        body = body_for(prompt, seed, max_tokens)
        return stream(served.host, served.port, COMPLETIONS, body)

    unloaded = await ask(long, 1)
    running = asyncio.create_task(ask(PROMPTS[0], 3500))
    await asyncio.sleep(0.3)
    late = await ask(long[::-1], 1)
    return [unloaded, late, await running]
