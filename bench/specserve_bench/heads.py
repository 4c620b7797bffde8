"""A draft head beside a draft model at a 0.6B model's cost: what they take and what they bring."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from specserve import LLM
from specserve.config import load_config
from specserve_bench import outputs, suite
from specserve_bench.commands import at_least_1, words
from specserve_bench.local import Local
from specserve_bench.report import ratio_words, shown
from specserve_bench.results import Load, Ratio, ratio
from specserve_bench.speculation import HOT, NAMES, Cell, Place, measured, order
from specserve_bench.workloads import workload

FILE = Path("bench/results/heads-cpu.json")
COMMAND = "python -m specserve_bench.figures heads"
ROUNDS, REQUESTS = 5, 4
COST = "qwen3-0.6b"
NODES = 8
ALONE: dict[str, Any] = {"drafter.options": {"ngrams": False}, "speculation.max_nodes": NODES}
BOTH = ["ngram", "eagle", "model", "grammar", "prediction"]
SUBJECTS: dict[str, dict[str, Any]] = {
    "off": {"drafter.name": "none"},
    f"eagle:{NODES}": {"drafter.name": "eagle", **ALONE},
    f"model:{NODES}": {"drafter.name": "model", **ALONE},
    "auto, eagle": {"drafter.options.sources": [name for name in BOTH if name != "model"]},
    "auto, model": {"drafter.options.sources": [name for name in BOTH if name != "eagle"]},
    "auto, both": {"drafter.options.sources": BOTH},
}
AUTO = [name for name in SUBJECTS if name.startswith("auto")]
LEVELS = 1, 2, 4  # of a chain
MOST = 0.15  # of a step: what drafting may take

DESCRIPTION = f"""
Measure the demo's head beside its draft model, at the cost of {COST}: each alone with {NODES} nodes
and without n-grams, and auto with one of them and with both, by workload, at its own temperature
and at {HOT}. Also what levels of the head take of a step. Auto begins a round with the costs that
earlier ones have shown.
"""


class Levels(msgspec.Struct):
    """Medians over rounds, in milliseconds of a step."""

    off: float  # the target's step without guesses
    drafting: dict[int, float]  # by levels of a chain
    part: dict[int, Ratio]  # of a step without guesses


class Kept(msgspec.Struct):
    levels: Levels
    cells: list[Cell]


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    outputs.check_file("--out", args.out)
    for name in args.workloads:
        workload(name, 1, 0)  # refuses unknown names
    loader = suite.Loader(progress=False)
    levels = measured_levels(loader, args.rounds)
    contenders = [load(loader, name, settings) for name, settings in SUBJECTS.items()]
    cells = []
    for name in args.workloads:
        for temperature in (None,) if name == "random" else (None, HOT):
            place = Place(COST, name, 1, temperature, is_warm=True)
            print(f"{name}, T = {temperature or 'its own'}", file=sys.stderr)
            asked = workload(name, args.requests, 0, temperature)
            cells.append(measured(place, asked, contenders, args.rounds))
    kept = Kept(levels, cells)
    outputs.write("--out", args.out, msgspec.json.encode(kept) + b"\n")
    print(table(kept))
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog=COMMAND, description=DESCRIPTION)
    p.add_argument("--workloads", type=words, default=NAMES, metavar="W,...")
    p.add_argument("--rounds", type=at_least_1, default=ROUNDS, help=f"default: {ROUNDS}")
    p.add_argument("--requests", type=at_least_1, default=REQUESTS, help=f"default: {REQUESTS}")
    p.add_argument("--out", type=Path, default=FILE, metavar="JSON", help=f"default: {FILE}")
    return p


def load(loader: suite.Loader, name: str, settings: Mapping[str, Any]) -> suite.Contender:
    loader.is_warm = name in AUTO
    return loader.load(name, load_config(None, {"model.demo_cost": COST, **settings}))


def measured_levels(loader: suite.Loader, rounds: int) -> Levels:
    """What chains of some levels take, which are verified without n-grams."""
    asked, settings = workload("completion", 2, 0, None), dict(SUBJECTS["off"])
    llms = {0: llm_of(load(loader, "off", settings))}
    for depth in LEVELS:
        options = {"ngrams": False, "width": 1, "max_depth": depth, "min_gain": 0, "min_value": 0}
        chain: dict[str, Any] = {"drafter.name": "eagle", "drafter.options": options}
        chain["speculation.max_nodes"] = depth
        llms[depth] = llm_of(load(loader, f"chain of {depth}", chain))
    taken: dict[int, list[float]] = {depth: [] for depth in llms}
    for number in range(1 + rounds):  # the first is not counted
        for depth, llm in llms.items():
            ms = milliseconds(llm, asked, is_drafting=depth > 0)
            taken[depth] += [ms] if number else []
    parts = {depth: ratio(taken[depth], taken[0]) for depth in LEVELS}
    return Levels(
        off=median(taken[0]),
        drafting={depth: median(taken[depth]) for depth in LEVELS},
        part={depth: part for depth, part in parts.items() if part is not None},
    )


def llm_of(contender: suite.Contender) -> LLM:
    assert isinstance(contender.runnable, Local)
    return contender.runnable.llm


def milliseconds(llm: LLM, asked: Any, is_drafting: bool) -> float:
    """Of drafting, or of the target, in a step."""
    stats = llm.engine.stats
    before = stats.draft_seconds, stats.verify_seconds, stats.num_steps
    Local(llm).run(asked, Load(concurrency=1))
    drafting, verifying, steps = (
        now - then
        for now, then in zip(
            (stats.draft_seconds, stats.verify_seconds, stats.num_steps), before, strict=True
        )
    )
    return 1e3 * (drafting if is_drafting else verifying) / steps


def table(kept: Kept) -> str:
    """In Markdown, as in docs/bench.md."""
    levels = kept.levels
    parts = [["levels of the head", "ms", f"of a step of {shown(levels.off)} ms"], ["---"] * 3]
    parts += [
        [str(depth), shown(ms), ratio_words(levels.part[depth])]
        for depth, ms in levels.drafting.items()
    ]
    names = [f"{name}: tokens a step (right, of guesses)" for name in list(SUBJECTS)[1:3]]
    brought = [["workload", "T", *names], ["---"] * 4]
    times = [["workload", "T", *SUBJECTS, "both / the better one"], ["---"] * (len(SUBJECTS) + 3)]
    for cell in sorted(kept.cells, key=lambda c: order(c.place._replace(pair="0.6b"))):
        begin = [told(cell), "-" if cell.temperature is None else f"{cell.temperature:g}"]
        brought.append([*begin, *(acceptance(cell, name) for name in list(SUBJECTS)[1:3])])
        ms = [shown(median(cell.tpot_ms[name])) for name in SUBJECTS]
        times.append([*begin, *ms, ratio_words(over_either(cell))])
    return "\n\n".join(
        "\n".join(f"| {' | '.join(line)} |" for line in part) for part in (parts, brought, times)
    )


def told(cell: Cell) -> str:
    return cell.workload + ("" if cell.is_same else " (OUTPUTS DIFFER)")


def acceptance(cell: Cell, name: str) -> str:
    tokens, guesses = cell.acceptance_length[name], cell.guesses[name]
    return f"{tokens:.2f} ({(tokens - 1) / guesses if guesses else 0:.0%})"


def over_either(cell: Cell) -> Ratio | None:
    """TPOT of auto with both over that with the better of them alone."""
    one, other, both = (cell.tpot_ms[name] for name in AUTO)
    better = min(one, other, key=median)
    return ratio(both, better)
