"""The numbers that an answer carries, in the shapes that tools already read."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from specserve.generation import Generation
from specserve.server.answer import Answer


def usage(answer: Answer) -> dict[str, Any]:
    """A prompt counts once, however many choices it has."""
    prompt = sum(len(g.prompt) for g in answer.firsts)
    cached = sum(g.num_cached for g in answer.firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer.num_said,
        "total_tokens": prompt + answer.num_said,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings(answer: Answer) -> dict[str, float | int | None]:
    """llama.cpp's names. Choices run side by side: their milliseconds are from first to last."""
    generations, counts = answer.generations, usage(answer)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    prompt_ms = 1e3 * (first_token_at(generations) - admitted_at(generations))
    predicted_ms = 1e3 * (last_token_at(generations) - first_token_at(generations))
    return {
        "prompt_n": counts["prompt_tokens"] - cached,
        "prompt_ms": prompt_ms,
        "predicted_n": counts["completion_tokens"],
        "predicted_ms": predicted_ms,
        "predicted_per_second": per_second(generations),
        "cache_n": cached,
        "draft_n": sum(g.num_drafted for g in generations),
        "draft_n_accepted": sum(g.num_accepted for g in generations),
    }


def metrics(generations: Sequence[Generation], drafter: str, max_nodes: int) -> dict[str, Any]:
    """vLLM's names. A step counts whether or not anything was drafted for it."""
    arrived, first = generations[0].arrived, first_token_at(generations)
    gaps = [max(0, len(g.token_ids) - 1) for g in generations]
    spread = sum(g.last_token_at - g.first_token_at for g in generations)
    return {
        "time_to_first_token_ms": 1e3 * (first - arrived),
        "generation_time_ms": 1e3 * (last_token_at(generations) - first),
        "queue_time_ms": 1e3 * (admitted_at(generations) - arrived),
        "mean_itl_ms": 1e3 * spread / sum(gaps) if sum(gaps) else None,
        "tokens_per_second": per_second(generations),
        "speculative_decoding": None
        if drafter == "none"
        else {"drafter": drafter} | speculation(generations, max_nodes),
    }


def speculation(generations: Sequence[Generation], max_nodes: int) -> dict[str, Any]:
    steps = [step for g in generations for step in g.steps]
    drafted, accepted = sum(d for d, _ in steps), sum(a for _, a in steps)
    said = sum(g.num_step_tokens for g in generations)
    histogram = Counter(a for _, a in steps)
    return {
        "mean_acceptance_length": said / len(steps) if steps else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": [histogram[n] for n in range(max(histogram, default=-1) + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max_nodes,
        "num_draft_fallbacks": sum(g.num_fallbacks for g in generations),
    }


def per_second(generations: Sequence[Generation]) -> float | None:
    """Tokens after the first ones, over the time that they took."""
    seconds = last_token_at(generations) - first_token_at(generations)
    num_tokens = sum(len(g.token_ids) - 1 for g in generations)
    return num_tokens / seconds if num_tokens > 0 and seconds > 0 else None


def admitted_at(generations: Sequence[Generation]) -> float:
    return min(g.admitted_at for g in generations)


def first_token_at(generations: Sequence[Generation]) -> float:
    return min(g.first_token_at for g in generations)


def last_token_at(generations: Sequence[Generation]) -> float:
    return max(g.last_token_at for g in generations)
