"""Steps are measured at start-up, so that their costs are known before the first request."""

import zlib

import pytest

from specserve.config import load_config
from specserve.engine import build as build_module
from specserve.engine import tuning
from specserve.engine.build import build
from specserve.engine.tuning import MeasuredStep
from specserve.speculation.constants import KNOWN
from specserve.speculation.costs import StepCosts
from tests.checkpoints import tiny_checkpoint
from tests.models.eagle_heads import write_head

MODELS = {"model": "draft", "head": "head"}  # setting -> folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a draft model and a head, with room for the longer context."""
    root = tmp_path_factory.mktemp("models")
    for name, layers in (("target", 4), ("draft", 1)):
        tiny_checkpoint(root / name, num_hidden_layers=layers, max_position_embeddings=4096)
    write_head(root / "head")
    return root


@pytest.fixture
def started(folders, tmp_path, monkeypatch):
    """Builds an engine; what it measures is kept in a folder of the test's own."""

    def file(model, *others):
        return tmp_path / f"{zlib.crc32(model.encode()):08x}.json"

    monkeypatch.setattr(build_module, "costs_file", file)
    monkeypatch.setattr(tuning, "MEASURING", 60.0)  # whatever else runs on this machine

    def start(drafter="auto", **settings):
        asked = {"drafter.name": drafter, "memory.kv_bytes": 1 << 25, "model.dtype": "fp32"}
        asked["model.path"] = str(folders / "target")
        if drafter == "auto":
            asked["drafter.options.sources"] = ["ngram", "model", "eagle"]
            asked |= {f"drafter.{name}": str(folders / file) for name, file in MODELS.items()}
        return build(load_config(None, asked | settings))

    return start


def test_costs_of_rows_requests_and_context_are_known_before_the_first_request(started):
    loaded = started()
    engine = loaded.engine
    for name, model in (("target", engine.scheduler), ("draft", engine.draft_model)):
        assert all(map(model.costs.is_known, (1, 8, 64))), name
        assert "after 2048 tokens: 1 row " in loaded.phases[f"{name} steps"]
    assert all(map(engine.head.costs.is_known, (1, 8, 64)))
    assert engine.pool.is_whole and engine.is_idle
    engine.kept[0].write()
    assert started().phases["target steps"].endswith("known from an earlier start")


def test_measured_steps_show_the_cost_of_rows_requests_and_context(started, monkeypatch):
    def true_seconds(step):
        attended = step.rows * step.context
        return 4e-3 + 1e-4 * step.rows + 1e-4 * step.requests + 2e-8 * attended

    monkeypatch.setattr(tuning, "measured", lambda step, *_: [true_seconds(step)] * 3)
    costs = started("ngram").engine.scheduler.costs
    for step in (
        *(MeasuredStep(rows, 1, context) for rows in (1, 8, 64) for context in (128, 1000, 2048)),
        MeasuredStep(8, 8, 128),
    ):
        found = costs.seconds(step.rows, step.context * step.requests, step.requests)
        assert found == pytest.approx(true_seconds(step), rel=0.1), step


@pytest.mark.parametrize(("slower", "is_kept"), [(16.0, False), (1 / 16, False), (2.0, True)])
def test_first_steps_that_contradict_the_measured_ones_drop_them(
    started, monkeypatch, slower, is_kept
):
    """Other load may have slowed the measured steps, or slow the first steps of requests."""
    monkeypatch.setattr(tuning, "measured", lambda step, *_: [1e-3 * (1 + step.rows / 8)] * 3)
    costs = started("ngram").engine.scheduler.costs
    for _ in range(KNOWN):
        costs.observe(1, 128, 1, slower * costs.seconds(1, 128, 1))
    assert costs.is_known(64) == is_kept


def test_nothing_is_measured_without_drafting_and_after_the_time_limit(started, monkeypatch):
    assert "target steps" not in started("none").phases
    monkeypatch.setattr(tuning, "MEASURING", 0.0)
    loaded = started("ngram")
    assert loaded.phases["target steps"].endswith("not measured")
    assert not loaded.engine.scheduler.costs.has_steps


def test_steps_that_would_take_too_long_are_left_out(started, monkeypatch):
    """One row takes 0.1 s and eight take 0.5 s: four steps of 64 rows do not fit into 1.5 s."""
    done, took = [], {1: 0.1, 8: 0.5, 64: 0.01}

    def fake(step, runner, pool):
        done.append(step)
        return [took[step.rows]] * 3

    monkeypatch.setattr(tuning, "measured", fake)
    monkeypatch.setattr(tuning, "MEASURING", 1.5)
    clock = iter(range(100))
    monkeypatch.setattr(tuning, "perf_counter", lambda: 0.25 * next(clock))
    started("ngram")
    assert done == [MeasuredStep(1, 1, 128), MeasuredStep(8, 1, 128)]


@pytest.mark.parametrize("most", [2, 9])
def test_steps_have_no_more_rows_than_the_scheduler_allows(started, most):
    settings = {"scheduler.max_batched_tokens": most, "scheduler.prefill_chunk": most}
    loaded = started("ngram", **settings, **{"scheduler.max_running": 1})
    assert isinstance(loaded.engine.scheduler.costs, StepCosts)
    assert ("8 rows" in loaded.phases["target steps"]) == (most == 9)
    assert "64 rows" not in loaded.phases["target steps"]
