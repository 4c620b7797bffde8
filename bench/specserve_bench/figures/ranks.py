"""Ranks against one process on the same cores, what they exchange, and estimates for GPUs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specserve.config import load_config
from specserve.engine.build import assemble
from specserve.engine.loading import load_ops
from specserve.engine.pool_plan import Models
from specserve.engine.ranks import identity, start_followers
from specserve.memory.blocks import BlockTable
from specserve.models.loader import load_decoder
from specserve.models.shard import Shard
from specserve_bench.bound import StepSize, kv_token_bytes
from specserve_bench.figures.steps import (
    BLOCK_SIZE,
    MAX_ROWS,
    Steps,
    interleaved,
    longest_context,
    table_lengths,
)
from specserve_bench.pairs import random_checkpoint
from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes, extremes_over
from specserve_drafters.candidates import TREE_SLOTS
from specserve_kernels.threads import topology

RANKS = 2
SIZES = tuple(StepSize(f"{rows} rows at 512", (512,), rows) for rows in (1, 8, MAX_ROWS))
ONE, MANY = "one process", "ranks"


class Model(NamedTuple):
    """The shape of a model on paper, in bf16."""

    name: str
    num_layers: int
    hidden: int  # also the width of all query heads
    inner: int
    vocab_size: int
    num_weights: float

    @property
    def widths(self) -> list[int]:
        """The columns of each gather of bf16 numbers in a step."""
        return [self.hidden, self.hidden, self.inner, self.hidden] * self.num_layers


class Connection(NamedTuple):
    """GPUs and what connects them: assumptions, not measurements."""

    name: str
    bytes_per_second: float  # of a GPU, in one direction
    seconds: float  # of a gather of few bytes, in a captured graph
    memory_bytes_per_second: float  # of a GPU


PAPER = (
    Model("8B", 32, 4096, 14336, 128256, 8.0e9),
    Model("70B", 80, 8192, 28672, 128256, 70.6e9),
)
CONNECTIONS = (
    Connection("NVLink 4", 450e9, 8e-6, 3.35e12),
    Connection("PCIe 5 x16", 50e9, 20e-6, 1.8e12),
)


class RankedSteps(Steps):
    """The same steps in several ranks, with one thread per rank."""

    def __init__(self, folder: Path, sizes: Sequence[StepSize]) -> None:
        lengths, longest = table_lengths(sizes), longest_context(sizes)
        num_tokens = sum(length + 2 * BLOCK_SIZE for length in lengths) + TREE_SLOTS
        given = {
            "model.path": str(folder),
            "model.dtype": "bf16",
            "model.threads": max(1, topology().cores // RANKS),
            "parallel.tensor": RANKS,
            "scheduler.max_batched_tokens": MAX_ROWS,
            "scheduler.max_running": len(lengths),
            "scheduler.max_model_len": longest,
            "drafter.name": "none",
            "memory.block_size": BLOCK_SIZE,
        }
        config = load_config(None, given)
        followers = start_followers(config, ends_with_thread=False)
        assert followers is not None, "the config has several ranks"
        ops = load_ops(config)
        part = load_decoder(folder, "bf16", ops, longest, shard=Shard(0, RANKS))
        given["memory.kv_bytes"] = num_tokens * kv_token_bytes(part.config)
        followers.wait_until_ready(identity(config, part), ops)
        models = Models(part)
        engine = assemble(load_config(None, given), models, longest, followers=followers)
        self.config, self.engine, self.followers = part.config, engine, followers
        self.runner, self.pool = engine.target, engine.pool
        self.tables = [BlockTable(self.pool, self.runner.kv.block_size) for _ in lengths]
        for table, length in zip(self.tables, lengths, strict=True):
            assert table.try_reserve(length), "the pool has room for all sizes"

    def run(self, size: StepSize) -> None:
        torch.set_num_threads(max(1, topology().cores // RANKS))
        super().run(size)

    def counts(self) -> tuple[int, int, int]:
        """Return bytes sent by rank 0, exchanges and their nanoseconds so far."""
        native = self.followers.connections.columns.native
        return native.num_bytes, native.num_exchanges, native.nanoseconds


@torch.inference_mode()
def measure(folder: Path | None = None, rounds: int = 5) -> dict[str, Any]:
    """For each size: milliseconds of one process and of ranks on the same cores, over interleaved
    rounds; bytes that a rank sends, and the share of the step that it spends in exchanges.
    """
    folder = folder or random_checkpoint()
    ranked = RankedSteps(folder, SIZES)
    one = Steps(load_decoder(folder, "bf16", ranked.runner.ops, longest_context(SIZES)), "", SIZES)
    one.runner.threads = None
    both: dict[str, Steps] = {ONE: AllCores(one), MANY: ranked}
    times = interleaved(both, SIZES, rounds)
    steps = [figure(size, times[size.label], ranked) for size in SIZES]
    ranked.engine.close()
    return {"ranks": RANKS, "cores": topology().cores, "steps": steps, "paper": on_paper()}


class AllCores(Steps):
    """Steps of one process on all cores."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def run(self, size: StepSize) -> None:
        torch.set_num_threads(topology().cores)
        self.steps.run(size)


def figure(
    size: StepSize, times: Mapping[str, Sequence[float]], ranked: RankedSteps
) -> dict[str, Any]:
    number, before = 20, ranked.counts()
    for _ in range(number):
        ranked.run(size)
    sent, exchanges, nanoseconds = (
        (now - then) / number for then, now in zip(before, ranked.counts(), strict=True)
    )
    return {
        "step": size.label,
        "one_ms": extremes(times[ONE]),
        "ranks_ms": extremes(times[MANY]),
        "over_one": extremes_over(times[MANY], times[ONE]),
        "sent_bytes": round(sent),
        "exchanges": round(exchanges),
        "exchange_ms": round(nanoseconds / 1e6, 3),
        "exchange_share": extremes_over([nanoseconds / 1e6] * len(times[MANY]), times[MANY]),
    }


def on_paper() -> list[dict[str, Any]]:
    """Estimate the exchanges of a step of one row, by model, connection and number of ranks."""
    return [
        estimate(model, connection, ranks)
        for model in PAPER
        for connection in CONNECTIONS
        for ranks in (2, 4, 8)
    ]


def estimate(model: Model, connection: Connection, ranks: int) -> dict[str, Any]:
    received = 2 * sum(model.widths) * (ranks - 1) / ranks
    logits = 4 * model.vocab_size * (ranks - 1) / ranks
    exchange = len(model.widths) * connection.seconds
    exchange += connection.seconds + (received + logits) / connection.bytes_per_second
    weights = 2 * model.num_weights / ranks / connection.memory_bytes_per_second
    return {
        "model": model.name,
        "connection": connection.name,
        "ranks": ranks,
        "bytes": round(received + logits),
        "exchange_ms": round(1e3 * exchange, 3),
        "weights_ms": round(1e3 * weights, 2),
        "share": round(exchange / (exchange + weights), 3),
    }


def table(result: Mapping[str, Any]) -> str:
    """Measured steps, and estimates for GPUs."""
    measured = markdown_table(
        ["step", "one process, ms", "ranks, ms", "ranks / one", "sent, kB", "exchanges", "share"],
        [
            [
                s["step"],
                f"{s['one_ms']['median']:.1f}",
                f"{s['ranks_ms']['median']:.1f}",
                extremes_words(s["over_one"]),
                f"{s['sent_bytes'] / 1e3:.0f}",
                str(s["exchanges"]),
                extremes_words(s["exchange_share"]),
            ]
            for s in result["steps"]
        ],
    )
    paper = markdown_table(
        ["model", "connection", "ranks", "kB per row", "exchanges, ms", "weights, ms", "share"],
        [
            [
                e["model"],
                e["connection"],
                str(e["ranks"]),
                f"{e['bytes'] / 1e3:.0f}",
                f"{e['exchange_ms']:.2f}",
                f"{e['weights_ms']:.2f}",
                f"{100 * e['share']:.0f} %",
            ]
            for e in result["paper"]
        ],
    )
    return (
        f"{result['ranks']} ranks on {result['cores']} cores against one process on all of them\n\n"
        f"{measured}\n\nEstimated for one row, from assumed rates:\n\n{paper}"
    )
