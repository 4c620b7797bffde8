"""A tenth of the equivalence matrix; `make equivalence` runs all of it."""

from collections import Counter

from tests.equivalence.asks import ASKED, DRAWN
from tests.equivalence.columns import COLUMNS
from tests.equivalence.matrix import CELLS, TENTH, TOGETHER, check, columns


def test_a_tenth_of_the_matrix_is_what_it_is_without_a_drafter():
    with columns() as every:
        report = check(every, TENTH)
    assert not report.failures, "\n".join(map(str, report.failures))
    assert report.num_run == report.num_reported + report.num_equal == len(TENTH)
    trees = report.facts["model tree of 16"]
    assert trees["trees"] and trees["moved"], "no branch was taken"


def test_the_tenth_is_spread_over_all_of_the_matrix():
    assert len(CELLS) == 6 * 3 * 19 * 4 and round(len(TENTH) / len(CELLS), 1) == 0.1
    pairs = Counter((c.column, c.asked) for c in TENTH)
    pairs += Counter((c.drawn, c.situation) for c in TENTH)
    assert len(pairs) == len(COLUMNS) * len(ASKED) + len(DRAWN) * len(TOGETHER)
