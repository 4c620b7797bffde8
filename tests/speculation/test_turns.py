"""How often a request's guesses are made."""

import pytest

from specserve.speculation.constants import AT_FIRST, EXPLORATION, MOST_LOST
from tests.speculation.oracle_accounts import SourceAccount


def due(account, id, saved):
    """What a request's turn in this step shows, if it has one."""
    share = account.of(id)
    return [(share, saved, not share.pays)] if share.pays or account.is_exploring else []


def steps_of(account, saved, id=1, num_steps=1000):
    """The steps in which a request has its turn, each of which saves so much of its time."""
    found = []
    for step in range(num_steps):
        account.next_step(1)
        if outcome := due(account, id, saved):
            found.append(step)
            account.add(outcome)
    return found


@pytest.mark.parametrize("saved", (-0.1, -1.0, -2.5))
def test_trials_lose_a_small_share_of_all_steps_time(saved):
    account = SourceAccount()
    steps_of(account, saved)
    lost = -saved * len(steps_of(account, saved, num_steps=10000))
    assert EXPLORATION / 2 < lost / 10000 <= 1.1 * EXPLORATION


def test_what_the_first_trials_lose_is_bounded():
    assert len(steps_of(SourceAccount(), -1.0, num_steps=100)) <= AT_FIRST + 2


def test_a_trial_that_takes_very_long_is_followed_by_another():
    account = SourceAccount()
    steps_of(account, -1000.0, num_steps=3)
    wait = int((AT_FIRST + MOST_LOST) / EXPLORATION)
    assert len(steps_of(account, -1000.0, num_steps=3 * wait)) > 2


def test_the_first_turn_of_all_decides_nothing():
    account = SourceAccount()
    steps_of(account, -2.0, num_steps=1)
    assert len(steps_of(account, 0.5, num_steps=100)) == 100


def test_a_small_loss_of_a_long_step_is_free():
    assert len(steps_of(SourceAccount(), -0.01)) == 1000


def test_a_trial_that_saves_time_is_followed_by_others_at_once():
    account = SourceAccount()
    steps_of(account, -2.5)
    first, *others = steps_of(account, 0.5, num_steps=500)
    assert others == [*range(first + 1, 500)]


def test_one_loss_among_gains_changes_nothing():
    account = SourceAccount()
    steps_of(account, 0.5, num_steps=20)
    steps_of(account, -0.5, num_steps=1)
    assert len(steps_of(account, 0.5, num_steps=20)) == 20


def test_a_new_request_begins_with_what_others_have_shown():
    account = SourceAccount()
    steps_of(account, -2.0, id=1)
    assert len(steps_of(account, -2.0, id=2, num_steps=100)) <= 1
    account = SourceAccount()
    steps_of(account, 0.5, id=1)
    account.left = -AT_FIRST
    assert len(steps_of(account, 0.5, id=2, num_steps=20)) == 20


def test_gains_of_a_request_pay_for_no_trials_of_another():
    account, lost = SourceAccount(), 0
    steps_of(account, -2.0, id=2, num_steps=300)
    for _ in range(5000):
        account.next_step(1)
        outcomes = due(account, 1, 1.0) + due(account, 2, -2.0)
        account.add(outcomes, num_roots=2)
        lost += len(outcomes) == 2
    assert account.of(1).pays and lost <= 1.1 * 5000 * EXPLORATION


def test_requests_that_lose_time_are_tried_in_the_same_steps():
    account = SourceAccount()
    steps_of(account, -2.0, id=1, num_steps=77)
    alone = 0
    for _ in range(1000):
        account.next_step(1)
        outcomes = due(account, 1, -2.0) + due(account, 2, -2.0)
        alone += len(outcomes) == 1
        account.add(outcomes, num_roots=2)
    assert not alone
