"""The stages of `make gpu-check`: processes of their own, with limits, under one deadline.

Without names of stages those of one run of 540 seconds. Needs a checkout, the machine's Python, and
a folder of the wheels that this Python lacks; only the standard library until those are installed.
A stage that is done for this source is not run again, and one that was stopped is continued.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from specserve_bench.gpu import processes
from specserve_bench.gpu.record import ROOT, UNFINISHED, RecordContent, load, source_digest
from specserve_bench.gpu.toolchain import toolchain
from specserve_bench.machine import add_allow_dirty, exit_if_dirty

DEADLINE = 540  # seconds for all stages together
LEAST = 15  # seconds without which no stage is begun
MODULE = "specserve_bench.gpu."
AT_ONCE = "-n 12 --dist worksteal"  # most of a test's time is Triton's compiler, on one core
BOTH = "tests/kernels tests/engine/test_cuda.py tests/models/test_logits.py "
BOTH += "tests/models/test_eagle_head.py tests/models/test_mtp_head.py -m 'cuda and not slow'"
ALONE = "tests/kernels/test_gpu.py -m gpu"
# The tests of a rehearsal.
REHEARSED = "tests/kernels/test_layers.py -m cuda -k 'norm or linear' -n 2"


class GpuStage(NamedTuple):
    seconds: int  # at most
    command: list[str]  # a module and its arguments
    environment: dict[str, str] = {}  # noqa: RUF012


STAGES = {  # in this order
    "ceilings": GpuStage(40, [f"{MODULE}ceilings"]),
    "tests": GpuStage(
        140,
        [f"{MODULE}checks", f"{BOTH} {AT_ONCE}"],
        {"SPECSERVE_TEST_ATTENTION": "triton"},  # FlashInfer's kernels take minutes to compile
    ),
    "text": GpuStage(80, [f"{MODULE}text"]),
    "figures": GpuStage(110, [f"{MODULE}figures"]),
    "serve": GpuStage(90, [f"{MODULE}serve"]),
    "bits": GpuStage(50, [f"{MODULE}bits"]),
}
KNOWN = STAGES | {  # only if they are named
    "sizes": GpuStage(
        540,
        [
            f"{MODULE}checks",
            f"{BOTH} -k flashinfer {AT_ONCE}",
            f"{ALONE} -k 'not memory and not allocat' {AT_ONCE}",
            f"{ALONE} -k 'memory or allocat'",
        ],
    ),
    "parity": GpuStage(300, [f"{MODULE}checks", f"tests/engine/test_gpu.py -m gpu {AT_ONCE}"]),
    "ranks": GpuStage(60, [f"{MODULE}checks", "tests/engine/test_gpu_ranks.py -m gpu"]),
    "sweep": GpuStage(540, [f"{MODULE}sweep"]),
    "demo": GpuStage(540, [f"{MODULE}demo"]),
    "structured": GpuStage(300, [f"{MODULE}demo", "--structured"]),
}
NOTHING = RecordContent({}, False)
NEEDED = (
    *("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers"),
    *("httptools", "jinja2", "llguidance", "msgspec", "starlette", "uvicorn"),
    *("prometheus_client", "regex", "rich"),
    *("pytest", "pytest_rerunfailures", "xdist", "hypothesis", "jsonschema"),
)
MACHINE = """
import importlib.util, sys
missing = [name for name in {needed} if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"{{sys.executable}} lacks {{', '.join(missing)}}: name another GPU_PYTHON, or WHEELS")
import torch
if not {rehearse} and not torch.cuda.is_available():
    sys.exit(f"torch {{torch.__version__}} sees no NVIDIA GPU: nothing can be checked here")
"""


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    deadline = time.monotonic() + args.seconds
    unknown = [stage for stage in args.stages if stage not in KNOWN]
    if unknown:
        raise SystemExit(f"no stage {', '.join(unknown)}: there are {', '.join(KNOWN)}")
    args.out = args.out.resolve()
    exit_if_dirty(f"--out {args.out}", args.allow_dirty or args.rehearse)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise SystemExit(f"--out {args.out}: {e.strerror}; name a folder") from e
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through `finally`
    with tempfile.TemporaryDirectory(prefix="specserve-gpu-") as scratch:
        environment = prepare(args.wheels, Path(scratch))
        if args.rehearse:
            environment["TRITON_INTERPRET"] = "1"
        check_machine(environment, args.rehearse)
        states = []
        for name in args.stages or STAGES:
            line = attempt(name, args, environment, deadline)
            states.append(line["state"])
            print(json.dumps(line), flush=True)
            with (args.out / "gpu-check.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    return 0 if set(states) <= {"kept", "done"} else 1


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="make gpu-check", description=__doc__)
    p.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(KNOWN)}")
    p.add_argument("--out", type=Path, default=ROOT / "bench/results", help="folder of the JSON")
    p.add_argument("--wheels", type=Path, help="folder of wheels to install, only for this run")
    p.add_argument("--again", action="store_true", help="run also what is done for this source")
    p.add_argument("--seconds", type=float, default=DEADLINE, help="for all stages together")
    p.add_argument("--rehearse", action="store_true", help="on a CPU, with small shapes")
    add_allow_dirty(p)
    return p


def prepare(wheels: Path | None, scratch: Path) -> dict[str, str]:
    """The environment of the stages; what is missing is installed into a folder of its own."""
    paths = [str(ROOT / folder) for folder in ("", "kernels", "drafters", "bench")]
    if wheels is not None:
        found = sorted(map(str, wheels.glob("*.whl")))
        if not found:
            raise SystemExit(f"--wheels {wheels}: no wheels there")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        site = str(scratch / "site")
        subprocess.run([*pip, "--no-compile", "--target", site, *found], check=True)
        paths.append(site)
    given = os.environ.get("PYTHONPATH")
    own = {"PYTHONPATH": os.pathsep.join([*paths, *([given] if given else [])])}
    return (
        os.environ
        # A fixed folder: FlashInfer compiles again for other paths.
        | toolchain(Path("~/.cache/specserve").expanduser())
        | own
        | {"PYTHONUNBUFFERED": "1"}
    )


def check_machine(environment: dict[str, str], rehearse: bool = False) -> None:
    """Refuse a Python that lacks what the stages import, or that sees no GPU."""
    command = [sys.executable, "-c", MACHINE.format(needed=NEEDED, rehearse=rehearse)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit((done.stdout + done.stderr).strip().splitlines()[-1])


def attempt(
    name: str, args: argparse.Namespace, environment: dict[str, str], deadline: float
) -> dict[str, Any]:
    """Run a stage as far as time allows; its outcome, for one line of JSON.

    state  done, or kept from an earlier run; failed; unfinished: at its limit, or at the deadline;
           not begun: too little time was left
    """
    file, start = args.out / f"gpu-{name}.jsonl", time.monotonic()
    stage, known = KNOWN[name], load(file)
    left = deadline - start
    seconds = left if args.rehearse else min(float(stage.seconds), left)
    if known is not None and known.done and not args.again:
        state = "kept"
    elif seconds < min(LEAST, stage.seconds):
        state = "not begun"
    else:
        print(f"\n== {name}, {seconds:.0f} s at most ==", flush=True)
        if args.again:
            file.unlink(missing_ok=True)
        state = run(stage, file, environment, seconds, args)
    return {
        "stage": name,
        "state": state,
        "seconds": round(time.monotonic() - start, 1),
        "source": source_digest(),
        "summary": (load(file) or NOTHING).figures.get("summary"),
    }


def run(
    stage: GpuStage,
    file: Path,
    environment: dict[str, str],
    seconds: float,
    args: argparse.Namespace,
) -> str:
    own = max(1, int(seconds) - 10)  # the stage's own limit is before the one that kills it
    options = ["--out", str(file), "--seconds", str(own)]
    options += ["--rehearse"] if args.rehearse else []
    options += ["--allow-dirty"] if args.allow_dirty else []
    command = [sys.executable, "-m", *stage.command, *options]
    code = processes.run(command, seconds, environment | stage.environment, ROOT)
    if code in (None, UNFINISHED):
        return "unfinished"
    return "done" if code == 0 and (load(file) or NOTHING).done else "failed"
