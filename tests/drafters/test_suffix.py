"""Earlier outputs as a source of guesses, against a search through all of them."""

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_drafters import ROOT, DraftRequest, suffix
from specserve_drafters.base import SourceRequest
from specserve_drafters.native import NativeOutputIndex
from specserve_drafters.suffix import LENGTHS, OutputIndex, SuffixPart, SuffixSource, best

TEXT = [*range(100, 160)]


def learnt(*outputs, salt=""):
    source = SuffixSource()
    for output in outputs:
        source.learn(array("i", output), (0, salt, ""))
    return source


def asked(source, known, limit=8, id=1, salt=""):
    source.begin(SourceRequest(id, array("i", known), 0, (0, salt, ""), is_learnt=False))
    (draft_tokens,) = source.candidates([DraftRequest(id, array("i", known), limit, 0.0, 0)])
    return draft_tokens


def searched(texts, end):
    """Of the longest n-gram of LENGTHS at the end that is in a text: how often what follows, apart
    from the context at its beginning.
    """
    for n in reversed(LENGTHS):
        tail = end[-n:]
        follows = Counter(
            text[at]
            for text, num_context in texts
            for at in range(max(n, num_context), len(text))
            if len(tail) == n and text[at - n : at] == tail
        )
        if follows:
            return n, follows
    return 0, Counter()


tokens = st.lists(st.integers(0, 2), max_size=40)


@given(st.lists(st.tuples(tokens, st.integers(0, 20)), max_size=6), tokens)
def test_places_are_those_that_a_search_finds(texts, end):
    scope = OutputIndex()
    texts = [(text, min(num_context, len(text))) for text, num_context in texts if text]
    for text, num_context in texts:
        scope.add(array("i", text), num_context)
    n, follows = searched(texts, end)
    length, places = scope.matches(array("i", end), 16)
    assert (length, len(places)) == (n, min(follows.total(), suffix.MAX_MATCHES))
    found = Counter(part.tokens[place] for part, place in places)
    assert found <= follows


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from([0, 1, 2**31 - 1]), max_size=40), st.integers(0, 20))
    ),
    st.lists(st.integers(0, 40), max_size=4),
    st.fixed_dictionaries(
        {
            "SMALL": st.sampled_from([8, 64, 1 << 10]),
            "LARGE": st.sampled_from([64, 1 << 17]),
            "MAX_MATCHES": st.sampled_from([1, 3, 16]),
            "MAX_VISITS": st.sampled_from([2, 64]),
        }
    ),
)
def test_lookups_in_c_find_the_same(texts, cuts, bounds):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in bounds.items():
            patch.setattr(suffix, name, value)
        indexes = OutputIndex(), NativeOutputIndex()
        for text, num_context in texts:
            for index in indexes:
                index.add(array("i", text), min(num_context, len(text)))
            for cut in cuts:
                end = array("i", text[: len(text) - cut])
                for most in (1, 16):
                    one, other = (index.matches(end, most) for index in indexes)
                    assert one[0] == other[0] and places(indexes[0], one) == places(
                        indexes[1], other
                    )
                for limit in (0, 5, 63):
                    one, other = ([*index.candidates(end, limit)] for index in indexes)
                    assert one == other


def places(index, found):
    return [(index.parts.index(part), at) for part, at in found[1]]


def test_draft_tokens_go_on_as_earlier_outputs_did_the_most_frequent_first():
    source = learnt([1, 2, 3, 7, 7], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9])
    draft_tokens = asked(source, [0, 2, 3], limit=8)
    paths = {}
    for number, guess in enumerate(draft_tokens, 1):
        paths[number] = (*paths.get(guess.parent, ()), guess.token)
    assert paths[1] == (4,)
    assert {*paths.values()} >= {(7,), (4, 5, 9), (4, 5, 6)}
    assert draft_tokens[0].p > draft_tokens[[*paths.values()].index((7,))].p
    assert all(0 < guess.p < 1 for guess in draft_tokens)


def test_a_longer_match_wins_and_is_surer():
    source = learnt([9, 9, 3, 4, 1], [5, 6, 3, 4, 2])
    (first, *_) = asked(source, [5, 6, 3, 4], limit=1)
    assert first.token == 2
    (short,) = asked(source, [8, 8, 5, 6], limit=1)
    assert short.token == 3 and short.p < first.p


def test_draft_tokens_end_where_an_output_ends_and_nothing_crosses_two_outputs():
    source = learnt([1, 2, 3], [4, 5, 6])
    assert [g.token for g in asked(source, [1, 2])] == [3]
    assert asked(source, [2, 3]) == [] == asked(source, [3, 4])


def test_there_are_no_draft_tokens_of_another_scope_nor_its_odds():
    source = learnt(TEXT, salt="a")
    assert asked(source, TEXT[:20], salt="") == [] == asked(source, TEXT[:20], salt="b")
    assert asked(source, TEXT[:20], salt="a")
    source.begin(SourceRequest(5, array("i", TEXT[:20]), 0, (0, "b", ""), is_learnt=True))
    assert source.expected_accepted(5, array("i", TEXT[:20])) == 0.0
    source.learn(array("i", TEXT), (0, "b", ""))
    accuracy = [*source.accuracy[0, "b", ""].expected]
    source.begin(SourceRequest(6, array("i", TEXT[:20]), 0, (0, "a", ""), is_learnt=True))
    for size in range(20, 60):
        source.expected_accepted(6, array("i", TEXT[:size]))
    for each in source.accuracy.values():
        each.sum()
    assert (
        [*source.accuracy[0, "b", ""].expected]
        == accuracy
        != [*source.accuracy[0, "a", ""].expected]
    )


def test_an_output_is_learnt_when_its_request_ends_unless_it_asked_not_to_be():
    source = SuffixSource()
    for id, is_learnt in ((1, False), (2, True)):
        source.begin(
            SourceRequest(id, array("i", [50, 51, *TEXT]), 2, (0, "", ""), is_learnt=is_learnt)
        )
        source.forget(id)
        assert bool(asked(source, TEXT[:10], id=9)) == is_learnt
    assert asked(source, [9, 50], id=9) == []  # the prompt is none of it
    source.forget(77)


def test_the_beginning_of_an_output_is_found_by_the_end_of_its_prompt():
    source, prompt = SuffixSource(), [*range(30)]
    source.begin(
        SourceRequest(1, array("i", prompt + TEXT), len(prompt), (0, "", ""), is_learnt=True)
    )
    source.forget(1)
    assert [guess.token for guess in asked(source, prompt, id=2)] == TEXT[:8]
    held = [part.tokens for part in source.scopes[0, "", ""].parts]
    assert held == [array("i", [suffix.END, *prompt[-LENGTHS[-1] :], *TEXT, suffix.END])]


def test_what_it_promises_follows_the_text_and_falls_after_a_difference():
    source, text = learnt(TEXT), array("i", TEXT[:4])
    source.begin(SourceRequest(1, text, 0, (0, "", ""), is_learnt=False))
    first = source.expected_accepted(1, text)
    text.extend(TEXT[4:20])
    assert source.expected_accepted(1, text) > first > 0
    text.append(7)
    assert source.expected_accepted(1, text) == 0
    text.extend(TEXT[30:32])
    assert 0 < source.expected_accepted(1, text) <= first


@pytest.mark.parametrize("num_scopes", [1, 60])
def test_memory_stays_in_its_bound_over_a_million_tokens(monkeypatch, num_scopes):
    monkeypatch.setattr(suffix, "MOST_BYTES", 4 << 20)
    monkeypatch.setattr(suffix, "LARGE", 1 << 15)
    source = SuffixSource()
    for n in range(1000):
        output = array("i", ((n * 1000 + i) * 7919 % 5003 for i in range(1000)))
        source.learn(output, (0, str(n % num_scopes), ""))
        assert source.num_bytes <= 4 << 20
        held = sum(len(p.tokens) for s in source.scopes.values() for p in s.parts)
        assert 4 * held <= source.num_bytes
    assert source.accuracy.keys() == source.scopes.keys()
    assert asked(source, output[:20], salt=str(999 % num_scopes))


def test_a_tenant_with_many_salts_takes_no_memory_from_others(monkeypatch):
    monkeypatch.setattr(suffix, "MOST_BYTES", 1 << 20)
    source = learnt(TEXT)
    for n in range(200):
        source.learn(array("i", TEXT), (1, str(n)))
    assert asked(source, TEXT[:20]) and len(source.scopes) < 60


def test_an_output_longer_than_a_part_is_cut_to_its_end():
    scope = OutputIndex()
    scope.add(array("i", [i % 5000 for i in range(suffix.LARGE)]))
    assert scope.parts[0].size <= suffix.LARGE
    assert scope.matches(array("i", [1, 2, 3, 4]), 16)[0] == 4


def test_a_lookup_visits_a_bounded_number_of_places():
    part = SuffixPart(1 << 12)
    part.add(array("i", [1] * 4000))
    mixed = sum(suffix.MIX[:2])
    assert len([*part.matches(array("i", [1, 1]), 0, mixed)]) == suffix.MAX_VISITS
    assert best([], 0, 8) == []
    draft_tokens = best([(part, 5)], 2, 63)
    assert [g.parent for g in draft_tokens] == [ROOT, *range(1, 63)]


def test_all_is_forgotten_on_reset():
    source, text = learnt(TEXT), array("i", TEXT[:8])
    source.begin(SourceRequest(1, text, 0, (0, "", ""), is_learnt=True))
    assert source.expected_accepted(1, text) > 0
    source.reset()
    assert source.expected_accepted(1, text) == 0 and asked(source, TEXT[:8], id=2) == []
