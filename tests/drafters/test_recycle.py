"""Tokens' likeliest successors as a source of guesses."""

from array import array
from math import nan
from random import Random

import pytest

from specserve_drafters import ROOT, DraftRequest, recycle
from specserve_drafters.base import SourceRequest
from specserve_drafters.recycle import NUM_SLOTS, OLD, WAYS, RecycleSource, Successors

AFTER = {1: ([2, 3], [0.5, 0.25]), 2: ([4, 1], [0.9, 0.1]), 3: ([5], [1.0])}


def source_of(scope=(0, "", ""), id=1, is_learnt=True, after=AFTER):
    source = RecycleSource()
    source.begin(SourceRequest(id, array("i"), 0, scope, is_learnt=is_learnt))
    for token, (ids, p) in after.items():
        source.enter_successors(id, token, ids, p)
    return source


def asked(source, *text, limit=8, id=1):
    (draft_tokens,) = source.candidates([DraftRequest(id, array("i", text), limit, 0.0, 0)])
    return draft_tokens


def paths(draft_tokens):
    found = {ROOT: ()}
    for number, guess in enumerate(draft_tokens, 1):
        found[number] = (*found[guess.parent], guess.token)
    return [*found.values()][1:]


TREES = {  # the last token, the limit -> paths, the likeliest first
    "successors of successors": (1, 4, [(2,), (2, 4), (3,), (3, 5)]),
    "no more than are asked for": (1, 1, [(2,)]),
    "a circle is gone through again": (2, 3, [(4,), (1,), (1, 2)]),
    "nothing is known": (9, 4, []),
}


@pytest.mark.parametrize(("token", "limit", "want"), TREES.values(), ids=TREES)
def test_the_likeliest_paths_come_first(token, limit, want):
    assert paths(asked(source_of(), 7, token, limit=limit)) == want


def test_a_draft_has_its_probability_after_its_parent():
    draft_tokens = asked(source_of(), 1, limit=4)
    assert [g.p for g in draft_tokens] == pytest.approx([0.5, 0.9, 0.25, 1.0], abs=1e-4)
    assert {g.source for g in draft_tokens} == {"recycle"}


def test_successors_are_wanted_where_they_are_missing_and_again_once_they_are_old():
    source = source_of()
    assert source.wanted_successors(1, [1, 2, 8, 9]) == [2]
    source.enter_successors(1, 8, [9], [1.0])
    assert source.wanted_successors(1, [1, 2, 8, 9]) == []
    source.wanted_successors(1, [1] * (OLD + 1))
    assert source.wanted_successors(1, [2, 8, 1]) == [0, 1]
    source.enter_successors(1, 2, [4], [1.0])
    assert source.wanted_successors(1, [2, 8, 1]) == [1]
    assert paths(asked(source, 2)) == [(4,)], "the new successors are in the place of the old ones"


def test_nothing_is_learnt_from_a_request_that_asked_for_that():
    source = source_of(is_learnt=False)
    assert source.wanted_successors(1, [8, 9]) == []
    assert paths(asked(source, 1, limit=1)) == [(2,)], "it may have guesses"


@pytest.mark.parametrize("other", [(0, "b"), (1, "a")])
def test_an_owner_finds_nothing_of_another(other):
    source = source_of(scope=(0, "a"))
    source.begin(SourceRequest(2, array("i"), 0, other, is_learnt=True))
    assert asked(source, 1, id=2) == [] and source.expected_accepted(2, array("i", [1])) == 0.0
    for _ in range(300):
        source.wanted_successors(1, [1, 9])  # where it was wrong
    source.enter_successors(2, 1, *AFTER[1])
    assert source.expected_accepted(2, array("i", [1])) == pytest.approx(0.5, abs=1e-3)
    assert source.expected_accepted(1, array("i", [1])) < 0.1


def test_an_owner_that_was_forgotten_comes_back_as_a_new_one(monkeypatch):
    source = source_of()
    source.forget(1)
    for salt in range(300):
        source.begin(SourceRequest(2, array("i"), 0, (0, str(salt)), is_learnt=True))
        source.enter_successors(2, 1, [salt], [1.0])
        source.forget(2)
    source.begin(SourceRequest(1, array("i"), 0, (0, "", ""), is_learnt=True))
    assert asked(source, 1) == []
    source.begin(SourceRequest(2, array("i"), 0, (0, "299"), is_learnt=True))
    assert paths(asked(source, 1, id=2))[0] == (299,), "of the last ones all is kept"


def test_what_it_promises_is_how_often_first_successors_were_right():
    source, random = source_of(after={1: ([2], [0.5])}), Random(0)
    for _ in range(400):
        source.wanted_successors(1, [1, 2 if random.random() < 0.8 else 3])
    assert source.expected_accepted(1, array("i", [1])) == pytest.approx(0.8, abs=0.08)
    assert source.expected_accepted(1, array("i", [3])) == 0


def test_probabilities_that_are_no_numbers_are_not_entered():
    source = source_of(after={1: ([2, 3], [nan, nan])})
    assert asked(source, 1) == []


def test_a_tree_looks_up_each_draft_once(monkeypatch):
    source, calls = source_of(after={n: ([1, 2], [0.5, 0.5]) for n in (1, 2)}), []
    find = source.table.find
    source.table.find = lambda *key: calls.append(key) or find(*key)
    assert len(asked(source, 1, limit=63)) == 63 and len(calls) == 64


@pytest.mark.parametrize("num_owners", [1, 60])
def test_memory_stays_below_4_megabytes_over_a_million_tokens(num_owners):
    source, random = RecycleSource(), Random(0)
    for id in range(num_owners):
        source.begin(SourceRequest(id, array("i"), 0, (0, str(id)), is_learnt=True))
    size = source.table.num_bytes
    for n in range(1000):
        id, tokens = n % num_owners, [random.randrange(150_000) for _ in range(1001)]
        for place in source.wanted_successors(id, tokens)[::20]:
            source.enter_successors(id, tokens[place], [tokens[place + 1]] * 8, [0.1] * 8)
    table = source.table
    arrays = [each for each in vars(table).values() if isinstance(each, array)]
    held = sum(len(each) * each.itemsize for each in arrays)
    assert held == table.num_bytes == size < 4e6
    assert table.now == 1_000_000


def test_of_a_full_set_the_one_that_was_entered_first_gives_way(monkeypatch):
    monkeypatch.setattr(recycle, "NUM_SLOTS", WAYS)
    table = Successors()
    for token in range(WAYS + 1):
        table.now += 1
        table.enter(1, token, [token], [1.0], table.now)
    assert [table.find(1, token) is None for token in range(WAYS + 1)] == [True] + [False] * WAYS
    assert NUM_SLOTS > WAYS


def test_all_is_forgotten_on_reset():
    source = source_of()
    source.reset()
    assert asked(source, 1) == [] and source.expected_accepted(1, array("i", [1])) == 0.0
    source.enter_successors(1, 1, [5], [1.0])
    assert paths(asked(source, 1, limit=1)) == [(5,)]
