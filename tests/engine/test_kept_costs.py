"""Costs on disk: read at a start, whatever a file holds."""

import logging

import pytest

from specserve import LLM, SamplingParams
from specserve.engine import engine, tuning
from specserve.engine.tuning import KeptCosts, costs_file, keep_costs, read_costs
from specserve.speculation.constants import KNOWN
from specserve.speculation.costs import StepCosts
from tests.checkpoints import tiny_checkpoint


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def costs():
    found = StepCosts(64)
    for _ in range(KNOWN):
        found.observe(8, 0, 1, 0.03)
    return found


def test_they_are_kept_by_model_device_and_threads(cache):
    keep_costs(costs_file("model", "cpu", "2"), costs())
    assert read_costs(costs_file("model", "cpu", "2")) == costs().known()
    for other in (("another", "cpu", "2"), ("model", "cuda", "2"), ("model", "cpu", "4")):
        assert read_costs(costs_file(*other)) is None


def test_nothing_is_kept_before_a_step(cache):
    file = costs_file("model", "cpu", "2")
    keep_costs(file, StepCosts(64))
    assert not file.exists()


@pytest.mark.parametrize(
    "text",
    [
        *("", '{"stairs":', "[1]", '{"stairs": {"8": "fast"}, "added": [0, 0]}', "[" * 100_000),
        b'{"stairs": {"1": 0.1}, "added": [0, 0], "\xff": 1}',
    ],
    ids=range(6),
)
def test_a_spoilt_file_is_ignored_with_one_warning_and_replaced(cache, caplog, text):
    file = costs_file("model", "cpu", "2")
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with caplog.at_level(logging.WARNING):
        assert read_costs(file) is None
    assert len(caplog.messages) == 1 and str(file) in caplog.messages[0]
    keep_costs(file, costs())
    assert read_costs(file) == costs().known()


def test_a_missing_file_is_no_warning(cache, caplog):
    assert read_costs(costs_file("model", "cpu", "2")) is None
    assert caplog.messages == []


def test_what_cannot_be_written_leaves_nothing_behind(cache):
    file = costs_file("model", "cpu", "2")
    file.mkdir()
    keep_costs(file, costs())
    assert [*file.parent.glob("costs-*")] == [file]


def test_without_a_place_nothing_is_kept(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/x")
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    file = costs_file("model", "cpu", "2")
    assert file is None and read_costs(file) is None
    keep_costs(file, costs())


def test_an_engine_begins_with_what_an_earlier_one_kept(cache):
    file = costs_file("model", "cpu", "2")
    first = KeptCosts(costs(), file)
    first.write()
    second = KeptCosts(StepCosts(64), file)
    assert second.costs.seconds(8, 0, 1) == pytest.approx(first.costs.seconds(8, 0, 1))
    assert second.costs.is_known(8)


def test_an_idle_engine_writes_them_once_a_minute(cache, tmp_path, monkeypatch):
    file, now = costs_file("model", "cpu", "2"), [0.0]
    monkeypatch.setattr(engine, "monotonic", lambda: now[0])
    settings = {"model.threads": 1, "memory.kv_bytes": 1 << 24}
    with LLM(tiny_checkpoint(tmp_path / "model"), set=settings, progress=False) as llm:
        llm.engine.kept = [KeptCosts(costs(), file)]
        llm.engine.rest()
        written = file.read_text()
        for _ in range(100):
            llm.engine.kept[0].costs.observe(16, 0, 1, 0.04)
        llm.engine.rest()
        assert file.read_text() == written, "a moment ago it was written"
        now[0] += engine.KEEP_EVERY + 1
        llm.engine.rest()
        assert file.read_text() != written


def test_costs_of_another_format_are_not_read(cache, monkeypatch):
    keep_costs(costs_file("model", "cpu", "2"), costs())
    monkeypatch.setattr(tuning, "FORMAT", "0")
    assert read_costs(costs_file("model", "cpu", "2")) is None


def test_an_llm_that_is_closed_keeps_its_last_costs(tmp_path, monkeypatch):
    file = tmp_path / "costs.json"
    monkeypatch.setattr(tuning, "kept_file", lambda *key: file)
    settings = {"model.threads": 1, "memory.kv_bytes": 1 << 24}
    with LLM(tiny_checkpoint(tmp_path / "model"), set=settings, progress=False) as llm:
        for _ in range(2):  # the second within a minute of the first
            llm.engine.rest()
            llm.generate("the cat", SamplingParams(max_tokens=20, seed=1))
        known = llm.engine.scheduler.costs.known()
    assert read_costs(file) == known
