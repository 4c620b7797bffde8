"""The n-gram drafter's guesses. The engine's tests cannot see bad ones: they only cost speed."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_drafters import Draft, DraftRequest, make_drafter
from specserve_drafters.ngram import NgramDrafter


def look_up(text, limit, **options):
    drafter = NgramDrafter(NgramDrafter.Options(**options))
    return drafter.look_up(array("i", map(ord, text)), limit)


def paths(draft):
    """The texts from the root to each leaf, in order of the leaves."""
    texts = {0: ""}
    for k, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), 1):
        texts[k] = texts[parent] + chr(token)
    return [text for k, text in texts.items() if k not in draft.parents]


CASES = {  # text, limit -> the texts that the tree guesses
    "what followed the last two": ("the cat sat. the", 4, [" cat"]),
    "the longest match wins": ("xab1 ab2 xab", 1, ["1"]),
    "the newest match wins": ("ab1ab2ab", 1, ["2"]),
    "a match at the end reads itself on": ("aaaa", 5, ["aaaaa"]),
    "a period is repeated as far as the tree allows": ("xyzxyzxy", 8, ["zxyzxyzx"]),
    "and also one longer than the match": ("abcdefabc", 9, ["defabcdef"]),
    "never seen": ("abcdef", 4, []),
    "seen with another neighbour only": ("ab cb db", 4, []),
    "too short to have a past": ("a", 4, []),
    "empty": ("", 4, []),
    "nobody asked": ("abcabc", 0, []),
    "the second best gets a quarter": ("ab12345678ab!?.,;:-+ab", 8, ["!?.,;:", "12"]),
    "no quarter, no second": ("ab12345ab!?.,ab", 3, ["!?."]),
    "a quarter of five is one": ("ab12345ab!?.,;ab", 5, ["!?.,", "1"]),
    "what both share is guessed once": ("abxy1234abxy!?.,ab", 8, ["xy!?.,", "xy12"]),
    "no room after the fork, no second": ("ab1234567xab1234567yab", 8, ["1234567y"]),
    "just room for one node after it": ("ab12345xxab12345yyab", 8, ["12345y", "12345xx"]),
    "the second may come from a shorter match": ("ab0123zab2222zab", 4, ["222", "0"]),
    "a third is not looked at": ("ab1...ab2...ab3...ab", 4, ["3..", "2"]),
    "equal continuations are one": ("ab12ab12ab12ab", 4, ["12ab"]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "limit", "draft_tokens"), CASES.values(), ids=CASES)
def test_draft_tokens(text, limit, draft_tokens):
    draft = look_up(text, limit)
    assert [p for p in paths(draft) if p] == draft_tokens


def test_the_best_continuation_has_the_lowest_numbers():
    assert look_up("ab12345ab!?.,;ab", 5) == Draft([*map(ord, "!?.,1")], [0, 1, 2, 3, 0])
    assert look_up("abx1234abx!?.,ab", 8).parents == [0, 1, 2, 3, 4, 5, 1, 7]


def test_a_match_across_token_boundaries_is_no_match():
    shifted = [0x01000000, 0x00000002, 7, 0x00020100]  # the tail's bytes stand inside the first two
    drafter = NgramDrafter(NgramDrafter.Options(min_ngram=1))
    assert drafter.look_up(array("i", shifted), 3) == Draft()


def test_a_match_hidden_behind_one_across_boundaries_is_found():
    ids = [5, 0, 0, 0x01000000, 7, 0, 0]  # eight bytes of zeros stand in four places, once aligned
    drafter = NgramDrafter(NgramDrafter.Options(max_ngram=2))
    assert drafter.look_up(array("i", ids), 1).tokens == [0x01000000]


@pytest.mark.parametrize(
    ("options", "guess"), [({"min_ngram": 1}, "1"), ({"min_ngram": 2}, "")], ids=str
)
def test_a_match_has_at_least_min_ngram_tokens(options, guess):
    assert "".join(map(chr, look_up("xb1yb", 1, **options).tokens)) == guess


@pytest.mark.parametrize(("longest", "guess"), [(2, "2"), (3, "1")])
def test_a_match_has_at_most_max_ngram_tokens(longest, guess):
    assert paths(look_up("xab1yab2xab", 1, max_ngram=longest)) == [guess]


texts = st.text("abc", max_size=80)


@given(texts, st.integers(0, 63), st.integers(1, 3))
def test_whatever_the_text_a_draft_is_a_tree_within_the_limit(text, limit, shortest):
    draft = look_up(text, limit, min_ngram=shortest)
    assert draft.cut(limit, 128) == draft
    assert draft.expanded == []
    siblings = [*zip(draft.parents, draft.tokens, strict=True)]
    assert len(set(siblings)) == len(siblings)


@given(texts, st.integers(1, 20))
def test_a_match_is_always_found_and_its_continuation_stood_there(text, limit):
    first = "".join(map(chr, look_up(text, limit, max_ngram=2).tokens))[:1]
    tail = text[-2:]
    if len(text) > 2 and tail in text[:-1]:
        assert tail + first == text[(at := text[:-1].rfind(tail)) : at + 3]
    else:
        assert first == ""


def test_every_item_has_its_own_draft():
    items = [
        DraftRequest(i, array("i", ids), 2, 0.0, 0) for i, ids in ((4, [1, 2, 3, 1, 2]), (9, [1]))
    ]
    drafter = make_drafter("ngram", {})
    assert drafter.propose(items) == [Draft([3, 1], [0, 1]), Draft()]
    drafter.observe(4, Draft(), [])
    drafter.forget(4)
