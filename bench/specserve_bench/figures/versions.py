"""Steps and servers of this checkout and of another one, in interleaved rounds.

For steps each checkout has a process of its own, which loads the model and waits for a size to run.
A server is started anew for each round, without a drafter.
"""

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

import torch

from specserve.engine.runner import build_step_input
from specserve.models.loader import load_decoder
from specserve_bench.bound import StepSize
from specserve_bench.figures.steps import WARM_UP, Steps, chain, longest_context, typical
from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes, extremes_over
from specserve_bench.served import Served, Stream, environment, settings, stream
from specserve_kernels import SampleParams, load

NUM_STREAMS, NUM_TOKENS = 16, 128
SIZES = tuple(StepSize(f"{n} rows at 512", (512,), n) for n in (1, 2, 4, 8, 16, 32))


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--before", required=True, type=Path, metavar="FOLDER", help="other checkout")
    p.add_argument("--models", required=True, nargs="+", metavar="MODEL", help="folders or .gguf")
    p.add_argument("--rounds", type=int, default=20, help="of steps; default: %(default)s")
    p.add_argument("--servers", type=int, default=0, help="rounds of servers; default: none")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    command = ["git", "-C", str(args.before), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    models = {
        Path(model).name: [
            *compare(model, args.before, args.rounds),
            *compare_servers(model, args.before, args.servers),
        ]
        for model in args.models
    }
    return {"before": commit, "models": models}


def compare(model: str, before: Path, rounds: int) -> list[dict[str, Any]]:
    """For each size: milliseconds in both checkouts, and the ratio within a round."""
    workers = {"before": worker(before, model), "now": worker(Path(), model)}
    times: list[dict[str, list[float]]] = [{name: [] for name in workers} for _ in SIZES]
    for _ in range(rounds):
        for i, each in enumerate(times):
            for name, process in workers.items():
                each[name].append(milliseconds(process, i))
    for process in workers.values():
        process.communicate()
    return [compared(size.label, each) for size, each in zip(SIZES, times, strict=True)]


def compared(what: str, each: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return {
        "step": what,
        "before": extremes(each["before"]),
        "now": extremes(each["now"]),
        "now_over_before": extremes_over(each["now"], each["before"]),
    }


def compare_servers(model: str, before: Path, rounds: int) -> list[dict[str, Any]]:
    """Start-up, time per token of one stream, and the HTTP process's CPU time and memory."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, checkout in (("before", before), ("now", Path())):
            for what, value in serve_once(model, checkout).items():
                found.setdefault(what, {}).setdefault(name, []).append(value)
    return [compared(what, each) for what, each in found.items()]


def serve_once(model: str, checkout: Path) -> dict[str, float]:
    flags = str(Path(model).resolve()), "--drafter=none", *settings(memory__prefix_cache="false")
    with Served(*flags, checkout=checkout) as served:
        asyncio.run(streams(served, 1))  # first use is no part of the figures
        [alone] = asyncio.run(streams(served, 1))
        before = served.cpu_seconds()
        asyncio.run(streams(served, NUM_STREAMS))
        cpu = served.cpu_seconds() - before
        return {
            "start-up": 1e3 * served.ready_seconds,
            "time per token of one stream": 1e3 * fmean(alone.gaps),
            "CPU time of the HTTP process per token": 1e3 * cpu / (NUM_STREAMS * NUM_TOKENS),
            "memory of the HTTP process, MB": served.resident_bytes() / 1e6,
        }


async def streams(served: Served, number: int) -> list[Stream]:
    body = {"prompt": [7] * 20, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    each = (stream(served.host, served.port, "/v1/completions", body) for _ in range(number))
    return await asyncio.gather(*each)


def worker(checkout: Path, model: str) -> "subprocess.Popen[str]":
    """A process with the code of one checkout, which runs that checkout's copy of this file."""
    found = [*(checkout / "bench" / "specserve_bench").rglob("versions.py"), Path(__file__)]
    return subprocess.Popen(
        [sys.executable, "-P", str(found[0].resolve()), str(Path(model).resolve())],
        env=environment(checkout),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def milliseconds(process: "subprocess.Popen[str]", size: int) -> float:
    assert process.stdin is not None and process.stdout is not None
    print(size, file=process.stdin, flush=True)
    return float(process.stdout.readline())


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


def run(steps: Steps, size: StepSize) -> None:
    """A root and a chain of draft tokens, and the token after each of them."""
    [context] = size.contexts
    group = chain(steps.tables[0], context, size.rows)
    launched = steps.runner.launch(build_step_input([group], steps.pool.updates))
    greedy = SampleParams.greedy(size.rows)
    steps.runner.ops.sample(launched.logits, torch.arange(size.rows), greedy)


def table(result: Mapping[str, Any]) -> str:
    models: Mapping[str, Sequence[Mapping[str, Any]]] = result["models"]
    rows = (
        [
            model,
            each["step"],
            *(f"{each[name]['median']:.1f}" for name in ("before", "now")),
            extremes_words(each["now_over_before"]),
        ]
        for model, steps in models.items()
        for each in steps
    )
    return markdown_table(
        ["model", "step or server", "before, ms", "now, ms", "now / before"], rows
    )


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing else may come in between
    work(sys.argv[1], sys.stdin, answers)
