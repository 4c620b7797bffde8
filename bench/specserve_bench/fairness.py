"""How long a small request waits for its first token beside a large one."""

import random
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any

from specserve import LLM, SamplingParams
from specserve_bench.workloads import source_tokens

CHOICES, CHOICE_TOKENS = 128, 150
LONG_PROMPT, SMALL_PROMPT = 3900, 20
STEPS_BEFORE = 4  # steps of the large request before the small one comes
ROUNDS = 3


def fairness_figures() -> dict[str, Any]:
    """Milliseconds and steps until a small request's first token, on the demo pair."""
    settings = {"memory.kv_bytes": 1 << 28}
    with LLM(set=settings, progress=False) as llm:
        source = source_tokens(llm)
        choices = f"beside {CHOICES} choices of {CHOICE_TOKENS} tokens"
        beside: dict[str, Callable[[], Any]] = {
            "alone": lambda: None,
            choices: lambda: start(llm, source[:100], CHOICE_TOKENS, CHOICES),
            f"beside a prompt of {LONG_PROMPT:,} tokens": lambda: start(llm, source[:LONG_PROMPT]),
        }
        figures = {name: first_token(llm, large, source) for name, large in beside.items()}
    print(table(figures))
    return figures


def table(figures: Mapping[str, Any]) -> str:
    """In Markdown, as in docs/bench.md."""
    rows = (
        f"| {name} | {row['ttft_ms']} ({row['ttft_ms_min_max'][0]} to {row['ttft_ms_min_max'][1]}) "
        f"| {row['steps']} |"
        for name, row in figures.items()
    )
    head = f"| a prompt of {SMALL_PROMPT} tokens | TTFT, ms (lowest to highest) | steps |"
    return "\n".join([head, "|---|---|---|", *rows])


def start(llm: LLM, prompt: list[int], max_tokens: int = 1, n: int = 1) -> Any:
    params = SamplingParams(
        max_tokens=max_tokens, temperature=1 if n > 1 else 0, seed=0, n=n, ignore_eos=True
    )
    return llm.start(*llm.check(prompt, params))


def first_token(llm: LLM, large: Callable[[], Any], source: list[int]) -> dict[str, Any]:
    """Medians over rounds, in the middle of what the large request does."""
    rounds = [one_round(llm, large, source, i) for i in range(1 + ROUNDS)][1:]
    times = [ms for ms, _ in rounds]
    return {
        "ttft_ms": round(median(times), 1),
        "ttft_ms_min_max": [round(min(times), 1), round(max(times), 1)],
        "steps": max(steps for _, steps in rounds),
    }


def one_round(
    llm: LLM, large: Callable[[], Any], source: list[int], seed: int
) -> tuple[float, int]:
    llm.reset_cache()
    begin = random.Random(seed).randrange(LONG_PROMPT, len(source) - SMALL_PROMPT)
    running = large() or []
    for _ in range(STEPS_BEFORE):
        llm.step()
    before, steps = perf_counter(), 0
    [small] = start(llm, source[begin : begin + SMALL_PROMPT], 4)
    while not small.token_ids:
        llm.step()
        steps += 1
    seconds = perf_counter() - before
    llm.end([*running, small])
    return 1e3 * seconds, steps
