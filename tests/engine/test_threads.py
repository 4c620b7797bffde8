"""The number of threads is found while requests run, and changes no text."""

import pytest
import torch

from specserve.config import load_config
from specserve.engine.build import build
from specserve.engine.process import ready
from specserve_kernels import cpu
from specserve_kernels.cpu.threads import MeasuredThreads
from specserve_kernels.threads import Topology
from specserve_kernels.types import FixedThreads
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import engine_for, load_small
from tests.engine.test_engine import greedy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=3)


@pytest.fixture(autouse=True)
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def text(target, threads):
    engine = engine_for(target)
    engine.target.threads = threads
    request = engine.add([5, 17, 42], greedy(60))
    while not engine.is_idle:
        engine.step()
    return request.token_ids.tolist()


def test_steps_of_requests_settle_the_threads_and_the_text_is_the_same(folder):
    target, threads = load_small(folder), MeasuredThreads(Topology(2, 2))
    assert text(target, threads) == text(target, FixedThreads(1))
    assert threads.is_settled(1)
    assert len(threads.duels[2].seconds[2]) == 1, "the prompt's three rows are a size of their own"


SETTINGS = {"memory.kv_bytes": 1 << 24, "drafter.name": "none"}


@pytest.mark.parametrize(("asked", "dtype"), [("auto", "fp32"), ("bf16", "bf16")])
def test_the_engine_process_reports_what_it_has_chosen(folder, asked, dtype):
    config = load_config(None, SETTINGS | {"model.path": str(folder), "model.dtype": asked})
    told = ready(build(config))
    assert (told.dtype, told.kv_dtype) == (dtype, dtype)
    assert (told.vocab_size, told.max_model_len) == (320, 512)
    assert told.arithmetic.split()[0] == "cpu" and len(told.arithmetic.split()) > 1


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_it_reports_how_kv_is_kept(folder, kv_dtype):
    settings = SETTINGS | {"model.path": str(folder), "memory.kv_dtype": kv_dtype}
    loaded = build(load_config(None, settings))
    assert ready(loaded).kv_dtype == kv_dtype
    assert f" tokens in {kv_dtype}, in blocks of 64: " in loaded.phases["pool"]


def test_a_number_of_threads_that_the_config_names_stays(folder):
    settings = SETTINGS | {"model.path": str(folder), "model.threads": 1}
    loaded = build(load_config(None, settings))
    assert loaded.engine.target.threads == FixedThreads(1)
    assert loaded.phases["target threads"].endswith("1, as configured")


def test_engines_that_share_a_model_learn_together(folder):
    config = load_config(None, SETTINGS | {"model.path": str(folder)})
    first = build(config)
    second = build(config, known=first.weights)
    assert second.engine.target.threads is first.engine.target.threads


def test_a_build_of_the_ops_may_run_its_first_steps_at_load(folder, monkeypatch):
    """As the one for GPUs does, which finds out so whether the memory of a step is there."""
    seen = []

    def tune(step, most, threads, key):
        seen.extend((rows, tuple(step(rows).shape)) for rows in (1, most))
        return FixedThreads(1), "1"

    monkeypatch.setattr(cpu, "tune", tune)
    engine = build(load_config(None, SETTINGS | {"model.path": str(folder)})).engine
    assert seen == [(1, (1, 320)), (512 + 64 - 256, (1, 320))]
    assert engine.pool.is_whole
