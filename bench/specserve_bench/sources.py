"""What sources bring: predictions of edits, earlier outputs, and all of them on random text."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from specserve.config import load_config
from specserve_bench import outputs, suite
from specserve_bench.commands import at_least_1
from specserve_bench.pairs import PAIRS, Pair
from specserve_bench.report import ratio_words
from specserve_bench.results import Goals, Load, Ratio, ratio
from specserve_bench.speculation import HOT, KV_BYTES, tokens_a_step, tpot
from specserve_bench.workloads import workload
from specserve_drafters.base import BUILT_IN, USUAL

FILE = Path("bench/results/sources-cpu.json")
COMMAND = "python -m specserve_bench.figures sources"
ROUNDS = 3
WARM = "auto with suffix, warm"
SUBJECTS: dict[str, dict[str, Any]] = {
    "off": {"drafter.name": "none", "drafter.model": None},
    "prediction": {"drafter.options": {"sources": ["prediction"]}, "drafter.model": None},
    "auto": {},
    WARM: {"drafter.options": {"sources": [*USUAL, "suffix"]}},
    "all sources": {"drafter.options": {"sources": [*BUILT_IN]}},
}

DESCRIPTION = f"""
Measure sources of guesses, one request at a time: predictions on the workload edit, earlier outputs
on agent and on questions, both of which were asked once before, and all sources
({", ".join(BUILT_IN)}) on random. On two cores it takes two minutes or more with the pair at a 0.6B
model's cost.
"""


class Comparison(NamedTuple):
    """A subject that is to be at least `wanted` times as fast as another one on a workload."""

    workload: str
    requests: int
    subject: str
    base: str
    wanted: float
    temperature: float | None = None  # None: the workload's


COMPARISONS = (
    Comparison("edit", 2, "prediction", "off", 4.0),
    Comparison("agent", 4, WARM, "auto", 1.3),
    Comparison("questions", 4, WARM, "auto", 1.3),
    Comparison("questions", 4, WARM, "auto", 1.3, HOT),
    Comparison("random", 3, "all sources", "off", 1 / 1.03),
)


class Row(msgspec.Struct, kw_only=True):
    """A comparison's figures, of each round where they are lists; rounds are paired."""

    workload: str
    temperature: float
    requests: int
    subject: str
    base: str
    tpot_ms: list[float]  # means over the requests
    base_tpot_ms: list[float]
    tokens_a_step: float
    times_as_fast: Ratio  # the base's TPOT over the subject's in the same round
    wanted: float
    is_same: bool  # all texts of both and of all rounds


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    outputs.check_file("--out", args.out)
    contenders = load(PAIRS[args.pair]())
    rows = [measured(each, contenders, args.rounds) for each in COMPARISONS]
    result = {"machine": suite.machine(COMMAND), "pair": args.pair, "rows": rows}
    outputs.write("--out", args.out, msgspec.json.encode(result) + b"\n")
    print(table(rows))
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog=COMMAND, description=DESCRIPTION)
    p.add_argument("--pair", choices=[*PAIRS], default="0.6b", help="default: 0.6b")
    p.add_argument("--rounds", type=at_least_1, default=ROUNDS, help=f"default: {ROUNDS}")
    p.add_argument("--out", type=Path, default=FILE, metavar="JSON", help=f"default: {FILE}")
    return p


def load(pair: Pair) -> dict[str, suite.Contender]:
    """All subjects; their models are loaded once."""
    target, draft = map(str, pair)
    shared = {"model.path": target, "drafter.model": draft, "memory.kv_bytes": KV_BYTES}
    cold, warm = suite.Loader(progress=False), suite.Loader(progress=False, is_warm=True)
    warm.models = cold.models
    return {
        name: (warm if name == WARM else cold).load(name, load_config(None, shared | settings))
        for name, settings in SUBJECTS.items()
    }


def measured(asked: Comparison, contenders: Mapping[str, suite.Contender], rounds: int) -> Row:
    chosen = workload(asked.workload, asked.requests, 0, asked.temperature)
    print(f"{asked.workload}: {asked.subject}, {asked.base}", file=sys.stderr)
    both = [contenders[asked.base], contenders[asked.subject]]
    trials = suite.Trials([chosen], [Load(concurrency=1)], rounds)
    base, subject = suite.measure("drafters", both, trials, Goals(), COMMAND).runs
    ms, base_ms = ([tpot(round) for round in run.rounds] for run in (subject, base))
    found = ratio(base_ms, ms)
    assert found is not None, "there is at least one round"
    return Row(
        workload=asked.workload,
        temperature=chosen.asks[0].temperature,
        requests=asked.requests,
        subject=asked.subject,
        base=asked.base,
        tpot_ms=ms,
        base_tpot_ms=base_ms,
        tokens_a_step=tokens_a_step(subject.rounds),
        times_as_fast=found,
        wanted=asked.wanted,
        is_same=len({round.output_hash for run in (base, subject) for round in run.rounds}) == 1,
    )


def table(rows: Sequence[Row]) -> str:
    """In Markdown, as in docs/bench.md."""
    head = ["workload", "T", "guesses", "TPOT, ms", "beside", "TPOT, ms", "times as fast", "wanted"]
    lines = [head, ["---"] * len(head), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(row: Row) -> list[str]:
    return [
        row.workload + ("" if row.is_same else " (OUTPUTS DIFFER)"),
        f"{row.temperature:g}",
        row.subject,
        f"{median(row.tpot_ms):.2f}",
        row.base,
        f"{median(row.base_tpot_ms):.2f}",
        ratio_words(row.times_as_fast),
        f"at least {row.wanted:.3g}",
    ]
