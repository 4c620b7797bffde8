"""Every drafter with the demo pair, and scaled to a larger model's cost."""

from pathlib import Path

import msgspec

from specserve_bench import suite
from specserve_bench.pairs import PAIRS
from specserve_bench.report import markdown, report
from specserve_bench.results import Result
from specserve_bench.workloads import workload

SETTINGS = ("off", *(f"{name}:{n}" for name in ("ngram", "model") for n in (4, 8, 16)), "auto")
table = markdown


def measure() -> list[Result]:
    """Keep a file of each pair, and draw the plots of both."""
    from specserve_bench.plots import draw  # matplotlib is optional

    measured = []
    for pair, file, requests in (("demo", "demo-cpu", 16), ("0.6b", "demo-0.6b-cpu", 6)):
        target, draft = map(str, PAIRS[pair]())
        models = {"model.path": target, "drafter.model": draft}
        result = suite.measure_drafters(
            suite.Loader().load_each(SETTINGS, models),
            [workload(w, requests, seed=0) for w in ("questions", "completion")],
            rounds=7,
            command="python -m specserve_bench.figures demo",
        )
        print(report(result))
        content = msgspec.json.encode(result) + b"\n"
        Path("bench/results", f"{file}.json").write_bytes(content)
        measured.append(result)
    draw(measured, Path("docs/pictures"), ["tpot-ratios"])
    return measured
