"""A draft head against a draft model, at 0.6B compute.

Measures the tokens per step of each with 8 nodes and without n-grams, and the time of the head's
levels. Then it measures TPOT of `auto` with one of them and with both. `auto` keeps
learned costs between rounds.
"""

import argparse
import sys
from collections.abc import Mapping
from statistics import median
from typing import Any

import msgspec

from specserve.config import load_config
from specserve_bench import suite
from specserve_bench.arguments import Once, at_least_1, listed
from specserve_bench.figures.drafter_cells import HOT, KV_BYTES, NAMES, Cell, Place, measured
from specserve_bench.local import Local
from specserve_bench.report import markdown_table, ratio_words, shown
from specserve_bench.results import Load, Ratio, ratio
from specserve_bench.workloads import WORKLOADS, workload

COST = "qwen3-0.6b"
USUAL = ["ngram", "grammar", "prediction"]
ALONE: dict[str, dict[str, Any]] = {
    f"{name}:8": {
        "drafter.name": name,
        "drafter.options": {"ngrams": False},
        "speculation.max_nodes": 8,
    }
    for name in ("eagle", "model")
}
AUTO: dict[str, dict[str, Any]] = {
    "auto, eagle": {"drafter.options": {"sources": ["eagle", *USUAL]}},
    "auto, model": {"drafter.options": {"sources": ["model", *USUAL]}},
    "auto, both": {"drafter.options": {"sources": ["eagle", "model", *USUAL]}},
}


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--workloads",
        action=Once,
        type=listed(str, WORKLOADS),
        default=("questions", "completion", "agent"),
        metavar="W,...",
        help="for the times",
    )
    p.add_argument("--rounds", type=at_least_1, default=9, help="default: 9")
    p.add_argument("--requests", type=at_least_1, default=2, help="default: 2")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    plain, scaled = suite.Loader(progress=False), suite.Loader(progress=False)
    alone = [load(plain, name, settings) for name, settings in ALONE.items()]
    places = [
        Place("demo", name, 1, temperature)
        for name in NAMES
        for temperature in ((None,) if name == "random" else (None, HOT))
    ]
    brought = []
    for place in places:
        print(place.workload, file=sys.stderr)
        brought.append(measured(place, 8, alone, 1))  # time does not count
    levels = measured_levels(scaled, args.rounds)
    scaled.is_warm = True
    chosen = [load(scaled, name, settings, COST) for name, settings in AUTO.items()]
    places = [Place("0.6b", name, 1, None, is_warm=True) for name in args.workloads]
    times = [measured(place, args.requests, chosen, args.rounds) for place in places]
    return {"levels": levels, "brought": brought, "times": times}


def load(
    loader: suite.Loader, name: str, settings: Mapping[str, Any], cost: str | None = None
) -> suite.Contender:
    at_cost = {} if cost is None else {"model.demo_compute": cost}
    return loader.load(
        name, load_config(None, {"memory.kv_bytes": KV_BYTES, **at_cost, **settings})
    )


def measured_levels(loader: suite.Loader, rounds: int) -> dict[str, Any]:
    """Drafting time of chains with several levels, without n-grams."""
    asked, depths = workload("completion", 1, 0, None), (1, 2, 4)
    runs = {0: load(loader, "off", {"drafter.name": "none"}, COST).runnable}
    for depth in depths:
        options = {"ngrams": False, "width": 1, "max_depth": depth, "min_gain": 0, "min_value": 0}
        chain: dict[str, Any] = {"drafter.name": "eagle", "drafter.options": options}
        chain["speculation.max_nodes"] = depth
        runs[depth] = load(loader, f"chain of {depth}", chain, COST).runnable
    taken: dict[int, list[float]] = {depth: [] for depth in runs}
    for number in range(1 + rounds):  # the first is not counted
        for depth, local in runs.items():
            assert isinstance(local, Local)
            stats = local.llm.engine.stats
            before = stats.num_steps
            round = local.run(asked, Load(concurrency=1))
            seconds = round.draft_seconds if depth else round.verify_seconds
            ms = 1e3 * (seconds or 0.0) / (stats.num_steps - before)
            taken[depth] += [ms] if number else []
    return {
        "off": median(taken[0]),  # milliseconds of the target's step
        "drafting": {str(depth): median(taken[depth]) for depth in depths},
        "part": {str(depth): ratio(taken[depth], taken[0]) for depth in depths},
    }


def table(kept: Mapping[str, Any]) -> str:
    levels, brought, times = (
        kept["levels"],
        *(msgspec.convert(kept[name], list[Cell]) for name in ("brought", "times")),
    )
    parts = (
        [depth, shown(ms), ratio_words(levels["part"][depth])]
        for depth, ms in levels["drafting"].items()
    )
    of_step = f"of a step of {levels['off']:.2f} ms"
    alone = ([*told(cell), *(acceptance(cell, n) for n in ALONE)] for cell in brought)
    both = (
        [*told(c), *(shown(median(c.tpot_ms[n])) for n in AUTO), ratio_words(over_either(c))]
        for c in times
    )
    heads = [f"{name}: tokens per step (draft tokens accepted)" for name in ALONE]
    return "\n\n".join(
        [
            markdown_table(["levels of the head", "ms", of_step], parts),
            markdown_table(["workload", "T", *heads], alone),
            markdown_table(["workload", "T", *AUTO, "both / the faster one"], both),
        ]
    )


def told(cell: Cell) -> list[str]:
    name = cell.workload + ("" if cell.is_same else " (OUTPUTS DIFFER)")
    return [name, "-" if cell.temperature is None else f"{cell.temperature:g}"]


def acceptance(cell: Cell, name: str) -> str:
    tokens, drafted = cell.acceptance_length[name], cell.draft_tokens[name]
    return f"{tokens:.2f} ({(tokens - 1) / drafted if drafted else 0:.0%})"


def over_either(cell: Cell) -> Ratio | None:
    """TPOT of auto with both, over TPOT of auto with the faster one."""
    one, other, both = (cell.tpot_ms[name] for name in AUTO)
    better = min(one, other, key=median)
    return ratio(both, better)
