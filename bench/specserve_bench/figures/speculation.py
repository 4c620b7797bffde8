"""TPOT of `auto` against fixed settings, for each workload and load.

A cell is a pair of models, a workload, and so many requests at a time. It takes the place of the
same cell measured before, so a measurement can be done in parts. On two cores all takes about ten
minutes for the demo pair and three hours for the pair at a 0.6B model's cost. One request at a
time is measured at temperature 0.8 as well, with auto, model:8 and model:16. A round starts without
learned state unless --warm is given.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import NamedTuple

import msgspec

from specserve.errors import ConfigError
from specserve_bench import arguments, suite
from specserve_bench.arguments import Once, at_least_1, listed
from specserve_bench.figures.demo import SETTINGS
from specserve_bench.machine import DIRTY
from specserve_bench.pairs import PAIRS
from specserve_bench.report import markdown_table, ratio_words, shown
from specserve_bench.results import Ratio, Result, Round, ratio, spread_of
from specserve_bench.workloads import EDIT, WORKLOADS, workload

NAMES = [name for name in WORKLOADS if name != EDIT]  # fixed settings have no use for predictions
LIKE_MODEL = ("model:8", "model:16")  # what `auto` is compared with on average over workloads
REQUESTS = {  # by pair and concurrency
    "demo": {1: 16, 4: 32, 16: 64},
    "0.6b": {1: 8, 4: 12, 16: 16},
    "mixture": {1: 4, 4: 8, 16: 16},
}
KV_BYTES = 3 << 29  # of each subject: all of them are in memory at once
HOT = 0.8
MARK = "†"  # of commits of uncommitted trees
OVER_BEST, OVER_OFF, OVER_MODEL = 1.05, 1.03, 0.9  # ends of intervals that are asked for


class Place(NamedTuple):
    """The models, workload and load of a cell."""

    pair: str
    workload: str
    concurrency: int
    temperature: float | None  # None: the workload's
    is_warm: bool = False  # rounds start with learned costs and acceptance rates


class Cell(msgspec.Struct, kw_only=True):
    """A cell's figures by subject, of each round; rounds are paired."""

    pair: str
    workload: str
    concurrency: int
    temperature: float | None
    is_warm: bool = False
    requests: int
    tpot_ms: dict[str, list[float]]  # means over the requests of a round
    acceptance_length: dict[str, float]
    draft_tokens: dict[str, float]  # verified per step
    is_same: bool  # all texts of all subjects and rounds
    machine: dict[str, object]

    @property
    def place(self) -> Place:
        return Place(*(getattr(self, name) for name in Place._fields))

    def over(self, subject: str) -> Ratio | None:
        """TPOT of `auto` over the subject's in the same round."""
        return ratio(self.tpot_ms["auto"], self.tpot_ms[subject])

    @property
    def best(self) -> str:
        """The fixed setting with the lowest median over all rounds."""
        fixed = [name for name in self.tpot_ms if name != "auto"]
        return min(fixed, key=lambda name: median(self.tpot_ms[name]))


class Average(NamedTuple):
    """TPOT of `auto` over another subject's, over workloads."""

    pair: str
    temperature: float
    subject: str
    ratio: Ratio


class Cells(msgspec.Struct):
    """The file."""

    cells: list[Cell] = []


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--pairs",
        action=Once,
        type=listed(str, PAIRS),
        default=[*PAIRS],
        metavar="P,...",
        help=", ".join(PAIRS),
    )
    p.add_argument(
        "--concurrency", action=Once, type=listed(at_least_1), default=(1, 4, 16), metavar="N,..."
    )
    p.add_argument(
        "--workloads", action=Once, type=listed(str, WORKLOADS), default=NAMES, metavar="W,..."
    )
    p.add_argument(
        "--warm",
        action="store_true",
        help="start rounds with learned state, like a server that has run for a while",
    )
    p.add_argument("--rounds", type=at_least_1, default=7, help="default: 7")
    p.add_argument(
        "--requests",
        type=at_least_1,
        metavar="N",
        help="requests per cell; default: by models and load",
    )


def measure(args: argparse.Namespace) -> Cells:
    """Each cell is kept as soon as it is measured."""
    for pair in args.pairs:
        contenders = load(PAIRS[pair](), settings(pair), args.warm)
        for place in places(pair, args.workloads, args.concurrency):
            place = place._replace(is_warm=args.warm)
            usual = REQUESTS[pair].get(place.concurrency, 2 * place.concurrency)
            those = subjects(place)
            chosen = [c for c in contenders if c.label in those]
            print(
                f"{pair}, {place.workload}, {place.concurrency} concurrent requests",
                file=sys.stderr,
            )
            keep(measured(place, args.requests or usual, chosen, args.rounds), args.out)
    return read(args.out)


def places(pair: str, names: Sequence[str], concurrencies: Sequence[int]) -> Iterator[Place]:
    """Cells in the order of measurement; what is random has a temperature of its own."""
    for concurrency in concurrencies:
        for name in names:
            yield Place(pair, name, concurrency, None)
            if concurrency == 1 and name != "random":
                yield Place(pair, name, 1, HOT)


def settings(pair: str) -> Sequence[str]:
    """The subjects. A mixture reads more experts for more rows, so it gets small limits too."""
    few = [f"{name}:{n}" for name in ("ngram", "model") for n in (1, 2, 3)]
    return (*SETTINGS[:-1], *(few if pair == "mixture" else ()), "auto")


def subjects(place: Place) -> Sequence[str]:
    return settings(place.pair) if place.temperature is None else (*LIKE_MODEL, "auto")


def load(pair: tuple[Path, Path], every: Sequence[str], is_warm: bool) -> list[suite.Contender]:
    target, draft = map(str, pair)
    shared = {"model.path": target, "drafter.model": draft, "memory.kv_bytes": KV_BYTES}
    loader, found = suite.Loader(progress=False), []
    for setting in every:
        loader.is_warm = is_warm and setting == "auto"  # the others learn nothing of costs
        found += loader.load_each([setting], shared)
    return found


def measured(place: Place, size: int, contenders: Sequence[suite.Contender], rounds: int) -> Cell:
    asked = workload(place.workload, size, 0, place.temperature)
    command = "python -m specserve_bench.figures speculation"
    result = suite.measure_drafters(contenders, [asked], rounds, command, place.concurrency)
    return cell(place, result)


def cell(place: Place, result: Result) -> Cell:
    """The cell's figures from a Result of its own."""
    by_subject = {run.subject: run.rounds for run in result.runs}
    every = [round for rounds in by_subject.values() for round in rounds]
    speculation = {
        name: [r.speculation for r in rounds if r.speculation]
        for name, rounds in by_subject.items()
    }
    return Cell(
        **place._asdict(),
        requests=len(every[0].requests),
        tpot_ms={name: [tpot(r) for r in rounds] for name, rounds in by_subject.items()},
        acceptance_length={name: tokens_a_step(rounds) for name, rounds in by_subject.items()},
        draft_tokens={
            name: sum(s.drafted for s in told) / max(1, sum(s.steps for s in told))
            for name, told in speculation.items()
        },
        is_same=len({round.output_hash for round in every}) == 1,
        machine=result.machine,
    )


def tpot(round: Round) -> float:
    found = spread_of(round.requests, "tpot_ms")
    assert found is not None, "no request of the workload has two tokens"
    return found.mean


def tokens_a_step(rounds: Sequence[Round]) -> float:
    return fmean(r.speculation.acceptance_length or 1.0 for r in rounds if r.speculation)


def keep(cell: Cell, file: Path) -> None:
    """Put a cell into the file, in the place of the one measured before."""
    others = [c for c in read(file).cells if c.place != cell.place]
    arguments.write("--out", file, msgspec.json.encode(Cells([*others, cell])) + b"\n")


def read(file: Path) -> Cells:
    """The cells of the file; none without a file."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Cells)
    except FileNotFoundError:
        return Cells()
    except msgspec.MsgspecError as e:
        raise ConfigError(f"{file}: no cells of `figures speculation` ({e}): name another") from e


def averages(cells: Sequence[Cell]) -> Iterator[Average]:
    """For each pair, at T = 0 and at 0.8, as far as there are cells."""
    for pair in PAIRS:
        for temperature in (None, HOT):
            those = averaged(cells, pair, temperature)
            for subject in LIKE_MODEL if those else ():
                yield Average(pair, temperature or 0.0, subject, mean_ratio(those, subject))


def averaged(cells: Sequence[Cell], pair: str, temperature: float | None) -> list[Cell]:
    """One at a time; `random` has one temperature, and counts at both."""
    alone = [c for c in cells if (c.pair, c.concurrency, c.is_warm) == (pair, 1, False)]
    own = [c for c in alone if c.workload != "random" and c.temperature == temperature]
    return [*own, *(c for c in alone if c.workload == "random")] if own else []


def mean_ratio(cells: Sequence[Cell], subject: str) -> Ratio:
    """TPOT of `auto` over the subject's: the geometric mean over cells, in each round."""
    both = [zip(c.tpot_ms["auto"], c.tpot_ms[subject], strict=True) for c in cells]
    means = [geometric_mean(a / b for a, b in rounds) for rounds in zip(*both, strict=False)]
    found = ratio(means, [1.0] * len(means))
    assert found is not None, "a cell has at least one round"
    return found


def table(kept: Cells) -> str:
    head = ["pair", "workload", "concurrent requests", "T", "off", "best fixed", "auto"]
    rows = map(row, sorted(kept.cells, key=lambda c: order(c.place)))
    means = (
        [a.pair, f"{a.temperature:g}", a.subject, checked(a.ratio, OVER_MODEL)]
        for a in averages(kept.cells)
    )
    note = (
        f"TPOT in ms; ! marks intervals that do not end below {OVER_BEST} (auto / best fixed), "
        f"{OVER_OFF} (auto / off), {OVER_MODEL} (mean)"
    )
    over_models = markdown_table(["pair", "T", "setting", "auto / setting, geometric mean"], means)
    head += ["auto / best fixed", "auto / off", "commit"]
    return "\n\n".join([markdown_table(head, rows), over_models, losses(kept), note])


def losses(kept: Cells) -> str:
    """How often `auto` is slower than the best fixed setting and than no drafting."""
    over_best = [r.median for c in kept.cells if (r := c.over(c.best))]
    over_off = [r.median for c in kept.cells if "off" in c.tpot_ms and (r := c.over("off"))]
    slower_best, slower_off = (sum(r > 1 for r in each) for each in (over_best, over_off))
    return (
        f"`auto` is slower than the best fixed setting in {slower_best} of {len(over_best)} cells, "
        f"and slower than no drafting in {slower_off} of {len(over_off)} cells."
    )


def caption(kept: Cells) -> str:
    """Machines and dates of the cells; their commits are a column of the table."""
    machines = [c.machine for c in kept.cells]
    hardware = dict.fromkeys(f"{m['cores']} cores of an {m['cpu']}" for m in machines)
    dates = sorted({str(m["date"]) for m in machines})
    dirty = sum(str(m.get("commit", "")).endswith(DIRTY) for m in machines)
    text = f"Measured on {' and '.join(dates)} on {', '.join(hardware)}. Each row names its commit."
    return text + (f" {MARK} marks {dirty} rows measured on an uncommitted tree." if dirty else "")


def order(place: Place) -> tuple[int, int, float, int, bool]:
    names = [*PAIRS], [*WORKLOADS]
    pair, name = names[0].index(place.pair), names[1].index(place.workload)
    return pair, place.concurrency, place.temperature or 0.0, name, place.is_warm


def row(cell: Cell) -> list[str]:
    ms = {name: median(rounds) for name, rounds in cell.tpot_ms.items()}
    has_off = "off" in ms
    return [
        cell.pair,
        cell.workload
        + (", warm" if cell.is_warm else "")
        + ("" if cell.is_same else " (OUTPUTS DIFFER)"),
        str(cell.concurrency),
        "-" if cell.temperature is None else f"{cell.temperature:g}",
        shown(ms.get("off")),
        f"{shown(ms[cell.best])} ({cell.best})",
        shown(ms["auto"]),
        checked(cell.over(cell.best), OVER_BEST),
        checked(cell.over("off"), OVER_OFF) if has_off else "-",
        short(str(cell.machine.get("commit", "-"))),
    ]


def short(commit: str) -> str:
    """The beginning of a commit, marked if the tree had changes."""
    return commit.removesuffix(DIRTY)[:7] + (MARK if commit.endswith(DIRTY) else "")


def checked(ratio: Ratio | None, bound: float) -> str:
    """The ratio in words, marked if its interval does not end below the bound."""
    is_below = ratio is not None and ratio.interval is not None and ratio.interval[1] < bound
    return ratio_words(ratio) + ("" if is_below else " !")
