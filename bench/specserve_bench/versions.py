"""`figures versions`: steps of this checkout and of another one, in interleaved rounds.

Each checkout has a process of its own, which loads the model and waits for a size to run.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from specserve.engine.runner import RowGroup, build_step_input
from specserve.models.loader import load_decoder
from specserve_bench import outputs, suite
from specserve_bench.steps import (
    WARM_UP,
    Size,
    Steps,
    longest_context,
    spread,
    typical,
    words,
)
from specserve_kernels import SampleParams, load

RESULT = Path("bench/results/versions-cpu.json")
ROUNDS = 20
SIZES = tuple(Size(f"{n} rows at 512", (512,), n) for n in (1, 2, 4, 8, 16, 32))
FOLDERS = ".", "kernels", "drafters", "bench"  # of a checkout, that Python imports from


def main(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m specserve_bench.figures versions")
    p.add_argument("--before", required=True, type=Path, metavar="FOLDER", help="other checkout")
    p.add_argument("--models", required=True, nargs="+", metavar="MODEL", help="folders or .gguf")
    p.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    p.add_argument(
        "--out", type=Path, default=RESULT, help="file of the JSON; default: %(default)s"
    )
    args = p.parse_args(argv)
    outputs.check_file("--out", args.out)
    result = {"machine": suite.machine("figures versions"), "before": commit(args.before)}
    result |= {"models": {Path(m).name: compare(m, args.before, args.rounds) for m in args.models}}
    args.out.write_text(json.dumps(result) + "\n")
    return 0


def commit(folder: Path) -> str:
    told = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()


def compare(model: str, before: Path, rounds: int) -> list[dict[str, Any]]:
    """For each size: milliseconds in both checkouts, and the ratio within a round."""
    workers = {"before": Worker(before, model), "now": Worker(Path(), model)}
    times: dict[str, dict[str, list[float]]] = {s.label: {n: [] for n in workers} for s in SIZES}
    for _ in range(rounds):
        for i, size in enumerate(SIZES):
            for name, worker in workers.items():
                times[size.label][name].append(worker.milliseconds(i))
    for worker in workers.values():
        worker.close()
    figures = [figure(label, **each) for label, each in times.items()]
    for f in figures:
        print(f"{model}: {f['step']}: {f['now']['median']:.2f} ms, {words(f['now_over_before'])}")
    return figures


def figure(label: str, before: list[float], now: list[float]) -> dict[str, Any]:
    ratios = [b / a for a, b in zip(before, now, strict=True)]
    return {
        "step": label,
        "before": spread(before),
        "now": spread(now),
        "now_over_before": spread(ratios),
    }


class Worker:
    """A process with the code of one checkout."""

    def __init__(self, checkout: Path, model: str) -> None:
        path = os.pathsep.join(str((checkout / folder).resolve()) for folder in FOLDERS)
        command = [sys.executable, str(Path(__file__).resolve()), str(Path(model).resolve())]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **pipes)

    def milliseconds(self, size: int) -> float:
        pipe, answers = self.process.stdin, self.process.stdout
        assert pipe is not None and answers is not None, "both are pipes"
        print(size, file=pipe, flush=True)
        return float(answers.readline())

    def close(self) -> None:
        self.process.communicate()


@torch.inference_mode()
def work(model: str, asked: TextIO, answers: TextIO) -> None:
    """Answer each number of a size with the milliseconds of a step, forward and greedy draws."""
    decoder = load_decoder(Path(model), "auto", load("cpu"), longest_context(SIZES))
    steps = Steps(decoder, model, SIZES)
    for size in SIZES:
        for _ in range(WARM_UP):
            run(steps, size)
    for line in asked:
        size = SIZES[int(line)]
        print(1e3 * typical(partial(run, steps, size)), file=answers, flush=True)


def run(steps: Steps, size: Size) -> None:
    """A root and a chain of draft tokens, and the token after each of them."""
    masks = [(2 << k) - 1 for k in range(size.rows)]
    tokens, [context] = list(range(7, 7 + size.rows)), size.contexts
    group = RowGroup(steps.tables[0], tokens, context, size.rows, context, masks)
    launched = steps.runner.launch(build_step_input([group], steps.pool.updates))
    greedy = SampleParams.greedy(size.rows)
    steps.runner.ops.sample(launched.logits, torch.arange(size.rows), greedy)


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing else may come in between
    work(sys.argv[1], sys.stdin, answers)
