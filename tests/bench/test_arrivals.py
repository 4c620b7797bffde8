"""When requests arrive: at the given rate, by a random draw that depends on the seed only."""

from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from specserve_bench.results import Load


def test_a_concurrency_has_everything_due():
    assert Load(concurrency=3).due_times(4) == [0.0] * 4


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 3.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_asked_for(burstiness):
    times = Load(rate=5.0, burstiness=burstiness).due_times(20001)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0
    assert fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness, rel=0.05)


def test_the_seed_decides():
    assert Load(rate=5.0, seed=1).due_times(9) == Load(rate=5.0, seed=1).due_times(9)
    assert Load(rate=5.0, seed=1).due_times(9) != Load(rate=5.0, seed=2).due_times(9)


def test_the_same_chance_at_twice_the_rate_is_twice_as_fast():
    slow, fast = (Load(rate=rate, seed=3).due_times(50) for rate in (1.0, 2.0))
    assert slow == pytest.approx([2 * t for t in fast])
