"""Requests in an open loop, to specserve and to vLLM on this machine.

specserve has its defaults. vLLM for CPU runs without drafting, or with --vllm-speculation. Both get
the same requests at the same times, in turn. Rates are shares of the capacity: the requests per
second that the slower server completes with 16 concurrent requests.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Self

from specserve.errors import ConfigError
from specserve_bench import suite
from specserve_bench.arguments import Once, above_0, at_least_1, listed
from specserve_bench.pairs import PAIRS
from specserve_bench.peers.peer import checked_python, environment
from specserve_bench.report import markdown_table, ratio_words, report
from specserve_bench.results import Goals, Load, Result, Run, Spread, figures, ratio
from specserve_bench.served import Served, free_port, settings, wait_until_ready
from specserve_bench.workloads import Workload, workload

OURS, THEIRS = "specserve", "vllm"
KV_GIB, MAX_LEN = 2, 4096
COMPARED = {  # name -> a figure of a round, and its part
    "p99 TTFT": ("ttft_ms", "p99"),
    "p99 TPOT": ("tpot_ms", "p99"),
    "median TTFT": ("ttft_ms", "p50"),
    "mean end-to-end time": ("end_to_end_ms", "mean"),
}


class VLLMServer:
    """vLLM's server of the OpenAI API; ended when the block ends."""

    def __init__(self, python: str, target: Path, speculation: str | None) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = TemporaryFile()  # noqa: SIM115, closed with the server
        command = [python, "-m", "vllm.entrypoints.openai.api_server", f"--port={port}"]
        command += [f"--model={target.resolve()}", "--dtype=bfloat16", "--host=127.0.0.1"]
        command += [f"--max-model-len={MAX_LEN}", "--no-enable-prefix-caching"]
        command += [] if speculation is None else [f"--speculative-config={speculation}"]
        self.process = subprocess.Popen(
            command,
            env=environment() | of_vllm(python),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        try:
            wait_until_ready(self.url, self.process, 600)
        except ConfigError as e:
            self.log.seek(0)
            told = self.log.read().decode(errors="replace")[-2000:]
            self.__exit__()
            raise ConfigError(f"--vllm: the server did not become ready: {told}") from e
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # workers outlive a server that fails
        self.process.wait()
        self.log.close()


def of_vllm(python: str) -> dict[str, str]:
    """The environment that its manual advises for CPUs."""
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"  # comes with vLLM
    return {
        "LD_PRELOAD": str(openmp) if openmp.exists() else "",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--vllm", required=True, metavar="PYTHON", help="Python of an environment with vLLM"
    )
    p.add_argument(
        "--vllm-speculation",
        metavar="JSON",
        help="vLLM's speculative config; default: no drafting",
    )
    p.add_argument(
        "--workloads",
        action=Once,
        type=listed(str, repeats=True),
        default=("mixed",),
        metavar="W,...",
    )
    p.add_argument(
        "--shares",
        action=Once,
        type=listed(above_0),
        default=(0.5, 0.8),
        metavar="S,...",
        help="rates as shares of capacity",
    )
    p.add_argument(
        "--capacity", type=above_0, metavar="R", help="requests per second; default: measured"
    )
    p.add_argument("--requests", type=at_least_1, default=32, help="requests per workload")
    p.add_argument("--rounds", type=at_least_1, default=7)


def measure(args: argparse.Namespace) -> Result:
    python = checked_python("vllm", args.vllm)
    asked = [workload(name, args.requests, 0) for name in args.workloads]
    target, draft = PAIRS["0.6b"]()
    bounds = settings(
        memory__prefix_cache="false",  # rounds repeat the prompts
        memory__kv_bytes=KV_GIB << 30,
        scheduler__max_model_len=MAX_LEN,
    )
    with ExitStack() as stack:
        vllm = stack.enter_context(VLLMServer(python, target, args.vllm_speculation))
        ours = stack.enter_context(Served(target, "--draft-model", draft, *bounds))
        contenders = [
            suite.hosted(THEIRS, vllm.url, None, None),
            suite.hosted(OURS, ours.url, None, None),
        ]
        return measured(contenders, asked, args)


def measured(
    contenders: Sequence[suite.Contender], asked: Sequence[Workload], args: argparse.Namespace
) -> Result:
    """Rates of the first workload's capacity; rounds are interleaved."""
    capacities = {c.label: args.capacity or capacity(c, asked[0]) for c in contenders}
    print(f"requests a second at capacity: {capacities}", file=sys.stderr)
    slowest = min(capacities.values())
    loads = [Load(rate=round(share * slowest, 4)) for share in args.shares]
    trials = suite.Trials(asked, loads, args.rounds)
    goals, command = Goals(4000.0, 100.0), "python -m specserve_bench.figures open-loop"
    result = suite.measure("load", contenders, trials, goals, command)
    result.machine["capacity"] = {name: round(rate, 3) for name, rate in capacities.items()}
    return result


def capacity(contender: suite.Contender, asked: Workload) -> float:
    """Requests a second, the second time."""
    for _ in range(2):
        round = contender.runnable.run(asked, Load(concurrency=16))
    failed = [r.error for r in round.requests if r.error is not None]
    if failed:
        raise ConfigError(f"{contender.label} failed: {failed[0]}")
    return len(round.requests) / round.seconds


def table(result: Result) -> str:
    """All figures, then specserve over vLLM in the same round."""
    names = *COMPARED, "goodput"
    rows = []
    for place in dict.fromkeys((run.workload, run.load) for run in result.runs):
        runs = {r.subject: r for r in result.runs if (r.workload, r.load) == place}
        rows.append([*map(str, place), *compared(runs[OURS], runs[THEIRS], result.goals)])
    head = ["workload", "load", *(f"{name}, {OURS} / {THEIRS}" for name in names)]
    return f"{report(result)}\n\n{markdown_table(head, rows)}"


def summary_rows(result: Result) -> list[list[str]]:
    """p99 TTFT and TPOT of the first workload, for the table of all engines: specserve, llama.cpp,
    vLLM, ratio.
    """
    rows = []
    first = next(iter(result.workloads))
    for load in dict.fromkeys(run.load for run in result.runs if run.workload == first):
        runs = {r.subject: r for r in result.runs if (r.workload, r.load) == (first, load)}
        ratios = compared(runs[OURS], runs[THEIRS], result.goals)
        for name, key, found in zip(("TTFT", "TPOT"), ("ttft_ms", "tpot_ms"), ratios, strict=False):
            ours, theirs = (p99(runs[subject], key, result.goals) for subject in (OURS, THEIRS))
            cells = [f"{ours:.4g}", "not measured", f"{theirs:.4g}"]
            best = 0 if ours < theirs else 2
            cells[best] = f"**{cells[best]}**"
            what = f"open loop, {load.rate:.2g} requests/s: p99 {name}, ms (lower is better)"
            rows.append([what, *cells, f"{found.partition(' [')[0].replace('-', ' to ')}, vLLM"])
    return rows


def p99(run: Run, name: str, goals: Goals) -> float:
    """The median over rounds."""
    spreads: list[Spread] = [figures(round, goals)[name] for round in run.rounds]
    return median(spread.p99 for spread in spreads)


def compared(ours: Run, theirs: Run, goals: Goals) -> list[str]:
    """Ratios in the same rounds, in the order of COMPARED, and that of the goodput."""
    each = [[figures(round, goals) for round in run.rounds] for run in (ours, theirs)]
    found = []
    for key, part in COMPARED.values():
        a, b = ([f[key] and getattr(f[key], part) for f in rounds] for rounds in each)
        found.append(ratio_words(ratio(a, b)))
    a, b = ([f["goodput"] for f in rounds] for rounds in each)
    return [*found, ratio_words(ratio(a, b))]
