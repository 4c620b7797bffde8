"""How the merged tree is compared at as many guesses as another drafter verifies."""

import pytest

from specserve_bench.figures import merged
from specserve_bench.figures.merged import TreeMeans


def test_tokens_are_interpolated_between_sizes():
    trees = [TreeMeans(8.0, 3.0), TreeMeans(4.0, 2.0)]
    assert merged.at(5.0, trees) == 2.25
    assert merged.at(9.0, trees) == 3.0, "beyond the largest tree nothing is made up"


def test_fewer_draft_tokens_are_made_where_they_cost_more(monkeypatch):
    values = {"PRICES": (0.5, 0.02), "NAMES": ("agent",), "ROUNDS": 1, "REQUESTS": 2}
    for name, value in values.items():
        monkeypatch.setattr(merged, name, value)
    result = merged.measure()
    row, deep = result["rows"]
    dear, cheap, full = *row["merged_by_price"].values(), row["merged_full"]
    assert 0 < dear[0] < cheap[0] < full[0] <= 16 and full[0] > 10
    assert dear[1] <= row["merged_tokens"][0] <= cheap[1]
    assert row["over_at_same_limit"]["median"] == pytest.approx(full[1] / row["tokens"][0])
    assert deep["merged_full"] == full, "the same tree is compared with each"
    assert "| agent | model:16 |" in merged.table(result)
