"""lm-eval's rate with specserve's server, and with transformers in its own process."""

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from specserve_bench import outputs, suite
from specserve_bench.commands import at_least_1
from specserve_bench.harness.lm_eval import LOGLIKELIHOOD, Evaluation, LmEval, write_task
from specserve_bench.pairs import PAIRS
from specserve_bench.peers.pythons import checked_python
from specserve_bench.report import ratio_words
from specserve_bench.results import Ratio, ratio
from specserve_bench.served import Served, settings
from specserve_bench.workloads import beginning

FILE = Path("bench/results/lm-eval-cpu.json")
OURS, THEIRS = "specserve", "transformers"
TASK = "lines"
ITEMS, PARTS, TRIED = 500, 5, 16
CHARACTERS = 150, 750  # of a context: lines of code as of a few examples of a benchmark
SERVING = settings(memory__kv_bytes=2 << 30)
COMMAND = "python -m specserve_bench.figures lm-eval"
WORDS = {"_concurrent": "requests at a time:", "batch_size_per_gpu": "batch:"}
TRIES: Mapping[str, Sequence[Mapping[str, int]]] = {
    OURS: [{"_concurrent": n} for n in (4, 16, 64)],
    THEIRS: [{"batch_size_per_gpu": n} for n in (1, 2, 4, 8, 16)],
}
DESCRIPTION = """
Have lm-eval compute the loglikelihood of the next line of code, by specserve's server (echo and
logprobs) and by transformers (bfloat16, all cores), on the pair at a 0.6B model's cost. Each gets
the best of a few settings; then parts of the items are measured in turn.
"""


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    python = checked_python("lm-eval", args.lm_eval)
    outputs.check_file("--out", args.out)
    target, _ = PAIRS[args.pair]()
    docs = items(args.items)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="specserve-task-")))
        write_task(folder, TASK, docs, **LOGLIKELIHOOD)
        server = stack.enter_context(Served(target, *SERVING))
        loaded = {
            name: stack.enter_context(LmEval(python, *model, folder))
            for name, model in models(server, target).items()
        }
        told = {"items": described(docs), "lm_eval": loaded[OURS].version}
        told |= measured(loaded, args.items, args.parts)
    about = {"machine": suite.machine(COMMAND), "model": target.name}
    outputs.write("--out", args.out, json.dumps(about | told).encode() + b"\n")
    print(table(told))
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog=COMMAND, description=DESCRIPTION)
    p.add_argument(
        "--lm-eval",
        required=True,
        metavar="PYTHON",
        help="the Python of an environment with lm-eval, torch and transformers",
    )
    p.add_argument("--pair", choices=PAIRS, default="0.6b")
    p.add_argument("--items", type=at_least_1, default=ITEMS)
    p.add_argument("--parts", type=at_least_1, default=PARTS, help="that are measured in turn")
    p.add_argument("--out", type=Path, default=FILE, metavar="JSON", help=f"default: {FILE}")
    return p


def items(number: int) -> list[dict[str, str]]:
    """Some lines of files that the demo pair was not trained on, and the line that follows."""
    source = random.Random(TASK)
    docs: list[dict[str, str]] = []
    while len(docs) < number:
        text = beginning(source, source.randrange(*CHARACTERS)).rstrip()
        context = text.rpartition("\n")[0].rstrip()
        if context:
            docs.append({"context": context, "target": text[len(context) :]})
    return docs


def described(docs: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    return {
        "number": len(docs),
        "characters": sum(len(doc["context"]) + len(doc["target"]) for doc in docs),
        "hash": hashlib.sha256(json.dumps(docs).encode()).hexdigest()[:16],
    }


def models(server: Served, target: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """lm-eval's models, with their arguments."""
    folder = str(target.resolve())
    ours = {
        "model": target.name,
        "base_url": f"http://{server.host}:{server.port}/v1/completions",
        "tokenizer": folder,
        "tokenizer_backend": "huggingface",
    }
    theirs = {"pretrained": folder, "dtype": "bfloat16", "device": "cpu"}
    return {OURS: ("local-completions", ours), THEIRS: ("hf", theirs)}


def measured(loaded: Mapping[str, LmEval], number: int, num_parts: int) -> dict[str, Any]:
    """Each with its best setting; parts of the items in turn, who is first in turn as well."""
    tried = {name: tries(name, lm_eval, min(number, TRIED)) for name, lm_eval in loaded.items()}
    best = {name: max(told, key=lambda each: each["items_per_s"]) for name, told in tried.items()}
    runs: dict[str, list[Evaluation]] = {name: [] for name in loaded}
    for part in range(num_parts):
        for name in [OURS, THEIRS] if part % 2 else [THEIRS, OURS]:
            numbers = range(part, number, num_parts)
            runs[name].append(loaded[name].run(TASK, numbers, **best[name]["setting"]))
            print(f"part {part + 1}: {name}: {runs[name][-1].seconds:.1f} s", file=sys.stderr)
    seconds = {name: sum(run.seconds for run in told) for name, told in runs.items()}
    return {
        "tried": tried,
        "setting": {name: told["setting"] for name, told in best.items()},
        "items_per_s": {name: round(number / each, 3) for name, each in seconds.items()},
        "rate_over_theirs": seconds[THEIRS] / seconds[OURS],
        "rate_over_theirs_in_parts": msgspec.to_builtins(
            ratio(*([run.seconds for run in runs[name]] for name in (THEIRS, OURS)))
        ),
        "parts": {name: [round(run.seconds, 3) for run in told] for name, told in runs.items()},
        **compared(runs),
    }


def tries(name: str, lm_eval: LmEval, number: int) -> list[dict[str, Any]]:
    lm_eval.run(TASK, range(min(number, 4)), **TRIES[name][0])  # the first steps are slower
    told = []
    for setting in TRIES[name]:
        run = lm_eval.run(TASK, range(number), **setting)
        told.append({"setting": setting, "items_per_s": round(number / run.seconds, 3)})
        print(f"{name}: {told[-1]}", file=sys.stderr)
    return told


def compared(runs: Mapping[str, Sequence[Evaluation]]) -> dict[str, Any]:
    """How far the loglikelihoods are apart, and how many items only one says are greedy."""
    ours, theirs = (
        {number: answer for run in runs[name] for number, [answer] in run.answers.items()}
        for name in (OURS, THEIRS)
    )
    apart = [abs(ours[n][0] - theirs[n][0]) for n in ours]
    return {
        "mean_loglikelihood": {
            name: sum(a[0] for a in told.values()) / len(told)
            for name, told in ((OURS, ours), (THEIRS, theirs))
        },
        "loglikelihoods_apart": {"mean": sum(apart) / len(apart), "most": max(apart)},
        "greedy_by_one_alone": sum(ours[n][1] != theirs[n][1] for n in ours),
    }


def table(told: Mapping[str, Any]) -> str:
    lines = [["", "setting", "items/s"], ["---"] * 3]
    for name, setting in told["setting"].items():
        [(key, value)] = setting.items()
        lines.append([name, f"{WORDS[key]} {value}", f"{told['items_per_s'][name]:.2f}"])
    parts = ratio_words(msgspec.convert(told["rate_over_theirs_in_parts"], Ratio))
    return "\n".join(
        [
            *(f"| {' | '.join(line)} |" for line in lines),
            f"{OURS} / {THEIRS}: {told['rate_over_theirs']:.2f}; parts: {parts}",
        ]
    )
