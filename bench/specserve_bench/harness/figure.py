"""lm-eval's rate with specserve's server, and with transformers in its own process."""

import argparse
import hashlib
import json
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from specserve.errors import ConfigError
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
    about = {"model": target.name, "items": described(docs), "num_parts": args.parts}
    told = kept(args.out, about) if args.go_on else dict(about)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="specserve-task-")))
        write_task(folder, TASK, docs, **LOGLIKELIHOOD)
        server = stack.enter_context(Served(target, *SERVING))
        loaded = {
            name: stack.enter_context(LmEval(python, *model, folder))
            for name, model in models(server, target).items()
        }
        told = {"machine": suite.machine(COMMAND), "lm_eval": loaded[OURS].version, **told}
        for so_far in measured(told, loaded):
            told = so_far
            outputs.write("--out", args.out, json.dumps(told).encode() + b"\n")
    print(table(told))
    return 0


def kept(file: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier run has measured of the same; ConfigError if it was of something else."""
    if not file.exists():
        return dict(about)
    told: dict[str, Any] = json.loads(file.read_bytes())
    if any(told.get(name) != value for name, value in about.items()):
        raise ConfigError(f"--go-on: {file} is of another model, other items or other parts")
    return told


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
    p.add_argument("--go-on", action="store_true", help="measure the parts that --out lacks")
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


def measured(told: dict[str, Any], loaded: Mapping[str, LmEval]) -> Iterator[dict[str, Any]]:
    """What is told with each further part. Each model has its best setting; who comes first changes
    from part to part.
    """
    number, num_parts = told["items"]["number"], told["num_parts"]
    if "tried" not in told:
        tried = {n: tries(n, lm_eval, min(number, TRIED)) for n, lm_eval in loaded.items()}
        told = told | {"tried": tried, "parts": []}
    setting = {
        name: max(tried, key=lambda each: each["items_per_s"])["setting"]
        for name, tried in told["tried"].items()
    }
    for name, lm_eval in loaded.items():
        lm_eval.run(TASK, range(min(number, 4)), **setting[name])  # the first steps are slower
    for part in range(len(told["parts"]), num_parts):
        runs = {}
        for name in [OURS, THEIRS] if part % 2 else [THEIRS, OURS]:
            numbers = range(part, number, num_parts)
            runs[name] = loaded[name].run(TASK, numbers, **setting[name])
            print(f"part {part + 1}: {name}: {runs[name].seconds:.1f} s", file=sys.stderr)
        parts = [*told["parts"], of_part(runs)]
        told = told | {"setting": setting, "parts": parts} | over_parts(parts)
        yield told


def tries(name: str, lm_eval: LmEval, number: int) -> list[dict[str, Any]]:
    lm_eval.run(TASK, range(min(number, 4)), **TRIES[name][0])
    told = []
    for setting in TRIES[name]:
        run = lm_eval.run(TASK, range(number), **setting)
        told.append({"setting": setting, "items_per_s": round(number / run.seconds, 3)})
        print(f"{name}: {told[-1]}", file=sys.stderr)
    return told


def of_part(runs: Mapping[str, Evaluation]) -> dict[str, Any]:
    """Seconds, sums of loglikelihoods, how far they are apart, and how many items only one says are
    greedy.
    """
    ours, theirs = (
        {n: each for n, [each] in runs[name].answers.items()} for name in (OURS, THEIRS)
    )
    apart = [abs(ours[n][0] - theirs[n][0]) for n in ours]
    return {
        "items": len(ours),
        "seconds": {name: round(run.seconds, 3) for name, run in runs.items()},
        "loglikelihood": {OURS: total(ours), THEIRS: total(theirs)},
        "apart": {"sum": sum(apart), "most": max(apart)},
        "greedy_by_one_alone": sum(ours[n][1] != theirs[n][1] for n in ours),
    }


def total(answers: Mapping[int, Any]) -> float:
    return math.fsum(loglikelihood for loglikelihood, _ in answers.values())


def over_parts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    number = sum(part["items"] for part in parts)
    seconds = {name: [part["seconds"][name] for part in parts] for name in (OURS, THEIRS)}
    return {
        "items_per_s": {name: round(number / sum(each), 3) for name, each in seconds.items()},
        "rate_over_theirs": sum(seconds[THEIRS]) / sum(seconds[OURS]),
        "rate_over_theirs_in_parts": msgspec.to_builtins(ratio(seconds[THEIRS], seconds[OURS])),
        "mean_apart": sum(part["apart"]["sum"] for part in parts) / number,
        "greedy_by_one_alone": sum(part["greedy_by_one_alone"] for part in parts),
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
            f"{OURS} / {THEIRS}: {told['rate_over_theirs']:.2f}; parts: {parts}; items: "
            f"{sum(part['items'] for part in told['parts'])}",
        ]
    )
