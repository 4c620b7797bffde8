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
from typing import Any, NamedTuple, Protocol, TextIO

PR_SET_PDEATHSIG = 1  # prctl(2)
LOOKUP, DRAFT = "lookup", "draft"  # who guesses: the text so far, or a smaller model


class Guessing(NamedTuple):
    """How an engine speculates. `tokens` are guesses a step, `draft` is a folder."""

    by: str
    tokens: int
    draft: str | None = None


class Setup(NamedTuple):
    """What an engine is started with.

    model         a folder with safetensors; llama.cpp: a GGUF file
    max_len       tokens of a request, its prompt included
    max_requests  that run at once
    kv_bytes      enough for all of them
    threads       None: the engine's own choice
    quantize      of all models: w8a8, w8, w4, or None for the weights as they are
    """

    model: str
    max_len: int
    max_requests: int
    kv_bytes: int
    threads: int | None
    guessing: Guessing | None
    quantize: str | None = None


class Timed:
    """One request: its tokens, and when they came, in seconds from its start."""

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


class EngineError(RuntimeError):
    """A sentence for the table, where an engine gives none of its own."""


class Engine(Protocol):
    """An engine that has loaded its model. All text is greedy, and goes on after an end token."""

    @property
    def version(self) -> str: ...

    def alone(self, prompt: list[int], num_tokens: int) -> Timed: ...

    def together(self, prompts: list[list[int]], num_tokens: int) -> list[Timed]:
        """All prompts at once; times count from when the first was sent."""
        ...


def serve(load: Callable[[Setup], Engine]) -> None:
    """Load what the command line's Setup names, then answer requests until stdin is closed.

    Says {"version"} once loaded. A request is {"prompts", "num_tokens", "is_batch"}, its answer a
    list of {"token_ids", "times", "counts"}. Answers come as {"ok": ...} or {"error": text}; after
    an error in loading it ends.
    """
    end_with_parent()
    out = own_stdout()
    try:
        engine = load(setup_of_process())
    except Exception as e:
        tell_error(out, e)
        sys.exit(1)
    tell(out, {"ok": {"version": engine.version}})
    for line in sys.stdin:
        try:
            tell(out, {"ok": run(engine, json.loads(line))})
        except Exception as e:  # any engine's any error is its line in the table
            tell_error(out, e)


def tell_error(out: TextIO, e: Exception) -> None:
    """Our own errors are sentences; others need the name of their class."""
    traceback.print_exc()
    is_ours = type(e).__module__.startswith("specserve")
    tell(out, {"error": str(e) if is_ours else f"{type(e).__name__}: {e}"})


def tell(out: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=out, flush=True)


def run(engine: Engine, asked: dict[str, Any]) -> list[dict[str, Any]]:
    prompts, num_tokens = asked["prompts"], asked["num_tokens"]
    if asked["is_batch"]:
        done = engine.together(prompts, num_tokens)
    else:
        done = [engine.alone(prompt, num_tokens) for prompt in prompts]
    return [{"token_ids": d.token_ids, "times": d.times, "counts": d.counts} for d in done]


def setup_of_process() -> Setup:
    return read_setup(json.loads(sys.argv[1]))


def read_setup(fields: dict[str, Any]) -> Setup:
    """What `write_setup` wrote."""
    guessing = fields["guessing"]
    return Setup(**fields | {"guessing": guessing and Guessing(**guessing)})


def write_setup(setup: Setup) -> dict[str, Any]:
    guessing = setup.guessing
    return setup._asdict() | {"guessing": guessing and guessing._asdict()}


def own_stdout() -> TextIO:
    """Keep stdout for answers: what libraries print goes to stderr from here on."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def end_with_parent() -> None:
    """A stopped process would otherwise stay for good when the suite is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
