"""`specserve bench peers`: specserve beside other engines in one run."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specserve.errors import ConfigError
from specserve.models import families
from specserve.models.folder import resolve
from specserve_bench import suite
from specserve_bench.bound import Bound
from specserve_bench.peers.cases import FIGURES, Sizes, bound_size, make_cases
from specserve_bench.peers.comparison import Comparison, Limits
from specserve_bench.peers.models import Models, named_models, scaled_pair
from specserve_bench.peers.rounds import Group
from specserve_bench.peers.setups import Setups
from specserve_bench.peers.systems import System, make_systems
from specserve_bench.peers.table import agreements, group_result, sweep_result, sweep_table, table
from specserve_bench.steps import Cost, cost


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--model",
        metavar="FOLDER",
        help="a Llama or Qwen of 16-bit safetensors; default: the demo pair at a 0.6B model's cost",
    )
    p.add_argument(
        "--draft",
        action="append",
        default=[],
        metavar="FOLDER",
        help="with --model: a draft model of its vocabulary; several are compared one by one",
    )
    for name, engine in (("llama", "llama-cpp-python"), ("vllm", "vLLM for CPU")):
        p.add_argument(
            f"--{name}", metavar="PYTHON", help=f"the python of an environment with {engine}"
        )
    p.add_argument(
        "--transformers",
        default=sys.executable,
        metavar="PYTHON",
        help="the same with transformers; default: this python",
    )
    sizes = Sizes()
    p.add_argument("--rounds", type=positive, default=5, help="interleaved; default: 5")
    p.add_argument(
        "--prompts", type=positive, default=sizes.prompts, help=f"of a case; {sizes.prompts}"
    )
    p.add_argument("--batch", type=positive, default=sizes.batch, help=f"at once; {sizes.batch}")
    p.add_argument(
        "--tokens", type=several, default=sizes.tokens, help=f"after a prompt; {sizes.tokens}"
    )
    p.add_argument(
        "--timeout", type=positive, default=600, help="seconds to load and for a case; 600"
    )
    p.add_argument("--out", type=Path, metavar="JSON", help="keep the results")
    p.set_defaults(action=peers, plots=None)


def peers(args: argparse.Namespace) -> int:
    if args.draft and args.model is None:
        raise ConfigError("--draft: name the model that it drafts for with --model")
    with exits_on_sigterm(), TemporaryDirectory(prefix="specserve-peers-") as folder:
        scratch = Path(folder)
        models = chosen_models(args, scratch)
        result = compare(args, models, scratch)
    if args.out is not None:
        args.out.write_text(json.dumps(result) + "\n")
    print(sweep_table(result), table(result), sep="\n\n")
    if not sys.stdout.isatty():  # JSON is for programs, not for a terminal
        print(json.dumps(result))
    return 0


@contextmanager
def exits_on_sigterm() -> Iterator[None]:
    """Else SIGTERM would leave gigabytes of checkpoints in the temporary folder."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def chosen_models(args: argparse.Namespace, scratch: Path) -> Models:
    if args.model is None:
        return scaled_pair(scratch)
    return named_models(resolve(args.model), list(map(resolve, args.draft)), scratch)


def compare(args: argparse.Namespace, models: Models, scratch: Path) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    limits = Limits(args.rounds, cores, args.timeout)
    sizes = Sizes(prompts=args.prompts, batch=args.batch, tokens=args.tokens)
    comparison = Comparison(
        chosen_systems(args), Setups(models.target, scratch), limits, tell_on_stderr, Bound().rates
    )
    folders: list[Path | None] = [draft.folder for draft in models.drafts] or [None]
    groups = comparison.run(make_cases(models.target, sizes), folders)
    return described(models, sizes, comparison, groups)


def chosen_systems(args: argparse.Namespace) -> list[System]:
    pythons = {"specserve": sys.executable}
    pythons |= {name: getattr(args, name) for name in ("llama", "vllm", "transformers")}
    return make_systems({name: python for name, python in pythons.items() if python is not None})


def described(
    models: Models, sizes: Sizes, comparison: Comparison, groups: list[Group]
) -> dict[str, Any]:
    guesses: list[str | None] = [draft.label for draft in models.drafts] or [None]
    costs = step_costs(models.target, sizes)
    figures = [
        figure
        for group, label in zip(groups, [None, None, *guesses], strict=True)
        for figure in group_result(group, label, costs)
    ]
    return {
        "machine": suite.machine("specserve bench peers"),
        "model": models.label,
        "sizes": sizes._asdict(),
        "rounds": comparison.limits.rounds,
        "versions": comparison.versions,
        "sweep": sweep_result(comparison.sweep.tried.values()),
        "figures": figures,
        "same_text_as_ours": agreements(groups[0].lanes),
    }


def step_costs(target: Path, sizes: Sizes) -> dict[str, Cost]:
    config = families.load_config(target)
    steps = {figure.name: bound_size(figure.name, sizes) for figure in FIGURES}
    return {name: cost(config, size) for name, size in steps.items() if size is not None}


def tell_on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    return whole(text, 1)


def several(text: str) -> int:
    return whole(text, 2)


def whole(text: str, least: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
    return int(text)
