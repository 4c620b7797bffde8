"""A budget of reasoning: what may come next is a function of the tokens so far."""

import re
from random import Random

import numpy as np
import pytest

from specserve.exchange.sampling_params import ReasoningBudget
from specserve.scheduling.reasoning_state import ReasoningState, state_after_prompt

VOCAB = 40
OPEN, CLOSE, A, B, C, D = range(6)  # < > and others; as letters below
LETTERS = "<>abcd"
THINK = ReasoningBudget(3, (OPEN,), (CLOSE,))
CHANNELS = ReasoningBudget(3, (A, OPEN), (CLOSE, B, A))  # the closing ends as the opening begins


def allowed(state, budget):
    """The ids that may come next."""
    words = state.mask(budget, VOCAB)
    if words is None:
        return {*range(VOCAB)}
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB]
    return {*np.flatnonzero(bits).tolist()}


def drawn(budget, seed, size, state):
    """A random text that keeps to the masks, and what was allowed before each token."""
    random, text, masks = Random(seed), [], []
    for _ in range(size):
        masks.append(allowed(state, budget))
        text.append(random.choice(sorted(masks[-1] & {*range(6)})))
        state = state.after(text[-1], budget)
    return text, masks


def written(tokens):
    return "".join(LETTERS[token] for token in tokens)


@pytest.mark.parametrize("budget", [THINK, CHANNELS], ids=["think", "channels"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_reasoning_has_at_most_the_tokens_of_its_budget(budget, is_inside):
    """As an expression sees it, which reads the whole text."""
    opening, closing = written(budget.opening), written(budget.closing)
    num_full = 0
    for seed in range(300):
        text, masks = drawn(budget, seed, 30, ReasoningState(is_inside))
        whole, at = (opening if is_inside else "") + written(text), len(opening) * is_inside
        spans = [*re.finditer(f"{opening}([^>]*)(>|$)", whole)]
        thought = sum(len(span[1]) for span in spans)
        assert thought <= budget.max_tokens
        if thought == budget.max_tokens:
            num_full += 1
            end = spans[-1].end(1)
            forced = [sum(1 << t for t in mask) for mask in masks[end - at :][: len(closing)]]
            assert forced == [1 << token for token in budget.closing[: len(forced)]]
            assert closing.startswith(whole[end : end + len(closing)])
            later = masks[end - at + len(closing) :]
            assert all(len(mask) >= VOCAB - 1 for mask in later)
        else:
            assert all(len(mask) == VOCAB for mask in masks)
    assert num_full > 20


def test_no_tokens_mean_no_reasoning():
    none = ReasoningBudget(0, (OPEN,), (CLOSE,))
    assert allowed(ReasoningState(), none) == {*range(VOCAB)} - {OPEN}
    assert allowed(ReasoningState(is_inside=True), none) == {CLOSE}
    assert allowed(ReasoningState(True).after(CLOSE, none), none) == {*range(VOCAB)} - {OPEN}


PROMPTS = {
    "none": ([A, B], False),
    "at the end": ([B, A, OPEN], True),
    "before a line break": ([A, OPEN, D, D], True),
    "long ago": ([A, OPEN, D, D, D], False),
    "closed": ([A, OPEN, CLOSE], False),
    "of one token": ([OPEN], None),
}


@pytest.mark.parametrize(("prompt", "is_inside"), PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("budget", [THINK, CHANNELS], ids=["think", "channels"])
def test_a_prompt_may_end_inside_of_reasoning(budget, prompt, is_inside):
    is_inside = budget is THINK if is_inside is None else is_inside
    assert state_after_prompt(prompt, budget) == ReasoningState(is_inside)
