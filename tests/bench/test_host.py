"""How the host's share of a step is taken."""

from collections import Counter

import pytest

from specserve_bench.figures import host


def test_a_phase_inside_another_stops_the_outer_one(monkeypatch):
    now = iter([0, 5, 7, 10, 16, 20])
    monkeypatch.setattr(host, "perf_counter_ns", lambda: next(now))
    clock = host.PhaseClock()
    inner = clock.timed(max, "inner")
    assert clock.timed(lambda a: inner(a, 3), "outer")(2) == 3
    assert clock.take() == {"rest": 5 + 4, "outer": 2 + 6, "inner": 3}
    assert clock.spent == {}


def test_a_phase_that_raises_ends():
    clock = host.PhaseClock()
    with pytest.raises(ValueError):
        clock.timed(int, "plan")("x")
    assert clock.phase == "rest"


def test_the_hosts_share_of_a_step_is_all_but_ops():
    steps = [Counter(plan=n * 10**6, build=10**6, forward=9 * 10**6) for n in (1, 2, 3)]
    row = host.summary(host.HostSetting("none", 1, 0.0), steps)
    assert (row["host_ms"], row["step_ms"], row["steps"]) == (3.0, 12.0, 3)
    assert row["phases_ms"]["plan"] == 2.0


def test_every_setting_is_measured_in_steps_with_all_of_its_requests(monkeypatch, capsys):
    small = {"ROUNDS": 1, "SHARED": 68, "OWN": 4, "NEW_TOKENS": 9}
    chosen = ("none", 2, 1.0), ("model", 1, 0.0), ("auto", 1, 0.0)
    settings = [host.HostSetting(*each) for each in chosen]
    for name, value in (small | {"SETTINGS": settings}).items():
        monkeypatch.setattr(host, name, value)
    figures = host.measure()
    plain, drafted, planned = figures["rows"]
    assert plain["steps"] == 6  # the second request starts a step later, the first ends one earlier
    assert plain["phases_ms"]["draft"] < drafted["phases_ms"]["draft"]
    assert all(row["host_ms"] < row["step_ms"] for row in figures["rows"])
    printed = capsys.readouterr().out
    assert host.table(figures).count("\n|") == 4
    assert plain["planning_ms"] == drafted["planning_ms"] == 0
    assert 0 < planned["phases_ms"]["choose"] <= planned["planning_ms"] < planned["host_ms"]
    assert printed.count("merge + choose + learn") == 1


def test_what_is_timed_of_auto_is_put_back():
    def named():
        return (
            host.NativeTrie.merge,
            host.DraftDepthController.first,
            host.DraftDepthController.next,
        )

    before = named()
    llm = host.LLM(drafter="auto", set={"memory.kv_bytes": 1 << 26}, progress=False)
    with llm, host.watched(llm.engine, host.Link, host.PhaseClock()):
        assert not {*before} & {*named()}
    assert before == named()
