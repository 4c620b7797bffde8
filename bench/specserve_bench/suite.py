"""Subjects in turn over workloads and loads: what `specserve bench` measures, as a Result."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specserve import LLM
from specserve.config import Config, load_config
from specserve.engine.loading import Model
from specserve.errors import ConfigError
from specserve.models.folder import name_of
from specserve.models.selection import needs_draft_model, resolve_drafters, scaled_models
from specserve.version import VERSION
from specserve_bench import scripted
from specserve_bench.hosted import Hosted
from specserve_bench.local import Local
from specserve_bench.machine import cpu_name
from specserve_bench.results import Goals, Load, Result, Round, Run, Subject
from specserve_bench.workloads import UNGUESSED, UNLEARNT, Ask, Workload
from specserve_drafters.candidates import MAX_NODES

NO_MODEL = {"drafter.model": None, "drafter.quantize": None}
NO_HEAD = {"drafter.head": None}
NO_DRAFT = NO_MODEL | NO_HEAD
T = TypeVar("T")


class Runnable(Protocol):
    def check(self, ask: Ask) -> object:
        """Raise for a request that would be refused, as far as that is known beforehand."""
        ...

    def record(self, asks: Sequence[Ask]) -> list[str]:
        """What the target says to the requests."""
        ...

    def run(self, workload: Workload, load: Load) -> Round: ...


class Contender(NamedTuple):
    label: str
    about: Subject
    runnable: Runnable
    is_warm: bool = False  # before each measured round it runs one that is not measured


class Trials(NamedTuple):
    """Every subject runs each workload under each load, `rounds` times."""

    workloads: Sequence[Workload]
    loads: Sequence[Load]
    rounds: int


def measure(
    kind: str, contenders: Sequence[Contender], trials: Trials, goals: Goals, command: str
) -> Result:
    """All rounds, interleaved, so that other load on the machine affects every subject.

    Each round begins with another subject, as the first may be slower. Before all rounds, every
    subject warms up on the longest requests of every workload, as many as the load has at a time.
    Predictions are made before that, of what the subject's own target says.
    """
    runs = {
        (c.label, w.name, load): Run(subject=c.label, workload=w.name, load=load, rounds=[])
        for w in trials.workloads
        for load in trials.loads
        for c in contenders
    }
    by_label = {c.label: c for c in contenders}
    for ask in (ask for w in trials.workloads for ask in w.asks):
        for contender in contenders:
            contender.runnable.check(ask)
    total = (1 + trials.rounds) * len(runs)
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True))
    with bar:
        task, places = bar.add_task("measuring", total=total), count(1)
        asks = {
            (c.label, w.name): with_predictions(w, c.runnable)
            for w in trials.workloads
            for c in contenders
        }
        for number in range(1 + trials.rounds):
            for label, name, load in in_turn(runs, number, len(contenders)):
                stage = "" if number else " (warm-up)"
                words = f"run {next(places)} of {total}{stage}: {name}, {load}, {label}"
                bar.update(task, description=words)
                asked, contender = asks[label, name], by_label[label]
                if number == 0:
                    contender.runnable.run(longest(asked, load.concurrency or 1), load)
                else:
                    runs[label, name, load].rounds.append(measured(contender, asked, load))
                bar.advance(task)
    return Result(
        kind=kind,
        machine=machine(command),
        subjects={c.label: c.about for c in contenders},
        workloads={w.name: w.described() for w in trials.workloads},
        runs=list(runs.values()),
        goals=goals,
    )


def with_predictions(workload: Workload, runnable: Runnable) -> Workload:
    """The workload, if need be with predictions, made of what the subject's target says."""
    if not workload.is_edit:
        return workload
    return workload.expecting(runnable.record(workload.guessed(UNGUESSED).asks))


def longest(workload: Workload, size: int) -> Workload:
    """Its longest requests. Sources do not learn what they say: measured rounds say it again."""
    asks = sorted(workload.asks, key=lambda ask: -len(str(ask.prompt)))
    return workload._replace(asks=asks[:size]).guessed(UNLEARNT)


def measured(contender: Contender, workload: Workload, load: Load) -> Round:
    """A round. A warm subject has learnt from one before it, with other seeds, and does not learn
    what is measured: all rounds say the same.
    """
    if not contender.is_warm:
        return contender.runnable.run(workload, load)
    contender.runnable.run(workload.once_before, load)
    return contender.runnable.run(workload.guessed(UNLEARNT), load)


def in_turn(runs: Iterable[T], number: int, num_subjects: int) -> Iterator[T]:
    """Runs grouped by workload and load, each group beginning with another subject every round."""
    everyone = list(runs)
    for start in range(0, len(everyone), num_subjects):
        group, first = everyone[start : start + num_subjects], number % num_subjects
        yield from group[first:] + group[:first]


def measure_drafters(
    contenders: Sequence[Contender],
    workloads: Sequence[Workload],
    rounds: int,
    command: str,
    concurrency: int = 1,
) -> Result:
    trials = Trials(workloads, [Load(concurrency=concurrency)], rounds)
    return measure("drafters", contenders, trials, Goals(), command)


class Loader:
    """LLMs of configs, which share their models: each is loaded once."""

    def __init__(self, progress: bool = True, is_warm: bool = False) -> None:
        self.progress, self.is_warm = progress, is_warm
        self.models: list[Model | None] = []

    def llm(self, config: Config) -> LLM:
        llm = LLM(set=settings_of(config), progress=self.progress, weights=self.models)
        self.models += [model for model in llm.weights if model not in self.models]
        return llm

    def load(self, label: str, config: Config) -> Contender:
        llm = self.llm(config)
        local = Local(llm, is_warm=self.is_warm)
        return Contender(label, about(llm, self.is_warm), local, self.is_warm)

    def load_each(self, drafters: Iterable[str], settings: Mapping[str, Any]) -> list[Contender]:
        """One for each drafter setting, with further settings that all have."""
        base = load_config(None, settings)
        return [
            self.load(name, load_config(None, {**settings, **drafting(name, base)}))
            for name in drafters
        ]


def settings_of(config: Config) -> Mapping[str, Any]:
    """What differs from the defaults, by "section.key"."""
    plain, usual = msgspec.to_builtins(config), msgspec.to_builtins(Config())
    return {
        f"{section}.{key}": value
        for section, values in plain.items()
        for key, value in values.items()
        if value != usual[section][key]
    }


def about(llm: LLM, is_warm: bool) -> Subject:
    config, phases = llm.config, llm.loaded.phases
    needs_draft = needs_draft_model(config, resolve_drafters(config))
    is_drafting = config.drafter_name != "none"
    return Subject(
        model=name_of(config.target),
        draft_model=name_of(config.draft) if needs_draft and config.draft else None,
        drafter=config.drafter_name,
        max_nodes=config.max_nodes,
        is_warm=is_warm and is_drafting,
        config=without_paths(settings_of(config)),
        threads={name: words for name, words in phases.items() if name.endswith("threads")},
        scaled=scaled_models(llm.folders[:3]),
    )


def without_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out paths, also among a drafter's options."""
    return {
        key: without_paths(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if key not in ("model.path", "drafter.model", "recording")
    }


def hosted(
    label: str, url: str, key: str | None, model: str | None, is_warm: bool = False
) -> Contender:
    server = Hosted(url, key, model)
    card = server.remote.card
    about = Subject(
        url=url,
        model=card.id,
        drafter=card.drafter,
        max_nodes=card.max_nodes,
        is_warm=card.drafter not in (None, "none"),
        scaled=card.scaled,
    )
    return Contender(label, about, server, is_warm)


def drafting(setting: str, base: Config) -> dict[str, Any]:
    """off, NAME or NAME:NODES, scripted:0.9/0.8/0.7 -> settings of the engine, on top of `base`."""
    name, colon, rest = setting.partition(":")
    if "." in name:  # package.module:Class:NODES
        attribute, colon, rest = rest.partition(":")
        name = f"{name}:{attribute}"
    if name in ("off", "none") and not colon:
        return {"drafter.name": "none", "drafter.options": {}} | NO_DRAFT
    if name == "scripted":
        acceptance = chances(setting, rest)
        settings = {"drafter.name": scripted.NAME, "drafter.options": {"acceptance": acceptance}}
        return settings | NO_DRAFT | nodes(len(acceptance), base)
    if colon and not (rest.isdecimal() and 1 <= int(rest) <= MAX_NODES):
        raise ConfigError(
            f"--drafters {setting}: write off, NAME or NAME:NODES with 1 to {MAX_NODES} nodes, as "
            "in ngram:8"
        )
    return (
        {"drafter.name": name}
        | (NO_DRAFT if name == "ngram" else {})
        | (NO_HEAD if name == "model" else {})
        # Where no head is named as such, the draft model is one.
        | (NO_MODEL if name == "eagle" and base.drafter.head is not None else {})
        | ({} if name == base.drafter_name else {"drafter.options": {}})  # another drafter's
        | (nodes(int(rest), base) if colon else {})
    )


def nodes(number: int, base: Config) -> dict[str, Any]:
    """Settings for that many guesses a request, and room for them in a step."""
    most = max(number, base.speculation.max_step_nodes or 32)
    return {"speculation.max_nodes": number, "speculation.max_step_nodes": most}


def chances(setting: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split("/")]
    except ValueError as e:
        raise ConfigError(
            f"--drafters {setting}: write the acceptance by depth, as in scripted:0.9/0.8/0.7"
        ) from e


def record(llm: LLM, workloads: Sequence[Workload], file: Path) -> None:
    """Record the target's text for every request, for the scripted drafter."""
    local = Local(llm)
    checked = [local.check(ask) for workload in workloads for ask in workload.asks]
    outputs = llm.generate([ids for ids, _ in checked], [asked.params for _, asked in checked])
    file.write_text(json.dumps([o.prompt_token_ids + o.token_ids for o in outputs]))


def machine(command: str) -> dict[str, Any]:
    """The machine, the software and the command of this measurement, as far as they are known."""
    facts = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "numpy")},
        **gpu(),
        "specserve": VERSION,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def gpu() -> dict[str, Any]:
    """The GPU and its driver and libraries; empty where there is none."""
    if not torch.cuda.is_available():
        return {}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        driver = "unknown"
    found = {}
    for package in ("triton", "flashinfer-python"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    name, cuda = torch.cuda.get_device_name(), torch.version.cuda
    return {"gpu": name, "driver": driver, "cuda": cuda, **found}


def commit() -> str | None:
    """The commit of this file's repository; None where it is installed without one."""
    git, here = ["git", "-C", str(Path(__file__).parent)], Path(__file__).name
    try:
        known = subprocess.run([*git, "ls-files", "--error-unmatch", here], capture_output=True)
        done = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    return done.stdout.strip() if known.returncode == 0 else None
