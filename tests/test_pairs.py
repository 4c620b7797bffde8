"""The mark `pairs` leaves less than the product, and all pairs."""

from itertools import combinations, product

from tests.pairs import covering


def pairs_of(cases):
    return {pair for case in cases for pair in combinations(case.items(), 2)}


def test_each_pair_of_choices_is_in_one_of_few_cases():
    cases = [dict(zip("abcd", case, strict=True)) for case in product(*map(range, (5, 4, 3, 2)))]
    kept = [cases[i] for i in covering(cases)]
    assert pairs_of(kept) == pairs_of(cases)
    assert len(kept) <= 25, "of 120; the two largest alone need 20"


def test_of_one_parameter_each_choice_is_kept():
    assert covering([{"a": "x"}, {"a": "y"}, {"a": "x"}]) == {0, 1}
