"""An expected text as a source of guesses: it follows the output, and finds it again."""

from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_drafters import DraftRequest
from specserve_drafters.base import SourceRequest
from specserve_drafters.prediction import Alignment, PredictionSource

TEXT = [*range(100, 160)]
EDITS = {  # what comes instead of TEXT -> the tokens that came as expected, of 60
    "nothing is changed": (TEXT, 60),
    "a token is another one": ([*TEXT[:20], 7, *TEXT[21:]], 59),
    "a token is two": ([*TEXT[:20], 7, 8, *TEXT[21:]], 58),
    "two tokens are one": ([*TEXT[:20], 7, *TEXT[22:]], 57),
    "a part is left out": ([*TEXT[:20], *TEXT[30:]], 49),
    "a part is put in": ([*TEXT[:20], *range(8), *TEXT[20:]], 59),
    "it begins elsewhere": (TEXT[25:], 34),
    "it has nothing in common": ([*range(60)], 0),
    "it goes on after the end": ([*TEXT, 1, 2, 3], 60),
}


def followed(expected, output):
    alignment = Alignment(expected)
    alignment.follow_all(output)
    return alignment


@pytest.mark.parametrize(("output", "num_came"), EDITS.values(), ids=EDITS)
def test_after_a_difference_the_place_is_found_again(output, num_came):
    assert followed(TEXT, output).num_came == num_came


def test_a_single_token_is_enough_near_by_and_not_far_away():
    assert followed(TEXT, [*TEXT[:10], TEXT[40]]).at == 41
    far = [*range(100, 1000)]
    assert followed(far, [*far[:10], far[800]]).at == 11
    assert followed(far, [*far[:10], *far[800:804]]).at == 804


def test_of_equal_places_the_nearest_is_taken():
    expected = [1, 2, 9, 3, 4, 9, 5, 6, 9, 7]
    assert followed(expected, [1, 2, 9, 3, 4, 8, 8, 9]).at == 6


@pytest.mark.parametrize(("repeated", "most"), [([1], 8), ([1, 2], 6), ([1, 2, 3], 6)])
def test_a_text_that_repeats_itself_is_not_taken_back_to_the_same_difference(repeated, most):
    output = (repeated * 120)[:120]
    expected = [*output[:40], 7, 8, *output[40:80], 7, 8, *output[80:]]
    alignment = Alignment(expected)
    missed = sum(not alignment.follow(token) for token in output)
    assert missed <= most


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=60))
def test_whatever_comes_the_place_is_one_of_the_text_and_its_length_is_true(expected, output):
    alignment = Alignment(expected)
    for n, token in enumerate(output, 1):
        before = alignment.at
        is_right = alignment.follow(token)
        assert is_right == (before < len(expected) and expected[before] == token)
        length = alignment.length
        if n >= 16 and length:
            assert expected[alignment.at - length : alignment.at] == output[n - length : n]
    assert 0 <= alignment.num_came <= min(len(expected), len(output))


def item(known, limit, id=1):
    return DraftRequest(id, array("i", known), limit, 0.0, 0)


def test_draft_tokens_are_what_comes_next_the_surer_the_longer_it_was_right():
    source, prompt = PredictionSource(), [5, 6, 7]
    source.begin(SourceRequest(1, array("i"), len(prompt), prediction=TEXT))
    (draft_tokens,) = source.candidates([item(prompt, 4)])
    assert [(g.token, g.parent) for g in draft_tokens] == [*zip(TEXT[:4], range(4), strict=True)]
    (later,) = source.candidates([item(prompt + TEXT[:20], 4)])
    assert [g.token for g in later] == TEXT[20:24] and later[0].p > draft_tokens[0].p
    (changed,) = source.candidates([item(prompt + TEXT[:20] + [7], 4)])
    assert [g.token for g in changed] == TEXT[21:25] and changed[0].p < draft_tokens[0].p
    (end,) = source.candidates([item(prompt + TEXT[:20] + [7] + TEXT[21:58], 4)])
    assert [g.token for g in end] == TEXT[58:]
    source.forget(1)
    assert not source.requests


def test_what_it_promises_is_learnt_from_what_came():
    source, text = PredictionSource(), array("i", TEXT)
    source.begin(SourceRequest(1, array("i"), 0, prediction=TEXT))
    at_first = source.expected_accepted(1, text[:30])
    source.begin(SourceRequest(2, array("i"), 0, prediction=[9] * 60))
    assert source.expected_accepted(2, text[:30]) < at_first
    assert source.expected_accepted(1, text[:59]) <= 1 and source.expected_accepted(1, text) == 0


def test_following_a_long_text_takes_no_longer_where_all_tokens_are_alike():
    chance = Random(0)
    expected = [1] * 20_000
    alignment = Alignment(expected)
    visited = 0
    length_at = Alignment.length_at

    class Counting(Alignment):
        def length_at(self, place):
            nonlocal visited
            visited += 1
            return length_at(self, place)

    alignment = Counting(expected)
    alignment.follow_all(chance.choice([1, 2]) for _ in range(1000))
    assert visited <= 64 * 1000
