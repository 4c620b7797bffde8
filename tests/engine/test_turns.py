"""How often a request's guesses are made."""

from specserve.engine.turns import FIRST, LAST, Turns


def steps_of(turns, saved, id=1, num_steps=1000):
    """The steps in which a request has its turn, each of which saves so much of its time."""
    found = []
    for step in range(num_steps):
        turns.next_step()
        if turns.is_due(id):
            found.append(step)
            turns.add(id, saved)
    return found


def test_a_request_whose_guesses_lose_time_is_asked_ever_more_rarely():
    asked = steps_of(Turns(), -0.1)
    assert len(asked) < 30
    assert asked[-1] - asked[-2] == LAST


def test_a_small_loss_of_a_long_step_is_free():
    assert len(steps_of(Turns(), -0.01)) == 1000


def test_a_turn_that_saves_time_is_followed_by_others_at_once():
    turns = Turns()
    steps_of(turns, -0.1)
    assert len(steps_of(turns, 0.5, num_steps=100)) > 100 - LAST


def test_one_loss_among_gains_changes_nothing():
    turns = Turns()
    steps_of(turns, 0.5, num_steps=20)
    steps_of(turns, -0.5, num_steps=1)
    assert len(steps_of(turns, 0.5, num_steps=20)) == 20


def test_a_new_request_begins_with_what_others_have_shown():
    turns = Turns()
    steps_of(turns, -0.1, id=1)
    assert len(steps_of(turns, -0.1, id=2, num_steps=FIRST)) == 1
    turns.forget(2)
    assert len(steps_of(turns, 0.5, id=2, num_steps=20)) > 20 - FIRST


def test_requests_that_lose_time_have_their_turns_in_the_same_steps():
    turns = Turns()
    first = steps_of(turns, -0.1, id=1, num_steps=77)
    both = [set[int](), set[int]()]
    for step in range(len(first), 600):
        turns.next_step()
        for id in (1, 2):
            if turns.is_due(id):
                both[id - 1].add(step)
                turns.add(id, -0.1)
    assert both[0] <= both[1]
