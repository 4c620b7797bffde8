"""TTFT of a small request while a large one runs."""

import random
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from specserve import LLM, SamplingParams
from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes
from specserve_bench.workloads import source_tokens

CHOICES, CHOICE_TOKENS = 128, 150
LONG_PROMPT, SMALL_PROMPT = 3900, 20
ROUNDS = 3


def measure() -> dict[str, Any]:
    """Milliseconds and steps until a small request's first token, on the demo pair."""
    with LLM(set={"memory.kv_bytes": 1 << 28}, progress=False) as llm:
        source = source_tokens(llm)
        sequences = f"{CHOICES} sequences of {CHOICE_TOKENS} tokens"
        others: dict[str, Callable[[], Any]] = {
            "no other request": lambda: [],
            sequences: lambda: start(llm, source[:100], CHOICE_TOKENS, CHOICES),
            f"a prompt of {LONG_PROMPT:,} tokens": lambda: start(llm, source[:LONG_PROMPT]),
        }
        return {name: first_token(llm, large, source) for name, large in others.items()}


def start(llm: LLM, prompt: list[int], max_tokens: int = 1, n: int = 1) -> Any:
    params = SamplingParams(
        max_tokens=max_tokens, temperature=1 if n > 1 else 0, seed=0, n=n, ignore_eos=True
    )
    return llm.start(*llm.check(prompt, params))


def first_token(llm: LLM, large: Callable[[], Any], source: list[int]) -> dict[str, Any]:
    """Medians over rounds, in the middle of what the large request does."""
    rounds = [one_round(llm, large, source, i) for i in range(1 + ROUNDS)][1:]
    ms = extremes([ms for ms, _ in rounds], 1)
    return {
        "ttft_ms": ms["median"],
        "ttft_ms_min_max": [ms["low"], ms["high"]],
        "steps": max(steps for _, steps in rounds),
    }


def one_round(
    llm: LLM, large: Callable[[], Any], source: list[int], seed: int
) -> tuple[float, int]:
    llm.reset_cache()
    begin = random.Random(seed).randrange(LONG_PROMPT, len(source) - SMALL_PROMPT)
    running = large()
    for _ in range(4):  # steps of the large request before the small one comes
        llm.step()
    before, steps = perf_counter(), 0
    [small] = start(llm, source[begin : begin + SMALL_PROMPT], 4)
    while not small.token_ids:
        llm.step()
        steps += 1
    seconds = perf_counter() - before
    llm.end([*running, small])
    return 1e3 * seconds, steps


def table(figures: Mapping[str, Any]) -> str:
    rows = []
    for name, row in figures.items():
        low, high = row["ttft_ms_min_max"]
        ttft = extremes_words({"median": row["ttft_ms"], "low": low, "high": high}, 1)
        rows.append([name, ttft, str(row["steps"])])
    head = ["running request", f"TTFT of a {SMALL_PROMPT}-token prompt, ms", "steps"]
    return markdown_table(head, rows)
