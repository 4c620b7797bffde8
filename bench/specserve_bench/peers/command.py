"""`specserve bench peers`: measures specserve and other engines in one run."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specserve.errors import ConfigError
from specserve.models.folder import is_gguf, resolve
from specserve.models.gguf.header import Header, read_header
from specserve.models.gguf.names import EMBEDDING, HEAD
from specserve.models.source import open_source
from specserve_bench import arguments, suite
from specserve_bench.arguments import add_json, at_least_1, integer
from specserve_bench.bound import Bound, Cost, cost, kv_token_bytes, state_bytes
from specserve_bench.gguf_shapes import MIXTURES, SHAPES, write_shape
from specserve_bench.machine import add_allow_dirty
from specserve_bench.peers.cases import FIGURES, PeerSizes, bound_size, make_cases
from specserve_bench.peers.comparison import Comparison, Limits, Series
from specserve_bench.peers.peer import checked_program, checked_python
from specserve_bench.peers.systems import (
    PROGRAMS,
    ComparedModels,
    System,
    make_systems,
    named_models,
    scaled_pair,
)
from specserve_bench.peers.table import agreements, group_result, sweep_result, sweep_table, table

DESCRIPTION = (
    "Measure specserve and the engines whose Pythons are named, on one checkpoint. With llama.cpp "
    "and vLLM it takes about 40 minutes on two cores."
)
ENGINES = {
    "llama": "llama-cpp-python",
    "ik": "ik-llama-cpp-python",
    "mistralrs": "mistralrs",
    "openvino": "openvino-genai",
    "vllm": "vLLM for CPU",
    "transformers": "transformers",
}
ONLY_GGUF = ("ik", "mistralrs", "openvino", "llama_programs")


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--model",
        metavar="FOLDER",
        help="Llama or Qwen as 16-bit safetensors; default: the demo models at 0.6B compute",
    )
    p.add_argument(
        "--gguf",
        metavar="FILE",
        help="GGUF file instead of a model, measured on specserve and the engines that read such "
        "files",
    )
    p.add_argument(
        "--shape",
        choices=[*SHAPES],
        help="in place of --gguf: random weights of this published shape, written to a temporary "
        "GGUF file",
    )
    p.add_argument(
        "--mixture",
        choices=MIXTURES,
        default=MIXTURES[0],
        help=f"with --shape: types of the weights, default: {MIXTURES[0]}",
    )
    p.add_argument(
        "--draft",
        action="append",
        default=[],
        metavar="FOLDER",
        help="with --model: draft model with the same vocabulary; may be given several times",
    )
    for name, engine in ENGINES.items():
        p.add_argument(
            f"--{name}",
            metavar="PYTHON",
            help=f"Python of an environment with {engine}; default: not measured",
        )
    p.add_argument(
        "--llama-programs",
        metavar="FOLDER",
        help="with --gguf: folder of llama.cpp's own llama-server and llama-bench",
    )
    p.add_argument(
        "--quantize",
        choices=["w8a8", "w8", "w4"],
        help="compare quantized weights with llama.cpp's Q8_0 or Q4_0, and with 16 bits",
    )
    p.add_argument("--rounds", type=at_least_1, default=5, help="interleaved rounds; default: 5")
    sizes = PeerSizes()
    for flag, kind, size, meaning in (
        ("prompts", at_least_1, sizes.prompts, "prompts of the cases plain and drafting"),
        ("long", at_least_1, sizes.long, "prompts of the case prompt"),
        ("longest", integer(0), sizes.longest, "with --gguf: rounds of a prompt of 8,000 tokens"),
        ("batch", at_least_1, sizes.batch, "prompts of the case batch"),
        ("tokens", integer(2), sizes.tokens, "output tokens per prompt"),
        ("timeout", at_least_1, 600, "seconds to load, and for a case"),
    ):
        p.add_argument(
            f"--{flag}", type=kind, default=size, metavar="N", help=f"{meaning}; default: {size}"
        )
    p.add_argument(
        "--threads",
        type=at_least_1,
        metavar="N",
        help="threads of engines that do not choose them; drafting limits are tried once. Default: "
        "the fastest number of threads",
    )
    p.add_argument("--out", type=Path, metavar="JSON", help="write the results to this file")
    add_json(p)
    add_allow_dirty(p)
    p.set_defaults(action=peers, plots=None)


def peers(args: argparse.Namespace) -> int:
    """The exit code is 1 where every engine failed."""
    if args.draft and args.model is None:
        raise ConfigError("--draft: needs its target model. Add --model.")
    for name in ONLY_GGUF:
        if getattr(args, name) and not is_on_gguf(args):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag}: this engine is measured only on a GGUF file. Add --gguf.")
    if args.gguf and args.shape:
        raise ConfigError("--gguf excludes --shape. Remove one of them.")
    if args.longest and not is_on_gguf(args):
        raise ConfigError("--longest: measured only on a GGUF file. Add --gguf or --shape.")
    others = "model", "quantize", "vllm", "transformers"
    refused = [f"--{name}" for name in others if getattr(args, name)]
    if is_on_gguf(args) and refused:
        given = "--gguf" if args.gguf else "--shape"
        raise ConfigError(f"{given} excludes {', '.join(refused)}. Remove one of them.")
    systems = chosen_systems(args)
    with exits_on_sigterm(), TemporaryDirectory(prefix="specserve-peers-") as folder:
        scratch = Path(folder)
        result = compare(args, systems, chosen_models(args, scratch), scratch)
    try:
        if args.out is not None:
            arguments.write("--out", args.out, json.dumps(result).encode() + b"\n")
    finally:
        print(sweep_table(result), table(result), sep="\n\n")
    if args.json:
        print(json.dumps(result))
    values = [value for figure in result["figures"] for value in figure["systems"].values()]
    return int(all("error" in value for value in values))


def is_on_gguf(args: argparse.Namespace) -> bool:
    return bool(args.gguf or args.shape)


@contextmanager
def exits_on_sigterm() -> Iterator[None]:
    """Else SIGTERM would leave gigabytes of checkpoints in the temporary folder."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def chosen_systems(args: argparse.Namespace) -> list[System]:
    writes = "--shape" if args.shape else "--llama" if args.llama and not args.gguf else None
    if writes is not None and find_spec("gguf") is None:
        raise ConfigError(
            f"{writes}: this environment lacks gguf. Run pip install 'specserve[bench]'."
        )
    if args.quantize is not None and (args.vllm or args.transformers or not args.llama):
        raise ConfigError(
            "--quantize: only llama.cpp is compared. Add --llama, and remove other engines."
        )
    named = {name: getattr(args, name) for name in ENGINES}
    pythons = {
        name: checked_python(name, python) for name, python in named.items() if python is not None
    }
    folder = args.llama_programs
    programs = {} if folder is None else {name: checked_program(folder, name) for name in PROGRAMS}
    return make_systems({"specserve": sys.executable, **pythons}, args.quantize, programs)


def chosen_models(args: argparse.Namespace, scratch: Path) -> ComparedModels:
    if args.gguf is not None:
        file = resolve(args.gguf).resolve()
        if not is_gguf(file):
            raise ConfigError(f"--gguf: {args.gguf} is not a GGUF file. Use --model.")
        return ComparedModels(file.name, file, [])
    if args.shape is not None:
        label = f"{args.shape}, random weights, {args.mixture}"
        file = scratch / f"{args.shape}-{args.mixture}.gguf"
        write_shape(SHAPES[args.shape], args.mixture, file)
        return ComparedModels(label, file, [])
    if args.model is None:
        return scaled_pair(scratch)
    # Absolute, as engines run in folders of their own.
    target, *drafts = (resolve(path).resolve() for path in (args.model, *args.draft))
    return named_models(target, drafts, scratch)


def compare(
    args: argparse.Namespace, systems: list[System], models: ComparedModels, scratch: Path
) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    limits = Limits(args.rounds, cores, args.timeout, args.threads)
    sizes = PeerSizes(args.prompts, args.long, args.batch, args.tokens, args.longest)
    comparison = Comparison(systems, models.target, scratch, limits, print_on_stderr, Bound().rates)
    cases = make_cases(models.target, sizes, must_survive_text=is_on_gguf(args))
    if is_on_gguf(args):
        series = comparison.run_gguf(cases, sizes.longest)
    else:
        folders: list[Path | None] = [draft.folder for draft in models.drafts] or [None]
        series = comparison.run(cases, folders)
    machine = suite.machine(args.command)
    return {"machine": machine} | described(models, args.quantize, sizes, comparison, series)


def print_on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def described(
    models: ComparedModels,
    quantize: str | None,
    sizes: PeerSizes,
    comparison: Comparison,
    series: list[Series],
) -> dict[str, Any]:
    labels: dict[Path | None, str] = {draft.folder: draft.label for draft in models.drafts}
    costs = step_costs(models.target, sizes, quantize)
    figures = [
        figure
        for each in series
        for figure in group_result(each.group, each.drafter, labels.get(each.draft), costs)
    ]
    return {
        "model": models.label,
        "quantize": quantize,
        "sizes": sizes._asdict(),
        "rounds": comparison.limits.rounds,
        "versions": comparison.versions,
        "sweep": sweep_result(comparison.sweep.tried.values(), labels),
        "figures": figures,
        "same_text_as_ours": agreements(series[0].group.lanes),
    }


def step_costs(target: Path, sizes: PeerSizes, quantize: str | None) -> dict[str, Cost]:
    config = open_source(target).config()
    steps = {figure.name: bound_size(figure.name, sizes) for figure in FIGURES}
    sizes_of = {name: size for name, size in steps.items() if size is not None}
    costs = {name: cost(config, size, quantize) for name, size in sizes_of.items()}
    if not is_gguf(target):
        return costs
    weights = stored_bytes(read_header(target))
    kv = {name: sum(size.contexts) * kv_token_bytes(config) for name, size in sizes_of.items()}
    weights += 2 * state_bytes(config)  # read and written
    return {name: each._replace(num_bytes=weights + kv[name]) for name, each in costs.items()}


def stored_bytes(header: Header) -> int:
    """Bytes of all weights that a step reads; of an embedding that is no head, it reads rows."""
    tensors = dict(header.tensors)
    if HEAD in tensors:
        del tensors[EMBEDDING]
    return sum(tensor.size for tensor in tensors.values())
