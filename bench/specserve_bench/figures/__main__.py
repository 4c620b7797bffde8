"""`make bench`: measures engine, server and drafters, as tables and JSON.

Runs that are compared are interleaved, so that other load on the machine affects both. A figure is
a module of this package with `measure`, and `table`, which shows a result in Markdown.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import specserve  # noqa: F401, first: it configures the process before torch loads

import msgspec  # isort: skip
import torch  # isort: skip

from specserve.errors import ConfigError
from specserve_bench import arguments, machine, suite
from specserve_kernels.cpu.build import use_level
from specserve_kernels.cpu.levels import usable_levels

RESULTS = Path("bench/results")
PROGRAM = "python -m specserve_bench.figures"
FIGURES = {  # what they measure, without arguments
    "server": "the HTTP server: start-up, CPU time, idle connections, a newcomer",
    "steps": "steps of a random 0.6B model against their bound",
    "families": "steps of each model family against Llama's, with the same linear layers",
    "adapters": "steps of a 0.6B model with LoRA adapters",
    "implementations": "steps of a model with transformers' modules against native code",
    "kv": "attention over 8-bit KV against bf16 KV",
    "sampling": "time of penalties, masks, filters and logprobs in steps of a 0.6B model",
    "memory": "the block pool: prefix hits, sequences that share blocks",
    "fairness": "TTFT of a small request while a large one runs",
    "key-isolation": "time of a request while another API key sends expensive ones",
    "host": "host time of a step, by phase",
    "maps": "linear layers of 4 and 8 bits against bf16",
    "products": "linear layers of 64 rows and more against the CPU's multiply-adds per second",
    "merged": "one tree of all draft sources against the draft model's, with equal draft tokens",
    "mixtures": "steps of a mixture of experts against the bytes that its rows read",
    "quantized": "trees, prompts and steps of quantized weights with 8-bit activations",
    "recurrent": "steps, prompts and second turns of models with recurrent layers",
    "targets": "long prompts that arrive while streams with a TPOT target run",
    "ranks": "steps of a 0.6B model in two ranks against one process on the same cores",
    "restart": "pause of 16 streams when the engine process is killed",
    "swap": "longest wait of 8 streams while another draft model is loaded",
    "load-gaps": "the longest gap of streams while adapters or draft models load on a busy host",
    "demo": "each drafter with the demo models, also at 0.6B compute; draws plots",
}
# These compute in this process only, so that `--level` applies to all of it.
OF_KERNELS = (
    *("steps", "families", "kv", "sampling", "maps", "mixtures", "quantized"),
    "recurrent",
)
# These have `add_arguments`. They take long, and are measured only if they come first.
LONG = (
    *("speculation", "open-loop", "replicas", "heads", "lm-eval", "structured", "sources"),
    *("versions", "real", "busy", "tiers"),
)


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] in LONG:
        return measure_long(argv[0], argv[1:])
    p = parser()
    args = p.parse_args(argv)
    if not RESULTS.is_dir():
        p.error(f"There is no folder {RESULTS}. Run the command at the top of the repository.")
    refused = machine.refusal(str(RESULTS), args.allow_dirty)
    if refused is not None:
        p.error(refused)
    if args.level is not None:
        others = [name for name in args.parts or FIGURES if name not in OF_KERNELS]
        if others:
            p.error(f"--level supports only {', '.join(OF_KERNELS)}, not {others[0]}")
        use_level(args.level)
    threads = torch.get_num_threads()
    for name in args.parts or FIGURES:
        torch.set_num_threads(threads)  # an engine of the part before may have changed it
        figure = module(name)
        result = figure.measure()
        print(figure.table(result))
        if name != "demo":  # it keeps two files
            of_level = {} if args.level is None else {"level": args.level}
            options = [f"--level {level}" for level in of_level.values()]
            facts = suite.machine(" ".join([PROGRAM, name, *options])) | of_level
            line = json.dumps({"machine": facts} | result)
            file = "-".join([name, *of_level.values(), "cpu"])
            (RESULTS / f"{file}.json").write_text(line + "\n")
            print(line)
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=PROGRAM,
        description=f"Measure the named parts, or all. The figures replace those in {RESULTS}.",
        epilog="\n".join(f"  {name:15} {what}" for name, what in FIGURES.items())
        + "\n\nThese parts have options of their own and run one at a time: "
        f"{', '.join(LONG)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--level",
        type=usable_level,
        help="instruction set of the C++ kernels, for example x86-64-v3 (AVX2); default: the best "
        "one. The result gets a file of its own",
    )
    p.add_argument("parts", nargs="*", type=part, metavar="PART", help="one of the parts below")
    machine.add_allow_dirty(p)
    return p


def part(name: str) -> str:
    if name not in FIGURES:
        raise argparse.ArgumentTypeError(f"no part {name!r}; the parts are {', '.join(FIGURES)}")
    return name


def usable_level(name: str) -> str:
    known = [level.name for level in usable_levels()]
    if name not in known:
        raise argparse.ArgumentTypeError(
            f"this CPU cannot run level {name!r}; it can run {', '.join(known)}"
        )
    return name


def module(name: str) -> Any:
    return import_module(f"specserve_bench.figures.{name.replace('-', '_')}")


def measure_long(name: str, argv: Sequence[str]) -> int:
    figure, file = module(name), RESULTS / f"{name}-cpu.json"
    p = argparse.ArgumentParser(prog=f"{PROGRAM} {name}", description=figure.__doc__)
    figure.add_arguments(p)
    p.add_argument("--out", type=Path, default=file, metavar="JSON", help=f"default: {file}")
    machine.add_allow_dirty(p)
    args = p.parse_args(argv)
    try:
        arguments.check_result("--out", args.out, args.allow_dirty)
    except ConfigError as e:
        p.error(str(e))
    result = figure.measure(args)
    if isinstance(result, dict):
        result = {"machine": suite.machine(f"{PROGRAM} {name}")} | result
    arguments.write("--out", args.out, msgspec.json.encode(result) + b"\n")
    print(figure.table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
