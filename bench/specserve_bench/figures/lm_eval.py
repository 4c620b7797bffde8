"""lm-eval's rate with specserve's server, and with transformers in its own process.

lm-eval computes the loglikelihood of the next line of code, at 0.6B compute. It uses specserve's
server (echo and logprobs), and transformers (bfloat16, all cores). Each gets the best of a few
settings. Then parts of the items are measured in turn.
"""

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
from typing import Any, NamedTuple

import msgspec

from specserve.errors import ConfigError
from specserve_bench import arguments, suite
from specserve_bench.arguments import at_least_1
from specserve_bench.pairs import PAIRS
from specserve_bench.peers.peer import Worker, checked_python
from specserve_bench.report import markdown_table, ratio_words
from specserve_bench.results import ratio
from specserve_bench.served import Served, settings
from specserve_bench.workloads import beginning

OURS, THEIRS = "specserve", "transformers"
TASK = "lines"
CHARACTERS = 150, 750  # of a context: lines of code as of a few examples of a benchmark
LOGLIKELIHOOD = {
    "output_type": "loglikelihood",
    "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
}
TRIES: Mapping[str, Sequence[Mapping[str, int]]] = {
    OURS: [{"_concurrent": n} for n in (4, 16, 64)],
    THEIRS: [{"batch_size_per_gpu": n} for n in (1, 2, 4, 8, 16)],
}


class Evaluation(NamedTuple):
    """The task in lm-eval's format.

    seconds   of the calls of the model
    answers   by the number of the item: (loglikelihood, whether it is greedy) of each of its
              requests, or a generated text
    """

    seconds: float
    scores: Mapping[str, float]
    answers: Mapping[int, Any]


class LmEval(Worker):
    """A model of lm-eval, loaded; ended when the block ends. It downloads nothing."""

    def __init__(self, python: str, model: str, args: Mapping[str, Any], folder: Path) -> None:
        given = {"model": model, "args": args, "folder": str(folder.resolve())}
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": "cache"}
        env = offline | {"TOKENIZERS_PARALLELISM": "false"}
        super().__init__(python, "lm_eval", given, env=env)

    def run(
        self, task: str, numbers: Sequence[int] | None = None, **settings: object
    ) -> Evaluation:
        """`settings` are attributes of lm-eval's model."""
        request = {"task": task, "numbers": numbers and list(numbers), "settings": settings}
        told = self.ask(request)
        return Evaluation(told["seconds"], told["scores"], dict(told["answers"]))


def write_task(
    folder: Path, name: str, docs: Sequence[Mapping[str, Any]], **config: object
) -> None:
    """A task of lm-eval: its items have a `context` and a `target`, which follows it directly."""
    items = folder / f"{name}.jsonl"
    items.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    told = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(items.resolve())}},
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{target}}",
        "target_delimiter": "",
        "metadata": {"version": 1},
    }
    # JSON is YAML.
    (folder / f"{name}.yaml").write_text(json.dumps(told | config))


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--lm-eval",
        required=True,
        metavar="PYTHON",
        help="the Python of an environment with lm-eval, torch and transformers",
    )
    p.add_argument("--pair", choices=PAIRS, default="0.6b")
    p.add_argument("--items", type=at_least_1, default=500)
    p.add_argument("--parts", type=at_least_1, default=5, help="that are measured in turn")
    p.add_argument("--go-on", action="store_true", help="measure the parts that --out lacks")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Each part is kept as soon as it is measured."""
    python = checked_python("lm-eval", args.lm_eval)
    target, _ = PAIRS[args.pair]()
    docs = items(args.items)
    about = {"model": target.name, "items": described(docs), "num_parts": args.parts}
    told = kept(args.out, about) if args.go_on else dict(about)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="specserve-task-")))
        write_task(folder, TASK, docs, **LOGLIKELIHOOD)
        server = stack.enter_context(Served(target, *settings(memory__kv_bytes=2 << 30)))
        loaded = {
            name: stack.enter_context(LmEval(python, *model, folder))
            for name, model in models(server, target).items()
        }
        machine = suite.machine("python -m specserve_bench.figures lm-eval")
        told = {"machine": machine, "lm_eval": loaded[OURS].version, **told}
        for so_far in measured(told, loaded):
            told = so_far
            arguments.write("--out", args.out, json.dumps(told).encode() + b"\n")
    return told


def kept(file: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Results of an earlier run of the same measurement; ConfigError if it was another one."""
    if not file.exists():
        return dict(about)
    told: dict[str, Any] = json.loads(file.read_bytes())
    if any(told.get(name) != value for name, value in about.items()):
        raise ConfigError(f"--go-on: {file} is of another model, other items or other parts")
    return told


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
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": folder,
        "tokenizer_backend": "huggingface",
    }
    theirs = {"pretrained": folder, "dtype": "bfloat16", "device": "cpu"}
    return {OURS: ("local-completions", ours), THEIRS: ("hf", theirs)}


def measured(told: dict[str, Any], loaded: Mapping[str, LmEval]) -> Iterator[dict[str, Any]]:
    """Results after each further part. Models alternate, each with its best setting."""
    number, num_parts = told["items"]["number"], told["num_parts"]
    if "tried" not in told:
        tried = {n: tries(n, lm_eval, min(number, 16)) for n, lm_eval in loaded.items()}
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
        "greedy_by_only_one": sum(ours[n][1] != theirs[n][1] for n in ours),
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
        "greedy_by_only_one": sum(part["greedy_by_only_one"] for part in parts),
    }


def table(told: Mapping[str, Any]) -> str:
    words, rows = {"_concurrent": "concurrent requests:", "batch_size_per_gpu": "batch:"}, []
    for name, setting in told["setting"].items():
        [(key, value)] = setting.items()
        rows.append([name, f"{words[key]} {value}", f"{told['items_per_s'][name]:.2f}"])
    parts = ratio_words(told["rate_over_theirs_in_parts"])
    return (
        f"{markdown_table(['', 'setting', 'items/s'], rows)}\n"
        f"{OURS} / {THEIRS}: {told['rate_over_theirs']:.2f}; parts: {parts}; items: "
        f"{sum(part['items'] for part in told['parts'])}"
    )
