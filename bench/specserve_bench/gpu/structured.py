"""Structured output at a large model's cost: what guesses bring where a grammar rules."""

import sys

from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve_bench import structured, suite
from specserve_bench.gpu.demo import DEVICE, options, scaled
from specserve_bench.gpu.record import Record
from specserve_bench.schemas import SCHEMAS
from specserve_kernels import load

EVERY, ROUNDS = 5, 2  # each fifth schema


def main(argv: list[str]) -> int:
    args = options(argv, seconds=300)
    load(DEVICE)  # fail before minutes are spent on weights
    record = Record(args.out, suite.machine("python -m specserve_bench.gpu structured"))
    chosen = dict([*SCHEMAS.items()][::EVERY])
    pair = (
        scaled(DEMO_TARGET, args.shape, args.models),
        scaled(DEMO_DRAFT, f"{args.shape}-draft", args.models),
    )
    figures = structured.speed_figures(pair, chosen, ROUNDS, DEVICE)
    record.put("result", {"schemas": len(chosen), **figures})
    record.finish(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
