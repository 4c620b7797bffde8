"""Accounts and choices in C++, against the same in Python, step by step in random worlds."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from specserve.exchange.messages import Stats
from specserve.speculation import planner
from specserve.speculation.adaptive_speculator import AdaptiveSpeculator
from specserve.speculation.planner import NoLibraryError, Plans
from specserve_kernels.cpu import BuildError
from tests.engine.clock import Clock
from tests.speculation import oracle_requests, oracle_speculator
from tests.speculation.oracle_accounts import OracleStats, SourceAccount, Trust
from tests.speculation.oracle_speculator import OracleSpeculator
from tests.speculation.test_regret import (
    always,
    by_request,
    drifting,
    experts,
    level,
    linear,
    stairs,
)
from tests.speculation.worlds import BadSource, Engine, LookupSource, World

STEPS = 120


class Unforeseen(LookupSource):
    """Proposes the same without estimates, so each request has an average."""

    name, is_estimating = "unforeseen", False

    def candidates(self, items):
        self.engine.clock.now += 0.001
        return super().candidates(items)


@st.composite
def worlds(draw):
    p, q = draw(st.floats(0.05, 0.95)), draw(st.floats(0.05, 0.95))
    lookup = draw(st.sampled_from([always(p), drifting(p, q), by_request]))
    model = draw(st.sampled_from([None, always(q), drifting(q, p, every=3)]))
    return World(
        draw(st.sampled_from([linear, stairs, experts])),
        lookup=lookup,
        score=draw(st.floats(0.05, 0.95)),
        covers=draw(st.sampled_from([0.3, 1.0])),
        host=draw(st.sampled_from([0.0, 1e-4, 2e-3])),
        model=model,
        level=level(draw(st.sampled_from([0.02, 0.1, 0.4]))),
        catching_up=draw(st.sampled_from([0.0, 0.004])),
        streams=draw(st.sampled_from([1, 3, 8])),
        prompt=draw(st.sampled_from([16, 700])),
        output=draw(st.sampled_from([12, 60])),
        seed=draw(st.integers(0, 9)),
    )


def state_of(engine):
    """The drafts and the accounts after a step."""
    speculator = engine.speculator
    roots = [
        (id, root.scheduled.draft, root.proposed, root.tried)
        for id, root in speculator.roots.items()
    ]
    numbers = [*(prices(speculator) if speculator.roots else ()), engine.clock.now]
    for stats in speculator.acceptance.every:
        is_oracle = isinstance(stats, OracleStats)
        if is_oracle:
            numbers += [*(trust.value for trust in stats.kept), stats.planning, stats.gain]
        else:
            numbers += stats.state[:4]
        for name in speculator.names:
            for id in [*engine.texts]:
                numbers += account_of(stats, name, id)
    sums = speculator.spec_stats.sums
    counted = [(n, s.proposed, s.verified, s.accepted, s.accepted_at) for n, s in sums.items()]
    return roots, counted, numbers + [s.saved_seconds for s in sums.values()]


def prices(speculator):
    """Seconds that an accepted draft token saved, and that a row took."""
    if isinstance(speculator, OracleSpeculator):
        return speculator.saved_per_draft_token, speculator.row_seconds
    return speculator.plans.told.saved, speculator.plans.told.row


def account_of(stats, name, id):
    own = stats.account(name) if isinstance(stats, OracleStats) else stats.account(name, id)
    if not isinstance(own, SourceAccount):
        return [float(x) for x in own]
    share, trust = own.by_request.get(id, own.all), own.trust
    return [
        *(own.left, own.earned, own.loss, own.seconds, trust.value),
        *(float(own.is_exploring), float(own.may_pay(id)), own.all.saved, own.all.num_steps),
        *(share.saved, share.num_steps, share.num_own, own.spent, own.saved),
        *(trust.saved, trust.promised),
    ]


def states(world, clock, others, start, cls=None):
    clock.now = start
    engine = Engine(world, clock).with_auto(*(make(clock) for make in others))
    for source in engine.speculator.sources:
        source.engine = engine
    if cls is not None:
        before = engine.speculator
        given = before.sources, before.model_sources, engine.scheduler, None, Stats()
        engine.speculator = cls(*given)
    found = []
    for _ in range(STEPS):
        engine.step()
        found.append(state_of(engine))
    return found


def unforeseen(clock):
    return Unforeseen(None)


def bad(clock):
    return BadSource(clock)


def slow(clock):
    return BadSource(clock, seconds=0.02)


def failing(clock):
    return BadSource(clock, error=ValueError("broken"))


@pytest.fixture(scope="module")
def clock():
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        for module in (oracle_requests, oracle_speculator):
            patch.setattr(module, "perf_counter", lambda: clock.now)
        yield clock


OTHERS = st.sampled_from([[], [bad], [slow], [failing], [unforeseen], [failing, unforeseen]])


@settings(max_examples=20, deadline=None, phases=set(Phase) - {Phase.shrink})
@given(worlds(), OTHERS)
def test_accounts_and_drafts_are_those_of_the_slow_form(clock, world, others):
    start = clock.now
    want = states(world, clock, others, start, OracleSpeculator)
    got = states(world, clock, others, start)
    for number, (expected, found) in enumerate(zip(want, got, strict=True)):
        assert found[:2] == expected[:2], number
        assert found[2] == pytest.approx(expected[2], rel=1e-9, abs=1e-12), number


@settings(max_examples=8, deadline=None, phases=set(Phase) - {Phase.shrink})
@given(worlds(), OTHERS)
def test_a_request_that_gets_another_source_keeps_what_its_step_took_and_saved(
    clock, world, others
):
    """As if a grammar began at any step: its sources are bound again before the accounts settle."""
    start, due = clock.now, AdaptiveSpeculator.due
    want = states(world, clock, others, start)

    def rebound(speculator, *args):
        for root in speculator.served.values():
            root.bind()
        return due(speculator, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdaptiveSpeculator, "due", rebound)
        assert states(world, clock, others, start) == want


def test_auto_needs_the_library(monkeypatch):
    def fail():
        raise BuildError("no compiler")

    monkeypatch.setattr(planner, "plan_functions", fail)
    with pytest.raises(NoLibraryError, match="Install a C\\+\\+ compiler"):
        Plans()


def test_trust_follows_what_was_kept_of_promises_and_returns_without_evidence():
    trust = Trust(rate=0.1, least=0.5, most=1.25)
    assert trust.value == 1.0
    for _ in range(200):
        trust.add(0.7, 1.0)
    assert trust.value == pytest.approx(0.7, abs=0.01)
    for _ in range(40):
        trust.fade()
    assert trust.value == pytest.approx(1.0, abs=0.01)
    for saved, value in ((0.0, 0.5), (9.0, 1.25)):
        for _ in range(200):
            trust.add(saved, 1.0)
        assert trust.value == value
