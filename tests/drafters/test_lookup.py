"""The growing index, against the search that it replaces: `NgramDrafter`."""

from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_drafters import ROOT, Draft, DraftRequest, lookup
from specserve_drafters.lookup import NgramIndex, NgramSource
from specserve_drafters.ngram import NgramDrafter


def searched(text, limit):
    return NgramDrafter(NgramDrafter.Options(min_ngram=1)).look_up(array("i", text), limit)


def paths(tokens, parents):
    """Of the root and of every guess: the tokens down to it."""
    found = [()]
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent], token))
    return found


def agrees(candidates, draft, limit):
    """Whether the candidates are the continuations that the search found, the first one whole."""
    own = paths([c.token for c in candidates], [c.parent for c in candidates])
    both = set(paths(draft.tokens, draft.parents)) <= set(own)
    trunk = [c.token for c in candidates[:limit]]
    return (
        both
        and trunk[: len(draft.trunk())] == draft.trunk()
        and bool(own[1:]) == bool(draft.tokens)
    )


texts = st.lists(st.integers(0, 2), max_size=80)


@given(texts, texts, st.integers(1, 63))
def test_it_draft_tokens_what_the_search_finds_however_the_text_grew(before, after, limit):
    source, text = NgramSource(), array("i", before)
    source.look_up(0, text, 4)
    for token in after:
        text.append(token)
        if token:  # some steps bring several tokens
            assert agrees(source.look_up(0, text, limit), searched(text, limit), limit)


@given(st.lists(st.integers(0, 5), max_size=400), st.integers(0, 400))
def test_a_long_prompt_is_indexed_at_once_or_one_by_one_alike(prompt, begin):
    text, one, all_ = array("i", prompt), NgramIndex(512), NgramIndex(512)
    for end in range(len(text) + 1):
        one.add_each(text, end)
    all_.add_each(text, min(begin, len(text)))
    all_.add_all(text, len(text))
    assert (one.newest, one.before, one.next) == (all_.newest, all_.before, all_.next)


def test_tables_that_are_too_small_are_only_slower(monkeypatch):
    monkeypatch.setattr(lookup, "LEAST_SIZE", 4)
    source, text = NgramSource(), array("i", [1, 2])
    for token in [3, 1, 4, 1, 2, 3, 1, 4, 7, 8, 1, 4, 3, 1, 4] * 2:
        text.append(token)
        assert agrees(source.look_up(0, text, 8), searched(text, 8), 8)


def test_a_long_text_is_indexed_over_several_steps(monkeypatch):
    monkeypatch.setattr(lookup, "AT_ONCE", 100)
    source, text = NgramSource(), array("i", [*range(1000), 990, 991])
    for _ in range(9):
        assert source.look_up(0, text, 4) == []
    source.look_up(0, text, 4)
    assert [c.token for c in source.look_up(0, text, 4)] == [992, 993, 994, 995]


def test_what_is_kept_of_a_request_is_bounded_and_forgotten_with_it(monkeypatch):
    monkeypatch.setattr(lookup, "MAX_TOKENS", 64)
    monkeypatch.setattr(lookup, "LEAST_SIZE", 16)
    source, text = NgramSource(), array("i", [500, 501, 502])
    for token in range(300):
        text.append(token)
        source.look_up(7, text, 4)
    index = source.texts[7].index
    assert {len(table) for table in index.before} == {64}
    assert sum(map(len, index.newest)) <= 4 * 64
    text.extend([290, 291])
    assert [c.token for c in source.look_up(7, text, 2)][:2] == [292, 293]
    source.forget(7)
    source.forget(7)
    assert source.texts == {}


def test_of_a_text_that_is_too_long_the_end_is_indexed(monkeypatch):
    monkeypatch.setattr(lookup, "MAX_TOKENS", 64)
    monkeypatch.setattr(lookup, "AT_ONCE", 64)
    draft_tokens = NgramSource().look_up(0, array("i", [*range(1000), 990, 991]), 2)
    assert [c.token for c in draft_tokens] == [992, 993]


def test_a_place_counts_once_among_those_that_are_looked_at():
    """Twelve places match three tokens, and so two; only then comes the one that differs."""
    text = [0, 6, 1, 9] + [8, 6, 1, 5, 4, 3, 2] * 12 + [8, 6, 1]
    draft_tokens = NgramSource().look_up(0, array("i", text), 4)
    assert agrees(draft_tokens, searched(text, 4), 4)
    assert [c.token for c in draft_tokens if c.parent == ROOT] == [5, 9]


def test_an_id_that_is_used_again_has_an_index_of_its_own():
    source = NgramSource()
    source.look_up(7, array("i", [1, 2, 3, 1, 2]), 4)
    source.forget(7)
    assert source.look_up(7, array("i", [4, 5, 6, 1, 2]), 4) == []


def first_score(text, limit=4):
    return NgramSource().look_up(0, array("i", map(ord, text)), limit)[0].p


def test_a_longer_match_is_surer():
    assert first_score("xxab1yyab") < first_score("xcab1ycab") < first_score("dcab1 dcab")


def test_a_match_that_went_on_in_several_ways_is_less_sure():
    assert first_score("xab1yab2zab3wab") < first_score("xab1yab3zab3wab")
    assert first_score("xab1yab3zab3wab") < first_score("xab3yab3zab3wab")


def test_what_follows_a_right_draft_is_surer():
    draft_tokens = NgramSource().look_up(0, array("i", [1, 2, 3, 4, 5, 6, 1, 2]), 4)
    scores = [guess.p for guess in draft_tokens]
    assert scores == sorted(scores)


def test_the_second_continuation_forks_where_it_differs():
    text = array("i", map(ord, "abxy1234abxy!?.,ab"))
    draft_tokens = NgramSource().look_up(0, text, 8)
    tokens, parents = zip(*((c.token, c.parent) for c in draft_tokens), strict=True)
    assert "".join(map(chr, tokens)) == "xy!?.,ab" + "12"
    assert parents == (0, 1, 2, 3, 4, 5, 6, 7, 2, 9)
    assert draft_tokens[8].p < 1 - draft_tokens[2].p, "both cannot be right"


def test_every_item_has_its_own_candidates():
    items = [
        DraftRequest(i, array("i", ids), 2, 0.0, 0) for i, ids in ((4, [1, 2, 3, 1, 2]), (9, [1]))
    ]
    first, second = NgramSource().candidates(items)
    assert [(c.token, c.parent, c.source) for c in first] == [(3, ROOT, "ngram"), (1, 1, "ngram")]
    assert second == []


@pytest.mark.parametrize("limit", [0, 1, 63])
def test_there_are_no_more_tokens_on_a_path_than_the_limit(limit):
    draft_tokens = NgramSource().look_up(0, array("i", [1, 1, 1, 1]), limit)
    assert len(draft_tokens) == limit
    assert searched([1, 1, 1, 1], limit) == Draft.chain([1] * limit)


def test_it_promises_what_matches_of_a_length_have_brought():
    """In a text that repeats, and in one of which only single tokens come again."""
    source = NgramSource()
    repeats = array("i", [*range(30)] * 6)
    for end in range(40, len(repeats)):
        expected_accepted = source.expected_accepted(0, repeats[:end])
    assert expected_accepted > 10

    draw, once = Random(0), array("i", range(101))
    for _ in range(400):
        once.append(draw.randrange(101))
        expected_accepted = source.expected_accepted(1, once)
    assert expected_accepted < 0.3


def test_another_text_is_judged_by_what_all_have_shown():
    def first_promise():
        return source.expected_accepted(1, array("i", [1, 2, 3, 4, 1, 2]))

    source = NgramSource()
    before = first_promise()
    source.forget(1)
    changes = array("i")
    for k in range(200):  # after the same two tokens comes another one each time
        changes.extend([1, 2, 1000 + k])
        source.expected_accepted(0, changes[:-1])
        source.expected_accepted(0, changes)
    assert first_promise() < before / 2
