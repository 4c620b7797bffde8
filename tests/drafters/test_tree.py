import pytest

from specserve_drafters import ROOT, Draft

FORK = Draft([5, 6, 7, 5], [0, 1, 0, 3], [1, 2, 3, 0])  # 5 6 | 7 5


def test_a_chain_hangs_each_draft_below_the_one_before():
    assert Draft.chain([5, 6, 7]) == Draft([5, 6, 7], [0, 1, 2])
    assert (len(Draft.chain([5, 6])), len(Draft())) == (2, 0)


@pytest.mark.parametrize(
    ("node", "token", "child"),
    [(ROOT, 5, 1), (ROOT, 7, 3), (ROOT, 6, None), (1, 6, 2), (3, 5, 4), (3, 6, None), (4, 5, None)],
)
def test_a_child_is_found_by_its_parent_and_token(node, token, child):
    assert FORK.child(node, token) == child


def test_of_two_equal_siblings_the_first_is_the_child():
    assert Draft([5, 5], [0, 0]).child(ROOT, 5) == 1


def test_a_mask_holds_a_nodes_ancestors_and_itself():
    assert Draft([1, 2, 1], [0, 1, 0]).masks() == [0b1, 0b11, 0b111, 0b1001]
    assert FORK.masks() == [0b1, 0b11, 0b111, 0b1001, 0b11001]


def test_the_deepest_mask_fills_one_word():
    assert Draft.chain([0] * 63).masks()[-1] == 2**64 - 1


CUTS = {  # tokens, parents -> how many are left of them, at a limit of 4 and a vocabulary of 10
    "nothing wrong": ([1, 2, 9], [0, 1, 0], 3),
    "nothing there": ([], [], 0),
    "as many as fit": ([1, 2, 3, 4], [0, 1, 2, 3], 4),
    "too many": ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4], 4),
    "an id beyond the vocabulary": ([1, 10, 3], [0, 1, 2], 1),
    "a negative id": ([1, 2, -1], [0, 1, 2], 2),
    "an id that is no int": ([1, 2.0, 3], [0, 1, 2], 1),
    "an id that is a bool": ([1, True, 3], [0, 1, 2], 1),
    "an id that is nothing": ([None], [0], 0),
    "its own parent": ([1, 2, 3], [0, 2, 0], 1),
    "a parent that is still to come": ([1, 2, 3], [2, 0, 0], 0),
    "a negative parent": ([1, 2, 3], [0, 0, -1], 2),
    "a parent that is a bool": ([1, 2, 3], [0, True, 0], 1),
    "a parent that is a string": ([1, 2], [0, "1"], 1),
    "fewer parents than tokens": ([1, 2, 3], [0, 1], 2),
    "fewer tokens than parents": ([1], [0, 1, 2], 1),
}


@pytest.mark.parametrize(("tokens", "parents", "left"), CUTS.values(), ids=CUTS)
def test_a_draft_is_cut_before_its_first_bad_node(tokens, parents, left):
    cut = Draft(tokens, parents, [3, 2, 1, 0, 9]).cut(4, 10)
    assert (cut.tokens, cut.parents) == (tokens[:left], parents[:left])
    assert cut.expanded[:left] == [3, 2, 1, 0, 9][:left]


def test_what_is_cut_loses_its_numbers_in_the_draft_model_alike():
    assert FORK.cut(2, 10) == Draft([5, 6], [0, 1], [1, 2])
    assert FORK.cut(0, 10) == Draft()
    assert FORK.cut(4, 7) == Draft([5, 6], [0, 1], [1, 2])


@pytest.mark.parametrize(("limit", "left"), [(63, 63), (64, 64), (7, 7)])
def test_a_cut_keeps_to_any_limit(limit, left):
    assert len(Draft.chain([0] * 100).cut(limit, 1)) == left
