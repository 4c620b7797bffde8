"""How the merged tree is compared at as many guesses as another drafter verifies."""

import pytest

from specserve_bench import merged
from specserve_bench.merged import Tree


def test_tokens_are_interpolated_between_sizes():
    trees = [Tree(8.0, 3.0), Tree(4.0, 2.0)]
    assert merged.at(5.0, trees) == 2.25
    assert merged.at(9.0, trees) == 3.0, "beyond the largest tree nothing is made up"


def test_trees_have_as_many_guesses_as_they_may_whatever_rows_cost(monkeypatch, capsys):
    for name, value in {"SIZES": (2, 16), "NAMES": ("agent",), "ROUNDS": 1, "REQUESTS": 2}.items():
        monkeypatch.setattr(merged, name, value)
    [row] = merged.merged_figures()["rows"]
    small, large = row["merged_by_size"]["2"], row["merged_by_size"]["16"]
    assert 1 < small[0] <= 2 and large[0] > 10 and large[1] > small[1]
    assert small[1] <= row["merged_tokens"][0] <= large[1]
    assert row["over_at_same_limit"]["median"] == pytest.approx(large[1] / row["tokens"][0])
    assert "| agent |" in capsys.readouterr().out
