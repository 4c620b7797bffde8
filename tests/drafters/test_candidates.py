"""All sources' guesses in one tree, against the obvious way to merge and cut them."""

from math import nan, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_drafters import ROOT, Draft
from specserve_drafters.candidates import Candidate, checked, of_draft
from specserve_drafters.trie import LEAST, UNSCORED, WORTH
from tests.drafters.asks import Asks, RequestCandidates
from tests.drafters.oracle_trie import Calibration, Trie, best, most_urgent
from tests.drafters.paths import path_value


def chain(source, p, *tokens):
    return [Candidate(token, k, p, source) for k, token in enumerate(tokens)]


def merged(*lists):
    trie = Trie(Calibration(), 0)
    for candidates in lists:
        trie.merge(candidates)
    return trie


def likeliest(asks, most):
    return [*zip(*best(asks, most), strict=True)]


def cut(trie, limit):
    return trie.draft(Asks([RequestCandidates(trie, limit)]).select(limit).nodes).draft


def path(candidates, k):
    """The tokens from the root to a candidate."""
    tokens = []
    while k != ROOT:
        tokens.insert(0, candidates[k - 1].token)
        k = candidates[k - 1].parent
    return tuple(tokens)


def obvious(lists, limit):
    """The likeliest paths, each with its value: all are listed, and sorted."""
    p = {}  # path -> source -> probability, the better one where a source says it twice
    for candidates in lists:
        for k, one in enumerate(candidates, 1):
            words = p.setdefault(path(candidates, k), {})
            words[one.source] = max(one.p, words.get(one.source, 0))

    def combined(words):
        return min(1 - prod(1 - p for p in words.values()), max(words.values()) + worth(words))

    def worth(words):
        return WORTH if len(words) > 1 else 0

    value = {x: prod(combined(p[x[: d + 1]]) for d in range(len(x))) for x in p}
    return dict(sorted(value.items(), key=lambda item: -item[1])[:limit])


@st.composite
def lists(draw):
    """Candidates of up to three sources; with few tokens, so that they meet."""
    found = []
    for source in "abc"[: draw(st.integers(0, 3))]:
        candidates, seen = [], set()
        for k in range(draw(st.integers(0, 8))):
            parent, token = draw(st.integers(0, k)), draw(st.integers(0, 2))
            if len(seen) == len(seen | {(parent, token)}):
                parent, token = k, token  # no two equal siblings in a list, as in a trie
            seen.add((parent, token))
            candidates.append(Candidate(token, parent, draw(st.floats(0.05, 0.95)), source))
        found.append(candidates)
    return found


@given(lists(), st.integers(1, 12))
def test_the_cut_has_the_likeliest_paths_of_all_sources(lists, limit):
    trie = merged(*lists)
    found = likeliest([RequestCandidates(trie, limit)], limit)
    values = sorted(obvious(lists, limit).values(), reverse=True)
    values = values[: sum(v >= 1e-3 for v in values)]
    assert [value for value, _, _ in found] == pytest.approx(values)


@given(
    st.lists(st.tuples(lists(), st.integers(0, 9), st.integers(1, 9)), max_size=4),
    st.integers(0, 20),
)
def test_ranked_draft_tokens_are_those_that_urgency_finds_where_nobody_is_behind(requests, most):
    asks = [RequestCandidates(merged(*lists), limit, depth) for lists, limit, depth in requests]
    assert likeliest(asks, most) == most_urgent(asks, most)


@given(lists())
def test_settled_values_are_those_of_whole_paths(lists):
    trie = merged(*lists)
    assert trie.settle() == pytest.approx([path_value(trie, node) for node in range(len(trie) + 1)])


@given(lists(), st.lists(st.tuples(st.integers(0, 2), st.floats(0.05, 0.95)), max_size=3))
def test_children_of_a_branch_have_the_values_of_their_paths(lists, scored):
    trie = merged(*lists)
    scored = dict(scored).items()
    for node in [ROOT, *trie.children[ROOT].values()]:
        trie.branch(node, scored, "model")
        for child in trie.children[node].values():
            assert trie.values[child] == pytest.approx(path_value(trie, child))


@given(lists(), st.integers(1, 12))
def test_a_cut_is_a_draft_whose_likeliest_path_has_the_lowest_numbers(lists, limit):
    trie = merged(*lists)
    draft = cut(trie, limit)
    assert draft.cut(limit, 3) == draft, "every parent is there, and comes first"
    siblings = [*zip(draft.parents, draft.tokens, strict=True)]
    assert len(set(siblings)) == len(siblings)
    node, trunk = ROOT, []
    for token in draft.trunk():
        best = max(trie.children[node].values(), key=trie.p.__getitem__)
        assert trie.tokens[best] == token or trie.p[best] == trie.p[trie.children[node][token]]
        node = trie.children[node][token]
        trunk.append(token)
    assert draft.tokens[: len(trunk)] == trunk


def test_the_likeliest_path_is_numbered_before_likelier_draft_tokens_next_to_it():
    beside = [Candidate(5, 0, 0.9, "a"), Candidate(6, 0, 0.8, "a"), Candidate(7, 1, 0.5, "a")]
    assert cut(merged(beside), 3) == Draft([5, 7, 6], [0, 1, 0])


def test_equal_tokens_below_equal_parents_are_one_node_of_both_sources():
    trie = merged(chain("a", 0.6, 5, 6), chain("b", 0.5, 5, 7))
    assert trie.tokens[1:] == [5, 6, 7]
    assert trie.sources(1) == ["a", "b"] and trie.sources(3) == ["b"]
    assert trie.p[1] == pytest.approx(0.6 + WORTH), "no more than agreement has been worth"
    assert merged(chain("a", 0.1, 5), chain("b", 0.01, 5)).p[1] == pytest.approx(1 - 0.9 * 0.99)


def test_a_source_that_repeats_itself_does_not_agree_with_itself():
    for first, second in (0.6, 0.7), (0.7, 0.6):
        trie = merged(chain("a", first, 5), chain("a", second, 5))
        assert trie.p[1] == pytest.approx(0.7)


def test_a_source_may_continue_where_another_ended():
    trie = merged(chain("a", 0.6, 5, 6))
    nodes = trie.merge(chain("b", 0.5, 7, 8), below=2)
    assert [trie.parents[node] for node in nodes] == [2, 3]
    assert path_value(trie, nodes[1]) == pytest.approx(0.6**2 * 0.5**2)


def test_a_draft_keeps_the_number_that_the_draft_model_gave_it():
    trie = merged([Candidate(5, 0, 0.6, "a"), Candidate(6, 1, 0.5, "a")])
    trie.merge([Candidate(5, 0, 0.5, "model", 1), Candidate(9, 0, 0.55, "model", 2)])
    assert cut(trie, 3) == Draft([5, 6, 9], [0, 1, 0], [1, 0, 2]) or cut(trie, 3) == Draft(
        [5, 9, 6], [0, 0, 1], [1, 2, 0]
    )
    assert cut(merged(chain("a", 0.6, 5)), 3) == Draft([5], [0])


def test_the_draft_tokens_of_a_step_are_shared_by_value():
    sure, unsure = merged(chain("a", 0.9, 1, 2, 3)), merged(chain("a", 0.3, 1, 2, 3))
    found = likeliest([RequestCandidates(unsure, 9), RequestCandidates(sure, 9)], 4)
    assert [(i, node) for _, i, node in found] == [(1, 1), (1, 2), (1, 3), (0, 1)]
    capped = likeliest([RequestCandidates(unsure, 9), RequestCandidates(sure, 1)], 4)
    assert [(i, node) for _, i, node in capped] == [(1, 1), (0, 1), (0, 2), (0, 3)]


def test_what_a_request_needs_for_its_target_comes_first():
    sure, late, later = (merged(chain("a", p, 1, 2, 3)) for p in (0.9, 0.3, 0.3))
    asks = [
        RequestCandidates(sure, 9),
        RequestCandidates(late, 9, behind=0.3),
        RequestCandidates(later, 9, behind=0.35),
    ]
    order = [i for _, i, _ in likeliest(asks, 5)]
    assert order == [2, 1, 2, 0, 0]


def test_once_a_request_has_what_it_needs_its_other_draft_tokens_go_by_value():
    late = merged(chain("a", 0.5, 1), chain("a", 0.3, 2))
    other = merged(chain("a", 0.4, 1))
    found = likeliest([RequestCandidates(other, 9), RequestCandidates(late, 9, behind=0.1)], 3)
    assert [value for value, _, _ in found] == pytest.approx([0.5, 0.4, 0.3])


def test_candidates_of_user_code_end_before_the_first_that_is_invalid():
    good = [Candidate(5, 0, 0.5, "liar"), Candidate(6, 1, 2.0, "")]
    for bad in (Candidate(10, 0, 0.5, ""), Candidate(5, 4, 0.5, ""), (5, 0, 0.5, ""), None):
        assert checked([*good, bad, good[0]], "mine", 10) == [
            Candidate(5, 0, 0.5, "mine"),
            Candidate(6, 1, 2.0, "mine"),
        ]
    endless = iter(lambda: Candidate(1, 0, 0.5, ""), None)
    assert len(checked(endless, "mine", 10)) == 252


@pytest.mark.parametrize("score", [nan, None, "sure", 1e300, -1.0, True])
def test_a_score_may_be_anything_and_is_a_probability(score):
    trie = merged(checked([Candidate(1, 0, score, "")], "mine", 10))
    assert LEAST <= trie.p[1] <= 1 - LEAST
    if not isinstance(score, int | float) or score != score:
        assert trie.p[1] == UNSCORED


def test_a_draft_without_scores_is_merged_too():
    draft = Draft([5, 6, 7], [0, 1, 0], [1, 0, 2])
    trie = merged(of_draft(draft, "mine"))
    assert sorted(zip(trie.tokens[1:], trie.parents[1:], trie.expanded[1:], strict=True)) == [
        (5, 0, 1),
        (6, 1, 0),
        (7, 0, 2),
    ]
    assert trie.sources(2) == ["mine"]
