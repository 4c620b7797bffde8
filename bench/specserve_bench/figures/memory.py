"""The block pool: prefix hits, sequences that share blocks, unused slots."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import torch

from specserve import LLM, BeamSearchParams, SamplingParams
from specserve.config import DEMO_DRAFT
from specserve.memory.blocks import BlockPool, BlockTable, Keys
from specserve.models.folder import read_json
from specserve.models.loader import load_decoder
from specserve.speculation.draft_model import DraftModel
from specserve_bench.figures.host import PhaseClock
from specserve_bench.figures.steps import make_engine, plain_sampling
from specserve_bench.pairs import random_checkpoint, shape_folder
from specserve_bench.report import markdown_table
from specserve_bench.results import extremes, extremes_over
from specserve_bench.scale import scale_model
from specserve_bench.workloads import source_tokens
from specserve_kernels import load

PREFIX, SHARERS = 3000, 32
BLOCK_SIZE, ROUNDS = 16, 5
WIDTHS = 4, 6  # beams
HEADS = 6  # of the larger draft: its KV has a quarter of the target's bytes a token


def measure() -> dict[str, Any]:
    """On the demo pair, but the overhead, which is that of steps of a 0.6B shape."""
    figures: dict[str, Any] = {
        "shared_prefix": shared_prefix(),
        "choices": [choices(drafter) for drafter in ("none", "ngram", "model")],
        "beams": [beams(width) for width in WIDTHS],
        "unwritten": unwritten(),
        "overhead": overhead(random_checkpoint()),
    }
    with TemporaryDirectory(prefix="specserve-bench-") as folder:
        draft = larger_draft(Path(folder))
        loads = ElasticLoad(32, 300, 100), ElasticLoad(16, 800, 200)
        return figures | {"elastic": [one_load(load, draft) for load in loads]}


def table(figures: dict[str, Any]) -> str:
    shared, elastic = figures["shared_prefix"], figures["elastic"]
    rows = {
        f"TTFT with {shared['prefix_tokens']:,} cached prompt tokens / without": (
            f"{shared['hit_over_miss']:.3f}"
        ),
        f"KV blocks of {shared['requests']} requests with a shared prefix / minimum": (
            f"{shared['peak_over_least']:.2f}"
        ),
        "KV blocks saved by n = 16 against 16 requests (off, ngram, model)": ", ".join(
            f"{c['saved']:.0%}" for c in figures["choices"]
        ),
        f"KV blocks saved by {' and '.join(map(str, WIDTHS))} beams (prompt 512, output 128)": (
            ", ".join(f"{b['saved']:.0%}" for b in figures.get("beams", ())) or "not measured"
        ),
        "unused slots of allocated target KV blocks after a step: mean, maximum": (
            f"{figures['unwritten']['mean_share']:.1%}, {figures['unwritten']['highest_share']:.1%}"
        ),
        "scheduling and commit, share of a 0.6B step with 32 requests: median, maximum": (
            f"{figures['overhead']['share']:.1%}, {figures['overhead']['highest_share']:.1%}"
        ),
        "tokens/s with elastic draft blocks / fixed split, in a pool that is too small": ", ".join(
            f"{e['elastic_over_split']:.2f}" for e in elastic
        ),
    }
    return markdown_table(["figure", "measured"], [*rows.items()])


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
        ends = [source[PREFIX + 40 * i :][:40] for i in range(SHARERS)]
        prompts = [source[:PREFIX] + end for end in ends]
        misses, hits = [], []
        for _ in range(ROUNDS):
            llm.reset_cache()
            times = [llm.generate(p, saying(8))[0].timing.ttft_ms for p in prompts[:5]]
            misses.append(times[0])
            hits.append(median(times[1:]))
    over = extremes([hit / miss for hit, miss in zip(hits, misses, strict=True)], 4)
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
        "hit_over_miss": over["median"],
        "hit_over_miss_min_max": [over["low"], over["high"]],
        "peak_blocks": peak,
        "least_blocks": least,
        "peak_over_least": round(peak / least, 3),
    }


def beams(width: int) -> dict[str, Any]:
    """The share of blocks that beams save by sharing, over all steps of their output."""
    with demo("none") as llm:
        params = BeamSearchParams(beam_width=width, max_tokens=128, ignore_eos=True)
        generations = llm.start(*llm.check(source_tokens(llm)[:512], params.sampling))
        held = alone = 0
        while not all(g.is_done for g in generations):
            llm.step()
            tables = [r.table.blocks for r in llm.engine.requests.values() if r.num_output]
            held += len({block for blocks in tables for block in blocks})
            alone += sum(map(len, tables))
        llm.end(generations)
    return {"width": width, "saved": round(1 - held / alone, 4)}


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


@torch.inference_mode()
def overhead(shape: Path) -> dict[str, Any]:
    """Share of scheduling and commit in steps with 32 requests of the 0.6B shape. They allocate,
    hash, look up, publish and free all blocks. Requests come and go.
    """
    running, prompt, said = 32, 160, 24
    decoder = load_decoder(shape, "bf16", load(torch.device("cpu")), 512)
    settings = {"scheduler.max_running": running, "drafter.name": "none"}
    engine = make_engine(decoder, str(shape), 512, 8192, settings)
    rng = random.Random(0)
    beginning = [rng.randrange(decoder.config.vocab_size) for _ in range(prompt // 2)]
    for i in range(2 * running):  # later prompts find the first half of an earlier one
        ending = [rng.randrange(decoder.config.vocab_size) for _ in range(prompt // 2)]
        engine.add(beginning + ending, plain_sampling(said + i % running))
    clock = PhaseClock()
    engine.scheduler.plan = clock.timed(engine.scheduler.plan, "memory")  # type: ignore[method-assign]
    engine.commit = clock.timed(engine.commit, "memory")  # type: ignore[method-assign]
    times: list[tuple[int, int]] = []  # nanoseconds of steps, and of the memory in them
    plain_times = []  # where no prompt has rows
    while not engine.is_idle:
        rows = engine.stats.num_rows
        clock.take()
        num_said = len(engine.step())
        spent = clock.take()
        if num_said == running:
            times.append((spent.total(), spent["memory"]))
            if engine.stats.num_rows - rows == running:
                plain_times.append(times[-1])
    step, memory = (median(column) for column in zip(*plain_times, strict=True))
    return {
        "running": running,
        "steps": len(plain_times),
        "step_ms": round(step / 1e6, 2),
        "memory_ms": round(memory / 1e6, 3),
        "share": round(memory / step, 5),
        "highest_share": round(max(m / s for s, m in times), 5),
    }


class ElasticLoad(NamedTuple):
    """Requests that arrive at once: prompts of source, and tokens to generate."""

    requests: int
    num_prompt: int
    num_said: int


def larger_draft(folder: Path) -> Path:
    """The demo pair's draft with heads added, whose outputs are multiplied by zero."""
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    shape = shape_folder(folder / "shape", read_json(DEMO_DRAFT / "config.json") | heads)
    scale_model(DEMO_DRAFT, folder / "draft", shape)
    return folder / "draft"


def one_load(load: ElasticLoad, draft: Path) -> dict[str, Any]:
    """Tokens a second in a pool of 60 % of what both models want, over those of a fixed split."""
    roomy = LLM(draft_model=draft, progress=False, set=pool_settings(load, kv_bytes=1 << 28))
    bytes_of = [
        runner.kv.layers[0].k[0, 0].nbytes * 2 * len(runner.kv.layers)
        for runner in (roomy.engine.target, roomy.engine.draft_model.runner)  # type: ignore[union-attr]
    ]
    draft_share = bytes_of[1] / sum(bytes_of)
    length = load.num_prompt + load.num_said
    target_blocks = load.requests * -(-length // BLOCK_SIZE)
    num_blocks = int(0.6 * target_blocks / (1 - draft_share))  # of the blocks that both models want
    sized = pool_settings(load, num_blocks * roomy.engine.pool.block_bytes)
    llms = {
        name: LLM(None, own, drafter, progress=False, set=sized, weights=roomy.weights)
        for name, own, drafter in (
            ("elastic", draft, "model"),
            ("split", draft, "model"),
            ("off", None, "none"),
        )
    }
    split(llms["split"], draft_share)
    asks = prompts(roomy, load)
    rates: dict[str, list[float]] = {name: [] for name in llms}
    fallbacks = {}
    for _ in range(1 + ROUNDS):  # the first one warms up
        for name, llm in llms.items():
            before = llm.engine.stats.num_fallbacks
            rates[name].append(tokens_per_second(llm, asks, load.num_said))
            fallbacks[name] = llm.engine.stats.num_fallbacks - before
    over = extremes_over(rates["elastic"][1:], rates["split"][1:])
    return {
        **load._asdict(),
        "blocks": num_blocks,
        "draft_bytes_over_target": round(bytes_of[1] / bytes_of[0], 3),
        "tokens_per_s": {name: round(median(x[1:]), 1) for name, x in rates.items()},
        "fallbacks": fallbacks,
        "elastic_over_split": over["median"],
        "elastic_over_split_min_max": [over["low"], over["high"]],
    }


def pool_settings(load: ElasticLoad, kv_bytes: int) -> dict[str, Any]:
    return {
        "scheduler.max_running": load.requests,
        "scheduler.max_model_len": load.num_prompt + load.num_said + 1,
        "memory.block_size": BLOCK_SIZE,
        "memory.kv_bytes": kv_bytes,
    }


def prompts(llm: LLM, load: ElasticLoad) -> list[list[int]]:
    """Slices, at random places, of source that the demo pair was not trained on."""
    source = source_tokens(llm)
    rng, most = random.Random(0), len(source) - load.num_prompt
    begins = [rng.randrange(most) for _ in range(load.requests)]
    return [source[begin : begin + load.num_prompt] for begin in begins]


def tokens_per_second(llm: LLM, asks: Sequence[list[int]], num_said: int) -> float:
    llm.reset_cache()
    params = SamplingParams(max_tokens=num_said, temperature=0, ignore_eos=True)
    start = perf_counter()
    llm.generate(asks, params)
    return len(asks) * num_said / (perf_counter() - start)


def split(llm: LLM, draft_share: float) -> None:
    """Split the pool: the draft model's KV gets a fixed part, which nothing else may use.

    Both lie in the same arena: the target keeps the first blocks.
    """
    engine, pool = llm.engine, llm.engine.pool
    draft_model, scheduler = engine.draft_model, engine.scheduler
    assert draft_model is not None
    total, kept = pool.num_blocks, round(pool.num_blocks * (1 - draft_share))
    drafts = BlockPool(total, pool.block_bytes)
    drafts.updates = pool.updates
    drafts.free = list(range(total - 1, kept - 1, -1))
    pool.free, pool.num_blocks = list(range(kept - 1, -1, -1)), kept
    make_table = engine.tables.table

    def table(
        model: str, salt: str, keys: Keys | None = None, adapter: str = "", tenant: int = 0
    ) -> BlockTable:
        made = make_table(model, salt, keys, adapter, tenant)
        if model == "draft":
            made.pool = drafts
        return made

    class Apart(DraftModel):
        @property
        def spare(self) -> int:
            return drafts.num_available

    draft_model.__class__ = Apart
    engine.tables.table = table  # type: ignore[method-assign]
    scheduler.reclaim = lambda keeper: False  # type: ignore[method-assign]
