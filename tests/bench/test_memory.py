"""How the memory's figures are taken: what is timed, and what a fixed split is."""

import pytest

from specserve_bench import elastic
from specserve_bench.memory import Stopwatch


def test_seconds_inside_the_calls_are_added_up(monkeypatch):
    now = iter([0.0, 2.0, 10.0, 13.0])
    monkeypatch.setattr("specserve_bench.memory.perf_counter", lambda: next(now))
    watch = Stopwatch()
    assert watch.around(max)(3, 5) == 5
    with pytest.raises(ValueError):
        watch.around(int)("x")
    assert watch.seconds == 2.0 + 3.0


def test_a_fixed_split_gives_neither_side_the_others_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(elastic, "ROUNDS", 1)
    load = elastic.Load(6, 120, 40)
    split, seen = elastic.split, []

    def watched(llm, share):
        split(llm, share)
        pool, scheduler, step = llm.engine.pool, llm.engine.scheduler, llm.engine.step

        def step_and_look():
            said = step()
            seen.append((pool.num_blocks, [*scheduler.running]))
            drafts = [b for r in scheduler.running for b in r.draft_table.blocks]
            targets = [b for r in scheduler.running for b in r.table.blocks]
            assert all(b < pool.num_blocks for b in targets)
            assert all(b >= pool.num_blocks for b in drafts)
            return said

        llm.engine.step = step_and_look

    monkeypatch.setattr(elastic, "split", watched)
    figure = elastic.one_load(load, elastic.larger_draft(tmp_path))
    assert figure["draft_bytes_over_target"] == 0.25
    assert figure["blocks"] == int(0.6 * 60 * 1.25)
    assert seen[0][0] == round(figure["blocks"] * 0.8)
    assert min(figure["tokens_per_s"].values()) > 0
