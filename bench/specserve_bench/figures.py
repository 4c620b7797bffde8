"""`make bench`: the figures of engine and server on the CPU, as tables and JSON lines.

Where two things are compared they are run in turn, so that a busy neighbour hits both.
"""

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from specserve import LLM, SamplingParams  # first: it settles the process before torch comes
from specserve.version import VERSION

import torch  # isort: skip

from specserve_bench.prompts import PROMPTS
from specserve_bench.serving import serving_figures
from specserve_bench.shapes import random_checkpoint
from specserve_bench.steps import plain_step_figures
from specserve_bench.watch import OpClock

ROUNDS = 3
NEW_TOKENS = 128
SETTINGS: dict[str, tuple[str, int]] = {  # name -> drafter, nodes
    "off": ("none", 0),
    **{f"ngram {n}": ("ngram", n) for n in (4, 8, 16)},
    **{f"model {n}": ("model", n) for n in (4, 8, 16)},
}
RESULTS = Path("bench/results")
RANDOM_SHAPE = Path(".models/qwen3-0.6b-random")


def main(parts: Sequence[str]) -> int:
    """All parts, or those named: engine, server."""
    models = os.environ.get("SPECSERVE_TEST_MODELS")
    if not models:
        print("SPECSERVE_TEST_MODELS is not set: the figures of the trained pair are left out")
    if "engine" in parts or not parts:
        figures = {"pair": pair_figures(Path(models))} if models else {}
        shape = random_checkpoint("qwen3-0.6b", RANDOM_SHAPE)
        keep("engine-cpu", figures | {"plain_step": plain_step_figures(shape)})
    if models and ("server" in parts or not parts):
        keep("server-cpu", serving_figures(Path(models)))
    return 0


def keep(name: str, figures: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"machine": machine()} | figures)
    (RESULTS / f"{name}.json").write_text(line + "\n")
    print(line)


def pair_figures(models: Path) -> dict[str, Any]:
    """Every setting over all prompts, greedy and at T = 1, in interleaved rounds."""
    llms = {name: load(models, *setting) for name, setting in SETTINGS.items()}
    runs: dict[tuple[str, float], list[dict[str, float]]] = {}
    texts: dict[float, set[str]] = {0.0: set(), 1.0: set()}
    for _ in range(1 + ROUNDS):
        for temperature in texts:
            for name, llm in llms.items():
                run, text = one_run(llm, temperature)
                runs.setdefault((name, temperature), []).append(run)
                texts[temperature].add(text)
    assert all(len(t) == 1 for t in texts.values()), "a drafter has changed the text"
    rows = [summary(name, t, r[1:]) for (name, t), r in runs.items()]  # the first round warms up
    for row in rows:
        off = next(r for r in rows if r["setting"] == "off" and r["T"] == row["T"])
        row["tpot_over_off"] = round(row["tpot_ms"] / off["tpot_ms"], 3)
    print_rows(rows)
    faults = {name: page_faults(llm) for name, llm in llms.items() if name in ("off", "model 8")}
    print(f"minor page faults in 20 steady steps: {faults}")
    return {"rows": rows, "page_faults_in_20_steps": faults}


def load(models: Path, drafter: str, nodes: int) -> LLM:
    draft = models / "code-draft" if drafter == "model" else None
    settings = {"speculation.max_nodes": nodes, "memory.kv_bytes": 1 << 28}
    return LLM(models / "code-target", draft, drafter, set=settings, progress=False)


def one_run(llm: LLM, temperature: float) -> tuple[dict[str, float], str]:
    """All prompts one after the other; means over them, and what was said."""
    clock, stats = OpClock(llm.engine), llm.engine.stats
    before = (stats.num_steps, stats.draft_seconds, stats.verify_seconds, stats.step_seconds)
    params = SamplingParams(
        temperature=temperature, max_tokens=NEW_TOKENS, seed=1, ignore_eos=True, top_p=1.0
    )
    with clock:
        outputs = [llm.generate(p, params)[0] for p in PROMPTS]
    after = (stats.num_steps, stats.draft_seconds, stats.verify_seconds, stats.step_seconds)
    steps, draft, verify, step = (b - a for a, b in zip(before, after, strict=True))
    tokens = sum(o.speculation.steps * (o.speculation.mean_acceptance_length or 1) for o in outputs)
    levels = clock.draft_forwards
    run = {
        "ttft_ms": median(o.timing.ttft_ms for o in outputs),
        "tpot_ms": median(o.timing.tpot_ms or 0 for o in outputs),
        "acceptance_length": tokens / sum(o.speculation.steps for o in outputs),
        "draft_ms": 1e3 * draft / steps,
        "verify_ms": 1e3 * verify / steps,
        "engine_ms": 1e3 * (step - clock.target_seconds - draft) / steps,
        "python_ms_per_level": 1e3 * (draft - clock.draft_seconds) / levels if levels else 0.0,
    }
    return run, json.dumps([o.token_ids for o in outputs])


def summary(name: str, temperature: float, runs: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over rounds, and the spread of TPOT."""
    row: dict[str, Any] = {"setting": name, "T": temperature}
    row |= {key: round(median(r[key] for r in runs), 3) for key in runs[0]}
    row["tpot_ms_min_max"] = [round(f(r["tpot_ms"] for r in runs), 3) for f in (min, max)]
    return row


def page_faults(llm: LLM) -> int:
    """Minor faults of the process during 20 steps of a stream that has settled."""
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    for _ in llm.stream(PROMPTS[0], params):
        pass  # the blocks that the next stream gets have been touched
    stream = llm.stream(PROMPTS[0], params)
    for _ in range(10):
        next(stream)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        next(stream)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    stream.close()
    return after - before


def print_rows(rows: list[dict[str, Any]]) -> None:
    keys = [k for k in rows[0] if k != "tpot_ms_min_max"]
    print(" | ".join(keys))
    for row in rows:
        print(" | ".join(f"{row[k]:>{len(k)}}" for k in keys))


def machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return {
        "cpu": platform.processor() or cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "specserve": VERSION,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "make bench",
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
