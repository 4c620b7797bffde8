"""What /metrics says, against the library's own histogram and against counting each report."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibraryHistogram

from specserve.exchange.messages import Report, Stats, StepOutput
from specserve.server.metrics import Histogram, Metrics

BUCKETS = 0.001, 0.5, 1, 20
LABELS = {"model_name": "m", "engine": "0"}
OUTPUT = StepOutput(0, [5], None, True, 3, 2, 0.0)


@given(st.lists(st.floats(0, 100) | st.sampled_from(BUCKETS)))
def test_a_histogram_says_what_the_librarys_own_says(values):
    registries = CollectorRegistry(), CollectorRegistry()
    own = Histogram("seconds", "Words.", LABELS, BUCKETS)
    registries[0].register(own)
    its = LibraryHistogram("seconds", "Words.", [*LABELS], buckets=BUCKETS, registry=registries[1])
    for each in (own, its.labels(*LABELS.values())):
        for value in values:
            each.observe(value)
    assert generate_latest(registries[0]) == generate_latest(registries[1])


def reports():
    """Three steps' reports, as an engine that has just started sends them."""
    for n in (1, 2, 3):
        sums = {"num_steps": n, "num_rows": 9 * n, "num_roots": 2 * n, "num_drafted": 6 * n}
        stats = Stats(**sums, num_accepted=4 * n, step_seconds=0.25 * n)
        yield Report([OUTPUT, OUTPUT], 2, n, n, {"target": n, "draft": 1, "free": 9}, stats)


@pytest.mark.parametrize("num_restarts", [0, 1])
def test_reports_count_the_same_however_often_somebody_asks(num_restarts):
    asked, silent = Metrics("m", 4), Metrics("m", 4)
    for round in range(1 + num_restarts):
        if round:
            asked.on_restart()
            silent.on_restart()
        for report in reports():
            asked.on_report(report)
            asked.text()
            silent.on_report(msgspec.structs.replace(report))
    text = silent.text().decode()
    assert text == asked.text().decode()
    series = '{engine="0",model_name="m"}'
    for name, count in (("drafts", 6), ("num_draft_tokens", 18), ("num_accepted_tokens", 12)):
        name = name if name.startswith("num") else f"num_{name}"
        assert f"vllm:spec_decode_{name}_total{series} {count * (1 + num_restarts):.1f}\n" in text
    assert f"specserve_step_seconds_count{series} {3.0 * (1 + num_restarts)}\n" in text


def test_recurrent_states_in_the_prefix_cache_are_counted():
    metrics, series = Metrics("m", 4), '{engine="0",model_name="m"}'
    for kept, hits in ((3, 2), (1, 5)):
        metrics.on_stats(Stats(num_checkpoints=kept, num_checkpoint_hits=hits))
    text = metrics.text().decode()
    assert f"specserve_state_checkpoints{series} 1.0\n" in text
    assert f"specserve_state_checkpoint_hits_total{series} 5.0\n" in text
