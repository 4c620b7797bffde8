"""`specserve bench ...`: measures latency with and without speculation."""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from specserve.config import Config, Setting, load_config, parse_overrides
from specserve.errors import ConfigError
from specserve.server.keys import read_keys
from specserve_bench import agent, arguments, perplexity, results, scale, scripted, suite
from specserve_bench.arguments import Once, above_0, add_json, at_least_1, listed, natural, number
from specserve_bench.local import Local
from specserve_bench.machine import add_allow_dirty
from specserve_bench.peers import command as peers
from specserve_bench.report import markdown, report
from specserve_bench.results import Goals, Load, Result
from specserve_bench.workloads import WORKLOADS, Workload, workload

TRIED = ("questions", "completion")
# Commands that parse their own arguments.
OTHERS: dict[str, Callable[[Sequence[str]], int]] = {
    "scale-model": scale.main,
    "perplexity": perplexity.main,
}


def main(argv: list[str]) -> int:
    """The entry point of `specserve bench`."""
    if argv and argv[0] in OTHERS:
        return OTHERS[argv[0]](argv[1:])
    args = parser().parse_args(argv)
    args.command = shlex.join(["specserve", "bench", *argv])
    prepare(args)
    action: Callable[[argparse.Namespace], int] = args.action
    return action(args)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="specserve bench",
        description=__doc__,
        epilog="Also: scale-model SRC DST --like SHAPE, a checkpoint with the compute of a larger "
        "model; perplexity, the quality of quantized weights.",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    add_latency(commands.add_parser("latency", help="one request at a time, for each workload"))
    add_load(commands.add_parser("load", help="many requests: at a rate, or concurrent"))
    add_drafters(
        commands.add_parser("drafters", help="each drafter with several numbers of draft tokens")
    )
    add_compare(
        commands.add_parser("compare", help="configs and servers, compared with the first one")
    )
    peers.add_arguments(
        commands.add_parser(
            "peers",
            help="specserve against other engines, in one run",
            description=peers.DESCRIPTION,
        )
    )
    agent.add_arguments(
        commands.add_parser(
            "agent",
            help="an agent's sessions of many turns, on running servers",
            description=agent.DESCRIPTION,
        )
    )
    show = commands.add_parser("show", help="print the tables of results again, or plot them")
    show.add_argument("files", nargs="+", type=Path, metavar="JSON")
    show.add_argument("--plots", type=Path, metavar="FOLDER", help="write PNG plots there")
    form = show.add_mutually_exclusive_group()
    form.add_argument(
        "--markdown", action="store_true", help="one table of all files, with a row per subject"
    )
    add_json(form)
    show.set_defaults(action=shown, out=None)
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
        "--rate",
        action=Once,
        type=listed(above_0),
        metavar="R,...",
        help="requests per second; several rates run in turn",
    )
    kind.add_argument(
        "--concurrency",
        action=Once,
        type=listed(at_least_1),
        metavar="N,...",
        help="concurrent requests; several values run in turn; default: 1,2,4,8",
    )
    p.add_argument(
        "--burstiness",
        type=number(0.01, 100),
        metavar="CV",
        help="with --rate: coefficient of variation of the gaps; default: 1, which is Poisson",
    )
    add_run(p)
    p.set_defaults(action=loaded)


def add_drafters(p: argparse.ArgumentParser) -> None:
    add_subject(p)
    add_workloads(p, ("questions",))
    p.add_argument(
        "--nodes", action=Once, type=listed(at_least_1), metavar="N,...", help="default: 4,8,16"
    )
    add_run(p)
    p.set_defaults(action=drafters)


def add_compare(p: argparse.ArgumentParser) -> None:
    p.add_argument("subjects", nargs="+", metavar="CONFIG_OR_URL", help="a TOML file or http://...")
    p.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file with the API key of the server"
    )
    p.add_argument(
        "--concurrency",
        action=Once,
        type=listed(at_least_1),
        default=(1,),
        metavar="N",
        help="default: 1",
    )
    add_workloads(p, TRIED)
    add_run(p)
    p.set_defaults(action=compare)


def add_subject(p: argparse.ArgumentParser) -> None:
    p.add_argument("--url", help="server to measure; default: an engine in this process")
    p.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="with --url: file with the API key"
    )
    p.add_argument("--model", help="local folder or hub id; with --url: model name on the server")
    p.add_argument("--draft-model", help="draft model for the drafter `model`, or head for `eagle`")
    p.add_argument("--draft-head", help="head for `eagle`, in addition to a draft model")
    p.add_argument(
        "--drafters",
        action=Once,
        type=listed(str, repeats=True),
        metavar="D,...",
        help="drafters to compare with the first one: off, ngram:8, model:16, auto, "
        "scripted:0.9/0.8 (acceptance rates by depth)",
    )
    p.add_argument(
        "--config",
        type=Path,
        action="append",
        metavar="FILE",
        help="settings in TOML; later files override earlier ones",
    )
    p.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any other setting"
    )


def add_workloads(p: argparse.ArgumentParser, usual: Sequence[str]) -> None:
    p.add_argument(
        "--workloads",
        action=Once,
        type=listed(str),
        default=usual,
        metavar="W,...",
        help=f"workloads: {', '.join(WORKLOADS)}; default: {','.join(usual)}",
    )
    p.add_argument(
        "--requests", type=at_least_1, default=16, help="requests per workload; default: 16"
    )
    p.add_argument(
        "--temperature",
        type=number(0, 1e4),
        help="temperature of all requests; default: the workload's",
    )
    p.add_argument(
        "--seed", type=natural, default=0, help="seed of workloads and arrivals; default: 0"
    )


def add_run(p: argparse.ArgumentParser) -> None:
    p.add_argument("--rounds", type=at_least_1, default=3, help="interleaved rounds; default: 3")
    p.add_argument(
        "--warm",
        action="store_true",
        help="before each measured round, run the same requests with other seeds: drafters learn "
        "from their responses; default: rounds start without learned state",
    )
    p.add_argument(
        "--goal-ttft-ms", type=above_0, default=Goals().ttft_ms, help="TTFT limit of goodput"
    )
    p.add_argument(
        "--goal-tpot-ms", type=above_0, default=Goals().tpot_ms, help="TPOT limit of goodput"
    )
    p.add_argument("--out", type=Path, metavar="JSON", help="write the results to this file")
    add_json(p)
    add_allow_dirty(p)
    p.add_argument("--plots", type=Path, metavar="FOLDER", help="write PNG plots there")


def latency(args: argparse.Namespace) -> int:
    return one_by_one("latency", args, ["off", *available_drafters(args)])


def drafters(args: argparse.Namespace) -> int:
    if args.url is not None:
        raise ConfigError("--url: a server has one drafter. Use the command latency, or compare.")
    if args.nodes and args.drafters:
        raise ConfigError("--nodes: not allowed with --drafters. Write NAME:NODES there.")
    usual = ["off"]
    for name in available_drafters(args):  # `auto` chooses the number of draft tokens itself
        sizes = args.nodes or (4, 8, 16)
        usual += [name] if name == "auto" else [f"{name}:{size}" for size in sizes]
    return one_by_one("drafters", args, usual)


def one_by_one(kind: str, args: argparse.Namespace, usual: Sequence[str]) -> int:
    workloads = workloads_of(args)
    with subjects(args, usual, workloads) as chosen:
        return finish(kind, args, chosen, workloads, [Load(concurrency=1)])


def loaded(args: argparse.Namespace) -> int:
    if args.burstiness and not args.rate:
        raise ConfigError("--burstiness: needs an open loop. Add --rate.")
    cv = args.burstiness or 1.0
    loads = (
        [Load(rate=r, burstiness=cv, seed=args.seed) for r in args.rate]
        if args.rate
        else [Load(concurrency=n) for n in args.concurrency or (1, 2, 4, 8)]
    )
    workloads = workloads_of(args)
    with subjects(args, ["off", available_drafters(args)[-1]], workloads) as chosen:
        return finish("load", args, chosen, workloads, loads)


def compare(args: argparse.Namespace) -> int:
    urls = [name for name in args.subjects if is_url(name)]
    if args.api_key_file and len(urls) != 1:
        raise ConfigError("--api-key-file: a key is for one server. Name exactly one URL.")
    if len(args.subjects) < 2:
        raise ConfigError(
            f"compare {args.subjects[0]}: nothing to compare with. Name a second config or URL."
        )
    loader, key = suite.Loader(is_warm=args.warm), key_of(args)
    configs = {name: load_config(Path(name)) for name in args.subjects if not is_url(name)}
    chosen = [
        suite.hosted(label, name, key, None, args.warm)
        if is_url(name)
        else loader.load(label, configs[name])
        for label, name in zip(distinct(args.subjects), args.subjects, strict=True)
    ]
    loads = [Load(concurrency=n) for n in args.concurrency]
    return finish("compare", args, chosen, workloads_of(args), loads)


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def distinct(names: Sequence[str]) -> list[str]:
    """Number repeated labels, `name (2)`: naming a subject twice shows the noise of measurement."""
    return [
        name if (seen := names[:n].count(name)) == 0 else f"{name} ({seen + 1})"
        for n, name in enumerate(names)
    ]


def finish(
    kind: str,
    args: argparse.Namespace,
    chosen: Sequence[suite.Contender],
    workloads: Sequence[Workload],
    loads: Sequence[Load],
) -> int:
    """Measure, keep and show; the exit code is 1 where every request of a subject failed."""
    goals = Goals(args.goal_ttft_ms, args.goal_tpot_ms)
    trials = suite.Trials(workloads, loads, args.rounds)
    result = suite.measure(kind, chosen, trials, goals, args.command)
    try:
        if args.out is not None:
            arguments.write("--out", args.out, msgspec.json.encode(result) + b"\n")
    except ConfigError:
        print(report(result, args.json))  # else the measurements would be lost
        raise
    present([result], args.plots, has_json=args.json)
    answers = {run.subject: [a for r in run.rounds for a in r.requests] for run in result.runs}
    return int(any(all(a.error for a in each) for each in answers.values()))


def prepare(args: argparse.Namespace) -> None:
    """Refuse outputs that cannot be written, before anything is measured."""
    if args.plots is not None:
        arguments.check_folder("--plots", args.plots)
        import specserve_bench.plots  # noqa: F401, it may lack matplotlib
    if args.out is not None:
        arguments.check_result("--out", args.out, args.allow_dirty)


def shown(args: argparse.Namespace) -> int:
    present([results.read(file) for file in args.files], args.plots, args.markdown, args.json)
    return 0


def present(
    measured: Sequence[Result],
    folder: Path | None,
    is_markdown: bool = False,
    has_json: bool = False,
) -> None:
    of_turns = [r for r in measured if r.kind == agent.KIND and not has_json]
    others = [r for r in measured if r not in of_turns]
    if is_markdown and others:
        print(markdown(others))
    for result in measured if not is_markdown else of_turns:
        print(agent.table(result) if result in of_turns else report(result, has_json))
    if folder is not None:
        from specserve_bench.plots import draw  # matplotlib is optional

        for file in draw(measured, folder):
            print(f"plot: {file}", file=sys.stderr)


def workloads_of(args: argparse.Namespace) -> list[Workload]:
    return [workload(name, args.requests, args.seed, args.temperature) for name in args.workloads]


@contextmanager
def subjects(
    args: argparse.Namespace, usual: Sequence[str], workloads: Sequence[Workload]
) -> Iterator[list[suite.Contender]]:
    """The server, or an engine in this process for each drafter setting."""
    if args.url is not None:
        yield [suite.hosted(args.url, args.url, key_of(args), args.model, args.warm)]
        return
    base, loader = configured(args), suite.Loader(is_warm=args.warm)
    names = args.drafters or usual
    settings = {
        label: suite.drafting(name, base)
        for label, name in zip(distinct(names), names, strict=True)
    }
    if base.drafter.options and all("drafter.options" in chosen for chosen in settings.values()):
        raise ConfigError(
            f"drafter.options: they belong to {base.drafter_name}, which is not in --drafters. "
            "Name their drafter in --config."
        )
    if args.draft_model and all("drafter.model" in chosen for chosen in settings.values()):
        raise ConfigError(
            "--draft-model: no drafter in --drafters uses it. Add model, or remove the flag."
        )
    with tempfile.TemporaryDirectory(prefix="specserve-bench-") as folder:
        recording = Path(folder) / "recording.json"
        if any(chosen["drafter.name"] == scripted.NAME for chosen in settings.values()):
            plain = loader.load("off", configured(args, **suite.drafting("off", base))).runnable
            assert isinstance(plain, Local)
            suite.record(plain.llm, workloads, recording)
            for chosen in settings.values():
                if chosen["drafter.name"] == scripted.NAME:
                    chosen["drafter.options"] |= {"recording": str(recording)}
        yield [loader.load(label, configured(args, **chosen)) for label, chosen in settings.items()]


def configured(args: argparse.Namespace, **drafting: Any) -> Config:
    flags = {
        "--model": ("model.path", args.model),
        "--draft-model": ("drafter.model", args.draft_model),
        "--draft-head": ("drafter.head", args.draft_head),
    }
    given = [Setting(flag, *setting) for flag, setting in flags.items() if setting[1] is not None]
    given += [Setting("--drafters", key, value) for key, value in drafting.items()]
    return load_config(args.config, parse_overrides(args.set), given)


def available_drafters(args: argparse.Namespace) -> list[str]:
    """ngram, model with a draft model, and the config's drafter, which is the best one."""
    if args.url is not None:
        for flag in ("draft_model", "draft_head", "drafters", "config", "set"):
            if getattr(args, flag):
                name = flag.replace("_", "-")
                raise ConfigError(f"--{name}: a setting of the server. Remove it with --url.")
        return ["drafter of the server"]
    if args.api_key_file is not None:
        raise ConfigError("--api-key-file: only a server has a key. Add --url.")
    if any(text.startswith("drafter.name") for text in args.set):
        raise ConfigError("--set drafter.name: use --drafters instead.")
    config = configured(args)
    names = ["ngram", *(["model"] if config.draft else []), config.drafter_name]
    return [name for name in dict.fromkeys(names) if name != "none"]


def key_of(args: argparse.Namespace) -> str | None:
    return None if args.api_key_file is None else read_keys(args.api_key_file)[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
