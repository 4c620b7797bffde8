"""What the pool's parts bring: prefixes found again, choices that share, no slot held in vain."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from specserve import LLM, SamplingParams
from specserve.config import load_config
from specserve.engine.build import assemble
from specserve.engine.engine import Engine
from specserve.memory import BlockPool, BlockTable
from specserve.models.loader import load_decoder
from specserve.sampling import Sampling
from specserve.scheduling import Request
from specserve_bench.elastic import elastic_figures
from specserve_bench.workloads import source_tokens
from specserve_kernels import load

PREFIX, SHARERS = 3000, 32
ROUNDS = 5


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
    """In Markdown, as the manual has it."""
    shared, elastic = figures["shared_prefix"], figures["elastic"]
    rows = {
        f"TTFT of a prompt whose first {shared['prefix_tokens']:,} tokens are found, over a miss": (
            f"{shared['hit_over_miss']:.3f}"
        ),
        f"blocks of {shared['requests']} requests that share them, over the least there could be": (
            f"{shared['peak_over_least']:.2f}"
        ),
        "blocks that 16 choices save of those of 16 requests alone (off, ngram, model)": ", ".join(
            f"{c['saved']:.0%}" for c in figures["choices"]
        ),
        "slots of held target blocks without a token, after a step: mean, highest": (
            f"{figures['unwritten']['mean_share']:.1%}, {figures['unwritten']['highest_share']:.1%}"
        ),
        "allocation, hashing, lookup and commit, of a step of a 0.6B shape, 32 running": (
            f"{figures['overhead']['share']:.2%}"
        ),
        "tokens/s with elastic draft blocks, over a fixed split of too small a pool": ", ".join(
            f"{e['elastic_over_split']:.2f}" for e in elastic
        ),
    }
    return "\n".join(
        ["| what | measured |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())]
    )


def demo(drafter: str, **settings: Any) -> LLM:
    base = {"memory.kv_bytes": 1 << 28}
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    return LLM(drafter=drafter, set=base | keys, progress=False)


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
    size = 16
    tails = [-(-(len(p) + 64) // size) - PREFIX // size for p in prompts]
    least = PREFIX // size + sum(tails)
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
    """One beginning, and an end of its own for each request."""
    ends = [source[PREFIX + 40 * i :][:40] for i in range(SHARERS)]
    return [source[:PREFIX] + end for end in ends]


def peak_blocks(llm: LLM, generations: Sequence[Any]) -> dict[str, int]:
    """The most blocks that were held at once between two steps."""
    peak = {"target": 0, "draft": 0}
    while not all(g.is_done for g in generations):
        llm.step()
        held = llm.memory()
        if held["target"] + held["draft"] > sum(peak.values()):
            peak = {holder: held[holder] for holder in peak}
    return peak


def choices(drafter: str) -> dict[str, Any]:
    """Peak blocks of 16 choices of a prompt against 16 requests without a prefix cache."""
    n, num_prompt, num_said = 16, 1000, 100
    held = {}
    for name, settings in (("choices", {}), ("requests", {"memory__prefix_cache": False})):
        with demo(drafter, **settings) as llm:
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
    fewer = 1 - sum(held["choices"].values()) / sum(held["requests"].values())
    return {"drafter": drafter, "peak_blocks": held, "saved": round(fewer, 3)}


def unwritten() -> dict[str, Any]:
    """Slots of held target blocks that hold no token, at the ends of steps."""
    rng, shares = random.Random(0), []
    with demo("none", memory__block_size=16) as llm:
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
            slots = 16 * sum(len(t.blocks) for t in tables)
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


MEMORY = {
    BlockTable: ("try_reserve", "reserve_some", "match", "fork", "publish", "trim", "clear"),
    BlockPool: ("find",),
}


class Stopwatch:
    """Seconds inside the memory's methods; one called by another counts once."""

    def __init__(self) -> None:
        self.seconds, self.depth = 0.0, 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        patches = [
            patch.object(cls, name, self.timed(getattr(cls, name)))
            for cls, names in MEMORY.items()
            for name in names
        ]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()

    def timed(self, method: Any) -> Any:
        def call(*args: Any) -> Any:
            self.depth += 1
            start = perf_counter()
            try:
                return method(*args)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.seconds += perf_counter() - start

        return call


@torch.inference_mode()
def overhead(shape: Path) -> dict[str, Any]:
    """Of a step with 32 requests of the 0.6B shape: its memory's share. Requests come and go."""
    running, prompt, said = 32, 160, 24
    decoder = load_decoder(shape, "bf16", load(torch.device("cpu")), 512)
    settings = {
        "memory.kv_bytes": 1 << 30,
        "scheduler.max_running": running,
        "drafter.name": "none",
    }
    engine = assemble(load_config(None, settings), decoder, None, 512)
    engine.target.threads, _ = engine.target.ops.tune(lambda rows: warm(engine, rows), None)
    rng = random.Random(0)
    beginning = [rng.randrange(decoder.config.vocab_size) for _ in range(prompt // 2)]
    for i in range(2 * running):  # the first half of a prompt is found by those that come later
        ending = [rng.randrange(decoder.config.vocab_size) for _ in range(prompt // 2)]
        engine.add(beginning + ending, plain(said + i % running))
    watch, steps = Stopwatch(), []
    with watch.watching():
        while not engine.is_idle:
            before, start = watch.seconds, perf_counter()
            engine.step()
            if len(engine.scheduler.running) >= running * 3 // 4:
                steps.append((perf_counter() - start, watch.seconds - before))
    step, memory = (sum(column) for column in zip(*steps, strict=True))
    return {
        "running": running,
        "steps": len(steps),
        "step_ms": round(1e3 * step / len(steps), 2),
        "memory_ms": round(1e3 * memory / len(steps), 3),
        "share": round(memory / step, 5),
        "highest_share": round(max(m / s for s, m in steps), 5),
    }


def plain(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0, top_k=0, top_p=1, min_p=0, seed=0)


def warm(engine: Engine, rows: int) -> None:
    request: Request = engine.add(range(rows), plain(1))
    while request.id in engine.requests:
        engine.step()
