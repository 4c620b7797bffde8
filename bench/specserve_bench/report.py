"""A Result as text: its tables, then one line of JSON if that is wanted."""

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specserve.errors import ConfigError
from specserve_bench.results import (
    Load,
    Ratio,
    Result,
    Run,
    Spread,
    Subject,
    figures,
    middle,
    ratio,
)

TIMES = {
    "TTFT": "ttft_ms",
    "TPOT": "tpot_ms",
    "ITL": "itl_ms",
    "longest stall": "stall_ms",
    "end to end": "end_to_end_ms",
}
COMPARED = {"ttft_ms": "TTFT", "tpot_ms": "TPOT"}
COLUMNS = Spread.__struct_fields__
SECONDS = {"draft_s": "draft s", "verify_s": "verify s", "other_s": "other s"}


class Line(NamedTuple):
    """A run's figures: medians over its rounds, and ratios to the first subject's."""

    subject: str
    values: Mapping[str, Any]
    ratios: Mapping[str, Ratio | None]  # of the means of times
    is_same: bool  # in every round, as the first subject's in the first


def report(result: Result, has_json: bool = False) -> str:
    """Tables, then a line of JSON with their figures if `has_json`."""
    text = io.StringIO()
    console = Console(file=text, width=200, markup=False, emoji=False, highlight=False)
    console.print(heading(result))
    for (workload, load), lines in grouped(result):
        where = f"{workload}, {load}"
        for table in (speed_table, speculation_table, times_table):
            console.print(table(where, lines))
    for words, count in errors(result).items():
        console.print(f"{count} errors: {words}", soft_wrap=True)
    differing = [line.subject for _, lines in grouped(result) for line in lines if not line.is_same]
    if differing:
        names = ", ".join(dict.fromkeys(differing))
        console.print(f"OUTPUTS DIFFER from those of {next(iter(result.subjects))}: {names}")
    printed = [row.rstrip() for row in text.getvalue().splitlines()]
    return "\n".join([*printed, one_line(result)] if has_json else printed)


def errors(result: Result) -> Counter[str]:
    """Errors of failed requests, the most frequent first."""
    told = Counter(
        f"{run.subject}: {answer.error}"
        for run in result.runs
        for round in run.rounds
        for answer in round.requests
        if answer.error is not None
    )
    return Counter(dict(told.most_common(5)))  # different ones that a report shows


def heading(result: Result) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in result.machine.items())
    lines = [f"{result.kind}: {machine}"]
    lines += [f"{label}: {subject_words(subject)}" for label, subject in result.subjects.items()]
    lines += [f"{name}: {about['about']}" for name, about in result.workloads.items()]
    rounds = max((len(run.rounds) for run in result.runs), default=0)
    goals = result.goals
    lines.append(f"goodput: TTFT at most {goals.ttft_ms:g} ms, TPOT at most {goals.tpot_ms:g} ms")
    lines.append(f"milliseconds; means over requests, medians over {rounds} interleaved rounds")
    lines.append(
        "x base: the ratio of these medians to the first subject's; by round: its ratios within a "
        "round, (lowest-highest) [95 % interval]"
    )
    return "\n".join(lines)


def subject_words(subject: Subject) -> str:
    parts = [subject.model]
    if subject.scaled:
        costs = ", ".join(f"{s.source} padded to {s.like}" for s in subject.scaled)
        parts.append(f"(scaled demo: {costs})")
    if subject.draft_model is not None:
        parts.append(f"with {subject.draft_model}")
    if subject.drafter not in (None, "none"):
        warm = ", warm" if subject.is_warm else ""
        parts.append(f"drafter {subject.drafter}, at most {subject.max_nodes} nodes{warm}")
    return " ".join(parts)


def grouped(result: Result) -> Iterator[tuple[tuple[str, Load], list[Line]]]:
    """(workload, load) -> a line for each subject, in order."""
    places = dict.fromkeys((run.workload, run.load) for run in result.runs)
    for place in places:
        runs = [run for run in result.runs if (run.workload, run.load) == place]
        yield place, [line(run, runs[0], result) for run in runs]


def line(run: Run, base: Run, result: Result) -> Line:
    each = [figures(r, result.goals) for r in run.rounds]
    others = [figures(r, result.goals) for r in base.rounds]
    return Line(
        subject=run.subject,
        values={name: over_rounds([f[name] for f in each]) for name in each[0]},
        ratios={
            name: ratio([mean(f[name]) for f in each], [mean(f[name]) for f in others])
            for name in TIMES.values()
        },
        is_same={f["output_hash"] for f in each} == {f["output_hash"] for f in others[:1]},
    )


def over_rounds(values: Sequence[Any]) -> Any:
    """The median over rounds: of numbers, of each part of a spread, of each depth."""
    told = [v for v in values if v is not None]
    if not told or isinstance(told[0], str):
        return told[0] if told else None
    if isinstance(told[0], Spread):
        return Spread(*(middle([getattr(v, c) for v in told]) or 0.0 for c in COLUMNS))
    if isinstance(told[0], list):
        deepest = max(map(len, told))
        return [middle([v[n] if n < len(v) else 0.0 for v in told]) for n in range(deepest)]
    return middle(told)


def mean(spread: Spread | None) -> float | None:
    return None if spread is None else spread.mean


def over_base(line: Line, base: Line, name: str) -> float | None:
    """The ratio of the medians that tables show; it divides out, unlike a median of ratios."""
    value, other = mean(line.values[name]), mean(base.values[name])
    return value / other if value is not None and other else None


def speed_table(where: str, lines: Sequence[Line]) -> Table:
    times = [column for words in COMPARED.values() for column in (words, "x base", "by round")]
    title = f"{where}: latency and throughput, base {lines[0].subject}"
    table = table_of(title, "subject", *times, "tokens/s", "goodput/s", "errors", "outputs")
    for line in lines:
        v = line.values
        cells = (
            (shown(mean(v[n])), shown(over_base(line, lines[0], n)), range_words(line.ratios[n]))
            for n in COMPARED
        )
        table.add_row(
            line.subject,
            *(text for each in cells for text in each),
            shown(v["tokens_per_s"], 1),
            shown(v["goodput"]),
            shown(v["errors"], 0),
            f"{v['output_hash'][:8]}{'' if line.is_same else ' DIFFERENT'}",
        )
    return table


def speculation_table(where: str, lines: Sequence[Line]) -> Table:
    names = ("tokens per step", "reach depth 1, 2, ...", "wasted rows", *SECONDS.values())
    table = table_of(f"{where}: speculation of each subject", "subject", *names)
    for line in lines:
        v = line.values
        table.add_row(
            line.subject,
            shown(v["acceptance_length"]),
            " ".join(f"{share:.2f}" for share in v["acceptance_by_depth"][:6]) or "-",
            "-" if v["wasted_rows"] is None else f"{v['wasted_rows']:.0%}",
            *(shown(v[name]) for name in SECONDS),
        )
    return table


def times_table(where: str, lines: Sequence[Line]) -> Table:
    title = f"{where}: times of each subject in milliseconds"
    table = table_of(title, "subject", "time", *COLUMNS)
    for line in lines:
        for number, (words, name) in enumerate(TIMES.items()):
            found = line.values[name]
            cells = [shown(getattr(found, c)) if found else "-" for c in COLUMNS]
            table.add_row("" if number else line.subject, words, *cells)
    return table


def table_of(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def extremes_words(value: Mapping[str, float], digits: int = 2) -> str:
    """The median, in brackets the extremes."""
    each = (shown(value[name], digits) for name in ("median", "low", "high"))
    return "{} ({} to {})".format(*each)


def ratio_words(ratio: Ratio | Mapping[str, Any] | None) -> str:
    """The median, in brackets the extremes, in square ones the interval; a kept one is a dict."""
    if ratio is None:
        return "-"
    found = msgspec.convert(ratio, Ratio)
    return f"{found.median:.2f} {range_words(found)}"


def range_words(ratio: Ratio | None) -> str:
    """The extremes of rounds in brackets, the interval in square ones."""
    if ratio is None:
        return "-"
    low, high = ratio.interval or (None, None)
    interval = "" if ratio.interval is None else f" [{shown(low)}-{shown(high)}]"
    return f"({ratio.low:.2f}-{ratio.high:.2f}){interval}"


def markdown(results: Sequence[Result]) -> str:
    """One table of results over the same subjects: a row for each, a column for each workload.

    A cell is the TPOT in milliseconds (the mean over requests, the median over rounds). The ratio
    of this median to the first row's follows in brackets, then tokens per step. Results of several
    machines have theirs in the column's head.
    """
    if len({tuple(r.subjects) for r in results}) > 1:
        raise ConfigError("The results have different subjects. Show them one by one.")
    columns = [(r, place, lines) for r in results for place, lines in grouped(r)]
    heads = [
        f"{scaled_words(r) or next(iter(r.subjects.values())).model}{on_machine(r, results)}: "
        f"{workload}{f', {load}' if len({run.load for run in r.runs}) > 1 else ''}"
        for r, (workload, load), _ in columns
    ]
    rows = (
        [subject, *(cell(lines[number], lines[0]) for _, _, lines in columns)]
        for number, subject in enumerate(results[0].subjects)
    )
    return markdown_table(["drafter", *heads], rows)


def scaled_words(result: Result) -> str:
    """The shapes whose cost scaled subjects have; empty where none is scaled."""
    costs = [subject.scaled[0].like for subject in result.subjects.values() if subject.scaled]
    return f"scaled to {', '.join(dict.fromkeys(costs))}" if costs else ""


def on_machine(result: Result, results: Sequence[Result]) -> str:
    """The result's hardware, where the results are of several machines; else empty."""
    machines = {hardware(r) for r in results}
    return f" on {hardware(result)}" if len(machines) > 1 else ""


def hardware(result: Result) -> str:
    known = result.machine
    cores = [f"{known['cores']} cores"] if "cores" in known else []
    return ", ".join([*(str(known[key]) for key in ("gpu", "cpu") if key in known), *cores])


def cell(line: Line, base: Line) -> str:
    value, length = mean(line.values["tpot_ms"]), line.values["acceptance_length"]
    digits = 3 if value is not None and value < 1 else 2
    over = shown(over_base(line, base, "tpot_ms"))
    failed = line.values["errors"]
    notes = f"{f', {failed:g} errors' if failed else ''}{'' if line.is_same else ', DIFFERENT'}"
    return f"{shown(value, digits)} ({over}), {shown(length)}{notes}"


def one_line(result: Result) -> str:
    """The tables' figures, for programs that read the output."""
    rows = [
        {"workload": workload, "load": str(load), "subject": line.subject}
        | {"ratios": line.ratios, "is_same": line.is_same, **line.values}
        for (workload, load), lines in grouped(result)
        for line in lines
    ]
    plain = msgspec.to_builtins(rows)
    scaled = {"scaled_demo": words} if (words := scaled_words(result)) else {}
    about = {"kind": result.kind, "machine": result.machine, **scaled}
    return json.dumps(about | {"rows": rounded(plain)})


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value
