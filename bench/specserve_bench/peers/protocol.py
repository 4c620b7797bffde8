"""The messages between the suite and an engine in another process: JSON lines both ways.

Needs nothing but the standard library, as it runs in the environment of each engine.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

PR_SET_PDEATHSIG = 1  # prctl(2)
LOOKUP, DRAFT, AUTO = "lookup", "draft", "auto"  # n-gram lookup, draft model, planner


class PeerDrafting(NamedTuple):
    """How an engine speculates.

    by      LOOKUP, DRAFT or AUTO
    tokens  limit of draft tokens per step; 0 for AUTO, which sets its own
    draft   folder of the draft model
    """

    by: str
    tokens: int
    draft: str | None = None


class Setup(NamedTuple):
    """Arguments of an engine.

    model         a folder with safetensors; llama.cpp: a GGUF file
    max_len       tokens of a request, its prompt included
    max_requests  that run at once
    kv_bytes      enough for all of them
    threads       None: the engine's own choice
    quantize      of all models: w8a8, w8, w4, or None for the weights as they are
    program       of an engine that is no Python package
    tokenizer     a tokenizer.json, for an engine that takes text
    """

    model: str
    max_len: int
    max_requests: int
    kv_bytes: int
    threads: int | None
    drafting: PeerDrafting | None
    quantize: str | None = None
    program: str | None = None
    tokenizer: str | None = None


class Timed:
    """One request: its tokens, and when they came, in seconds from its start.

    `token_ids` is empty if the engine does not return all of them.
    """

    def __init__(self, start: float | None = None) -> None:
        self.start = perf_counter() if start is None else start
        self.times: list[float] = []
        self.counts: list[int] = []
        self.token_ids: list[int] = []

    def add(self, token_ids: Sequence[int]) -> None:
        """Tokens that come at this moment."""
        if token_ids:
            self.times.append(perf_counter() - self.start)
            self.counts.append(len(token_ids))
            self.token_ids += map(int, token_ids)


def timed_together(number: int) -> list[Timed]:
    """Timers of requests that are sent now."""
    start = perf_counter()
    return [Timed(start) for _ in range(number)]


class EngineError(RuntimeError):
    """A sentence for the table, where an engine gives none of its own."""


class PeerEngine(Protocol):
    """An engine that has loaded its model. All text is greedy, and goes on after an end token."""

    @property
    def version(self) -> str: ...

    def together(self, prompts: list[list[int]], num_tokens: int) -> list[Timed]:
        """All prompts at once; times count from when the first was sent."""
        ...


def serve(load: Callable[[Setup], PeerEngine]) -> None:
    """Load what the command line's Setup names, then answer requests until stdin is closed.

    A request is {"prompts", "num_tokens", "is_batch"}, its answer a list of {"token_ids", "times",
    "counts"}.
    """

    def start(given: dict[str, Any]) -> tuple[str, Callable[[dict[str, Any]], Any]]:
        engine = load(read_setup(given))
        return engine.version, lambda asked: run(engine, **asked)

    answer_requests(start)


def answer_requests(
    start: Callable[[dict[str, Any]], tuple[str, Callable[[dict[str, Any]], Any]]],
) -> None:
    """Start with the command line's JSON, then answer each line of stdin by a line.

    `start` returns a version and what answers requests. Answers come as {"ok": ...} or {"error":
    text}, the first is {"version"}; after an error in starting it ends.
    """
    ends_with_parent()
    out = os.fdopen(os.dup(1), "w")  # only for answers
    os.dup2(2, 1)  # what libraries print goes to stderr
    try:
        version, answer = start(json.loads(sys.argv[1]))
    except Exception as e:
        print(json.dumps(error_of(e)), file=out, flush=True)
        sys.exit(1)
    print(json.dumps({"ok": {"version": version}}), file=out, flush=True)
    for line in sys.stdin:
        try:
            told = {"ok": answer(json.loads(line))}
        except Exception as e:  # any engine's any error is its line in the table
            told = error_of(e)
        print(json.dumps(told), file=out, flush=True)


def ends_with_parent() -> None:
    """Else a stopped process would stay when the suite is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def error_of(e: Exception) -> dict[str, Any]:
    """Our own errors are sentences; others need the name of their class."""
    traceback.print_exc()
    is_ours = type(e).__module__.startswith("specserve")
    return {"error": str(e) if is_ours else f"{type(e).__name__}: {e}"}


def run(
    engine: PeerEngine, prompts: list[list[int]], num_tokens: int, is_batch: bool
) -> list[dict[str, Any]]:
    groups = [prompts] if is_batch else [[prompt] for prompt in prompts]
    done = [timed for group in groups for timed in engine.together(group, num_tokens)]
    return [{"token_ids": d.token_ids, "times": d.times, "counts": d.counts} for d in done]


def read_setup(fields: dict[str, Any]) -> Setup:
    """The inverse of `write_setup`."""
    drafting = fields["drafting"]
    return Setup(**fields | {"drafting": drafting and PeerDrafting(**drafting)})


def write_setup(setup: Setup) -> dict[str, Any]:
    drafting = setup.drafting
    return setup._asdict() | {"drafting": drafting and drafting._asdict()}
