"""Steps of a model against what they cost at least: bytes / bandwidth, or FLOPs / GEMM peak."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from specserve.config import load_config
from specserve.engine.build import assemble
from specserve.engine.engine import Engine
from specserve.engine.loading import Model, ModelKey
from specserve.engine.pool_plan import Models
from specserve.engine.runner import RowGroup, build_step_input
from specserve.engine.tuning import tune
from specserve.exchange.sampling_params import Sampling
from specserve.memory.blocks import BlockTable
from specserve.models.decoder import LoadedModel
from specserve.models.loader import load_decoder
from specserve_bench.bound import Bound, Cost, Rates, StepSize, cost, kv_token_bytes
from specserve_bench.pairs import random_checkpoint
from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes, extremes_over
from specserve_drafters.candidates import TREE_SLOTS
from specserve_kernels import load

WARM_UP = 20  # steps of a size before the rounds: the number of threads is chosen meanwhile
MAX_ROWS = 64
BLOCK_SIZE = 64  # tokens; the default on CPUs
SIZES = (
    StepSize("1 row at 512", (512,), 1),
    *(StepSize(f"{n} rows at 512", (512,), n) for n in (4, 8, 16, 32, MAX_ROWS)),
    *(StepSize(f"1 row at {n}", (n,), 1) for n in (8192, 16384, 32768)),
    StepSize("32 requests at 300 to 362", tuple(range(300, 364, 2)), 1),
)


@torch.inference_mode()
def measure(
    folder: Path | None = None, sizes: Sequence[StepSize] = SIZES, rounds: int = 7
) -> dict[str, Any]:
    """For each size: milliseconds, their bound, and step / bound, over interleaved rounds."""
    folder = folder or random_checkpoint()
    decoder = load_decoder(folder, "bf16", load(torch.device("cpu")), longest_context(sizes))
    bound, rates = Bound(), list[Rates]()
    steps = Steps(decoder, str(folder), sizes)
    times = interleaved({"ms": steps}, sizes, rounds, lambda: rates.append(bound.rates()))
    taken = {size.label: times[size.label]["ms"] for size in sizes}
    return {
        "rounds": rounds,
        "read_gb_per_s": extremes([r.read / 1e9 for r in rates]),
        "gemm_tflops": extremes([r.multiply / 1e12 for r in rates]),
        "gemm_peak_of": bound.unit,
        "steps": [
            figure(size.label, cost(steps.config, size), rates, taken[size.label])
            | {"over_first": extremes_over(taken[size.label], taken[sizes[0].label])}
            for size in sizes
        ],
    }


def figure(label: str, cost: Cost, rates: Sequence[Rates], ms: Sequence[float]) -> dict[str, Any]:
    """Medians over rounds, and step / bound within a round."""
    bounds = [1e3 * r.seconds(*cost) for r in rates]
    by_reading = median(cost.num_bytes / r.read - cost.flops / r.multiply for r in rates) > 0
    return {
        "step": label,
        "ms": extremes(ms),
        "bound_ms": round(median(bounds), 2),
        "bound_by": "reading" if by_reading else "multiplying",
        "over_bound": extremes_over(ms, bounds),
    }


class Steps:
    """A model, and KV for steps of any of the sizes."""

    def __init__(self, decoder: LoadedModel, name: str, sizes: Sequence[StepSize]) -> None:
        """The choice of threads is kept under this name."""
        self.config = decoder.config
        lengths = table_lengths(sizes)
        num_tokens = sum(length + 2 * BLOCK_SIZE for length in lengths) + TREE_SLOTS
        settings = {
            "scheduler.max_batched_tokens": MAX_ROWS,
            "scheduler.max_running": len(lengths),
            "drafter.name": "none",
        }
        engine = make_engine(decoder, name, longest_context(sizes), num_tokens, settings)
        self.runner, self.pool = engine.target, engine.pool
        self.runner.arena.blocks.fill_(0x3F)  # numbers near 0.7: pages of zeros would be one page
        self.tables = [BlockTable(self.pool, self.runner.kv.block_size) for _ in lengths]
        for table, length in zip(self.tables, lengths, strict=True):
            assert table.try_reserve(length), "the pool has room for all sizes"

    def run(self, size: StepSize) -> None:
        """Roots, each with a chain of draft tokens, as a verification has them."""
        both = zip(self.tables, size.contexts, strict=False)
        groups = [chain(table, context, size.rows) for table, context in both]
        launched = self.runner.launch(build_step_input(groups, self.pool.updates))
        assert launched.logits.shape[0] == size.rows * len(size.contexts)


def make_engine(
    model: LoadedModel, name: str, max_len: int, num_tokens: int, settings: Mapping[str, Any]
) -> Engine:
    """An engine with KV for so many tokens, and with the threads that fit the model."""
    memory = {"memory.kv_bytes": num_tokens * kv_token_bytes(model.config)}
    config = load_config(None, {**memory, **settings})
    engine = assemble(config, Models(model), max_len)
    key = ModelKey(name, "cpu", "auto", "bf16", max_len)
    tune(Model(key, lambda _: model), engine.target, engine.pool, config, max_len)
    return engine


def plain_sampling(max_tokens: int, temperature: float = 0.0, seed: int = 0) -> Sampling:
    """Without filters and penalties."""
    return Sampling(
        max_tokens=max_tokens, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed
    )


def chain(table: BlockTable, context: int, rows: int) -> RowGroup:
    """A root after the context, and a chain of draft tokens; all rows are read."""
    masks = [(2 << k) - 1 for k in range(rows)]
    return RowGroup(table, list(range(7, 7 + rows)), context, rows, context, masks)


def interleaved(
    steps: Mapping[str, Steps],
    sizes: Sequence[StepSize],
    rounds: int,
    begin: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by size and model, of each round; `begin` is called before each round."""
    for size in sizes:
        for each in steps.values():
            for _ in range(WARM_UP):
                each.run(size)
    times: dict[str, dict[str, list[float]]] = {s.label: {n: [] for n in steps} for s in sizes}
    for _ in range(rounds):
        begin()
        for size in sizes:
            for name, each in steps.items():
                times[size.label][name].append(1e3 * typical(partial(each.run, size)))
    return times


def beside(
    steps: Mapping[str, Steps], sizes: Sequence[StepSize], rounds: int, base: str, ratio: str
) -> list[dict[str, Any]]:
    """For each size: milliseconds of each model, over interleaved rounds, and under `ratio` what
    they are of those of `base` in the same round.
    """
    return [
        {"step": label}
        | {n: {"ms": extremes(ms), ratio: extremes_over(ms, each[base])} for n, ms in each.items()}
        for label, each in interleaved(steps, sizes, rounds).items()
    ]


def longest_context(sizes: Sequence[StepSize]) -> int:
    return max(max(size.contexts) + size.rows for size in sizes)


def table_lengths(sizes: Sequence[StepSize]) -> list[int]:
    """Slots that the first, second, ... request needs in any of the sizes."""
    lengths = [0] * max(len(size.contexts) for size in sizes)
    for size in sizes:
        for i, context in enumerate(size.contexts):
            lengths[i] = max(lengths[i], context + size.rows)
    return lengths


def typical(run: Callable[[], object]) -> float:
    """Seconds: the median of some runs in a row."""
    return median(elapsed(run) for _ in range(5))  # steps of a size in a round; their median counts


def elapsed(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def table(result: Mapping[str, Any]) -> str:
    """Each step's time, its bound, and their ratio."""
    read, gemm = result["read_gb_per_s"]["median"], result["gemm_tflops"]["median"]
    rates = f"{read:.1f} GB/s read, {gemm:.2f} TFLOP/s by {result['gemm_peak_of']}"
    rows = (
        [
            s["step"],
            f"{s['ms']['median']:.1f}",
            f"{s['bound_ms']:.1f} ({s['bound_by']})",
            *(extremes_words(s[name]) for name in ("over_bound", "over_first")),
        ]
        for s in result["steps"]
    )
    head = ["step", "ms", "bound, ms", "/ bound", f"/ {result['steps'][0]['step']}"]
    return f"{rates}\n\n{markdown_table(head, rows)}"
