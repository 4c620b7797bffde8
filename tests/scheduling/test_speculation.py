"""The planner over many steps, against every fixed setting: in a simulated engine."""

from functools import cache
from itertools import product

import pytest

from tests.scheduling.speculation import AutoEngine, FixedEngine, World

ACCEPTANCE = {  # how often n-grams and the draft model are right, given that the parent was
    "nothing is right": (0.02, 0.1),
    "n-grams are right": (0.9, 0.3),
    "the draft model is right": (0.1, 0.8),
    "both are right at times": (0.6, 0.6),
}
VERIFY = {  # seconds of so many rows
    "flat": lambda rows: 0.03 * (1 + max(0, rows - 64) / 64),
    "rising": lambda rows: 0.03 * (1 + rows / 16),
    "stairs": lambda rows: 0.03 * (1 + 0.5 * ((rows + 7) // 8 - 1)),
    # A row has 8 of 128 experts, which take 0.55 of its time: more rows read further experts.
    "experts": lambda rows: 0.03 * (0.45 + 0.55 * (1 - (120 / 128) ** rows) * 16),
}
DRAFT = 0.05, 0.3  # of the target's step
STEPS = {1: 4800, 4: 1200, 16: 300, 64: 100}  # by load: half of them before, for learning
FIXED = [(False, 0, 0), *((True, 0, n) for n in (1, 2, 4, 8, 12))]  # n-grams, levels, guesses
FIXED += product((False, True), (1, 2, 4), (1, 2, 4, 8, 16))


@cache
def tokens_per_step(acceptance, setting, steps):
    """Of a request with a fixed setting: neither load nor cost changes it."""
    world = World(*acceptance, lambda rows: 1.0, lambda rows: 0.0, seed=steps)
    return FixedEngine(world, 1, *setting).run(steps)


def best_fixed(acceptance, verify, draft, load):
    """The rate of the best setting, which is timed once more: some of many are best by luck."""

    def rate(setting, steps=500):
        ngrams, levels, draft_tokens = setting
        most = (12 if ngrams else 0) + (2 + 4 * (levels - 1) if levels else 0)
        drafting = sum(draft(load * min(2**level, 2)) for level in range(levels))
        seconds = drafting + verify(load * (1 + min(draft_tokens, most)))
        return load * tokens_per_step(acceptance, setting, steps) / seconds

    return rate(max(FIXED, key=rate), steps=4000)


def compare(acceptance, verify, part, load):
    """The planner's rate, once it has learnt, to that of the best fixed setting."""

    def draft(rows):
        return part * verify(1) * (1 + rows / 64)

    engine = AutoEngine(World(*acceptance, verify, draft), load)
    engine.run(STEPS[load] // 2)
    rate = engine.run(STEPS[load])
    return rate / best_fixed(acceptance, verify, draft, load)


def worlds():
    """All of them; a few every day."""
    for case in product(ACCEPTANCE, VERIFY, DRAFT, STEPS):
        acceptance, verify, part, load = case
        is_everyday = (
            verify == "stairs" and part == 0.3 and load in (1, 16) and "draft" in acceptance
        )
        is_everyday |= verify == "rising" and part == 0.05 and load == 4 and "both" in acceptance
        is_everyday |= verify == "experts" and part == 0.05 and load == 1
        marks = () if is_everyday else pytest.mark.slow
        yield pytest.param(*case, marks=marks, id=", ".join(map(str, case)))


@pytest.mark.parametrize(("acceptance", "verify", "part", "load"), [*worlds()])
def test_it_is_within_five_percent_of_the_best_fixed_setting(acceptance, verify, part, load):
    assert compare(ACCEPTANCE[acceptance], VERIFY[verify], part, load) > 0.95


@pytest.mark.parametrize("load", [1, 8])
def test_a_source_that_becomes_good_is_found_out(load):
    world = World(0.02, 0.02, VERIFY["stairs"], lambda rows: 0.003)
    engine = AutoEngine(world, load)
    engine.run(100)
    engine.num_drafted = 0
    engine.run(200)
    assert engine.num_drafted < 30, "it was off but for a few trials"
    world.model = 0.9
    engine.run(300)
    engine.num_drafted = 0
    engine.run(100)
    assert engine.num_drafted > 90


def test_a_neighbor_that_takes_half_the_machine_changes_no_plan():
    busy, verify = [1.0], VERIFY["stairs"]
    world = World(0.8, 0.1, lambda rows: busy[0] * verify(rows), lambda rows: 0.003)
    engine = AutoEngine(world, 4)
    quiet = engine.run(300)
    busy[0] = 2.0
    engine.run(200)
    assert engine.run(100) == pytest.approx(quiet / 2, rel=0.1)
    busy[0] = 1.0
    assert engine.run(200) == pytest.approx(quiet, rel=0.1)


def test_chains_are_short_where_every_row_costs_more():
    """Below a tile of rows an unknown number is hoped to be free; with experts none is."""
    verify, sizes = VERIFY["experts"], []
    engine = AutoEngine(World(0.1, 0.8, verify, lambda rows: 0.0015), 1)
    engine.run(1000)
    for _ in range(300):
        engine.run(1)
        sizes.append(len(engine.plan.nodes[0]))
    assert sum(2 <= size <= 3 for size in sizes) > 240
