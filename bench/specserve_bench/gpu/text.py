"""The demo's text on the GPU against the CPU's own: equal in float32, alike in bfloat16."""

import argparse
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from specserve import LLM, SamplingParams
from specserve_bench.gpu.record import Record
from specserve_bench.suite import machine
from specserve_bench.workloads import workload

REQUESTS, MAX_TOKENS = 4, 48  # of either workload
DRAFTERS = ("none", "ngram", "model", "auto")
# Rounding bfloat16 otherwise makes texts differ after a near-tie, every few dozen tokens; rows that
# attend to wrong slots make them differ at once.
ALIKE = 0.25  # of a text: the common beginning that at least half of them must have


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=int, default=90)
    p.add_argument("--device", default="cuda", help="what is compared with the CPU")
    args = p.parse_args(argv)
    record = Record(args.out, machine("python -m specserve_bench.gpu text"))
    is_right = True
    for dtype in ("fp32", "bf16"):
        want, _ = texts("cpu", dtype, "none")
        for drafter in DRAFTERS:
            got, attends = texts(args.device, dtype, drafter)
            figure = compared(want, got) | {"attends": attends}
            is_right = is_right and is_alike(figure, dtype)
            record.put(f"{dtype}, {drafter}", figure)
            print(f"{dtype}, {drafter}: {figure}", flush=True)
    record.put("summary", {name: f["same"] for name, f in record.figures.items() if "same" in f})
    record.save(done=is_right)
    return 0 if is_right else 1


def texts(device: str, dtype: str, drafter: str) -> tuple[list[list[int]], dict[str, int]]:
    """Half of them greedy, half drawn; and forwards by what attends, where there is a choice."""
    settings: dict[str, Any] = {"model.device": device, "memory.kv_bytes": 1 << 28}
    llm = LLM(drafter=drafter, dtype=dtype, set=settings, progress=False)
    with llm:
        before = dict(getattr(llm.engine.target.ops, "num_planned", {}))
        asks = [a for w in ("questions", "completion") for a in workload(w, REQUESTS, 0).asks]
        params = [
            SamplingParams(max_tokens=MAX_TOKENS, temperature=float(i % 2), seed=ask.seed)
            for i, ask in enumerate(asks)
        ]
        processor = llm.input_processor
        prompts = [
            processor.encode(p) if isinstance(p, str) else processor.render(p)
            for p in (ask.prompt for ask in asks)
        ]
        outputs = llm.generate(prompts, params)
        after = getattr(llm.engine.target.ops, "num_planned", {})
        attends = {name: n - before.get(name, 0) for name, n in after.items()}
        return [o.token_ids for o in outputs], attends


def compared(want: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How many texts are the same, and the share that each has in common from the beginning."""
    shares = [in_common(a, b) for a, b in zip(want, got, strict=True)]
    return {
        "requests": len(want),
        "same": sum(a == b for a, b in zip(want, got, strict=True)),
        "median in common": round(median(shares), 3),
        "in common": [round(share, 3) for share in shares],
    }


def is_alike(figure: dict[str, Any], dtype: str) -> bool:
    if dtype == "fp32":
        return bool(figure["same"] == figure["requests"])
    return bool(figure["median in common"] >= ALIKE)


def in_common(a: Sequence[int], b: Sequence[int]) -> float:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _ in same) / max(len(a), len(b), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
