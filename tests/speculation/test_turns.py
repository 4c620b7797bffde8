"""How often a request's guesses are made."""

import pytest

from specserve.scheduling.planner import AT_FIRST, EXPLORATION, ExplorationBudget


def steps_of(benefits, saved, id=1, num_steps=1000):
    """The steps in which a request has its turn, each of which saves so much of its time."""
    found = []
    for step in range(num_steps):
        benefits.next_step()
        if benefits.is_due(id):
            found.append(step)
            benefits.add([(benefits.of(id), saved)])
    return found


@pytest.mark.parametrize("saved", (-0.1, -1.0, -2.5))
def test_trials_lose_a_small_share_of_all_steps_time(saved):
    benefits = ExplorationBudget()
    steps_of(benefits, saved)
    lost = -saved * len(steps_of(benefits, saved, num_steps=10000))
    assert EXPLORATION / 2 < lost / 10000 <= 1.1 * EXPLORATION


def test_what_the_first_trials_lose_is_bounded():
    assert len(steps_of(ExplorationBudget(), -1.0, num_steps=100)) <= AT_FIRST + 2


def test_a_trial_that_takes_very_long_is_followed_by_another():
    benefits = ExplorationBudget()
    steps_of(benefits, -1000.0, num_steps=3)
    assert len(steps_of(benefits, -1000.0, num_steps=2000)) > 2


def test_the_first_turn_of_all_decides_nothing():
    benefits = ExplorationBudget()
    steps_of(benefits, -2.0, num_steps=1)
    assert len(steps_of(benefits, 0.5, num_steps=100)) == 100


def test_a_small_loss_of_a_long_step_is_free():
    assert len(steps_of(ExplorationBudget(), -0.01)) == 1000


def test_a_trial_that_saves_time_is_followed_by_others_at_once():
    benefits = ExplorationBudget()
    steps_of(benefits, -2.5)
    first, *others = steps_of(benefits, 0.5, num_steps=500)
    assert others == [*range(first + 1, 500)]


def test_one_loss_among_gains_changes_nothing():
    benefits = ExplorationBudget()
    steps_of(benefits, 0.5, num_steps=20)
    steps_of(benefits, -0.5, num_steps=1)
    assert len(steps_of(benefits, 0.5, num_steps=20)) == 20


def test_a_new_request_begins_with_what_others_have_shown():
    benefits = ExplorationBudget()
    steps_of(benefits, -2.0, id=1)
    assert len(steps_of(benefits, -2.0, id=2, num_steps=100)) <= 1
    benefits = ExplorationBudget()
    steps_of(benefits, 0.5, id=1)
    benefits.left = -AT_FIRST
    assert len(steps_of(benefits, 0.5, id=2, num_steps=20)) == 20


def test_gains_of_a_request_pay_for_no_trials_of_another():
    benefits, lost = ExplorationBudget(), 0
    steps_of(benefits, -2.0, id=2, num_steps=300)
    for _ in range(5000):
        benefits.next_step()
        due = [
            (benefits.of(id), saved) for id, saved in ((1, 1.0), (2, -2.0)) if benefits.is_due(id)
        ]
        if due:
            benefits.add(due, num_roots=2)
        lost += len(due) == 2
    assert benefits.of(1).pays and lost <= 1.1 * 5000 * EXPLORATION


def test_requests_that_lose_time_are_tried_in_the_same_steps():
    benefits = ExplorationBudget()
    steps_of(benefits, -2.0, id=1, num_steps=77)
    alone = 0
    for _ in range(1000):
        benefits.next_step()
        due = [id for id in (1, 2) if benefits.is_due(id)]
        alone += len(due) == 1
        if due:
            benefits.add([(benefits.of(id), -2.0) for id in due], num_roots=2)
    assert not alone
