"""Speedup of draft sources: predictions of edits, earlier outputs, and all on random text.

One request at a time. Predictions run on the workload edit, and all sources on random. Earlier
outputs run on agent and questions, which were both asked once before. On two cores it takes two
minutes or more with the pair at a 0.6B model's cost.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from specserve.config import load_config
from specserve_bench import suite
from specserve_bench.arguments import at_least_1
from specserve_bench.figures.drafter_cells import HOT, KV_BYTES, tokens_a_step, tpot
from specserve_bench.pairs import PAIRS
from specserve_bench.report import markdown_table, ratio_words
from specserve_bench.results import ratio
from specserve_bench.workloads import workload
from specserve_drafters.base import AUTO_SOURCES, USUAL

WARM = "auto with suffix, warm"
SUBJECTS: dict[str, dict[str, Any]] = {
    "off": {"drafter.name": "none", "drafter.model": None},
    "prediction": {"drafter.options": {"sources": ["prediction"]}, "drafter.model": None},
    "auto": {},
    WARM: {"drafter.options": {"sources": [*USUAL, "suffix"]}},
    "all sources": {"drafter.options": {"sources": [*AUTO_SOURCES]}},
}


class SourceCase(NamedTuple):
    """A subject that is to be at least `wanted` times as fast as another one on a workload."""

    workload: str
    requests: int
    subject: str
    base: str
    wanted: float
    temperature: float | None = None  # None: the workload's


COMPARISONS = (
    SourceCase("edit", 2, "prediction", "off", 4.0),
    SourceCase("agent", 4, WARM, "auto", 1.3),
    SourceCase("questions", 4, WARM, "auto", 1.3),
    SourceCase("questions", 4, WARM, "auto", 1.3, HOT),
    SourceCase("random", 3, "all sources", "off", 1 / 1.03),
)


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--pair", choices=[*PAIRS], default="0.6b", help="default: 0.6b")
    p.add_argument("--rounds", type=at_least_1, default=3, help="default: 3")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    contenders = load(PAIRS[args.pair]())
    rows = [measured(each, contenders, args.rounds) for each in COMPARISONS]
    return {"pair": args.pair, "rows": rows}


def load(pair: tuple[Path, Path]) -> dict[str, suite.Contender]:
    """All subjects; their models are loaded once."""
    target, draft = map(str, pair)
    shared = {"model.path": target, "drafter.model": draft, "memory.kv_bytes": KV_BYTES}
    loader, found = suite.Loader(progress=False), {}
    for name, settings in SUBJECTS.items():
        loader.is_warm = name == WARM
        found[name] = loader.load(name, load_config(None, shared | settings))
    return found


def measured(
    asked: SourceCase, contenders: Mapping[str, suite.Contender], rounds: int
) -> dict[str, Any]:
    """A case's figures, of each round where they are lists; rounds are paired."""
    chosen = workload(asked.workload, asked.requests, 0, asked.temperature)
    print(f"{asked.workload}: {asked.subject}, {asked.base}", file=sys.stderr)
    both = [contenders[asked.base], contenders[asked.subject]]
    base, subject = suite.measure_drafters(both, [chosen], rounds, "figures sources").runs
    ms, base_ms = ([tpot(round) for round in run.rounds] for run in (subject, base))
    return {
        "workload": asked.workload,
        "temperature": chosen.asks[0].temperature,
        "requests": asked.requests,
        "subject": asked.subject,
        "base": asked.base,
        "tpot_ms": ms,
        "base_tpot_ms": base_ms,
        "tokens_a_step": tokens_a_step(subject.rounds),
        "times_as_fast": ratio(base_ms, ms),
        "wanted": asked.wanted,
        "is_same": len({round.output_hash for run in (base, subject) for round in run.rounds}) == 1,
    }


def table(result: Mapping[str, Any]) -> str:
    head = ["workload", "T", "setting", "TPOT, ms", "base", "TPOT, ms", "speedup", "goal"]
    rows = (
        [
            row["workload"] + ("" if row["is_same"] else " (OUTPUTS DIFFER)"),
            f"{row['temperature']:g}",
            row["subject"],
            f"{median(row['tpot_ms']):.2f}",
            row["base"],
            f"{median(row['base_tpot_ms']):.2f}",
            ratio_words(row["times_as_fast"]),
            f"at least {row['wanted']:.3g}",
        ]
        for row in result["rows"]
    )
    return markdown_table(head, rows)
