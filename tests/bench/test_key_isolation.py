"""How the isolation of API keys and the gaps of streams are measured."""

import json

import pytest

from specserve_bench.figures import key_isolation, load_gaps


@pytest.mark.parametrize(
    ("ask", "field"),
    [(key_isolation.many_items, "input"), (key_isolation.many_messages, "messages")],
)
def test_a_load_has_as_many_items_as_its_name_says(ask, field):
    _, body = ask()
    wanted = {"input": 100_000, "messages": 90_000}[field]
    assert len(json.loads(body)[field]) == wanted and len(body) < 4 << 20


@pytest.mark.parametrize("ask", [key_isolation.slow_regex, key_isolation.schema])
def test_no_form_comes_twice(ask):
    assert len({ask()[1] for _ in range(9)}) == 9


def test_tables_have_a_row_for_each_load():
    spread = {"median": 2.0, "low": 1.0, "high": 3.0}
    row = {"load": "bodies", "unloaded_ms": spread, "loaded_ms": spread, "ratio": 1.0}
    shown = key_isolation.table({"rows": [row]})
    assert "| bodies | 2.0 (1.0 to 3.0) | 2.0 (1.0 to 3.0) | 1.00 |" in shown
    rows = {"adapters": {"longest_gap_ms": spread, "over_none": 1.5}}
    assert "| adapters | 2.0 (1.0 to 3.0) | 1.50 |" in load_gaps.table({"rows": rows})
