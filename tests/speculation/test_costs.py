"""Estimates of step times in C++, against the same in Python, and without a compiled library."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.scheduling.scheduler import prompt_rows
from specserve.speculation.constants import STALE
from specserve.speculation.costs import KnownCosts, Step, StepCosts, UncompiledCosts
from specserve_kernels.cpu import BuildError, drafting
from tests.speculation.oracle_costs import OracleCosts


def same(costs, oracle):
    """Compare all estimates, and what is known."""
    close = pytest.approx
    by_edge = [costs.table(), oracle.table()]
    assert [*by_edge[0].values()] == close([*by_edge[1].values()], rel=1e-9)
    assert costs.added == close(oracle.added, rel=1e-6, abs=1e-14)
    assert costs.slowdown == close(oracle.slowdown, rel=1e-9)
    assert [*map(bool, costs.known_edges)] == oracle.known_edges
    step = Step(9, 2000, 3, 3, prompt_rows=6, attended=9000, root_context=900)
    sizes = [0, 1, 5, 40, 90, 400]
    for is_hopeful in (False, True):
        want = oracle.of_each(step, sizes, is_hopeful)
        assert costs.of_each(step, sizes, is_hopeful) == close(want, rel=1e-9)
        for rows in (0, 1, 7, 70, 129, 1000):
            given = rows, 300, 2, is_hopeful
            assert costs.seconds(*given) == close(oracle.seconds(*given), rel=1e-9)
    assert costs.of_each(step, sizes)[0] == costs.seconds(9, 2000, 3, False, 9000), "exactly"
    for rows in (1, 3, 64, 500):
        assert costs.is_known(rows) == oracle.is_known(rows)
        assert costs.is_stale(rows) == oracle.is_stale(rows)


def run(chance, each, steps, machine):
    """Time steps of a random machine, whose other load changes."""
    base, row, token, request, noise = machine
    sizes = chance.sample([1, 2, 3, 4, 8, 9, 16, 40, 64, 70, 97, 128, 300], 4)
    slowed = 1.0
    for _ in range(steps):
        if chance.random() < 0.02:
            slowed = chance.choice((1.0, 1.0, 0.3, 2.0, 5.0))
        rows, requests = chance.choice(sizes), chance.randint(1, 4)
        context = chance.choice((0, 100, 900, 7000)) * requests
        attended = chance.choice((None, float(rows * context)))
        seconds = base + row * rows + token * context + request * requests
        seconds *= slowed * (1 + noise * chance.expovariate(1))
        if chance.random() < 0.01:
            seconds = chance.choice((-1.0, float("nan"), 1e9, 1e-7))
        for costs in each:
            costs.observe(rows, context, requests, seconds, attended)


SECONDS = st.floats(1e-4, 0.03), st.floats(0, 1e-3), st.floats(0, 1e-6), st.floats(0, 1e-3)
MACHINES = st.tuples(*SECONDS, st.floats(0, 1))


@settings(max_examples=40)
@given(st.integers(0, 1 << 32), MACHINES, MACHINES, st.sampled_from((1, 5, 64, 500)))
def test_estimates_are_those_of_the_python_form(seed, machine, other, most):
    chance = Random(seed)
    each = StepCosts(most, 1e-7), OracleCosts(most, 1e-7)
    for steps in (1, 3, 30, 60):
        run(chance, each, steps, machine)
        same(*each)
    known = each[0].known()
    assert known.buckets.keys() == each[1].known().buckets.keys()
    again = StepCosts(64, known=known), OracleCosts(64, known=known)
    same(*again)
    run(chance, again, 8, chance.choice((machine, other)))
    same(*again)
    for costs in each:
        costs.reset()
    same(*each)


def test_old_steps_are_forgotten_as_in_the_python_form():
    each = StepCosts(64), OracleCosts(64)
    for costs in each:
        for _ in range(4):
            costs.observe(4, 1000, 1, 1.0)
        for _ in range(2 * STALE):
            costs.observe(1, 1000, 1, 0.01)
    same(*each)
    assert not each[0].is_known(4)


def test_without_a_library_estimates_follow_the_latest_steps(monkeypatch):
    def fail():
        raise BuildError("no compiler")

    monkeypatch.setattr(drafting, "cost_functions", fail)
    costs = StepCosts(64, 1e-6, known=KnownCosts({}))
    assert isinstance(costs, UncompiledCosts) and not costs.has_steps
    for rows in (1, 17, 1, 17, 1):
        costs.observe(rows, 1000, 1, 0.02 * (1 + rows / 16) + 1e-3)
    assert costs.has_steps and costs.known() == KnownCosts({})
    assert costs.seconds(48, 500, 1) == pytest.approx(0.0805)
    step = Step(1, 0, 1, 1, allowed=0.05)
    few = prompt_rows(step, costs, 64, 64)
    assert 0 < few < prompt_rows(Step(1, 0, 1, 1), costs, 64, 64) == 64, "targets still count"
    costs.reset()
    assert not costs.has_steps and costs.table()[1] == pytest.approx(1e-3)
