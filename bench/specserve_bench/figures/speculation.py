"""`auto` against no drafting and against fixed settings, as users run them.

A cell has a model, a kind of prompts, a number of requests at a time and a temperature. Warm cells
are measured on servers that have answered 200 requests, cold ones with the first 20 requests of a
new server. Each round has prompts of its own. Every second round chooses the best fixed setting,
which is compared with `auto` on the others, so that chance does not choose it. A cell takes the
place of the same cell measured before, so a measurement can be done in parts.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice, product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec

from specserve import LLM
from specserve.config import load_config
from specserve.errors import ConfigError
from specserve_bench import arguments, suite
from specserve_bench.arguments import Once, at_least_1, listed
from specserve_bench.local import Local
from specserve_bench.machine import DIRTY
from specserve_bench.pairs import PAIRS
from specserve_bench.real_models import FOLDER, REMEDY, real_models
from specserve_bench.real_prompts import PROMPTS, SHORT, as_text, prompts
from specserve_bench.report import markdown_table, ratio_words, shown
from specserve_bench.results import Load, Ratio, Round, ratio
from specserve_bench.workloads import Ask, Workload
from specserve_drafters.base import AUTO_SOURCES

WARM_REQUESTS, WARM_TOKENS = 200, 24  # before the rounds of a warm cell, and tokens of each
COLD_REQUESTS = 20
ROUND_REQUESTS = {1: 6, 4: 12, 16: 32}  # of a warm round, by requests at a time
TEMPERATURES = 0.0, 0.8
KV_BYTES = 1 << 30  # of each subject; memory is used as it fills
FIXED = "off", "ngram:2", "ngram:4", "ngram:8"
WITH_MODEL = (*FIXED, "model:4", "model:8", "model:16")
OVER_OFF = {True: 1.05, False: 1.03}  # ends of intervals that are asked for, of warm and cold cells
OVER_BEST = 1.1
MARK = "†"  # of commits of uncommitted trees
MEASURES = "end_to_end_ms", "tpot_ms", "ttft_ms"


class Subjects(NamedTuple):
    """A model's settings, and the fixed settings of drafters that are compared."""

    settings: Mapping[str, Any]
    fixed: Sequence[str]
    is_chat: bool = True  # the target has a chat template


class Place(NamedTuple):
    model: str
    prompts: str
    concurrency: int
    temperature: float
    is_warm: bool


class Cell(msgspec.Struct, kw_only=True):
    """Means over the requests of each round, by measure and subject; rounds are paired."""

    model: str
    prompts: str
    concurrency: int
    temperature: float
    is_warm: bool
    requests: int  # of a round
    rounds: dict[str, dict[str, list[float]]]
    draft_tokens: float  # that `auto` verified per step
    tokens_per_step: float  # of `auto`
    is_same: bool  # all texts of all subjects
    machine: dict[str, object]

    @property
    def place(self) -> Place:
        return Place(*(getattr(self, name) for name in Place._fields))

    def over(self, subject: str, measure: str = MEASURES[0]) -> Ratio | None:
        """`auto` over the subject's in the same round."""
        rounds = self.rounds[measure]
        return ratio(rounds["auto"], rounds[subject])

    @property
    def best(self) -> str:
        """The fixed setting with the lowest time in every second round."""
        each = self.rounds[MEASURES[0]]
        return min((name for name in each if name != "auto"), key=lambda n: median(each[n][::2]))

    @property
    def over_best(self) -> Ratio | None:
        """`auto` over the best fixed setting, in the rounds that have not chosen it."""
        each = self.rounds[MEASURES[0]]
        own, best = each["auto"], each[self.best]
        return ratio(own[1::2] or own, best[1::2] or best)


class Cells(msgspec.Struct):
    """The file."""

    cells: list[Cell] = []


def add_arguments(p: argparse.ArgumentParser) -> None:
    def several(flag: str, kind: Any, default: Sequence[Any], **more: Any) -> None:
        p.add_argument(flag, action=Once, type=kind, default=default, **more)

    several("--models", listed(str, MODELS), [*MODELS], metavar="M,...", help=", ".join(MODELS))
    several("--prompts", listed(str, PROMPTS), [*SHORT], metavar="P,...", help=", ".join(PROMPTS))
    several("--concurrency", listed(at_least_1), (1, 4, 16), metavar="N,...")
    several("--temperatures", listed(float), TEMPERATURES, metavar="T,...")
    p.add_argument("--cold", action="store_true", help="the first 20 requests of new servers")
    p.add_argument("--rounds", type=at_least_1, default=6, help="default: 6")
    sources = listed(str, AUTO_SOURCES)
    fixed = listed(str, WITH_MODEL)
    several("--fixed", fixed, WITH_MODEL, metavar="F,...", help="besides off; default: all")
    several("--sources", sources, AUTO_SOURCES, metavar="S,...", help="of auto; default: all")


def measure(args: argparse.Namespace) -> Cells:
    """Each cell is kept as soon as it is measured."""
    for model in args.models:
        subjects = MODELS[model]()
        subjects = subjects._replace(fixed=[f for f in subjects.fixed if f in ("off", *args.fixed)])
        loader = Loader(subjects, args.sources)
        each = product(args.concurrency, args.temperatures, args.prompts)
        for concurrency, temperature, name in each:
            place = Place(model, name, concurrency, temperature, not args.cold)
            print(*place, file=sys.stderr)
            keep(measured(place, loader, args.rounds), args.out)
    return read(args.out)


def smollm2() -> Subjects:
    return Subjects({"model.path": str(weights().smollm2)}, FIXED)


def gemma() -> Subjects:
    return Subjects({"model.path": str(weights().gemma_folder)}, FIXED, is_chat=False)


def pair(name: str, **more: Any) -> Subjects:
    target, draft = map(str, PAIRS[name]())
    return Subjects({"model.path": target, "drafter.model": draft} | more, WITH_MODEL)


def weights() -> Any:
    models = real_models()
    if models is None:
        raise ConfigError(f"no real weights in {FOLDER}: {REMEDY}")
    return models


MODELS: dict[str, Callable[[], Subjects]] = {
    "SmolLM2": smollm2,
    "Gemma": gemma,
    "demo": lambda: pair("demo"),
    "0.6b": lambda: pair("0.6b"),
    "0.6b-w4": lambda: pair("0.6b", **{"model.quantize": "w4"}),
    "0.6b-long": lambda: pair("0.6b-long", **{"memory.kv_bytes": 4 * KV_BYTES}),
}


class Loader:
    """Servers of each subject; all of a model share its weights."""

    def __init__(self, subjects: Subjects, sources: Sequence[str]) -> None:
        self.loader, self.warm = suite.Loader(progress=False), dict[str, LLM]()
        self.is_chat = subjects.is_chat
        shared = {"memory.kv_bytes": KV_BYTES} | dict(subjects.settings)
        base = load_config(None, shared)
        self.configs = {
            name: load_config(None, {**shared, **suite.drafting(name, base)})
            for name in subjects.fixed
        }
        options = {"drafter.name": "auto", "drafter.options": {"sources": [*sources]}}
        self.configs["auto"] = load_config(None, shared | options)

    def started(self, name: str) -> LLM:
        """A new server."""
        return self.loader.llm(self.configs[name])

    def warmed(self, name: str) -> LLM:
        """A server that has answered 200 requests, of all kinds of short prompts."""
        if name not in self.warm:
            self.warm[name] = llm = self.started(name)
            self.run(llm, warming(), Load(concurrency=4))
        return self.warm[name]

    def run(self, llm: LLM, workload: Workload, load: Load) -> Round:
        """Run a workload, with all that the server has learned and cached."""
        asks = workload.asks if self.is_chat else [*map(as_text, workload.asks)]
        return Local(llm, is_lasting=True).run(workload._replace(asks=asks), load)


def warming() -> Workload:
    each = [cycle(prompts(name)[::-1]) for name in SHORT]
    asks = islice((next(some) for some in cycle(each)), WARM_REQUESTS)
    temperatures = cycle(TEMPERATURES)
    asks_of_all = [a._replace(max_tokens=WARM_TOKENS, temperature=next(temperatures)) for a in asks]
    return Workload("warm-up", "prompts of all kinds", 0, asks_of_all)


def measured(place: Place, loader: Loader, rounds: int) -> Cell:
    """Interleaved rounds; each begins with another subject."""
    usual = ROUND_REQUESTS.get(place.concurrency, 2 * place.concurrency)
    size = usual if place.is_warm else COLD_REQUESTS
    each, load = [*asks_of(place, size, rounds)], Load(concurrency=place.concurrency)
    runs: dict[str, list[Round]] = {name: [] for name in loader.configs}
    for number, asks in enumerate(each):
        workload = Workload(place.prompts, "", number, asks)
        for name in suite.in_turn(runs, number, len(runs)):
            llm = loader.warmed(name) if place.is_warm else loader.started(name)
            runs[name].append(loader.run(llm, workload, load))
            if not place.is_warm:
                llm.close()
    return cell(place, size, runs)


def asks_of(place: Place, size: int, rounds: int) -> Iterator[list[Ask]]:
    """The prompts of each round. If there are too few, they come again with other seeds."""
    known, rng = prompts(place.prompts), random.Random(place.concurrency)
    start = rng.randrange(len(known))
    every = islice(cycle(known), start, None)
    for number in range(rounds):
        asks = (a._replace(max_tokens=length(a, rng)) for a in islice(every, size))
        yield [
            a._replace(seed=a.seed + number * 2**20, temperature=place.temperature) for a in asks
        ]


def length(ask: Ask, rng: random.Random) -> int:
    """Half to one and a half times the usual length, as users' texts end at different times. With
    equal lengths and no drafting, requests would end in one step, and the next prompts would begin
    together. A schema ends its texts itself.
    """
    if ask.schema is not None:
        return ask.max_tokens
    return rng.randint(ask.max_tokens // 2, ask.max_tokens + ask.max_tokens // 2)


def cell(place: Place, size: int, runs: Mapping[str, Sequence[Round]]) -> Cell:
    told = [r.speculation for r in runs["auto"] if r.speculation]
    steps = max(1, sum(s.steps for s in told))
    hashes = [{r.output_hash for r in each} for each in zip(*runs.values(), strict=True)]
    return Cell(
        **place._asdict(),
        requests=size,
        rounds={
            measure: {name: [mean(r, measure) for r in each] for name, each in runs.items()}
            for measure in MEASURES
        },
        draft_tokens=sum(s.drafted for s in told) / steps,
        tokens_per_step=sum(s.tokens for s in told) / steps,
        is_same=all(len(each) == 1 for each in hashes),
        machine=suite.machine("python -m specserve_bench.figures speculation"),
    )


def mean(round: Round, measure: str) -> float:
    """Average the requests that have the measure: a text of one token has no TPOT."""
    values = [getattr(request, measure) for request in round.requests]
    return fmean([value for value in values if value is not None] or [0.0])


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


def table(kept: Cells) -> str:
    head = ["model", "prompts", "state", "requests at a time", "T", "off, ms", "best fixed, ms"]
    head += ["auto, ms", "auto / off", "TPOT", "TTFT", "auto / best fixed", "commit"]
    rows = map(row, sorted(kept.cells, key=lambda c: order(c.place)))
    note = (
        "Times are end to end, means per request; TPOT and TTFT are those of auto / off. ! marks "
        f"intervals that do not end below {OVER_OFF[True]} (auto / off, warm), {OVER_OFF[False]} "
        f"(cold) and {OVER_BEST} (auto / best fixed)."
    )
    return "\n\n".join([markdown_table(head, rows), losses(kept), note])


def losses(kept: Cells) -> str:
    """How often `auto` is slower than the best fixed setting and than no drafting."""
    over_best = [r.median for c in kept.cells if (r := c.over_best)]
    over_off = [r.median for c in kept.cells if (r := c.over("off"))]
    slower_best, slower_off = (sum(r > 1 for r in each) for each in (over_best, over_off))
    if not over_off:
        return "No cell is measured."
    return (
        f"`auto` is slower than no drafting in {slower_off} of {len(over_off)} cells (worst "
        f"{max(over_off):.2f}), and slower than the best fixed setting in {slower_best} (median "
        f"{median(over_best):.2f}, worst {max(over_best):.2f})."
    )


def caption(kept: Cells) -> str:
    """Machines and dates of the cells; their commits are a column of the table."""
    machines = [c.machine for c in kept.cells]
    if not machines:
        return "No cell is measured."
    hardware = dict.fromkeys(f"{m['cores']} cores of an {m['cpu']}" for m in machines)
    dates = sorted({str(m["date"]) for m in machines})
    dirty = sum(str(m.get("commit", "")).endswith(DIRTY) for m in machines)
    text = f"Measured on {' and '.join(dates)} on {', '.join(hardware)}. Each row names its commit."
    return text + (f" {MARK} marks {dirty} rows measured on an uncommitted tree." if dirty else "")


def order(place: Place) -> tuple[int, bool, int, float, int]:
    names = [*MODELS], [*PROMPTS]
    model, name = names[0].index(place.model), names[1].index(place.prompts)
    return model, not place.is_warm, place.concurrency, place.temperature, name


def row(cell: Cell) -> list[str]:
    ms = {name: median(rounds) for name, rounds in cell.rounds[MEASURES[0]].items()}
    return [
        cell.model,
        cell.prompts + ("" if cell.is_same else " (OUTPUTS DIFFER)"),
        "warm" if cell.is_warm else "cold",
        str(cell.concurrency),
        f"{cell.temperature:g}",
        shown(ms["off"]),
        f"{shown(ms[cell.best])} ({cell.best})",
        shown(ms["auto"]),
        checked(cell.over("off"), OVER_OFF[cell.is_warm]),
        *(ratio_words(cell.over("off", measure)) for measure in MEASURES[1:]),
        checked(cell.over_best, OVER_BEST),
        short(str(cell.machine.get("commit", "-"))),
    ]


def short(commit: str) -> str:
    """The beginning of a commit, marked if the tree had changes."""
    return commit.removesuffix(DIRTY)[:7] + (MARK if commit.endswith(DIRTY) else "")


def checked(ratio: Ratio | None, bound: float) -> str:
    """The ratio in words, marked if its interval does not end below the bound."""
    is_below = ratio is not None and ratio.interval is not None and ratio.interval[1] < bound
    return ratio_words(ratio) + ("" if is_below else " !")
