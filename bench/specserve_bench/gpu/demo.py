"""The demo pair at a large model's cost: drafters, and with --structured what grammars bring."""

import argparse
import sys
from pathlib import Path

import msgspec  # isort: skip

from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve_bench import suite
from specserve_bench.demo.scaled_model import SHAPES
from specserve_bench.figures import structured
from specserve_bench.gpu.record import Record
from specserve_bench.machine import add_allow_dirty, exit_if_dirty
from specserve_bench.pairs import MODELS, scaled
from specserve_bench.report import markdown
from specserve_bench.workloads import workload
from specserve_kernels import load

SETTINGS = ("off", "ngram:8", "model:4", "model:8", "model:16", "auto")


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=int)
    p.add_argument("--models", type=Path, default=MODELS)
    shapes = [shape for shape in SHAPES if f"{shape}-draft" in SHAPES]
    p.add_argument("--shape", default="llama-3.1-8b", choices=shapes)
    p.add_argument("--structured", action="store_true")
    add_allow_dirty(p)
    args = p.parse_args(argv)
    exit_if_dirty(f"--out {args.out}", args.allow_dirty)
    load("cuda")  # fail before minutes are spent on weights
    stage = "structured" if args.structured else "demo"
    record = Record(args.out, suite.machine(f"python -m specserve_bench.gpu {stage}"))
    pair = (
        scaled(DEMO_TARGET, args.shape, args.models, keeps=True),
        scaled(DEMO_DRAFT, f"{args.shape}-draft", args.models, keeps=True),
    )
    if args.structured:
        chosen = dict([*structured.SCHEMAS.items()][::5])
        figures = structured.speed_figures(pair, chosen, 2, "cuda")
        record.put("result", {"schemas": len(chosen), **figures})
    else:
        record.put("result", drafter_figures(pair))
    record.finish(done=True)
    return 0


def drafter_figures(pair: tuple[Path, Path]) -> object:
    models = {
        "model.path": str(pair[0]),
        "drafter.model": str(pair[1]),
        "model.device": "cuda",
        "memory.kv_bytes": 4 << 30,
    }
    contenders = suite.Loader(progress=False).load_each(SETTINGS, models)
    chosen = [workload(w, 16, seed=0) for w in ("questions", "completion")]
    result = suite.measure_drafters(contenders, chosen, 5, "specserve_bench.gpu demo")
    print(markdown([result]))
    return msgspec.to_builtins(result)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
