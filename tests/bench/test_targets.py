"""How prompts that arrive beside streams with a target are measured."""

from types import SimpleNamespace

import pytest

from specserve_bench.figures import targets
from specserve_bench.pairs import PAIRS


def test_arrivals_are_measured_next_to_streams_that_go_on(monkeypatch):
    small = {"ROUNDS": 2, "STREAMS": 2, "STREAM_PROMPT": 20, "LONG_PROMPT": 300, "ARRIVALS": 1}
    for name, value in {**small, "QUIET_STEPS": 9}.items():
        monkeypatch.setattr(targets, name, value)
    monkeypatch.setitem(PAIRS, "0.6b", PAIRS["demo"])
    figures = targets.measure()
    assert figures["target_ms"] == pytest.approx(1.5 * figures["quiet_step_ms"], abs=2e-3)
    assert 0 < figures["itl_p99_ms"] < figures["ttft_ms"], "several steps computed the prompt"
    assert figures["predicted_ttft_ms"] > 0
    printed = targets.table(figures)
    assert "| itl_p99_over_target |" in printed and "| at most 1.1 |" in printed


def test_a_prediction_takes_as_many_rows_as_the_target_allows(monkeypatch):
    class Costs:
        edges = (1, 16, 32, 64)

        def of(self, step):
            return 1.0 * step.rows + 0.01 * step.context

    streams = [SimpleNamespace(token_ids=[0] * 50)] * 2
    budget = SimpleNamespace(max_batched_tokens=128)
    scheduler = SimpleNamespace(running=streams, budget=budget)
    monkeypatch.setattr(targets, "AdaptiveSpeculator", SimpleNamespace)
    guesses = SimpleNamespace(planner=SimpleNamespace(costs=Costs()))
    engine = SimpleNamespace(scheduler=scheduler, speculator=guesses)
    # 32 rows are within 40 s, 64 are not: two roots and 30 rows a step, and the rest at last.
    steps = [*targets.predicted_steps(engine, 95, 40.0)]
    assert steps == pytest.approx([32 + 1.3, 32 + 1.6, 37 + 1.95])
