"""Measures the acceptance of draft tokens with which new servers begin, `priors.json`.

    python -m specserve_bench.priors

Real models answer real prompts, and the demo models theirs, at two temperatures. Each model counts
equally. It needs the weights that `make real-models` fetches, and takes about two minutes.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from specserve import LLM
from specserve.config import DEMO_DRAFT, DEMO_HEAD, DEMO_TARGET
from specserve_bench.figures.speculation import TEMPERATURES, weights
from specserve_bench.local import Local
from specserve_bench.real_prompts import PROMPTS, as_text, prompts
from specserve_bench.results import Load
from specserve_bench.workloads import Ask, Workload, workload
from specserve_drafters.base import AUTO_SOURCES, DEFAULT_SCOPE
from specserve_drafters.trie import PRIORS, BinCounts

DEMO_WORKLOADS = "questions", "completion", "agent"
REQUESTS = 20  # of each kind of prompts
MOST = 1024.0  # draft tokens of a bin that a model contributes


def main() -> int:
    models = weights()
    real = [ask for name in PROMPTS for ask in prompts(name)[:REQUESTS]]
    demo = [ask for name in DEMO_WORKLOADS for ask in workload(name, REQUESTS, 1).asks]
    pair = {"model.path": str(DEMO_TARGET), "drafter.model": str(DEMO_DRAFT)}
    pair["drafter.head"] = str(DEMO_HEAD)
    found = [
        learned({"model.path": str(models.smollm2)}, real),
        learned({"model.path": str(models.gemma_folder)}, [*map(as_text, real)]),
        learned(pair, demo),
    ]
    PRIORS.write_bytes(msgspec.json.format(msgspec.json.encode(together(found)), indent=1) + b"\n")
    return 0


def learned(settings: Mapping[str, Any], asks: Sequence[Ask]) -> dict[str, list[BinCounts]]:
    """The counts of a model that begins with none."""
    options = {"drafter.name": "auto", "drafter.options": {"sources": [*AUTO_SOURCES]}}
    with LLM(set=dict(settings) | options | {"memory.kv_bytes": 1 << 30}, progress=False) as llm:
        llm.engine.speculator.learn_anew()  # type: ignore[union-attr]  # `auto` has it
        local = Local(llm, is_lasting=True)
        for temperature in TEMPERATURES:
            some = [ask._replace(temperature=temperature) for ask in asks]
            local.run(Workload("priors", "", 0, some), Load(concurrency=4))
        stats = llm.engine.speculator.acceptance.find(DEFAULT_SCOPE)  # type: ignore[union-attr]
        counts: dict[str, list[BinCounts]] = stats.counts()
    return counts


def together(each: Sequence[Mapping[str, Sequence[BinCounts]]]) -> dict[str, list[BinCounts]]:
    """Sums by source and bin, at most MOST draft tokens of each model."""
    sums: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0] * 3))
    for source, kind, counts in all_bins(each):
        share = min(1.0, MOST / counts[0])
        sums[source][kind] = [
            a + share * b for a, b in zip(sums[source][kind], counts, strict=True)
        ]
    return {
        source: [BinCounts(kind, *(round(x, 2) for x in bins[kind])) for kind in sorted(bins)]
        for source, bins in sorted(sums.items())
    }


def all_bins(
    each: Sequence[Mapping[str, Sequence[BinCounts]]],
) -> Iterator[tuple[str, int, list[float]]]:
    for model in each:
        for source, bins in model.items():
            for kind, *counts in bins:
                yield source, int(kind), counts


if __name__ == "__main__":
    sys.exit(main())
