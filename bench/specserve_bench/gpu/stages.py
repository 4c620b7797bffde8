"""The stages of `make gpu-check`, each a process of its own with a limit, each to be gone on with.

Needs a checkout, the machine's Python, and a folder of the wheels that this Python lacks; only the
standard library until those are installed. A stage that is done for this source is not run again.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from specserve_bench.gpu.record import load_done, source_digest
from specserve_bench.gpu.toolchain import toolchain

ROOT = Path(__file__).parents[3]
LIMIT = 570  # seconds of a stage
UNFINISHED = 3  # the exit status of a stage that has run out of time, and can be gone on with
MODULE = "specserve_bench.gpu."
GPU_TESTS = "tests/kernels/test_gpu.py -m gpu"
STAGES: dict[str, list[str]] = {
    "compile": [f"{MODULE}compiling"],
    "kernels": [
        f"{MODULE}checks",
        "tests/kernels/test_triton_sampling.py",
        f"{GPU_TESTS} -k flashinfer",
        f"{GPU_TESTS} -k 'not flashinfer'",
    ],
    "parity": [f"{MODULE}checks", "tests/engine/test_gpu.py -m gpu"],
    "figures": [f"{MODULE}figures"],
    "demo": [f"{MODULE}demo"],
}


NEEDED = ("torch", "triton", "flashinfer", "msgspec", "transformers", "pytest", "hypothesis")
MACHINE = """
import importlib.util, sys
missing = [name for name in {needed} if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"{{sys.executable}} lacks {{', '.join(missing)}}: name another GPU_PYTHON, or WHEELS")
import torch
if not torch.cuda.is_available():
    sys.exit(f"torch {{torch.__version__}} sees no NVIDIA GPU: nothing can be checked here")
"""


class Outcome(NamedTuple):
    stage: str
    state: str  # kept, done, unfinished, failed
    seconds: float


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    unknown = [stage for stage in args.stages if stage not in STAGES]
    if unknown:
        raise SystemExit(f"no stage {', '.join(unknown)}: there are {', '.join(STAGES)}")
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    environment = prepare(args.wheels)
    check_machine(environment)
    outcomes = []
    for stage in args.stages or STAGES:
        file = args.out / f"gpu-{stage}.json"
        if load_done(file) and not args.again:
            outcomes.append(Outcome(stage, "kept", 0.0))
            continue
        outcomes.append(run(stage, file, environment, args.limit))
    print(f"\nsource {source_digest()}")
    for stage, state, seconds in outcomes:
        print(f"{stage:10} {state:10} {seconds:6.0f} s  {args.out / f'gpu-{stage}.json'}")
    return 0 if all(o.state in ("kept", "done") for o in outcomes) else 1


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="make gpu-check", description=__doc__)
    p.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; all")
    p.add_argument("--out", type=Path, default=ROOT / "bench/results", help="folder of the JSON")
    p.add_argument("--wheels", type=Path, help="folder of wheels to install, for this run alone")
    p.add_argument("--again", action="store_true", help="run also what is done for this source")
    p.add_argument("--limit", type=int, default=LIMIT, help="seconds of a stage")
    return p


def prepare(wheels: Path | None) -> dict[str, str]:
    """The environment of the stages; what is missing is installed into a folder of its own."""
    paths = [str(ROOT / folder) for folder in ("", "kernels", "drafters", "bench")]
    if wheels is not None:
        site = tempfile.mkdtemp(prefix="specserve-site-")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        found = sorted(map(str, wheels.glob("*.whl")))
        if not found:
            raise SystemExit(f"--wheels {wheels}: no wheels there")
        subprocess.run([*pip, "--no-compile", "--target", site, *found], check=True)
        paths.append(site)
    given = os.environ.get("PYTHONPATH")
    own = {"PYTHONPATH": os.pathsep.join([*paths, *([given] if given else [])])}
    return os.environ | toolchain() | own | {"PYTHONUNBUFFERED": "1"}


def check_machine(environment: dict[str, str]) -> None:
    """Refuse a Python that lacks what the stages import, or that sees no GPU."""
    command = [sys.executable, "-c", MACHINE.format(needed=NEEDED)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit((done.stdout + done.stderr).strip().splitlines()[-1])


def run(stage: str, file: Path, environment: dict[str, str], limit: int) -> Outcome:
    print(f"\n== {stage} ==", flush=True)
    module, *args = STAGES[stage]
    options = ["--out", str(file), "--seconds", str(max(1, limit - 30))]
    command = [sys.executable, "-m", module, *args, *options]
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # whoever it started would disturb the next stage
        code = process.wait()
    is_stopped = code == -signal.SIGKILL
    left = "unfinished" if code == UNFINISHED or is_stopped else "failed"
    state = "done" if load_done(file) else left
    return Outcome(stage, state, time.monotonic() - start)
