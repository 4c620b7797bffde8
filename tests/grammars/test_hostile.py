"""Grammars that are meant to take time or memory: within limits, or refused."""

import random
from time import perf_counter

import pytest

from specserve.errors import RequestError
from specserve.grammars.asked import StructuredOutputsParams, grammar_of
from specserve.grammars.compiled import GrammarError, compile_grammar
from tests.grammars.hostile import ENDLESS, EVERY
from tests.grammars.matching import END, allowed, tiny_vocabulary

STEP_MS = 60  # twenty times what the worst step takes on two idle cores
COMPILE_SECONDS = 1.5  # three times what the slowest takes


def compiled(asked):
    """The matcher, or what refuses it."""
    try:
        grammar = grammar_of(StructuredOutputsParams(**asked))
        return compile_grammar(tiny_vocabulary(), grammar), None
    except (RequestError, GrammarError) as e:
        return None, str(e)


def step_ms(matcher, token):
    start = perf_counter()
    matcher.consume_token(token)
    matcher.compute_bitmask()
    return (perf_counter() - start) * 1000


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ENDLESS])
def test_one_is_refused_soon_or_no_step_takes_long(name):
    start = perf_counter()
    matcher, refusal = compiled(EVERY[name])
    assert perf_counter() - start < COMPILE_SECONDS
    assert (matcher is None) == bool(refusal)
    chance, num_tokens, slow = random.Random(1), 0, []
    while matcher is not None and not matcher.is_stopped() and num_tokens < 60:
        tokens = [token for token in allowed(matcher) if token != END]
        slow += [ms for ms in [step_ms(matcher, chance.choice(tokens))] if ms > STEP_MS]
        num_tokens += 1
    assert len(slow) < 3, f"steps of {slow} ms"  # other load may delay one


def test_the_worst_are_refused():
    for name in ("regex: counts in a count", "json: 1 MB of names", "json: 900 lists in lists"):
        matcher, refusal = compiled(EVERY[name])
        assert matcher is None and refusal, name


def test_what_is_large_but_not_hostile_is_taken():
    many = {f"p{i}": {"type": "string"} for i in range(240)}
    for asked in (
        {"json": {"type": "object", "properties": many, "additionalProperties": False}},
        {"json": {"enum": [f"{i:05}{'x' * 20}" for i in range(7000)]}},
        {"choice": tuple(f"{i:05}{'y' * 45}" for i in range(4096))},
    ):
        assert compiled(asked)[1] is None
