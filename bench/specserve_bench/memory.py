"""What the block pool brings: prefix hits, choices that share blocks, few unwritten slots."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch

from specserve import LLM, SamplingParams
from specserve.config import load_config
from specserve.engine.build import assemble
from specserve.engine.pool_plan import Models
from specserve.engine.tuning import choose_threads
from specserve.exchange.sampling_params import Sampling
from specserve.models.loader import load_decoder
from specserve_bench.elastic import BLOCK_SIZE, elastic_figures
from specserve_bench.workloads import source_tokens
from specserve_kernels import load

PREFIX, SHARERS = 3000, 32
ROUNDS = 5

T = TypeVar("T")


def memory_figures(shape: Path) -> dict[str, Any]:
    """`shape` is a random checkpoint of the 0.6B shape; the rest is measured on the demo pair."""
    figures = {
        "shared_prefix": shared_prefix(),
        "choices": [choices(drafter) for drafter in ("none", "ngram", "model")],
        "unwritten": unwritten(),
        "overhead": overhead(shape),
        "elastic": elastic_figures(),
    }
    print(table(figures))
    return figures


def table(figures: dict[str, Any]) -> str:
    """In Markdown, as in docs/bench.md."""
    shared, elastic = figures["shared_prefix"], figures["elastic"]
    rows = {
        f"TTFT of a prompt whose first {shared['prefix_tokens']:,} tokens are found, over a miss": (
            f"{shared['hit_over_miss']:.3f}"
        ),
        f"blocks of {shared['requests']} requests that share them, over the least there could be": (
            f"{shared['peak_over_least']:.2f}"
        ),
        "share of blocks that one request with 16 choices saves over 16 requests "
        "(off, ngram, model)": ", ".join(f"{c['saved']:.0%}" for c in figures["choices"]),
        "slots of held target blocks without a token, after a step: mean, highest": (
            f"{figures['unwritten']['mean_share']:.1%}, {figures['unwritten']['highest_share']:.1%}"
        ),
        "planning and committing, of a step of a 0.6B shape with 32 running: usual, highest": (
            f"{figures['overhead']['share']:.1%}, {figures['overhead']['highest_share']:.1%}"
        ),
        "tokens/s with elastic draft blocks, over a fixed split of too small a pool": ", ".join(
            f"{e['elastic_over_split']:.2f}" for e in elastic
        ),
    }
    return "\n".join(
        ["| what | measured |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())]
    )


def demo(drafter: str, settings: Mapping[str, Any] | None = None) -> LLM:
    base = {"memory.kv_bytes": 1 << 28, "memory.block_size": BLOCK_SIZE}
    return LLM(drafter=drafter, set={**base, **(settings or {})}, progress=False)


def saying(max_tokens: int, seed: int = 0, temperature: float = 0, n: int = 1) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=seed, n=n, ignore_eos=True
    )


def shared_prefix() -> dict[str, Any]:
    """TTFT of a hit over that of a miss, one request at a time; blocks where all come at once."""
    with demo("model") as llm:
        source = source_tokens(llm)
        prompts = sharing(source)
        misses, hits = [], []
        for _ in range(ROUNDS):
            llm.reset_cache()
            times = [llm.generate(p, saying(8))[0].timing.ttft_ms for p in prompts[:5]]
            misses.append(times[0])
            hits.append(median(times[1:]))
        ratios = [hit / miss for hit, miss in zip(hits, misses, strict=True)]
    with demo("none") as llm:
        starts = [llm.start(*llm.check(p, saying(64))) for p in prompts]
        generations = [g for choices in starts for g in choices]
        peak = peak_blocks(llm, generations)["target"]
        llm.end(generations)
    tails = [-(-(len(p) + 64) // BLOCK_SIZE) - PREFIX // BLOCK_SIZE for p in prompts]
    least = PREFIX // BLOCK_SIZE + sum(tails)
    return {
        "prefix_tokens": PREFIX,
        "requests": SHARERS,
        "miss_ttft_ms": round(median(misses), 2),
        "hit_ttft_ms": round(median(hits), 2),
        "hit_over_miss": round(median(ratios), 4),
        "hit_over_miss_min_max": [round(f(ratios), 4) for f in (min, max)],
        "peak_blocks": peak,
        "least_blocks": least,
        "peak_over_least": round(peak / least, 3),
    }


def sharing(source: list[int]) -> list[list[int]]:
    """Prompts with one common beginning and different ends."""
    ends = [source[PREFIX + 40 * i :][:40] for i in range(SHARERS)]
    return [source[:PREFIX] + end for end in ends]


def peak_blocks(llm: LLM, generations: Sequence[Any]) -> dict[str, int]:
    """The most blocks held between two steps, and how many requests ran then."""
    peak = {"target": 0, "draft": 0, "running": 0}
    while not all(g.is_done for g in generations):
        llm.step()
        held = llm.memory() | {"running": len(llm.engine.scheduler.running)}
        if held["target"] + held["draft"] > peak["target"] + peak["draft"]:
            peak = {holder: held[holder] for holder in peak}
    return peak


def choices(drafter: str) -> dict[str, Any]:
    """Peak blocks of 16 choices of a prompt against 16 requests without a prefix cache."""
    n, num_prompt, num_said = 16, 1000, 100
    held = {}
    for name, settings in (("choices", {}), ("requests", {"memory.prefix_cache": False})):
        with demo(drafter, settings) as llm:
            prompt = source_tokens(llm)[:num_prompt]
            if name == "choices":
                generations = llm.start(*llm.check(prompt, saying(num_said, temperature=1, n=n)))
            else:
                starts = [
                    llm.start(*llm.check(prompt, saying(num_said, i, temperature=1)))
                    for i in range(n)
                ]
                generations = [g for choices in starts for g in choices]
            held[name] = peak_blocks(llm, generations)
            llm.end(generations)
    shared, alone = (held[name]["target"] + held[name]["draft"] for name in held)
    return {"drafter": drafter, "peak": held, "saved": round(1 - shared / alone, 3)}


def unwritten() -> dict[str, Any]:
    """Slots of held target blocks that hold no token, at the ends of steps."""
    rng, shares = random.Random(0), []
    with demo("none") as llm:
        source = source_tokens(llm)
        generations = []
        for _ in range(64):
            begin, size = rng.randrange(len(source) - 1000), rng.randrange(300, 700)
            asked = llm.check(source[begin : begin + size], saying(rng.randrange(50, 200)))
            generations += llm.start(*asked)
        lengths = [len(g.prompt) + g.sampling.max_tokens for g in generations]
        while not all(g.is_done for g in generations):
            llm.step()
            tables = [r.table for r in llm.engine.scheduler.running]
            slots = BLOCK_SIZE * sum(len(t.blocks) for t in tables)
            if slots:
                shares.append(1 - sum(t.num_computed for t in tables) / slots)
        llm.end(generations)
    return {
        "requests": 64,
        "mean_length": round(sum(lengths) / 64, 1),
        "mean_share": round(sum(shares) / len(shares), 4),
        "highest_share": round(max(shares), 4),
        "steps": len(shares),
    }


class Stopwatch:
    """Sums the seconds of the calls that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., T]) -> Callable[..., T]:
        def timed(*args: Any) -> T:
            start = perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += perf_counter() - start

        return timed


@torch.inference_mode()
def overhead(shape: Path) -> dict[str, Any]:
    """Share of planning and committing in steps with 32 requests of the 0.6B shape, in which all
    blocks are allocated, hashed, looked up, published and freed. Requests come and go.
    """
    running, prompt, said = 32, 160, 24
    decoder = load_decoder(shape, "bf16", load(torch.device("cpu")), 512)
    settings = {
        "memory.kv_bytes": 1 << 30,
        "scheduler.max_running": running,
        "drafter.name": "none",
    }
    config = load_config(None, settings)
    engine = assemble(config, Models(decoder), 512)
    engine.target.threads, _ = choose_threads(engine.target, engine.pool, config, 512)
    rng = random.Random(0)
    beginning = [rng.randrange(decoder.config.vocab_size) for _ in range(prompt // 2)]
    for i in range(2 * running):  # later prompts find the first half of an earlier one
        ending = [rng.randrange(decoder.config.vocab_size) for _ in range(prompt // 2)]
        engine.add(beginning + ending, plain(said + i % running))
    watch = Stopwatch()
    engine.scheduler.plan = watch.around(engine.scheduler.plan)  # type: ignore[method-assign]
    engine.commit = watch.around(engine.commit)  # type: ignore[method-assign]
    times: list[tuple[float, float]] = []  # of steps, and of the memory in them
    plain_times = []  # where no prompt has rows
    while not engine.is_idle:
        before, rows, start = watch.seconds, engine.stats.num_rows, perf_counter()
        num_said = len(engine.step())
        if num_said == running:
            times.append((perf_counter() - start, watch.seconds - before))
            if engine.stats.num_rows - rows == running:
                plain_times.append(times[-1])
    step, memory = (median(column) for column in zip(*plain_times, strict=True))
    return {
        "running": running,
        "steps": len(plain_times),
        "step_ms": round(1e3 * step, 2),
        "memory_ms": round(1e3 * memory, 3),
        "share": round(memory / step, 5),
        "highest_share": round(max(m / s for s, m in times), 5),
    }


def plain(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0, top_k=0, top_p=1, min_p=0, seed=0)
