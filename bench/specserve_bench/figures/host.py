"""Host time of a step: the engine process, apart from forward passes and sampling."""

import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from statistics import median, quantiles
from time import perf_counter_ns
from typing import Any, NamedTuple

import msgspec

from specserve import LLM
from specserve.config import load_config
from specserve.engine import engine as step_loop
from specserve.engine import process
from specserve.engine.engine import Engine
from specserve.engine.process import Control
from specserve.exchange.messages import Add, EngineCommands, Link, Report, encode, packed
from specserve.speculation.adaptive_speculator import AdaptiveSpeculator
from specserve.speculation.draft_depth import DraftDepthController
from specserve_bench import suite
from specserve_bench.figures.steps import plain_sampling
from specserve_bench.pairs import PAIRS
from specserve_bench.report import markdown_table
from specserve_bench.workloads import source_tokens
from specserve_drafters.native import NativeTrie

SHARED, OWN, NEW_TOKENS = 1000, 24, 150  # tokens of a prompt: the same in all, and its own
ROUNDS = 3
ALWAYS = ", asked in each step"
MOST = 0.9  # share of requests that draft in a step in which nearly all do
PLANNING = ("merge", "choose", "learn")  # what `auto` adds to the sources' own work
PHASES = (
    "receive",
    "plan",
    "draft",
    *PLANNING,
    *("build", "launch", "verify_tree", "commit", "report", "rest"),
)


class HostSetting(NamedTuple):
    drafter: str
    requests: int
    temperature: float
    pair: str = "demo"
    is_always: bool = False  # `auto` asks its sources for each request in each step


DRAFTING = "drafting"  # key of a step's number of requests with draft tokens, next to the phases
KV_BYTES = {"demo": 1 << 28, "0.6b": 3 << 29}  # by pair
SETTINGS = (
    HostSetting("none", 1, 0.0),
    HostSetting("none", 32, 0.0),
    HostSetting("none", 32, 1.0),
    HostSetting("ngram", 1, 0.0),
    HostSetting("ngram", 32, 0.0),
    HostSetting("model", 1, 0.0),
    HostSetting("model", 32, 0.0),
    *(HostSetting("auto", requests, 0.0, pair) for pair in KV_BYTES for requests in (1, 32)),
    *(HostSetting("auto", requests, 0.0, is_always=True) for requests in (1, 32)),
)


def measure() -> dict[str, Any]:
    """Milliseconds a step by phase for every setting, in interleaved rounds."""
    llms = load()
    source = source_tokens(next(iter(llms.values())))
    steps: dict[HostSetting, list[Counter[str]]] = {setting: [] for setting in SETTINGS}
    for i in range(1 + ROUNDS):
        for setting, known in steps.items():
            control = llms[setting.pair, setting.drafter].control
            ran = one_run(control, commands(setting, source), setting.is_always)
            known += ran if i else []  # the first round warms up
    rows = [summary(setting, known) for setting, known in steps.items()]
    for row in rows:
        if row["drafter"] == "auto":
            share = row["planning_ms"] / row["step_ms"]
            named = f"{row['pair']}, {row['requests']} requests{ALWAYS * row['is_always']}"
            words = f"{' + '.join(PLANNING)} {row['planning_ms']:.3f} ms, {share:.1%} of a step"
            print(f"{named}: {words}")
    return {"prompt_tokens": SHARED + OWN, "rows": rows}


def load() -> dict[tuple[str, str], LLM]:
    """An LLM for each pair and drafter; those of a pair share the weights."""
    llms = {}
    for pair in dict.fromkeys(setting.pair for setting in SETTINGS):
        target, draft = map(str, PAIRS[pair]())
        loader = suite.Loader(progress=False)
        for drafter in dict.fromkeys(s.drafter for s in SETTINGS if s.pair == pair):
            settings = {
                "model.path": target,
                "drafter.name": drafter,
                "memory.kv_bytes": KV_BYTES[pair],
            }
            settings |= {"drafter.model": draft} if drafter in ("model", "auto") else {}
            llms[pair, drafter] = loader.llm(load_config(None, settings))
    return llms


def commands(setting: HostSetting, source: list[int]) -> EngineCommands:
    """The setting's requests. Their prompts begin alike, so that they are soon computed."""
    sampling = plain_sampling(NEW_TOKENS, setting.temperature)
    begins = range(SHARED, SHARED + OWN * setting.requests, OWN)
    prompts = [source[:SHARED] + source[begin : begin + OWN] for begin in begins]
    return EngineCommands([Add(i, packed(p), sampling, [i]) for i, p in enumerate(prompts)], [])


def one_run(control: Control, first: EngineCommands, is_always: bool = False) -> list[Counter[str]]:
    """Nanoseconds by phase of every step that computed a token of each request. If `is_always`,
    `auto` asks its sources in each step.
    """
    engine = control.engine
    engine.reset_cache()
    if isinstance(engine.speculator, AdaptiveSpeculator):
        engine.speculator.asks_always = is_always
    clock = PhaseClock()
    ours, theirs = socket.socketpair()
    with theirs:  # another process reads the reports, as that of a server does
        reader = subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
    link = ClockedLink(ours, first, clock)
    with ours, watched(engine, link, clock), suppress(EOFError):
        process.serve(link, control)
    reader.wait()
    return link.steps


class PhaseClock:
    """Nanoseconds by phase since the last `take`; a phase inside another stops the outer one."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.phase, self.since = "rest", perf_counter_ns()

    def switch(self, phase: str) -> str:
        """Enter a phase; the one before."""
        at, before = perf_counter_ns(), self.phase
        self.spent[before] += at - self.since
        self.phase, self.since = phase, at
        return before

    def timed(self, run: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            before = self.switch(phase)
            try:
                return run(*args, **named)
            finally:
                self.switch(before)

        return timed

    def take(self) -> Counter[str]:
        self.switch(self.phase)
        spent, self.spent = self.spent, Counter()
        return spent


class ClockedLink(Link):
    """Delivers the first commands, notes every step's phases, and closes once all have ended."""

    def __init__(self, sock: socket.socket, first: EngineCommands, clock: PhaseClock) -> None:
        super().__init__(sock)
        self.first, self.clock = [encode(first)], clock
        self.num_requests = len(first.add)
        self.steps: list[Counter[str]] = []
        self.is_steady = False  # whether the step before had a root and a token of each request
        self.num_drafting = 0  # requests with draft tokens in it

    def receive(self, wait: bool) -> list[bytes]:
        spent = self.clock.take()
        if self.is_steady:
            self.steps.append(spent)
            spent[DRAFTING] = self.num_drafting
        first, self.first = self.first, []
        if wait and not first:
            raise EOFError
        return first + super().receive(wait=False)

    def send(self, message: msgspec.Struct) -> None:
        assert isinstance(message, Report)
        verified = [o for o in message.outputs if o.is_verified and o.finish_reason is None]
        self.is_steady = len(verified) == self.num_requests
        self.num_drafting = sum(o.num_drafted > 0 for o in verified)
        super().send(message)


def watched(engine: Engine, link: Link, clock: PhaseClock) -> ExitStack:
    """Replaces the parts of a step by timed ones, until the stack is closed."""
    parts: list[tuple[Any, str, str]] = [
        (link, "receive", "receive"),
        (engine.scheduler, "plan", "plan"),
        (engine, "draft", "draft"),
        (engine, "build", "build"),
        (engine, "verify", "launch"),
        (step_loop, "accepted_paths", "verify_tree"),
        (engine, "commit", "commit"),
        (process, "report", "report"),
        (link, "send", "report"),
    ]
    ops = engine.target.ops
    parts += [(ops, name, "draw") for name in ("sample", "top_children")]
    lent = engine.draft_model
    speculator, stack = engine.speculator, ExitStack()
    if isinstance(speculator, AdaptiveSpeculator):
        parts += planning_parts(speculator)
        stack.callback(setattr, speculator, "draft", speculator.draft)
        speculator.draft = choosing(speculator, clock)  # type: ignore[method-assign]
    for runner in [engine.target] if lent is None else [engine.target, lent.runner]:
        parts.append((runner.program, "run_pieces", "forward"))
    for owner, name, phase in parts:
        real = getattr(owner, name)
        stack.callback(setattr, owner, name, real)
        setattr(owner, name, clock.timed(real, phase))
    return stack


def choosing(speculator: AdaptiveSpeculator, clock: PhaseClock) -> Callable[..., None]:
    """The choice of a step's drafts, timed. Sources in C++ are asked within it."""
    run = clock.timed(speculator.draft, "choose")

    def draft(scheduled: Any) -> None:
        run(scheduled)
        asking = int(1e9 * speculator.plans.told.asking)
        clock.spent["choose"] -= asking
        clock.spent["draft"] += asking

    return draft


def planning_parts(speculator: AdaptiveSpeculator) -> list[tuple[Any, str, str]]:
    """The phases of `auto` in a step."""
    parts: list[tuple[Any, str, str]] = [
        (speculator, "timed", "learn"),
        (speculator, "learn", "learn"),
    ]
    parts += [(source, "add_candidates", "draft") for source in speculator.sources]
    named = ("grow", "draft"), ("branch", "merge"), ("best", "choose")
    for model_source in speculator.model_sources:
        parts += [(model_source.source, name, phase) for name, phase in named]
    parts += [(DraftDepthController, name, "choose") for name in ("first", "next", "ran")]
    parts.append((NativeTrie, "merge", "merge"))
    return parts


def summary(setting: HostSetting, steps: list[Counter[str]]) -> dict[str, Any]:
    """Medians over the steps, and the spread of the host's share."""
    drafting = [step for step in steps if step.pop(DRAFTING, 0) >= MOST * setting.requests]
    host = [sum(step[phase] for phase in PHASES) for step in steps]
    deciles = quantiles(host, n=10)
    return {
        **setting._asdict(),
        "steps": len(steps),
        "step_ms": ms(median(step.total() for step in steps)),
        "host_ms": ms(median(host)),
        "host_ms_p10_p90": [ms(deciles[0]), ms(deciles[-1])],
        "planning_ms": planning_ms(steps),
        "drafting_steps": len(drafting),
        "drafting_planning_ms": planning_ms(drafting) if drafting else None,
        "phases_ms": {
            phase: ms(median(step[phase] for step in steps))
            for phase in (*PHASES, "forward", "draw")
        },
    }


def planning_ms(steps: list[Counter[str]]) -> float:
    return ms(median(sum(step[phase] for phase in PLANNING) for step in steps))


def ms(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 4)


def table(result: Mapping[str, Any]) -> str:
    """Kept results may lack pairs and phases."""
    kept = result["rows"]
    names = {"pair": "pair", "drafter": "drafter", "requests": "requests", "temperature": "T"}
    named = [key for key in names if key in kept[0]]
    phases = [phase for phase in PHASES if phase in kept[0]["phases_ms"]]
    rows = []
    for row in kept:
        low, high = row["host_ms_p10_p90"]
        about = [f"{row[key]:g}" if key == "temperature" else str(row[key]) for key in named]
        about[named.index("drafter")] += ALWAYS * row.get("is_always", False)
        host = f"{row['host_ms']:.2f} ({low:.2f} to {high:.2f})"
        each = [f"{row['phases_ms'][phase]:.3f}" for phase in phases]
        rows.append([*about, f"{row['step_ms']:.2f}", host, *each])
    head = [*(names[key] for key in named), "step", "host (p10 to p90)", *phases]
    return markdown_table(head, rows)
