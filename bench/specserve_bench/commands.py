"""`specserve bench ...`: what speculation does to latency, in tables, JSON and plots."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from specserve.config import Config, load_config, parse_override
from specserve.errors import ConfigError
from specserve.keys import read_keys
from specserve_bench import results, scale, scripted, suite
from specserve_bench.local import Local
from specserve_bench.report import report
from specserve_bench.results import Goals, Load, Result
from specserve_bench.workloads import WORKLOADS, Workload, workload

NODES = (4, 8, 16)
TRIED = ("questions", "completion")
Number = TypeVar("Number", int, float)


def main(argv: list[str]) -> int:
    """Of the entry point that `specserve` finds."""
    if argv and argv[0] == "scale-model":
        return scale.main(argv[1:])
    args = parser().parse_args(argv)
    action: Callable[[argparse.Namespace], None] = args.action
    action(args)
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="specserve bench",
        description=__doc__,
        epilog="Also: scale-model SRC DST --like SHAPE, a checkpoint at a larger model's cost.",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    add_latency(commands.add_parser("latency", help="one request at a time, by workload"))
    add_load(commands.add_parser("load", help="many requests: at rates, or so many at a time"))
    add_drafters(commands.add_parser("drafters", help="one workload, every drafter and tree size"))
    add_compare(
        commands.add_parser("compare", help="configs and servers against the first of them")
    )
    show = commands.add_parser("show", help="the tables of kept results once more, and plots")
    show.add_argument("files", nargs="+", type=Path, metavar="JSON")
    show.add_argument("--plots", type=Path, metavar="FOLDER", help="write PNG plots there")
    show.set_defaults(action=shown)
    return top


def add_latency(p: argparse.ArgumentParser) -> None:
    add_subject(p)
    add_workloads(p, TRIED)
    add_run(p)
    p.set_defaults(action=latency)


def add_load(p: argparse.ArgumentParser) -> None:
    add_subject(p)
    add_workloads(p, ("mixed",))
    kind = p.add_mutually_exclusive_group()
    kind.add_argument(
        "--rate", type=numbers, metavar="R,...", help="requests a second, each in turn"
    )
    kind.add_argument(
        "--concurrency",
        type=whole,
        metavar="N,...",
        help="so many at a time, each in turn; 1,2,4,8",
    )
    p.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="CV",
        help="with --rate: coefficient of variation of the gaps; default: 1, which is Poisson",
    )
    add_run(p)
    p.set_defaults(action=loaded)


def add_drafters(p: argparse.ArgumentParser) -> None:
    add_subject(p)
    add_workloads(p, ("questions",))
    p.add_argument("--nodes", type=whole, default=NODES, metavar="N,...", help="default: 4,8,16")
    add_run(p)
    p.set_defaults(action=drafters)


def add_compare(p: argparse.ArgumentParser) -> None:
    p.add_argument("subjects", nargs="+", metavar="CONFIG_OR_URL", help="a TOML file or http://...")
    p.add_argument("--api-key-file", type=Path, metavar="FILE", help="the key that servers want")
    p.add_argument("--concurrency", type=whole, default=(1,), metavar="N", help="default: 1")
    add_workloads(p, TRIED)
    add_run(p)
    p.set_defaults(action=compare)


def add_subject(p: argparse.ArgumentParser) -> None:
    p.add_argument("--url", help="a server to ask; default: an engine in this process")
    p.add_argument("--api-key-file", type=Path, metavar="FILE", help="with --url: the key to show")
    p.add_argument(
        "--model", help="a local folder or a hub id; with --url, the server's name of it"
    )
    p.add_argument("--draft-model", help="for the drafter `model`")
    p.add_argument(
        "--drafters",
        type=words,
        metavar="D,...",
        help="each in turn, the first as the base of ratios: off, ngram:8, model:16, "
        "scripted:0.9/0.8 (right so often by depth)",
    )
    p.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML")
    p.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")


def add_workloads(p: argparse.ArgumentParser, usual: Sequence[str]) -> None:
    p.add_argument(
        "--workloads",
        type=words,
        default=usual,
        metavar="W,...",
        help=f"of {', '.join(WORKLOADS)}; default: {','.join(usual)}",
    )
    p.add_argument("--requests", type=at_least_1, default=16, help="of a workload; default: 16")
    p.add_argument("--temperature", type=float, help="of all requests; default: the workload's")
    p.add_argument("--seed", type=int, default=0, help="of workloads and arrivals; default: 0")


def add_run(p: argparse.ArgumentParser) -> None:
    p.add_argument("--rounds", type=at_least_1, default=3, help="interleaved; default: 3")
    p.add_argument("--goal-ttft-ms", type=float, default=Goals().ttft_ms, help="for goodput")
    p.add_argument("--goal-tpot-ms", type=float, default=Goals().tpot_ms, help="for goodput")
    p.add_argument("--out", type=Path, metavar="JSON", help="keep the results")
    p.add_argument("--plots", type=Path, metavar="FOLDER", help="write PNG plots there")


def latency(args: argparse.Namespace) -> None:
    every = [f"{name}:{NODES[-1]}" for name in guessing(args)]
    one_by_one("latency", args, ["off", *every])


def drafters(args: argparse.Namespace) -> None:
    every = [f"{name}:{n}" for name in guessing(args) for n in args.nodes]
    one_by_one("drafters", args, ["off", *every])


def one_by_one(kind: str, args: argparse.Namespace, usual: Sequence[str]) -> None:
    workloads = workloads_of(args)
    finish(kind, args, subjects(args, usual, workloads), workloads, [Load(concurrency=1)])


def loaded(args: argparse.Namespace) -> None:
    if args.rate:
        loads = [Load(rate=r, burstiness=args.burstiness, seed=args.seed) for r in args.rate]
    else:
        loads = [Load(concurrency=n) for n in args.concurrency or (1, 2, 4, 8)]
    workloads = workloads_of(args)
    chosen = subjects(args, ["off", guessing(args)[-1]], workloads)
    finish("load", args, chosen, workloads, loads)


def compare(args: argparse.Namespace) -> None:
    loader, key = suite.Loader(), key_of(args)
    chosen = [
        suite.hosted(name, key, None)
        if name.startswith(("http://", "https://"))
        else loader.load(name, load_config(Path(name)))
        for name in dict.fromkeys(args.subjects)
    ]
    loads = [Load(concurrency=n) for n in args.concurrency]
    finish("compare", args, chosen, workloads_of(args), loads)


def finish(
    kind: str,
    args: argparse.Namespace,
    chosen: Sequence[suite.Contender],
    workloads: Sequence[Workload],
    loads: Sequence[Load],
) -> None:
    """Measure, show, keep."""
    for path in (args.out and args.out.parent, args.plots):
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)  # now, not after an hour
    goals = Goals(args.goal_ttft_ms, args.goal_tpot_ms)
    plan = suite.Plan(workloads, loads, args.rounds)
    command = " ".join(["specserve", *sys.argv[1:]])
    result = suite.measure(kind, chosen, plan, goals, command)
    if args.out is not None:
        args.out.write_bytes(msgspec.json.encode(result) + b"\n")
    present([result], args.plots)


def shown(args: argparse.Namespace) -> None:
    present([results.read(file) for file in args.files], args.plots)


def present(measured: Sequence[Result], folder: Path | None) -> None:
    for result in measured:
        print(report(result))
    if folder is not None:
        from specserve_bench.plots import draw  # matplotlib is not everybody's

        for file in draw(measured, folder):
            print(f"plot: {file}")


def workloads_of(args: argparse.Namespace) -> list[Workload]:
    return [workload(name, args.requests, args.seed, args.temperature) for name in args.workloads]


def subjects(
    args: argparse.Namespace, usual: Sequence[str], workloads: Sequence[Workload]
) -> list[suite.Contender]:
    """The server, or an engine in this process for each drafter setting."""
    if args.url is not None:
        for flag in ("draft_model", "drafters", "config", "set"):
            if getattr(args, flag):
                name = flag.replace("_", "-")
                raise ConfigError(f"--{name} is the server's own affair: leave it out with --url")
        return [suite.hosted(args.url, key_of(args), args.model)]
    if args.api_key_file is not None:
        raise ConfigError("--api-key-file: only a server takes a key; name it with --url")
    settings = args.drafters or usual
    drafting = {setting: suite.drafting(setting) for setting in dict.fromkeys(settings)}
    configs = {label: configured(args, chosen) for label, chosen in drafting.items()}
    loader = suite.Loader()
    if any(chosen["drafter.name"] == scripted.NAME for chosen in drafting.values()):
        with_recording(args, configs, loader, workloads)
    return [loader.load(label, config) for label, config in configs.items()]


def with_recording(
    args: argparse.Namespace,
    configs: dict[str, Config],
    loader: suite.Loader,
    workloads: Sequence[Workload],
) -> None:
    """Let the target say all of it once, and tell the scripted drafters."""
    plain = loader.load("off", configured(args, suite.drafting("off"))).runnable
    assert isinstance(plain, Local)
    file = Path(tempfile.mkdtemp(prefix="specserve-bench-")) / "recording.json"
    suite.record(plain.llm, workloads, file)
    told = {"drafter.options.recording": str(file)}
    for label, config in configs.items():
        if config.drafter_name == scripted.NAME:
            configs[label] = configured(args, suite.drafting(label) | told)


def configured(args: argparse.Namespace, drafting: Mapping[str, Any]) -> Config:
    flags = {"model.path": args.model, "drafter.model": args.draft_model}
    given = {key: value for key, value in flags.items() if value is not None}
    return load_config(args.config, {**dict(map(parse_override, args.set)), **given, **drafting})


def guessing(args: argparse.Namespace) -> list[str]:
    """The built-in drafters that have what they need."""
    if args.url is not None:
        return ["ngram"]  # whoever guesses there
    name = configured(args, {}).drafter_name
    return ["ngram", "model"] if name == "model" else ["ngram"]


def key_of(args: argparse.Namespace) -> str | None:
    return None if args.api_key_file is None else read_keys(args.api_key_file)[0]


def words(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def numbers(text: str) -> tuple[float, ...]:
    return tuple(positive(float(part)) for part in words(text))


def whole(text: str) -> tuple[int, ...]:
    return tuple(map(at_least_1, words(text)))


def at_least_1(text: str) -> int:
    return positive(int(text))


def positive(value: Number) -> Number:
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
