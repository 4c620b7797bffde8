"""`make bench`: the figures of engine, server and drafters on the CPU, as tables and JSON lines.

Runs that are compared are interleaved, so that other load on the machine affects both.
"""

import argparse
import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from specserve import LLM, SamplingParams  # first: it configures the process before torch loads

import msgspec  # isort: skip

from specserve.config import load_config
from specserve_bench import (
    heads,
    open_loop,
    real,
    replicas,
    sources,
    speculation,
    structured,
    suite,
    versions,
)
from specserve_bench.adapters import adapter_figures
from specserve_bench.fairness import fairness_figures
from specserve_bench.families import family_figures
from specserve_bench.harness import figure
from specserve_bench.host import host_figures
from specserve_bench.implementations import implementation_figures
from specserve_bench.key_isolation import key_isolation_figures
from specserve_bench.kv import kv_figures
from specserve_bench.load_gaps import load_gap_figures
from specserve_bench.maps import map_figures
from specserve_bench.memory import memory_figures
from specserve_bench.merged import merged_figures
from specserve_bench.mixtures import mixture_figures
from specserve_bench.pairs import demo_pair, large_pair
from specserve_bench.plots import draw
from specserve_bench.prompts import PROMPTS
from specserve_bench.report import markdown, report
from specserve_bench.restart import restart_figures
from specserve_bench.results import Goals, Load, Result
from specserve_bench.sampling import sampling_figures
from specserve_bench.serving import serving_figures
from specserve_bench.shapes import random_checkpoint
from specserve_bench.steps import step_figures
from specserve_bench.swap import swap_figures
from specserve_bench.targets import target_figures
from specserve_bench.watch import OpClock
from specserve_bench.workloads import workload

ROUNDS = 7
NEW_TOKENS = 128
SETTINGS: dict[str, tuple[str, int]] = {  # name -> drafter, nodes
    "off": ("none", 0),
    **{f"ngram {n}": ("ngram", n) for n in (4, 8, 16)},
    **{f"model {n}": ("model", n) for n in (4, 8, 16)},
}
RESULTS = Path("bench/results")
PICTURES = Path("docs/pictures")
RANDOM_SHAPE = Path(".models/qwen3-0.6b-random")


PAIR = "code-target", "code-draft"
NO_PAIR = f"set SPECSERVE_TEST_MODELS to a folder with the models {' and '.join(PAIR)}"
OF_PAIR: dict[str, Callable[[Path], dict[str, Any]]] = {
    "engine": lambda models: {"pair": pair_figures(models)},
    "server": serving_figures,
}
OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "steps": lambda: step_figures(random_checkpoint("qwen3-0.6b", RANDOM_SHAPE)),
    "families": family_figures,
    "adapters": lambda: adapter_figures(random_checkpoint("qwen3-0.6b", RANDOM_SHAPE)),
    "implementations": lambda: implementation_figures(
        random_checkpoint("qwen3-0.6b", RANDOM_SHAPE)
    ),
    "kv": kv_figures,
    "sampling": lambda: sampling_figures(random_checkpoint("qwen3-0.6b", RANDOM_SHAPE)),
    "memory": lambda: memory_figures(random_checkpoint("qwen3-0.6b", RANDOM_SHAPE)),
    "fairness": fairness_figures,
    "key-isolation": key_isolation_figures,
    "host": host_figures,
    "maps": map_figures,
    "merged": merged_figures,
    "mixtures": mixture_figures,
    "targets": target_figures,
    "restart": restart_figures,
    "swap": swap_figures,
    "load-gaps": load_gap_figures,
}
PARTS = {  # what they measure
    "engine": "every drafter with the trained pair: TPOT, acceptance, the parts of a step",
    "server": "the HTTP server with the pair: start-up, CPU time, idle connections, a newcomer",
    "steps": "steps of a random 0.6B model against the least time that they could take",
    "families": "steps of every family of models beside Llama's, with the same linear maps",
    "adapters": "what LoRA adapters take of a 0.6B model's step",
    "implementations": "steps of a model by transformers' modules beside those of native code",
    "kv": "attention over KV of 8 bits and of bf16",
    "sampling": "what penalties, masks, filters and log-probabilities take of a 0.6B model's step",
    "memory": "what the block pool brings: prefix hits, choices that share blocks",
    "fairness": "how long a small request waits for its first token beside a large one",
    "key-isolation": "how long a request takes while another API key sends expensive ones",
    "host": "the host's share of a step",
    "maps": "linear maps of 4 and 8 bits beside the same maps in bf16",
    "merged": "one tree of all sources beside the draft model's, at as many guesses",
    "mixtures": "steps of a mixture of experts against the bytes that its rows need",
    "targets": "long prompts that arrive beside streams with a target for the time per token",
    "restart": "how long 16 streams pause when their engine process is killed",
    "swap": "how long 8 streams wait while another draft model takes the place of theirs",
    "load-gaps": "the longest gap of streams while adapters or draft models load on a busy host",
    "demo": "every drafter with the demo pair, and scaled to a larger model's cost; draws plots",
}
# With arguments of their own. They take long, and are measured only if they come first.
LONG: dict[str, Callable[[Sequence[str]], int]] = {
    "speculation": speculation.main,
    "open-loop": open_loop.main,
    "replicas": replicas.main,
    "heads": heads.main,
    "lm-eval": figure.main,
    "structured": structured.main,
    "sources": sources.main,
    "versions": versions.main,
    "real": real.main,
}


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] in LONG:
        return LONG[argv[0]](argv[1:])
    arguments = parser()
    named = arguments.parse_args(argv).parts
    models = pair_folder()
    if not RESULTS.is_dir():
        arguments.error(f"no folder {RESULTS}: run it at the top of the repository")
    if models is None and (lacking := [name for name in named if name in OF_PAIR]):
        arguments.error(f"{', '.join(lacking)}: {NO_PAIR}")
    for name in named or PARTS:
        measure(name, models)
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m specserve_bench.figures",
        description=f"Measure the named parts, or all. Their figures replace those in {RESULTS}.",
        epilog="\n".join(f"  {name:9} {what}" for name, what in PARTS.items())
        + f"\n\nFor {' and '.join(OF_PAIR)}, {NO_PAIR}. With arguments of their own, measured "
        f"only if they come first: {', '.join(LONG)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("parts", nargs="*", type=part, metavar="PART", help="of those below")
    return p


def part(name: str) -> str:
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"no part {name!r}; there are {', '.join(PARTS)}")
    return name


def pair_folder() -> Path | None:
    folder = os.environ.get("SPECSERVE_TEST_MODELS")
    if folder and all(Path(folder, name).is_dir() for name in PAIR):
        return Path(folder)
    return None


def measure(name: str, models: Path | None) -> None:
    if name == "demo":
        demo_figures()
    elif name in OTHERS:
        keep(f"{name}-cpu", OTHERS[name]())
    elif models is None:
        print(f"{name} is left out: {NO_PAIR}", file=sys.stderr)
    else:
        keep(f"{name}-cpu", OF_PAIR[name](models))


def demo_figures() -> None:
    """The demo pair and its scaling to a larger model's cost, off against every drafter."""
    measured = [
        drafter_figures("demo-cpu", *demo_pair(), requests=16),
        drafter_figures("demo-0.6b-cpu", *large_pair(), requests=6),
    ]
    print(markdown(measured))
    draw(measured, PICTURES, ["tpot-ratios", "acceptance-by-depth"])


def drafter_figures(name: str, target: Path, draft: Path, requests: int) -> Result:
    chosen = [workload(w, requests, seed=0) for w in ("questions", "completion")]
    every = [*speculation.FIXED, "auto"]
    models = {"model.path": str(target), "drafter.model": str(draft)}
    base, loader = load_config(None, models), suite.Loader(progress=False)
    contenders = [
        loader.load(setting, load_config(None, models | suite.drafting(setting, base)))
        for setting in every
    ]
    trials = suite.Trials(chosen, [Load(concurrency=1)], ROUNDS)
    result = suite.measure("drafters", contenders, trials, Goals(), "make bench")
    print(report(result))
    (RESULTS / f"{name}.json").write_bytes(msgspec.json.encode(result) + b"\n")
    return result


def keep(name: str, figures: dict[str, Any]) -> None:
    line = json.dumps({"machine": suite.machine("make bench")} | figures)
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
    settings = {
        "speculation.max_nodes": nodes,
        "memory.kv_bytes": 1 << 28,
        "memory.prefix_cache": False,  # all rounds repeat the same prompts
    }
    return LLM(models / "code-target", draft, drafter, set=settings, progress=False)


def one_run(llm: LLM, temperature: float) -> tuple[dict[str, float], str]:
    """All prompts, one after the other; means over them, and the texts."""
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
    """Minor page faults of the process during 20 steps of a stream, after its first ones."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
