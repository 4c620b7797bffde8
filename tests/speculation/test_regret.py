"""The plans of `auto` in simulated worlds, against the best fixed plan in hindsight."""

import pytest

from tests.engine.clock import Clock
from tests.speculation.worlds import BadSource, Engine, World, outcome

BEGIN, END = 500, 5000  # steps in which regret is measured
MOST = 0.03  # regret


# Seconds of the target by rows and context. A step of one row takes 10 ms.
def flat(rows, context):
    return 0.01 * (1 + max(0, rows - 16) / 16)


def linear(rows, context):
    return 0.01 * (1 + (rows - 1) * 0.25)


def steep(rows, context):
    return 0.004 * (1 + 0.13 * rows)


def stairs(rows, context):
    return 0.01 * (1 + 0.5 * ((rows + 7) // 8 - 1))


def experts(rows, context):
    """A row has 8 of 128 experts: more rows read further experts."""
    return 0.01 * (0.45 + 0.55 * (1 - (120 / 128) ** rows) * 16)


def by_context(rows, context):
    return 0.01 * (1 + (rows - 1) * 0.1) + rows * context * 1e-6


# What other load makes of a step's time, by the step's number.
def by_steps(*factors, every=100):
    return lambda step: factors[step // every % len(factors)]


# How often a source is right, by request and place.
def always(p):
    return lambda request, place: p


def drifting(low, high, every=8):
    return lambda request, place: high if (request // every) % 2 else low


def by_place(request, place):
    return 0.9 if (place // 40) % 3 == 0 else 0.1


def by_request(request, place):
    return (0.05, 0.5, 0.9)[request % 3]


def level(part):
    """A level takes this part of the target's step of one row."""
    return lambda rows: 0.01 * part


EVERY_DAY = {
    "nothing is right": World(linear, lookup=always(0.05), host=1e-4),
    "at times right": World(linear, lookup=always(0.6)),
    "experts": World(experts, lookup=always(0.7), streams=4),
    "right, then wrong": World(linear, lookup=drifting(0.1, 0.8)),
    "a burst of prompts": World(
        by_context, lookup=always(0.5), prompt=1000, output=200, streams=4, burst=4
    ),
    "a dear draft model": World(stairs, model=always(0.4), level=level(0.3)),
}
OTHERS = {
    "rows are free": World(flat, lookup=always(0.05)),
    "rarely right": World(linear, lookup=always(0.3)),
    "stairs": World(stairs, lookup=always(0.6)),
    "stairs, often right": World(stairs, lookup=always(0.8)),
    "experts, one request": World(experts, lookup=always(0.7)),
    "experts, rarely right": World(experts, lookup=always(0.4)),
    "small coverage": World(linear, lookup=always(0.7), covers=0.3, host=1e-4),
    "soon wrong": World(flat, lookup=drifting(0.1, 0.8, every=3)),
    "right in places": World(linear, lookup=by_place),
    "right for some": World(linear, lookup=by_request),
    "right for some, short": World(linear, lookup=by_request, output=40),
    "too sure": World(linear, lookup=always(0.1), score=0.95),
    "too shy": World(linear, lookup=always(0.8), score=0.05),
    "four streams": World(linear, lookup=always(0.5), streams=4),
    "many streams": World(linear, lookup=always(0.5), streams=16),
    "many streams, right for some": World(stairs, lookup=by_request, streams=16),
    "long contexts": World(by_context, lookup=always(0.5), prompt=6000, output=300),
    "short bursts": World(linear, lookup=always(0.6), streams=16, burst=8, prompt=200, output=60),
    "a cheap draft model": World(stairs, model=always(0.8), level=level(0.05)),
    "a dear, good draft model": World(stairs, model=always(0.8), level=level(0.3)),
    "a useless draft model": World(linear, model=always(0.1), level=level(0.3)),
    "two sources": World(linear, lookup=always(0.5), model=always(0.6), level=level(0.05)),
    "two sources, four streams": World(
        stairs, lookup=by_request, model=always(0.7), level=level(0.1), streams=4
    ),
    "a draft model drifts": World(
        stairs, lookup=always(0.2), model=drifting(0.2, 0.85), level=level(0.1)
    ),
    "short requests, a draft model that drifts": World(
        stairs,
        model=lambda request, place: 0.05 if request // 50 % 2 else 0.85,
        level=level(0.15),
        catching_up=0.004,
        output=24,
        seed=2,
    ),
    "short requests, a draft model": World(
        stairs, model=always(0.7), level=level(0.2), catching_up=0.005, output=24, streams=4
    ),
    "a noisy machine": World(linear, lookup=always(0.3), noise=0.2),
    "load comes and goes": World(
        linear, lookup=always(0.2), covers=0.5, streams=16, load=by_steps(1, 1.25, 1.5, 1.25)
    ),
    "load comes and goes, one stream": World(
        linear, lookup=always(0.5), load=by_steps(1, 1.8, 1.5, 1.2, every=150)
    ),
    "load falls while drafts pay": World(
        steep,
        lookup=drifting(0.2, 0.7, every=16),
        streams=16,
        burst=16,
        load=by_steps(1.6, 1.45, 1.3, 1.15, 1.0, every=97),
    ),
    "load falls bit by bit": World(
        linear, lookup=always(0.2), streams=16, load=by_steps(2, 1.8, 1.6, 1.4, 1.2, 1, every=60)
    ),
}
WORLDS = [
    *(pytest.param(world, id=name) for name, world in EVERY_DAY.items()),
    *(pytest.param(world, id=name, marks=pytest.mark.slow) for name, world in OTHERS.items()),
]


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_there_are_thirty_worlds():
    assert len(WORLDS) >= 30


@pytest.mark.parametrize("world", WORLDS)
def test_no_fixed_plan_is_much_better_in_hindsight(world, clock):
    found = outcome(world, clock, BEGIN, END)
    assert found.regret <= MOST, (found.best, found.regret)


def seconds(world, clock, *others):
    """The time of 3000 tokens after fifty steps, with further sources."""
    engine = Engine(world, clock).with_auto(*others)
    while engine.num_steps < 50:
        engine.step()
    start = clock.now
    return engine.run(engine.num_tokens + 3000) - start


@pytest.mark.parametrize(
    "bad",
    [{}, {"seconds": 0.005}, {"seconds": 0.1}, {"error": ValueError("broken")}],
    ids=["false estimates", "slow", "stalls", "raises"],
)
@pytest.mark.parametrize("p", [0.05, 0.7])
def test_a_bad_source_costs_little_after_fifty_steps(bad, p, clock):
    world = World(linear, lookup=always(p), noise=0.0)
    without = seconds(world, clock)
    assert seconds(world, clock, BadSource(clock, **bad)) <= 1.01 * without


def test_false_estimates_cost_other_sources_no_trust(clock):
    world = World(linear, lookup=always(0.7), noise=0.0)
    engine = Engine(world, clock).with_auto(BadSource(clock))
    while engine.num_steps < 200:
        engine.step()
    [acceptance] = engine.speculator.acceptance.every
    trust = {name: account.trust for name, account in acceptance.accounts.items()}
    assert trust["bad"] < 0.05 and trust["lookup"] > 0.3


class Oracle(BadSource):
    """Its estimates take a tenth of a step, and are always zero."""

    def expected_accepted(self, id, text):
        self.clock.now += 0.001
        return 0.0


def test_estimates_that_save_nothing_are_soon_rare(clock):
    world = World(linear, lookup=always(0.05), noise=0.0)
    without = seconds(world, clock)
    assert seconds(world, clock, Oracle(clock)) < 1.02 * without, "a tenth in every eighth step"


def test_other_load_changes_no_plan(clock):
    """A neighbor takes half of the machine for a while."""
    busy = [1.0]
    world = World(lambda rows, context: busy[0] * stairs(rows, context), lookup=always(0.8))
    engine, rates = Engine(world, clock).with_auto(), []
    for load, settles in ((1.0, 300), (2.0, 100), (1.0, 20)):
        busy[0] = load
        for _ in range(settles):
            engine.step()
        start, tokens = clock.now, engine.num_tokens
        for _ in range(500):
            engine.step()
        rates.append((engine.num_tokens - tokens) / (clock.now - start))
    quiet, loaded, after = rates
    assert loaded == pytest.approx(quiet / 2, rel=0.1)
    assert after == pytest.approx(quiet, rel=0.1)


def test_few_draft_tokens_are_verified_where_every_row_reads_more_experts(clock):
    engine, sizes = Engine(World(experts, lookup=always(0.8)), clock).with_auto(), []
    for _ in range(600):
        engine.step()
        plan = engine.speculator.plan
        sizes += [plan.rows - 1] if plan is not None and engine.num_steps > 300 else []
    assert sum(1 <= size <= 3 for size in sizes) > 0.8 * len(sizes) > 0
