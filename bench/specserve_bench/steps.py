"""Steps of a model against what they cost at least: bytes / bandwidth, or FLOPs / GEMM peak."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from specserve.config import load_config
from specserve.engine.build import assemble
from specserve.engine.loading import Model, ModelKey
from specserve.engine.pool_plan import Models
from specserve.engine.runner import RowGroup, build_step_input
from specserve.engine.tuning import tune
from specserve.memory.blocks import BlockTable
from specserve.models.decoder import LoadedModel
from specserve.models.decoder_config import Shape
from specserve.models.loader import load_decoder
from specserve_bench.bound import Bound, Rates
from specserve_drafters.tree import TREE_SLOTS
from specserve_kernels import load

ROUNDS = 7
REPEATS = 5  # steps of a size in a round; their median counts
WARM_UP = 20  # steps of a size before the rounds: the number of threads is chosen meanwhile
MAX_ROWS = 64
BLOCK_SIZE = 16
ITEMSIZE = 2  # bytes of a bfloat16


class Size(NamedTuple):
    """A step: `rows` rows for each context of a request, all of them read."""

    label: str
    contexts: tuple[int, ...]
    rows: int


SIZES = (
    Size("1 row at 512", (512,), 1),
    *(Size(f"{n} rows at 512", (512,), n) for n in (4, 8, 16, 32, MAX_ROWS)),
    *(Size(f"1 row at {n}", (n,), 1) for n in (8192, 16384, 32768)),
    Size("32 requests at 300 to 362", tuple(range(300, 364, 2)), 1),
)


class Cost(NamedTuple):
    """What a step has to do: bytes of weights and KV to read, and floating-point operations."""

    num_bytes: float
    flops: float


# Bytes of a weight in the layers and in the head. w4: a float32 is shared by 64 weights.
WEIGHT_BYTES = {None: (ITEMSIZE, ITEMSIZE), "w8": (1, 1), "w8a8": (1, 1), "w4": (0.5 + 4 / 64, 1)}


def cost(c: Shape, size: Size, quantize: str | None = None) -> Cost:
    num_weights, in_layers = num_linear_weights(c), num_layer_weights(c)
    layer_bytes, head_bytes = WEIGHT_BYTES[quantize]
    num_rows = size.rows * len(size.contexts)
    seen = sum(size.rows * context for context in size.contexts)  # (row, earlier token) pairs
    attention = 4 * c.num_layers * c.num_heads * c.head_dim  # FLOPs a pair
    return Cost(
        num_bytes=in_layers * layer_bytes
        + (num_weights - in_layers) * head_bytes
        + sum(size.contexts) * kv_token_bytes(c),
        flops=2 * num_weights * num_rows + attention * seen,
    )


def kv_token_bytes(c: Shape) -> int:
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * ITEMSIZE


def num_linear_weights(c: Shape) -> int:
    """Of the linear maps and the head; of the embedding a step reads a few rows."""
    return num_layer_weights(c) + c.vocab_size * c.hidden_size


def num_layer_weights(c: Shape) -> int:
    query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = c.hidden_size * (2 * query + 2 * kv + 3 * c.intermediate_size)
    return c.num_layers * layer


@torch.inference_mode()
def step_figures(
    folder: Path, sizes: Sequence[Size] = SIZES, rounds: int = ROUNDS
) -> dict[str, Any]:
    """For each size: milliseconds, their bound, and step / bound, over interleaved rounds."""
    longest = longest_context(sizes)
    decoder = load_decoder(folder, "bf16", load(torch.device("cpu")), longest)
    engine_steps = Steps(decoder, str(folder), sizes)
    bound = Bound()
    for size in sizes:
        for _ in range(WARM_UP):
            engine_steps.run(size)
    rates: list[Rates] = []
    seconds: dict[str, list[float]] = {size.label: [] for size in sizes}
    for _ in range(rounds):
        rates.append(bound.rates())
        for size in sizes:
            seconds[size.label].append(typical(partial(engine_steps.run, size)))
    figures = [
        figure(size, cost(engine_steps.config, size), rates, seconds[size.label]) for size in sizes
    ]
    over_first(figures, seconds)
    result = {
        "rounds": rounds,
        "read_gb_per_s": spread([r.read / 1e9 for r in rates]),
        "gemm_tflops": spread([r.multiply / 1e12 for r in rates]),
        "gemm_peak_of": bound.unit,
        "steps": figures,
    }
    print(table(result))
    return result


class Steps:
    """A model, and KV for steps of any of the sizes."""

    def __init__(self, decoder: LoadedModel, name: str, sizes: Sequence[Size]) -> None:
        """The choice of threads is kept under this name."""
        longest = longest_context(sizes)
        self.config = decoder.config
        lengths = table_lengths(sizes)
        num_tokens = sum(length + 2 * BLOCK_SIZE for length in lengths) + TREE_SLOTS
        kv_bytes = num_tokens * kv_token_bytes(self.config)
        config = load_config(None, settings(kv_bytes, len(lengths)))
        engine = assemble(config, Models(decoder), longest)
        self.runner, self.pool = engine.target, engine.pool
        self.runner.arena.blocks.fill_(0x3F)  # numbers near 0.7: pages of zeros would be one page
        key = ModelKey(name, "cpu", "auto", "bf16", longest)
        tune(Model(decoder, key), self.runner, self.pool, config, longest)
        self.tables = [BlockTable(self.pool, self.runner.kv.block_size) for _ in lengths]
        for table, length in zip(self.tables, lengths, strict=True):
            assert table.try_reserve(length), "the pool has room for all sizes"

    def run(self, size: Size) -> None:
        """Roots, each with rows - 1 guesses in a chain, as a verification has them."""
        masks = [(2 << k) - 1 for k in range(size.rows)]
        token_ids = list(range(7, 7 + size.rows))
        groups = [
            RowGroup(table, token_ids, context, size.rows, context, masks)
            for table, context in zip(self.tables, size.contexts, strict=False)
        ]
        launched = self.runner.launch(build_step_input(groups, self.pool.updates))
        assert launched.logits.shape[0] == size.rows * len(size.contexts)


def beside(
    steps: Mapping[str, Steps], sizes: Sequence[Size], rounds: int, base: str, ratio: str
) -> list[dict[str, Any]]:
    """For each size: milliseconds of each model, over interleaved rounds, and under `ratio` what
    they are of those of `base` in the same round.
    """
    for size in sizes:
        for each in steps.values():
            for _ in range(WARM_UP):
                each.run(size)
    times: dict[str, dict[str, list[float]]] = {size.label: {} for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            for name, each in steps.items():
                taken = 1e3 * typical(partial(each.run, size))
                times[size.label].setdefault(name, []).append(taken)
    return [
        {"step": label}
        | {
            name: {
                "ms": spread(own),
                ratio: spread([a / b for a, b in zip(own, of_size[base], strict=True)]),
            }
            for name, own in of_size.items()
        }
        for label, of_size in times.items()
    ]


def settings(kv_bytes: int, num_requests: int) -> dict[str, Any]:
    return {
        "memory.kv_bytes": kv_bytes,
        "memory.block_size": BLOCK_SIZE,
        "scheduler.max_batched_tokens": MAX_ROWS,
        "scheduler.max_running": num_requests,
        "drafter.name": "none",
    }


def longest_context(sizes: Sequence[Size]) -> int:
    return max(max(size.contexts) + size.rows for size in sizes)


def table_lengths(sizes: Sequence[Size]) -> list[int]:
    """Slots that the first, second, ... request needs in any of the sizes."""
    lengths = [0] * max(len(size.contexts) for size in sizes)
    for size in sizes:
        for i, context in enumerate(size.contexts):
            lengths[i] = max(lengths[i], context + size.rows)
    return lengths


def typical(run: Callable[[], object]) -> float:
    """Seconds: the median of some runs in a row."""
    return median(elapsed(run) for _ in range(REPEATS))


def elapsed(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def figure(
    size: Size, cost: Cost, rates: Sequence[Rates], seconds: Sequence[float]
) -> dict[str, Any]:
    """Medians over rounds, and step / bound within a round."""
    bounds = [r.seconds(*cost) for r in rates]
    by_reading = median(cost.num_bytes / r.read - cost.flops / r.multiply for r in rates) > 0
    return {
        "step": size.label,
        "ms": spread([1e3 * s for s in seconds]),
        "bound_ms": round(1e3 * median(bounds), 2),
        "bound_by": "reading" if by_reading else "multiplying",
        "over_bound": spread([s / b for s, b in zip(seconds, bounds, strict=True)]),
    }


def over_first(figures: Sequence[dict[str, Any]], seconds: Mapping[str, Sequence[float]]) -> None:
    """Add what each step costs in steps of the first size, of the same round."""
    first = seconds[figures[0]["step"]]
    for each in figures:
        own = seconds[each["step"]]
        each["over_first"] = spread([s / f for s, f in zip(own, first, strict=True)])


def spread(values: Sequence[float]) -> dict[str, float]:
    each = {"median": median(values), "low": min(values), "high": max(values)}
    return {name: round(value, 3) for name, value in each.items()}


def table(result: Mapping[str, Any]) -> str:
    """Markdown: each step's time, its bound, and their ratio."""
    read, gemm = result["read_gb_per_s"]["median"], result["gemm_tflops"]["median"]
    rows = [
        f"| {s['step']} | {s['ms']['median']:.1f} | {s['bound_ms']:.1f} ({s['bound_by']}) | "
        f"{words(s['over_bound'])} | {words(s['over_first'])} |"
        for s in result["steps"]
    ]
    head = [
        f"{read:.1f} GB/s read, {gemm:.2f} TFLOP/s by {result['gemm_peak_of']}",
        "",
        f"| step | ms | bound, ms | / bound | / {result['steps'][0]['step']} |",
        "|" + " --- |" * 5,
    ]
    return "\n".join([*head, *rows])


def words(value: Mapping[str, float]) -> str:
    return f"{value['median']:.2f} ({value['low']:.2f} to {value['high']:.2f})"
