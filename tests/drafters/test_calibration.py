"""What is learnt of sources that are scripted: they are right as often as a test says."""

from itertools import pairwise
from math import nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_drafters import ROOT
from specserve_drafters.trie import LEAST, MOST, WORTH
from tests.drafters.oracle_trie import Calibration, Trie


def learn(calibration, steps, right, score=0.6, depth=1, id=0, seed=0, source="a"):
    """A chain of `depth` guesses a step, each right with this probability given its parent."""
    random = Random(seed)
    for _ in range(steps):
        trie, node, tokens = Trie(calibration, id), ROOT, []
        for _ in range(depth):
            node = trie.add(node, 1, score, source)
            if len(tokens) == trie.depths[node] - 1:
                tokens.append(1 if random.random() < right else 2)
        trie.observe(tokens)


def estimate(calibration, score=0.6, depth=1, id=0, source="a"):
    return calibration.calibrators(id)[source].weigh(score, depth)[3]


def test_at_first_a_score_is_believed():
    assert estimate(Calibration(), 0.6) == pytest.approx(0.6)


@pytest.mark.parametrize("right", [0.02, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("score", [0.05, 0.5, 0.99])
def test_it_converges_to_how_often_a_source_is_right(right, score):
    calibration, found = Calibration(), []
    for seed in range(20):
        learn(calibration, 20, right, score, seed=seed)
        found.append(estimate(calibration, score))
    assert sum(found[10:]) / 10 == pytest.approx(right, abs=0.08)
    new = estimate(calibration, score, id=1)
    assert new == pytest.approx(right, abs=0.12), (
        "what is known of all requests is known of a new one"
    )


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9), (0.8, 0.4)])
def test_it_follows_a_change_within_fifty_steps(before, after):
    found = []
    for seed in range(20):
        calibration = Calibration()
        learn(calibration, 300, before, seed=seed)
        learn(calibration, 50, after, seed=seed + 100)
        found.append(estimate(calibration))
    assert sum(found) / len(found) == pytest.approx(after, abs=0.1)


def test_one_draft_moves_an_estimate_to_where_it_was_right():
    for score in 0.05, 0.5, 0.95:
        right, wrong = Calibration(), Calibration()
        learn(right, 1, 1.0, score)
        learn(wrong, 1, 0.0, score)
        assert estimate(wrong, score, id=1) < score < estimate(right, score, id=1)


def test_a_draft_whose_parent_was_wrong_is_not_counted():
    calibration = Calibration()
    learn(calibration, 200, 0.0, depth=3)
    assert estimate(calibration, depth=1) < 0.05
    kinds = calibration.table()["a"]
    assert [kind["depth"] for kind in kinds] == [1]


def test_each_depth_is_learnt_on_its_own():
    calibration = Calibration()
    for step in range(300):  # the first is right in half of the steps, the second always then
        trie = Trie(calibration, 0)
        trie.add(trie.add(ROOT, 1, 0.6, "a"), 1, 0.6, "a")
        trie.observe([1, 1] if step % 2 else [2])
    assert estimate(calibration, depth=2) - estimate(calibration, depth=1) > 0.3


def test_a_candidate_that_was_not_verified_teaches_too():
    """What follows the root is known in any case: a source that is off can prove itself."""
    calibration = Calibration()
    for _ in range(50):
        trie = Trie(calibration, 0)
        trie.add(ROOT, 7, 0.1, "a")
        trie.observe([7])
    assert estimate(calibration, 0.1) > 0.8


def test_one_request_may_differ_from_all_others():
    calibration = Calibration()
    for seed in range(50):
        learn(calibration, 8, 0.8, seed=seed, id=1)
        learn(calibration, 2, 0.1, seed=seed + 50, id=2)
    assert estimate(calibration, id=1) - estimate(calibration, id=2) > 0.3
    calibration.forget(2)
    assert estimate(calibration, id=2) > 0.5


def test_what_nothing_confirms_of_a_request_goes_back_to_what_holds_for_all():
    """So a source that is off after bad luck is not off for ever."""
    calibration = Calibration()
    learn(calibration, 200, 0.8, id=1)
    learn(calibration, 10, 0.0, id=2)
    unlucky = estimate(calibration, id=2)
    learn(calibration, 100, 0.8, id=2, source="another")
    assert unlucky < 0.4 and estimate(calibration, id=2) > 0.6


def test_sources_are_distinguished():
    calibration = Calibration()
    learn(calibration, 100, 0.1, source="a")
    assert estimate(calibration, source="b") == pytest.approx(0.6)


@pytest.mark.parametrize("is_worth", [True, False])
def test_what_agreement_is_worth_is_learnt(is_worth):
    """Two sources, each right half of the time; where they agree they are always right, or no more
    often than each of them.
    """
    calibration, random = Calibration(), Random(0)
    for _ in range(600):
        trie = Trie(calibration, 0)
        agree = random.random() < 0.5
        trie.add(ROOT, 1, 0.5, "a")
        trie.add(ROOT, 1 if agree else 2, 0.5, "b")
        right = agree if is_worth else random.random() < 0.5
        trie.observe([1 if right else 3])
    (worth,) = calibration.worth.values()
    assert worth > 3 * WORTH if is_worth else worth < WORTH


def test_how_often_a_source_finds_the_right_child_is_learnt_beyond_what_is_there():
    calibration = Calibration()
    reach = []
    for _ in range(200):
        trie = Trie(calibration, 0)
        trie.add(ROOT, 1, 0.6, "a")
        reach.append(trie.reach(ROOT, "b"))
        trie.ask(ROOT, "b")
        trie.add(ROOT, 1, 0.9, "b")  # the same token: it adds nothing
        trie.observe([1])
    assert reach[0] == pytest.approx(0.7 * 0.4), "of what is missing at first"
    assert reach[-1] < 0.05


@given(st.lists(st.tuples(st.floats(), st.booleans()), max_size=30), st.floats())
def test_whatever_a_source_says_and_is_its_estimate_is_a_probability(said, score):
    calibration = Calibration()
    for p, is_right in said:
        trie = Trie(calibration, 0)
        trie.add(ROOT, 1, p, "a")
        trie.observe([1 if is_right else 2])
    assert LEAST <= estimate(calibration, score) <= MOST


def test_scores_of_one_kind_keep_their_order():
    calibration = Calibration()
    learn(calibration, 100, 0.3, score=0.6)
    found = [estimate(calibration, score) for score in (0.51, 0.55, 0.6, 0.64)]
    assert all(a < b for a, b in pairwise(found))
    assert estimate(calibration, nan) == estimate(calibration, None)
