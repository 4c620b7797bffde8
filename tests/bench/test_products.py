"""Linear layers against the multiply peak: what is measured, and its table."""

import pytest

from specserve_bench.bound import Bound
from specserve_bench.figures import maps, products


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr("specserve_bench.bound.READ_BYTES", 1 << 20)
    monkeypatch.setattr("specserve_bench.bound.MULTIPLY_SECONDS", 1e-4)


def test_shares_have_every_form_and_number_of_rows(small):
    result = products.measure(rows=(3, 5), rounds=2, size=64)
    assert [each["form"] for each in result["forms"]] == [kind.name for kind in products.GOALS]
    for each in result["forms"]:
        assert [row["rows"] for row in each["rows"]] == [3, 5]
        assert all(0 < row["share"]["low"] < 1 for row in each["rows"])
    assert products.table(result).count("\n|") == 2 + len(products.GOALS)


def test_a_share_is_operations_per_second_over_those_of_its_own_peak(small, monkeypatch):
    """With layers of one millisecond, and a peak of codes four times that of bf16."""
    monkeypatch.setattr(maps.Map, "ms", lambda self, num_rows: 1.0)
    rates = Bound().rates()._replace(multiply=4 * 2 * 10 * 64 * 64 * 1e3)
    monkeypatch.setattr(Bound, "rates", lambda self: rates)
    monkeypatch.setattr(Bound, "code_rate", lambda self: 4 * rates.multiply)
    result = products.measure(rows=(10,), rounds=1, size=64)
    found = {each["form"]: each["rows"][0]["share"]["median"] for each in result["forms"]}
    assert found.pop("bf16") == 0.25
    assert set(found.values()) == {0.062}
