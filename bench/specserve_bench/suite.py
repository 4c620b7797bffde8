"""Subjects in turn over workloads and loads: what `specserve bench` measures, as a Result."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specserve import LLM
from specserve.config import Config
from specserve.engine.build import Model, needs_draft_model, resolve_draft, resolve_model
from specserve.errors import ConfigError
from specserve.machine import cpu_name
from specserve.version import VERSION
from specserve_bench import scripted
from specserve_bench.hosted import Hosted
from specserve_bench.local import Local
from specserve_bench.results import Goals, Load, Result, Round, Run, Subject
from specserve_bench.scale import scaled_from
from specserve_bench.workloads import Workload
from specserve_drafters.tree import MAX_NODES

PATHS = ("model.path", "drafter.model", "recording")  # of one machine: names say enough
PACKAGES = ("torch", "transformers", "numpy")


class Runnable(Protocol):
    def run(self, workload: Workload, load: Load) -> Round: ...


class Contender(NamedTuple):
    label: str
    about: Subject
    runnable: Runnable


class Plan(NamedTuple):
    """Which rounds: every subject on every workload under every load, again and again."""

    workloads: Sequence[Workload]
    loads: Sequence[Load]
    rounds: int


def measure(
    kind: str, contenders: Sequence[Contender], plan: Plan, goals: Goals, command: str
) -> Result:
    """All rounds, interleaved: what disturbs the machine for a while hits every subject.

    Before them, every subject answers the first requests of every workload, as many as come at a
    time: that is thrown away.
    """
    runs = {
        (c.label, w.name, load): Run(subject=c.label, workload=w.name, load=load, rounds=[])
        for w in plan.workloads
        for load in plan.loads
        for c in contenders
    }
    by_name = {w.name: w for w in plan.workloads}
    by_label = {c.label: c for c in contenders}
    total = (1 + plan.rounds) * len(runs)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
    with bar:
        task = bar.add_task("measuring", total=total)
        for number in range(1 + plan.rounds):
            for (label, name, load), run in runs.items():
                bar.update(task, description=f"{name}, {label}")
                asked, runnable = by_name[name], by_label[label].runnable
                if number == 0:
                    runnable.run(asked._replace(asks=asked.asks[: load.concurrency or 1]), load)
                else:
                    run.rounds.append(runnable.run(asked, load))
                bar.advance(task)
    return Result(
        kind=kind,
        machine=machine(command),
        subjects={c.label: c.about for c in contenders},
        workloads={w.name: w.described() for w in plan.workloads},
        runs=list(runs.values()),
        goals=goals,
    )


class Loader:
    """LLMs of configs, which share their models: each is loaded, and timed for threads, once."""

    def __init__(self, progress: bool = True) -> None:
        self.progress = progress
        self.models: list[Model | None] = []

    def load(self, label: str, config: Config) -> Contender:
        llm = LLM(set=settings_of(config), progress=self.progress, weights=self.models)
        self.models += [model for model in llm.weights if model not in self.models]
        return Contender(label, about(llm), Local(llm))


def settings_of(config: Config) -> Mapping[str, Any]:
    """What differs from the defaults, by "section.key"."""
    plain, usual = msgspec.to_builtins(config), msgspec.to_builtins(Config())
    return {
        f"{section}.{key}": value
        for section, values in plain.items()
        for key, value in values.items()
        if value != usual[section][key]
    }


def about(llm: LLM) -> Subject:
    config = llm.config
    folder = resolve_model(config)
    phases = llm.loaded.phases
    is_drafting = config.drafter_name != "none"
    return Subject(
        model=folder.name,
        draft_model=resolve_draft(config).name if needs_draft_model(config) else None,
        drafter=config.drafter_name,
        max_nodes=config.speculation.max_nodes if is_drafting else 0,
        config=without_paths(settings_of(config)),
        threads={name: words for name, words in phases.items() if name.endswith("threads")},
        scaled=scaled_from(folder),
    )


def without_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Also without those among a drafter's options."""
    return {
        key: without_paths(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if key not in PATHS
    }


def hosted(label: str, url: str, key: str | None, model: str | None) -> Contender:
    server = Hosted(url, key, model)
    return Contender(label, Subject(url=url, model=server.remote.fields["model"]), server)


def drafting(setting: str, base: Config) -> dict[str, Any]:
    """off, NAME or NAME:NODES, scripted:0.9/0.8/0.7 -> settings of the engine, on top of `base`."""
    name, colon, rest = setting.partition(":")
    if "." in name:  # package.module:Class:NODES
        attribute, colon, rest = rest.partition(":")
        name = f"{name}:{attribute}"
    if name in ("off", "none") and not colon:
        return {"drafter.name": "none", "drafter.model": None, "drafter.options": {}}
    if name == "scripted":
        acceptance = chances(setting, rest)
        settings = {"drafter.name": scripted.NAME, "drafter.options": {"acceptance": acceptance}}
        return settings | {"drafter.model": None} | nodes(len(acceptance), base)
    if colon and not (rest.isdecimal() and 1 <= int(rest) <= MAX_NODES):
        raise ConfigError(
            f"--drafters {setting}: write off, NAME or NAME:NODES with 1 to {MAX_NODES} nodes, as "
            "in ngram:8"
        )
    return (
        {"drafter.name": name}
        | ({"drafter.model": None} if name == "ngram" else {})
        | ({} if name == base.drafter_name else {"drafter.options": {}})  # another drafter's
        | (nodes(int(rest), base) if colon else {})
    )


def nodes(number: int, base: Config) -> dict[str, Any]:
    """So many guesses for a request, and room for them in a step."""
    most = max(number, base.speculation.max_step_nodes)
    return {"speculation.max_nodes": number, "speculation.max_step_nodes": most}


def chances(setting: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split("/")]
    except ValueError as e:
        raise ConfigError(
            f"--drafters {setting}: write the acceptance by depth, as in scripted:0.9/0.8/0.7"
        ) from e


def record(llm: LLM, workloads: Sequence[Workload], file: Path) -> None:
    """What the target says to every request, for the scripted drafter."""
    local = Local(llm)
    checked = [local.check(ask) for workload in workloads for ask in workload.asks]
    outputs = llm.generate([ids for ids, _ in checked], [params for _, params in checked])
    file.write_text(json.dumps([o.prompt_token_ids + o.token_ids for o in outputs]))


def machine(command: str) -> dict[str, Any]:
    """Where, with what and how this was measured."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "specserve": VERSION,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
    }


def commit() -> str | None:
    """Of the repository that this file is part of; None where it is installed without one."""
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
