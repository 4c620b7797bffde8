"""Grammars that are meant to take time or memory: within limits, or refused."""

import random
import tracemalloc
from time import process_time, thread_time

import numpy as np
import pytest

from specserve.errors import RequestError
from specserve.scheduling.grammar_state import PATIENCE, QUICK, TOO_SLOW, GrammarState
from specserve.text.grammars.compiled import Compiled, GrammarError
from specserve.text.grammars.structured_outputs import (
    MAX_BYTES,
    StructuredOutputsParams,
    grammar_of,
)
from tests.text.grammars.hostile import ENDLESS, EVERY, WRITTEN
from tests.text.grammars.matching import END, SIZE, tiny_vocabulary

COMPILE_SECONDS = 1.5  # three times what the slowest takes
WRITE_SECONDS = 0.3  # four times what the slowest takes
WRITE_BYTES = 1 << 24


def written(asked):
    """The grammar, of no more than its bytes, or what refuses it."""
    try:
        grammar = grammar_of(StructuredOutputsParams(**asked))
        assert len(grammar) <= MAX_BYTES
        return grammar
    except RequestError as e:
        return str(e)


def compiled(asked):
    """The grammar for requests, or what refuses it."""
    try:
        grammar = grammar_of(StructuredOutputsParams(**asked))
        return Compiled(tiny_vocabulary(), grammar), None
    except (RequestError, GrammarError) as e:
        return None, str(e)


@pytest.mark.timed
@pytest.mark.parametrize("name", WRITTEN)
def test_one_is_written_or_refused_in_little_time_and_memory(name):
    start = process_time()
    written(WRITTEN[name])
    assert process_time() - start < WRITE_SECONDS
    tracemalloc.start()
    written(WRITTEN[name])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < WRITE_BYTES


@pytest.mark.timed
@pytest.mark.parametrize("name", [name for name in EVERY if name not in ENDLESS])
def test_one_is_refused_soon_or_its_steps_take_no_more_than_patience(name):
    start = process_time()
    grammar, refusal = compiled(EVERY[name])
    assert process_time() - start < COMPILE_SECONDS
    assert (grammar is None) == bool(refusal)
    if grammar is None:
        return
    state, chance, slow = GrammarState(grammar, [END], SIZE), random.Random(1), []
    for _ in range(60):
        start = thread_time()
        bits = np.unpackbits(state.mask(()).view(np.uint8), bitorder="little")
        tokens = [token for token in np.flatnonzero(bits).tolist() if token != END]
        if not tokens:
            break
        state.extend([chance.choice(tokens)])
        slow += [seconds for seconds in [thread_time() - start] if seconds > 2 * QUICK]
    assert sum(slow[:-1]) < 2 * PATIENCE, slow


def test_a_grammar_that_has_taken_too_long_ends_its_text_and_says_so():
    grammar, _ = compiled({"regex": "[ab]*"})
    state = GrammarState(grammar, [END], SIZE)
    assert state.mask(()).any()
    state.patience = 0.0
    assert not state.mask(()).any() and state.why == f" ({TOO_SLOW})"


def test_the_worst_are_refused():
    for name in ("regex: counts in a count", "json: 1 MB of names", "json: 900 lists in lists"):
        grammar, refusal = compiled(EVERY[name])
        assert grammar is None and refusal, name


def test_what_is_large_but_not_hostile_is_taken():
    many = {f"p{i}": {"type": "string"} for i in range(240)}
    for asked in (
        {"json": {"type": "object", "properties": many, "additionalProperties": False}},
        {"json": {"enum": [f"{i:05}{'x' * 20}" for i in range(7000)]}},
        {"choice": tuple(f"{i:05}{'y' * 45}" for i in range(4096))},
    ):
        assert compiled(asked)[1] is None
