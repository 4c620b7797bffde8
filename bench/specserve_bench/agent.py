"""`specserve bench agent`: long sessions of an agent, turn by turn, on one server or several.

A session begins with the files of a project. In each turn, the agent sends the output of a tool, or
some code to edit, after all that was said before. Servers that keep prefixes compute only what is
new. All servers get the same messages, in turn; the answers between them are each server's own.
"""

import argparse
import random
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from time import perf_counter

import msgspec

from specserve.errors import ConfigError
from specserve.server.keys import read_keys
from specserve_bench import arguments, suite
from specserve_bench.arguments import Once, at_least_1, listed, natural, number
from specserve_bench.hosted import Heard, Hosted, finished, read
from specserve_bench.machine import add_allow_dirty, measured
from specserve_bench.report import markdown_table
from specserve_bench.results import Load, Result, Round, Run, middle, spread
from specserve_bench.workloads import Ask, Message, says

KIND = "agent"
CHARACTERS = 4  # of Python per token, roughly
RESULT, EDITED = 2400, 1200  # characters of a tool's output, and of code to edit
MAX_TOKENS = 128  # of an answer
ONE = Load(concurrency=1)
DESCRIPTION = """\
Measures an agent's sessions on running servers: TTFT of the first turn and of later ones, TPOT, and
tokens per step. The prompt of each turn repeats all earlier ones. Servers run in turns of the same
session, on the machine's own load: start all of them first, with prefix caching."""


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "servers",
        nargs="+",
        type=named_url,
        metavar="[NAME=]URL",
        help="servers; the first one is compared with; NAME is the server's in the table",
    )
    p.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file with the API key of the server"
    )
    p.add_argument("--model", help="model name on all servers; default: the first that each lists")
    p.add_argument(
        "--contexts",
        action=Once,
        type=listed(at_least_1),
        default=(8000, 32000),
        metavar="N,...",
        help="tokens of the first prompt, roughly; default: 8000,32000",
    )
    p.add_argument("--turns", type=at_least_1, default=20, help="turns of a session; default: 20")
    p.add_argument("--sessions", type=at_least_1, default=1, help="per context; default: 1")
    p.add_argument("--temperature", type=number(0, 1e4), default=0.0, help="default: 0")
    p.add_argument("--seed", type=natural, default=0, help="seed of the sessions; default: 0")
    p.add_argument("--out", type=Path, metavar="JSON", help="write the results to this file")
    add_allow_dirty(p)
    p.set_defaults(action=main, plots=None)


def main(args: argparse.Namespace) -> int:
    servers: dict[str, str] = dict(args.servers)
    if len(servers) < len(set(args.servers)):
        raise ConfigError("two servers have the same name. Give each its own.")
    if args.api_key_file and len(servers) != 1:
        raise ConfigError("--api-key-file: a key is for one server. Name exactly one URL.")
    key = None if args.api_key_file is None else read_keys(args.api_key_file)[0]
    contenders = [suite.hosted(name, url, key, args.model) for name, url in servers.items()]
    result = measure(contenders, args)
    print(table(result))
    if args.out is not None:
        arguments.write("--out", args.out, msgspec.json.encode(result) + b"\n")
    failures = [a.error for run in result.runs for r in run.rounds for a in r.requests if a.error]
    for words in dict.fromkeys(failures):
        print(f"error: {words}", file=sys.stderr)
    return int(bool(failures))


def named_url(words: str) -> tuple[str, str]:
    """A server's name and URL; the URL is the name unless one comes before it."""
    name, equals, url = words.partition("=")
    return (name, url) if equals and name and "/" not in name else (words, words)


class Session:
    """The messages of one session with one server, up to its next turn."""

    def __init__(self, seed: int, context: int, temperature: float = 0.0) -> None:
        self.source = random.Random(f"{KIND} {seed} {context}")
        self.temperature, self.files = temperature, project(self.source)
        files = lines(self.files, CHARACTERS * context)
        self.messages: list[Message] = [
            says("user", f"These are the files of a project.\n\n{files}\n\nWhat is it for?")
        ]

    def ask(self) -> Ask:
        return Ask([*self.messages], MAX_TOKENS, self.temperature, len(self.messages))

    def go_on(self, answer: str) -> None:
        """Add the server's answer, and the agent's next message."""
        if len(self.messages) % 4 == 1:
            message = f"The tool printed this:\n\n{lines(self.files, RESULT)}\n\nWhat is next?"
        else:
            code = lines(self.files, EDITED)
            message = f"Add type hints to this code, and change nothing else:\n\n{code}"
        self.messages += [says("assistant", answer), says("user", message)]


def project(source: random.Random) -> Iterator[str]:
    """Lines of the standard library's files, in random order, without end."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    while True:
        for path in source.sample(paths, len(paths)):
            yield f"# {path.name}\n"
            yield from path.read_text("utf-8", "replace").splitlines(keepends=True)


def lines(files: Iterator[str], characters: int) -> str:
    """The next lines, of at least so many characters."""
    found, size = [], 0
    while size < characters:
        found.append(next(files))
        size += len(found[-1])
    return "".join(found)


def measure(contenders: Sequence[suite.Contender], args: argparse.Namespace) -> Result:
    rounds: dict[tuple[str, str], list[Round]] = {}
    workloads = {}
    for context in args.contexts:
        name = f"{context:,} tokens"
        about = f"{args.turns} turns after about {name} of Python"
        workloads[name] = {"about": about, "seed": args.seed, "requests": args.turns}
        for n in range(args.sessions):
            print(f"{name}, session {n + 1} of {args.sessions}", file=sys.stderr)
            sessions = {
                c.label: Session(args.seed + n, context, args.temperature) for c in contenders
            }
            for label, round in run(contenders, sessions, args.turns).items():
                rounds.setdefault((name, label), []).append(round)
    runs = [
        Run(subject=c.label, workload=name, load=ONE, rounds=rounds[name, c.label])
        for name in workloads
        for c in contenders
    ]
    return Result(
        kind=KIND,
        machine=suite.machine(args.command),
        subjects={c.label: c.about for c in contenders},
        workloads=workloads,
        runs=runs,
    )


def run(
    contenders: Sequence[suite.Contender], sessions: Mapping[str, Session], turns: int
) -> dict[str, Round]:
    """One session of each; another server begins in each turn. A failed request ends its server's
    session.
    """
    servers = {c.label: c.runnable for c in contenders}
    before = {label: series(server) for label, server in servers.items()}
    heard: dict[str, list[Heard]] = {label: [] for label in servers}
    going, started_at = [*servers], perf_counter()
    for turn in range(turns):
        first = turn % max(len(going), 1)
        for label in going[first:] + going[:first]:
            server, session = servers[label], sessions[label]
            assert isinstance(server, Hosted)
            heard[label].append(one := server.ask(turn, session.ask(), None, started_at))
            read(one)
            if one.error is None:
                session.go_on(one.text)
            else:
                going.remove(label)
    return {
        label: finished(heard[label], before[label], series(server))
        for label, server in servers.items()
    }


def series(server: suite.Runnable) -> dict[str, float]:
    assert isinstance(server, Hosted)
    return server.series()


def table(result: Result) -> str:
    """Medians over turns; ratios are those of later turns' TTFT and of TPOT to the first server."""
    head = ["context", "server", "prompt tokens", "first TTFT, ms", "later TTFT, ms (p90)"]
    head += ["ratio", "TPOT, ms", "ratio", "tokens per step"]
    rows, first = [], dict[str, tuple[float | None, float | None]]()
    for one in result.runs:
        turns = [r for round in one.rounds for r in round.requests if r.error is None]
        begun = [r.ttft_ms for r in turns if r.number == 0]
        later = spread([r.ttft_ms for r in turns if r.number and r.ttft_ms is not None])
        tpot = middle([r.tpot_ms for r in turns])
        sizes = [r.prompt_tokens for r in turns]
        told = [round.speculation for round in one.rounds if round.speculation is not None]
        steps = sum(each.steps for each in told)
        ttft = None if later is None else later.p50
        base = first.setdefault(one.workload, (ttft, tpot))
        rows.append(
            [
                one.workload,
                one.subject,
                f"{min(sizes):,} to {max(sizes):,}" if sizes else "-",
                words(middle(begun)),
                "-" if later is None else f"{words(later.p50)} ({words(later.p90)})",
                over(ttft, base[0]),
                words(tpot),
                over(tpot, base[1]),
                f"{sum(each.tokens for each in told) / steps:.2f}" if steps else "-",
            ]
        )
    return markdown_table(head, rows)


def caption(results: Mapping[str, Result]) -> str:
    """An item for each result: its models, machine and commit. `results` are by their files."""
    lines = []
    for file, result in results.items():
        drafters = [f"{n}: {a.drafter}" for n, a in result.subjects.items() if a.drafter]
        words = f"- {models(result)} was {measured(result.machine)} (`{file}`)."
        words += f" Drafters: {', '.join(drafters)}." if drafters else ""
        lines.append(fill(words, 100, subsequent_indent="  ", break_long_words=False))
    return "\n".join(lines)


def tables(results: Mapping[str, Result]) -> str:
    """A table for each result, below its models."""
    return "\n\n".join(f"{models(result)}:\n\n{table(result)}" for result in results.values())


def models(result: Result) -> str:
    return ", ".join(dict.fromkeys(Path(about.model).stem for about in result.subjects.values()))


def words(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def over(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}"
