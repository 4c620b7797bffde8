"""Drafting before, during and after other load: two processes that each keep a core busy.

Two servers answer the same chat questions, one without drafting and one with `auto`, in turn. Each
has 20 steps or fewer between the end of the load and the first round after it.
"""

import argparse
import random
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median
from time import monotonic
from typing import Any

from specserve_bench.arguments import above_0, at_least_1
from specserve_bench.figures.load_gaps import busy_processes
from specserve_bench.figures.speculation import MODELS, Loader, length, mean
from specserve_bench.real_prompts import prompts
from specserve_bench.report import markdown_table, ratio_words
from specserve_bench.results import Load, ratio
from specserve_bench.workloads import Ask, Workload
from specserve_drafters.base import AUTO_SOURCES

SUBJECTS = "off", "auto"
REQUESTS = 4  # of a round
WANTED = 1.03  # of auto / off after the load
STEPS = 20  # most of each subject between the end of the load and the first round after it


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", choices=MODELS, default="SmolLM2")
    p.add_argument("--seconds", type=above_0, default=600.0, help="of load; default: 600")
    p.add_argument("--rounds", type=at_least_1, default=8, help="before and after; default: 8")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    loader = Loader(MODELS[args.model](), AUTO_SOURCES)
    servers = {name: loader.warmed(name) for name in SUBJECTS}
    asks, rng = prompts("chat"), random.Random(0)

    def run(name: str, asked: Sequence[Ask]) -> float:
        workload = Workload("chat", "", 0, [*asked])
        return mean(loader.run(servers[name], workload, Load(concurrency=1)), "tpot_ms")

    def rounds(found: dict[str, list[float]], number: int) -> None:
        each = [drawn(ask, rng) for ask in rng.sample(asks, REQUESTS)]
        for name in SUBJECTS if number % 2 else SUBJECTS[::-1]:
            found[name].append(run(name, each))

    phases: dict[str, dict[str, list[float]]] = {}
    for phase in ("before", "during", "after"):
        found = phases[phase] = {name: [] for name in SUBJECTS}
        with busy_processes() if phase == "during" else nullcontext():
            end, number = monotonic() + args.seconds, 0
            while number < args.rounds or (phase == "during" and monotonic() < end):
                rounds(found, number)
                number += 1
        if phase == "during":
            for name in SUBJECTS:
                run(name, [asks[0]._replace(max_tokens=STEPS)])
    return {"model": args.model, "seconds": args.seconds, "tpot_ms": phases, "wanted": WANTED}


def drawn(ask: Ask, rng: random.Random) -> Ask:
    """The question with a new seed: no text comes again."""
    return ask._replace(max_tokens=length(ask, rng), temperature=0.8, seed=rng.randrange(2**32))


def table(result: dict[str, Any]) -> str:
    rows = [
        [
            phase,
            *(f"{median(each[name]):.2f}" for name in SUBJECTS),
            ratio_words(ratio(each["auto"], each["off"])),
            str(len(each["off"])),
        ]
        for phase, each in result["tpot_ms"].items()
    ]
    head = ["load", "off, TPOT ms", "auto, TPOT ms", "auto / off", "rounds"]
    return markdown_table(head, rows)
