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
from specserve_bench.once import Once
from specserve_bench.report import ratio_words, shown
from specserve_bench.results import Load, Ratio, ratio
from specserve_bench.speculation import HOT, KV_BYTES, NAMES, Cell, Place, measured
from specserve_bench.workloads import workload

FILE = Path("bench/results/heads-cpu.json")
COMMAND = "python -m specserve_bench.figures heads"
ROUNDS, REQUESTS, ASKED = 9, 2, 8  # ASKED: requests where time does not count
COST = "qwen3-0.6b"
TIMED = "questions", "completion", "agent"
NODES = 8
USUAL = ["ngram", "grammar", "prediction"]
ALONE: dict[str, dict[str, Any]] = {
    f"{name}:{NODES}": {
        "drafter.name": name,
        "drafter.options": {"ngrams": False},
        "speculation.max_nodes": NODES,
    }
    for name in ("eagle", "model")
}
AUTO: dict[str, dict[str, Any]] = {
    "auto, eagle": {"drafter.options": {"sources": ["eagle", *USUAL]}},
    "auto, model": {"drafter.options": {"sources": ["model", *USUAL]}},
    "auto, both": {"drafter.options": {"sources": ["eagle", "model", *USUAL]}},
}
OFF: dict[str, Any] = {"drafter.name": "none"}
LEVELS = 1, 2, 4  # of a chain

DESCRIPTION = f"""
Measure the demo's head beside its draft model. What each alone brings with {NODES} nodes and
without n-grams, by workload, at its own temperature and at {HOT}. At the cost of {COST} what levels
of the head take of a step, and the time of a token by auto with one of them and with both; auto
begins a round with the costs that earlier ones have shown.
"""


class Levels(msgspec.Struct):
    """Medians over rounds, in milliseconds of a step."""

    off: float  # the target's step without guesses
    drafting: dict[int, float]  # by levels of a chain
    part: dict[int, Ratio]  # of a step without guesses


class Kept(msgspec.Struct):
    levels: Levels
    brought: list[Cell]
    times: list[Cell]


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    outputs.check_file("--out", args.out)
    for name in args.workloads:
        workload(name, 1, 0)  # refuses unknown names
    plain, scaled = suite.Loader(progress=False), suite.Loader(progress=False)
    alone = [load(plain, name, settings) for name, settings in ALONE.items()]
    places = [
        Place("demo", name, 1, temperature)
        for name in NAMES
        for temperature in ((None,) if name == "random" else (None, HOT))
    ]
    brought = [cell(place, ASKED, alone, 1) for place in places]
    levels = measured_levels(scaled, args.rounds)
    scaled.is_warm = True
    chosen = [load(scaled, name, settings, COST) for name, settings in AUTO.items()]
    places = [Place("0.6b", name, 1, None, is_warm=True) for name in args.workloads]
    times = [cell(place, args.requests, chosen, args.rounds) for place in places]
    kept = Kept(levels, brought, times)
    outputs.write("--out", args.out, msgspec.json.encode(kept) + b"\n")
    print(table(kept))
    return 0


def cell(place: Place, size: int, chosen: Sequence[suite.Contender], rounds: int) -> Cell:
    print(f"{place.pair}, {place.workload}", file=sys.stderr)
    asked = workload(place.workload, size, 0, place.temperature)
    return measured(place, asked, chosen, rounds)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog=COMMAND, description=DESCRIPTION)
    p.add_argument(
        "--workloads", action=Once, type=words, default=TIMED, metavar="W,...", help="for the times"
    )
    p.add_argument("--rounds", type=at_least_1, default=ROUNDS, help=f"default: {ROUNDS}")
    p.add_argument("--requests", type=at_least_1, default=REQUESTS, help=f"default: {REQUESTS}")
    p.add_argument("--out", type=Path, default=FILE, metavar="JSON", help=f"default: {FILE}")
    return p


def load(
    loader: suite.Loader, name: str, settings: Mapping[str, Any], cost: str | None = None
) -> suite.Contender:
    at_cost = {} if cost is None else {"model.demo_cost": cost}
    return loader.load(
        name, load_config(None, {"memory.kv_bytes": KV_BYTES, **at_cost, **settings})
    )


def measured_levels(loader: suite.Loader, rounds: int) -> Levels:
    """What chains of some levels take, which are verified without n-grams."""
    asked = workload("completion", 1, 0, None)
    llms = {0: llm_of(load(loader, "off", OFF, COST))}
    for depth in LEVELS:
        options = {"ngrams": False, "width": 1, "max_depth": depth, "min_gain": 0, "min_value": 0}
        chain: dict[str, Any] = {"drafter.name": "eagle", "drafter.options": options}
        chain["speculation.max_nodes"] = depth
        llms[depth] = llm_of(load(loader, f"chain of {depth}", chain, COST))
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
    brought = [["workload", "T", *(f"{name}: tokens a step (guesses right)" for name in ALONE)]]
    brought += [["---"] * len(brought[0])]
    brought += [[*told(cell), *(acceptance(cell, name) for name in ALONE)] for cell in kept.brought]
    times = [["workload", "T", *AUTO, "both / the better one"], ["---"] * (len(AUTO) + 3)]
    for cell in kept.times:
        ms = [shown(median(cell.tpot_ms[name])) for name in AUTO]
        times.append([*told(cell), *ms, ratio_words(over_either(cell))])
    return "\n\n".join(
        "\n".join(f"| {' | '.join(line)} |" for line in part) for part in (parts, brought, times)
    )


def told(cell: Cell) -> list[str]:
    name = cell.workload + ("" if cell.is_same else " (OUTPUTS DIFFER)")
    return [name, "-" if cell.temperature is None else f"{cell.temperature:g}"]


def acceptance(cell: Cell, name: str) -> str:
    tokens, guesses = cell.acceptance_length[name], cell.guesses[name]
    return f"{tokens:.2f} ({(tokens - 1) / guesses if guesses else 0:.0%})"


def over_either(cell: Cell) -> Ratio | None:
    """TPOT of auto with both over that with the better of them alone."""
    one, other, both = (cell.tpot_ms[name] for name in AUTO)
    better = min(one, other, key=median)
    return ratio(both, better)
