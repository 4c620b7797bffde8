"""Requests at a rate, to specserve and to vLLM on this machine: at shares of what both can do."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Self
from urllib.error import URLError
from urllib.request import urlopen

import msgspec

from specserve.errors import ConfigError
from specserve_bench import outputs, suite
from specserve_bench.commands import above_0, at_least_1, numbers, words
from specserve_bench.once import Once
from specserve_bench.pairs import PAIRS
from specserve_bench.peers.peer import environment
from specserve_bench.peers.pythons import checked_python
from specserve_bench.report import ratio_words, report
from specserve_bench.results import Goals, Load, Result, Run, Spread, figures, ratio
from specserve_bench.served import Served, settings
from specserve_bench.workloads import Workload, workload

FILE = Path("bench/results/open-loop-cpu.json")
OURS, THEIRS = "specserve", "vllm"
ROUNDS, REQUESTS, CONCURRENCY = 7, 32, 16
SHARES = (0.5, 0.8)
GOALS = Goals(ttft_ms=4000.0, tpot_ms=100.0)
COMPARED = {"p99 TTFT": "ttft_ms", "p99 TPOT": "tpot_ms"}
KV_GIB = 2
MAX_LEN = 4096
TIMEOUT = 600  # seconds until vLLM is ready

DESCRIPTION = f"""
Start specserve, with its defaults, and vLLM for CPU, alone or with guesses, and send both the same
requests at the same times, in turn. Rates are shares of the capacity: of the requests a second that
the slower of both answers with {CONCURRENCY} at a time.
"""


class VLLM:
    """vLLM's server of the OpenAI API; ended when the block ends."""

    def __init__(self, python: str, target: Path, speculation: str | None) -> None:
        self.port = free_port()
        self.log = TemporaryFile()  # noqa: SIM115, closed with the server
        command = [python, "-m", "vllm.entrypoints.openai.api_server", f"--port={self.port}"]
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

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        try:
            self.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def wait(self) -> None:
        """Until it is ready; ConfigError with the end of its log if it does not become so."""
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urlopen(f"{self.url}/health", timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(0.2)
        self.log.seek(0)
        told = self.log.read().decode(errors="replace")[-2000:]
        raise ConfigError(f"--vllm: the server did not become ready: {told}")

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # workers outlive a server that fails
        self.process.wait()
        self.log.close()


def of_vllm(python: str) -> dict[str, str]:
    """What its manual advises on CPUs."""
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"  # comes with vLLM
    return {
        "LD_PRELOAD": str(openmp) if openmp.exists() else "",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    python = checked_python("vllm", args.vllm)
    outputs.check_file("--out", args.out)
    asked = [workload(name, args.requests, 0) for name in args.workloads]
    target, draft = PAIRS["0.6b"]()
    with ExitStack() as stack:
        vllm = stack.enter_context(VLLM(python, target, args.vllm_speculation))
        ours = stack.enter_context(served(target, draft))
        contenders = [
            suite.hosted(THEIRS, vllm.url, None, None),
            suite.hosted(OURS, f"http://{ours.host}:{ours.port}", None, None),
        ]
        result = measured(contenders, asked, args)
    outputs.write("--out", args.out, msgspec.json.encode(result) + b"\n")
    print(report(result), table(result), sep="\n\n")
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m specserve_bench.figures open-loop", description=DESCRIPTION
    )
    p.add_argument("--vllm", required=True, metavar="PYTHON", help="of an environment with vLLM")
    p.add_argument(
        "--vllm-speculation",
        metavar="JSON",
        help="vLLM's speculative config; default: no guesses",
    )
    p.add_argument("--workloads", action=Once, type=words, default=("mixed",), metavar="W,...")
    p.add_argument(
        "--shares", action=Once, type=numbers, default=SHARES, metavar="S,...", help="of capacity"
    )
    p.add_argument("--capacity", type=above_0, metavar="R", help="requests a second; else measured")
    p.add_argument("--requests", type=at_least_1, default=REQUESTS, help="of a workload")
    p.add_argument("--rounds", type=at_least_1, default=ROUNDS)
    p.add_argument("--out", type=Path, default=FILE, metavar="JSON", help=f"default: {FILE}")
    return p


def served(target: Path, draft: Path) -> Served:
    bounds = settings(
        memory__prefix_cache="false",  # rounds repeat the prompts
        memory__kv_bytes=KV_GIB << 30,
        scheduler__max_model_len=MAX_LEN,
    )
    return Served(target, "--draft-model", draft, *bounds)


def measured(
    contenders: Sequence[suite.Contender], asked: Sequence[Workload], args: argparse.Namespace
) -> Result:
    """Rates of the first workload's capacity; rounds are interleaved."""
    capacities = {c.label: args.capacity or capacity(c, asked[0]) for c in contenders}
    print(f"requests a second, {CONCURRENCY} at a time: {capacities}", file=sys.stderr)
    slowest = min(capacities.values())
    loads = [Load(rate=round(share * slowest, 4)) for share in args.shares]
    trials = suite.Trials(asked, loads, args.rounds)
    command = "python -m specserve_bench.figures open-loop"
    result = suite.measure("load", contenders, trials, GOALS, command)
    result.machine["capacity"] = {name: round(rate, 3) for name, rate in capacities.items()}
    return result


def capacity(contender: suite.Contender, asked: Workload) -> float:
    """Requests a second, the second time."""
    for _ in range(2):
        round = contender.runnable.run(asked, Load(concurrency=CONCURRENCY))
    failed = [r.error for r in round.requests if r.error is not None]
    if failed:
        raise ConfigError(f"{contender.label} failed: {failed[0]}")
    return len(round.requests) / round.seconds


def table(result: Result) -> str:
    """specserve over vLLM in the same round, in Markdown."""
    head = ["workload", "load", *(f"{name}, {OURS} / {THEIRS}" for name in COMPARED)]
    lines = [[*head, f"goodput, {OURS} / {THEIRS}"], ["---"] * (len(head) + 1)]
    places = dict.fromkeys((run.workload, run.load) for run in result.runs)
    for name, load in places:
        runs = {r.subject: r for r in result.runs if (r.workload, r.load) == (name, load)}
        lines.append([name, str(load), *compared(runs[OURS], runs[THEIRS], result.goals)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def compared(ours: Run, theirs: Run, goals: Goals) -> list[str]:
    each = [[figures(round, goals) for round in run.rounds] for run in (ours, theirs)]
    p99 = [[[p99_of(f[figure]) for f in rounds] for rounds in each] for figure in COMPARED.values()]
    good = [[f["goodput"] for f in rounds] for rounds in each]
    return [ratio_words(ratio(a, b)) for a, b in (*p99, good)]


def p99_of(spread: Spread | None) -> float | None:
    return None if spread is None else spread.p99
