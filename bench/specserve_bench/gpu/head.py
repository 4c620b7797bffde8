"""Training a draft head on a GPU from a folder of texts, in parts of limited time.

    python -m specserve_bench.gpu.head TEXTS OUT --target MODEL --seconds 500

The same command goes on where it was stopped, and exits with 3 until the head is in OUT.
"""

import argparse
import sys
from pathlib import Path

from specserve_bench.gpu import processes
from specserve_bench.gpu.record import UNFINISHED

KINDS = ".txt", ".md", ".py", ".jsonl"


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m specserve_bench.gpu.head", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("texts", type=Path, help=f"folder of files that end in {', '.join(KINDS)}")
    p.add_argument("out", type=Path, help="folder of the head, and of what is half done")
    p.add_argument("--target", help="a local folder; default: the demo target")
    p.add_argument("--config", type=Path, help="JSON: as of specserve demo train-head")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--seconds", type=float, default=500, help="until it is stopped")
    args = p.parse_args(argv)
    texts = sorted(str(f) for f in args.texts.rglob("*") if f.suffix in KINDS and f.is_file())
    if not texts:
        raise SystemExit(f"{args.texts}: no files that end in {', '.join(KINDS)}; name another one")
    options = ["--device", args.device]
    for name in ("target", "config"):
        if (value := getattr(args, name)) is not None:
            options += [f"--{name}", str(value)]
    command = [sys.executable, "-m", "specserve_bench.demo.train_head", str(args.out), *options]
    code = processes.run([*command, "--text", *texts], args.seconds)
    return UNFINISHED if code is None else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
