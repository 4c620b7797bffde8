"""The demo pair at a large model's cost: off, n-grams, the small draft model, and auto."""

import argparse
import shutil
import sys
from pathlib import Path

import msgspec  # isort: skip

from specserve.config import DEMO_DRAFT, DEMO_TARGET, load_config
from specserve_bench import suite
from specserve_bench.demo.scaled_model import SHAPES
from specserve_bench.gpu.record import Record
from specserve_bench.report import markdown
from specserve_bench.results import Goals, Load
from specserve_bench.scale import scale_model
from specserve_bench.workloads import workload
from specserve_kernels import load

SHAPE = "llama-3.1-8b"
SETTINGS = ("off", "ngram:8", "model:4", "model:8", "model:16", "auto")
REQUESTS, ROUNDS = 16, 5
DEVICE = "cuda"


def main(argv: list[str]) -> int:
    args = options(argv, seconds=540)
    load(DEVICE)  # fail before minutes are spent on weights
    record = Record(args.out, suite.machine("python -m specserve_bench.gpu demo"))
    models = {
        "model.path": str(scaled(DEMO_TARGET, args.shape, args.models)),
        "drafter.model": str(scaled(DEMO_DRAFT, f"{args.shape}-draft", args.models)),
        "model.device": DEVICE,
        "memory.kv_bytes": 4 << 30,
    }
    base, loader = load_config(None, models), suite.Loader(progress=False)
    contenders = [
        loader.load(setting, load_config(None, models | suite.drafting(setting, base)))
        for setting in SETTINGS
    ]
    chosen = [workload(w, REQUESTS, seed=0) for w in ("questions", "completion")]
    trials = suite.Trials(chosen, [Load(concurrency=1)], ROUNDS)
    result = suite.measure("drafters", contenders, trials, Goals(), "specserve_bench.gpu demo")
    print(markdown([result]))
    record.put("result", msgspec.to_builtins(result))
    record.finish(done=True)
    return 0


def options(argv: list[str], seconds: int) -> argparse.Namespace:
    """Of a stage at the cost of a shape."""
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=int, default=seconds)
    p.add_argument("--models", type=Path, default=Path(".models"))
    p.add_argument("--shape", default=SHAPE, choices=[s for s in SHAPES if f"{s}-draft" in SHAPES])
    return p.parse_args(argv)


def scaled(source: Path, shape: str, models: Path) -> Path:
    """The scaled checkpoint's folder; written once on this machine."""
    target = models / f"{source.name}-{shape}"
    if not (target / "config.json").exists():
        shutil.rmtree(target, ignore_errors=True)  # what an interrupted run has left
        scale_model(source, target, shape)
    return target


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
