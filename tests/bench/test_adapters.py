"""What adapters take of a step: what is measured, and its table."""

from specserve_bench.figures import adapters
from specserve_bench.figures.adapters import BASE, SUBJECTS
from tests.checkpoints import tiny_checkpoint


def test_every_subject_is_measured_next_to_the_engine_without_slots(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "STEPS", 2)
    result = adapters.measure(tiny_checkpoint(tmp_path, max_position_embeddings=512), 2, rank=4)
    one, eight = result["rows"]
    assert (one["requests"], eight["requests"]) == (1, 8)
    assert {*eight["steps"]} == {*SUBJECTS}
    assert {*one["steps"]} == {BASE, "slots, no adapter", "one adapter"}
    assert eight["steps"][BASE]["over_base"] == {"median": 1, "low": 1, "high": 1}
    assert all(step["ms"]["low"] > 0 for step in eight["steps"].values())
    assert adapters.table(result).count("\n|") == 3
