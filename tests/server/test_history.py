"""The samples of the last 15 minutes, and who may read the dashboard's data."""

import pytest
from starlette.testclient import TestClient

from specserve.config import ServerConfig
from specserve.exchange.messages import Report, Stats, StepOutput
from specserve.server.history import EVERY, NUM_SAMPLES, History, percentile_ms
from specserve.server.metrics import Metrics
from specserve.server.routes import DASHBOARD
from tests.server.server_process import eventually
from tests.server.test_routes import app_with

OUTPUT = StepOutput(0, [5], None, True, 3, 2, 0.0)


def report(n):
    sums = {"num_steps": n, "num_rows": 9 * n, "num_roots": 2 * n, "num_drafted": 6 * n}
    cache = {"num_looked_up": 10 * n, "num_cached": 5 * n}
    stats = Stats(**sums, **cache, num_accepted=4 * n)
    return Report([OUTPUT, OUTPUT], 2, n, n, {"target": 3, "draft": 1, "free": 4}, stats)


def test_a_sample_has_the_figures_since_the_last_one():
    history = History(Metrics("m", 4))
    for n in 1, 2:
        history.metrics.on_report(report(n))
    history.metrics.num_generated = 60
    history.metrics.window.ttft += [0.02, 0.01, 0.03]
    history.take(100.0)
    history.metrics.on_restart()
    history.take(103.0)
    first, second = history.samples
    assert (first.running, first.waiting, first.kv_usage) == (2, 2, 0.5)
    assert (first.tokens_per_second, first.tokens_per_step) == (60 / EVERY, 3.0)
    assert first.prefix_hit_rate == 0.5 and first.restarts == 0
    assert (first.ttft_ms_p50, first.ttft_ms_p95, first.tpot_ms_p50) == (20.0, 30.0, None)
    assert (second.running, second.tokens_per_second, second.tokens_per_step) == (0, 0.0, None)
    assert second.restarts == 1 and second.ttft_ms_p50 is None
    assert history.after(0).step_rows == {9: 2}
    assert [s.at for s in history.after(100.0).samples] == [103.0]


def test_a_sample_has_the_largest_load_since_the_last_one():
    history = History(Metrics("m", 4))
    full, empty = report(2), Report([], 0, 0, 0, {"target": 0, "draft": 0, "free": 8}, Stats())
    for each in full, empty:
        history.metrics.on_report(each)
    for now in 100.0, 103.0:
        history.take(now)
    short, idle = history.samples
    assert (short.running, short.waiting, short.kv_usage) == (2, 2, 0.5)
    assert (idle.running, idle.waiting, idle.kv_usage) == (0, 0, 0.0)
    history.metrics.on_report(full)
    for now in 106.0, 109.0:  # a long step: no report comes between them
        history.take(now)
    assert [s.running for s in history.samples][2:] == [2, 2]


def test_old_samples_are_dropped():
    history = History(Metrics("m", 4))
    for n in range(NUM_SAMPLES + 5):
        history.take(float(n))
    assert len(history.samples) == NUM_SAMPLES and history.samples[0].at == 5
    assert NUM_SAMPLES * EVERY == 15 * 60


@pytest.mark.parametrize(
    ("values", "share", "shown"),
    [([], 0.5, None), ([1], 0.95, 1000), ([2, 1], 0.5, 1000), ([3, 1, 2], 0.5, 2000)],
)
def test_a_percentile_is_one_of_the_values(values, share, shown):
    assert percentile_ms(values, share) == shown
    assert percentile_ms([*range(1, 101)], 0.95) == 95_000


def test_a_server_returns_its_samples(server):
    server.post("/v1/completions", {"prompt": "the cat", "max_tokens": 5})

    def sampled():
        return server.get("/metrics/history").body["samples"]

    eventually(lambda: any(s["ttft_ms_p50"] for s in sampled()))
    last = sampled()[-1]["at"]
    assert all(s["at"] > last for s in server.get(f"/metrics/history?since={last}").body["samples"])
    wrong = server.get("/metrics/history?since=now")
    assert wrong.status == 400 and "Unix time" in wrong.body["error"]["message"]


def test_the_dashboards_data_is_open_only_if_the_server_allows_it(tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    keys = str(tmp_path / "keys")
    shut = TestClient(app_with(api_key_file=keys))
    app = app_with(api_key_file=keys, open_dashboard=True)
    opened = TestClient(app, raise_server_exceptions=False)  # nothing is behind its guards
    for path in DASHBOARD:
        assert shut.get(path).status_code == 401
        assert opened.post(path).status_code == opened.patch(path).status_code == 401
    assert opened.get("/v1/models").status_code != 401
    assert opened.get("/v1/models/x").status_code == 401
    assert opened.post("/v1/chat/completions", json={}).status_code == 401


def test_an_open_dashboard_without_keys_is_an_error():
    with pytest.raises(ValueError, match=r"open_dashboard = true needs server\.api_key_file"):
        ServerConfig(open_dashboard=True)
