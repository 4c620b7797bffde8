"""Sleep of an `LLM`: memory really leaves, and the same weights and texts come back."""

import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve import LLM, ConfigError, RequestError, SamplingParams
from specserve.engine.fork_server import released
from specserve.engine.process import NOTHING, Control, Shared
from specserve.errors import Sleeping
from specserve_kernels import cpu, reference
from tests.adapters import write_adapter
from tests.checkpoints import tiny_checkpoint
from tests.models.eagle_heads import write_head
from tests.models.formats import quantized
from tests.models.gguf_files import WIDE, write
from tests.models.transformers_models import foreign_checkpoint

SETTINGS = {"model.threads": 1, "memory.kv_bytes": 1 << 26, "scheduler.max_model_len": 256}
PROMPTS = ["the cat sat on the mat, and the cat", "def read_lines(path):"]
ASKED = SamplingParams(max_tokens=24, temperature=0, logprobs=2, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=24, temperature=0.9, seed=3, logprobs=2, ignore_eos=True)


def loaded(folder, **settings):
    return LLM(folder, set=SETTINGS | settings, progress=False)


def with_draft_and_head(root):
    base = tiny_checkpoint(root / "base", "llama", seed=1, num_hidden_layers=4)
    draft = tiny_checkpoint(root / "draft", "llama", seed=2)
    write_head(root / "head", without=["embed_tokens.weight"])
    write_adapter(root / "adapter", base)
    settings = {
        "drafter.model": str(draft),
        "drafter.head": str(root / "head"),
        "lora.max_loras": 2,
    }
    llm = loaded(base, **settings)
    llm.load_lora_adapter("adapter", root / "adapter")
    return llm


KINDS = {
    "a draft model, a head and an adapter": with_draft_and_head,
    "w4": lambda root: loaded(tiny_checkpoint(root / "m"), **{"model.quantize": "w4"}),
    "w8a8": lambda root: loaded(tiny_checkpoint(root / "m"), **{"model.quantize": "w8a8"}),
    "experts": lambda root: loaded(tiny_checkpoint(root / "m", "qwen2_moe")),
    "a tied head": lambda root: loaded(tiny_checkpoint(root / "m", "smollm")),
    "GPTQ": lambda root: loaded(quantized(root / "m", "gptq-v1")),
    "GGUF": lambda root: loaded(write(root, "llama", **WIDE).file),
    "transformers' modules": lambda root: loaded(
        foreign_checkpoint(root / "m", model_type="stablelm")
    ),
}


def outputs(llm):
    loras = [None, "adapter"] if llm.engine.adapters is not None else [None]
    found = [
        llm.generate(PROMPTS, params, lora=lora, use_tqdm=False)
        for lora in loras
        for params in (ASKED, DRAWN)
    ]
    each = [output.outputs[0] for group in found for output in group]
    return [(choice.token_ids, choice.logprobs) for choice in each]


def storages(llm):
    return [x for model in filter(None, llm.weights) for x in model.storages]


def num_lost(llm):
    """Storages whose whole pages are zero."""
    return sum(len(x) > 8192 and not x[4096:-4096].any() for x in storages(llm))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_texts_and_logprobs_come_back(kind, tmp_path):
    with closing(KINDS[kind](tmp_path)) as llm:
        before, weights = outputs(llm), [x.clone() for x in storages(llm)]
        for model in filter(None, llm.weights):
            assert sum(map(len, model.storages)) >= 0.9 * model.decoder.forms.num_bytes
        already = num_lost(llm)
        for level in (1, 2):
            llm.sleep(level)
            assert (num_lost(llm) > already) == (level == 2)
            llm.wake_up()
            assert all(map(torch.equal, storages(llm), weights))
            assert outputs(llm) == before


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_returns_to_the_system_and_comes_back():
    with LLM(set=SETTINGS | {"memory.kv_bytes": 1 << 27}, progress=False) as llm:
        before = outputs(llm)
        arena, num_weights = llm.engine.target.arena.blocks, sum(map(len, storages(llm)))
        assert arena.nbytes + num_weights > 100 << 20
        for level, expected in (1, arena.nbytes), (2, arena.nbytes + num_weights):
            arena.fill_(1)
            awake = resident()
            llm.sleep(level)
            assert awake - resident() > 0.97 * expected
            llm.wake_up()
            assert outputs(llm) == before


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture
def llm(folder):
    with loaded(folder) as llm:
        yield llm


def test_an_llm_that_sleeps_refuses_requests_until_all_parts_are_awake(llm):
    before = outputs(llm)
    llm.sleep()
    llm.sleep(2)
    llm.sleep(1)  # it stays as deep
    assert llm.is_sleeping()
    for tags in None, ["weights"], ["weights"]:
        with pytest.raises(Sleeping, match="Call wake_up"):
            llm.generate(PROMPTS, ASKED)
        with pytest.raises(Sleeping):
            llm.change_speculation(max_nodes=1)
        if tags is not None:
            llm.wake_up(tags)
    llm.wake_up(["kv_cache"])
    llm.wake_up()
    assert not llm.is_sleeping()
    assert outputs(llm) == before


def test_the_cache_is_empty_after_sleep_and_statistics_are_kept(llm):
    outputs(llm)
    steps, costs = llm.engine.stats.num_steps, llm.speculation().costs["target"]
    assert llm.memory()["cached"] > 0
    llm.sleep(2)
    assert llm.memory()["free"] == llm.engine.pool.num_blocks
    llm.wake_up()
    llm.engine.check()
    assert llm.engine.stats.num_steps == steps
    assert llm.speculation().costs["target"].steps == costs.steps


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_stream_is_ended_or_completed_before_the_sleep(llm, mode):
    stream = llm.stream(PROMPTS[0], ASKED)
    next(stream)
    llm.sleep(2, mode=mode)
    with pytest.raises(StopIteration) as end:
        while True:
            next(stream)
    output = end.value.value
    is_whole = len(output.token_ids) == ASKED.max_tokens
    assert (output.finish_reason, is_whole) == (
        ("abort", False) if mode == "abort" else ("length", True)
    )


def test_another_threads_batch_is_aborted(llm):
    found, has_begun, step = [], threading.Event(), llm.step

    def slow():
        step()
        has_begun.set()
        time.sleep(0.02)  # without the lock, which a busy thread rarely leaves to others

    llm.step = slow
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    thread = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS, long)))
    thread.start()
    assert has_begun.wait(10)
    llm.sleep()
    thread.join(10)
    assert {output.finish_reason for output in found} == {"abort"}


WRONG = {
    "level": ([0], r"level: 0 is not 1 or 2"),
    "true": ([True], r"level: True is not 1 or 2"),
    "mode": ([1, "later"], "mode: 'later' is unknown. Use abort, wait, keep"),
    "keep": ([1, "keep"], "mode: 'keep' is for AsyncLLM and the server"),
}


def test_wrong_arguments_change_nothing(llm):
    for args, why in WRONG.values():
        with pytest.raises(RequestError, match=why):
            llm.sleep(*args)
    for tags in [], ["kv"], "weights":
        with pytest.raises(RequestError, match="must be a list of weights and kv_cache"):
            llm.wake_up(tags)
    assert not llm.is_sleeping()


def test_weights_that_another_llm_uses_are_not_dropped(llm, folder):
    with LLM(folder, set=SETTINGS, progress=False, weights=llm.weights) as other:
        before = outputs(other)
        with pytest.raises(ConfigError, match="another LLM of this process uses these weights"):
            llm.sleep()
        assert outputs(llm) == outputs(other) == before
    llm.sleep()


def test_weights_whose_file_is_gone_are_not_dropped(tmp_path):
    made = write(tmp_path, "llama", **WIDE)
    with loaded(made.file) as llm:
        before = outputs(llm)
        made.file.rename(tmp_path / "away")
        with pytest.raises(ConfigError, match=r"cannot be read again.* Sleep at level 1"):
            llm.sleep(2)
        assert not llm.is_sleeping() and outputs(llm) == before
        (tmp_path / "away").rename(made.file)
        llm.sleep(2)
        llm.sleep(2)
        llm.wake_up()
        llm.sleep(1)
        llm.wake_up()
        assert outputs(llm) == before


def write_changed(source, target):
    """Write the same tensors with other values: all sizes stay."""
    tensors = load_file(source)
    save_file({name: x + 1 for name, x in tensors.items()}, target)


def test_a_wake_up_that_fails_can_be_repeated(tmp_path):
    folder = tiny_checkpoint(tmp_path / "m", seed=1)
    other = tiny_checkpoint(tmp_path / "other", seed=1, num_hidden_layers=3)
    file, away = folder / "model.safetensors", tmp_path / "away"
    with loaded(folder) as llm:
        before = outputs(llm)
        llm.sleep(2)
        file.rename(away)
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            llm.wake_up()
        assert llm.is_sleeping()
        write_changed(away, file)
        with pytest.raises(ConfigError, match="has changed since the sleep began"):
            llm.wake_up()
        file.unlink()
        (folder / "config.json").rename(tmp_path / "config")
        (folder / "config.json").write_text((other / "config.json").read_text())
        (other / "model.safetensors").rename(file)
        with pytest.raises(ConfigError, match="has changed since the sleep began"):
            llm.wake_up()
        (tmp_path / "config").rename(folder / "config.json")
        away.rename(file)
        llm.wake_up()
        assert outputs(llm) == before


def test_a_failed_wake_up_releases_what_it_had_restored(tmp_path, folder):
    draft = tiny_checkpoint(tmp_path / "draft", seed=2)
    with loaded(folder, **{"drafter.model": str(draft)}) as llm:
        before, awake = outputs(llm), num_lost(llm)
        llm.sleep(2)
        asleep = num_lost(llm)
        assert asleep > awake
        draft.rename(tmp_path / "away")
        with pytest.raises(ConfigError):
            llm.wake_up()
        assert num_lost(llm) == asleep
        (tmp_path / "away").rename(draft)
        llm.wake_up()
        assert outputs(llm) == before


@pytest.mark.parametrize("part", ["weights", "kv_cache"])
def test_missing_memory_is_named_and_changes_nothing(llm, part, monkeypatch):
    before = outputs(llm)
    llm.sleep(2)
    llm.wake_up([tag for tag in ("weights", "kv_cache") if tag != part])
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.target.ops, "renew", raising(MemoryError("none left")))
        with pytest.raises(ConfigError, match=r"too little memory \(none left\) to wake up"):
            llm.wake_up()
    assert llm.is_sleeping()
    llm.wake_up()
    assert outputs(llm) == before


def test_a_sleep_without_host_memory_changes_nothing(llm, monkeypatch):
    before = outputs(llm)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.target.ops, "offload", raising(MemoryError("none left")))
        with pytest.raises(ConfigError, match="or sleep at level 2"):
            llm.sleep(1)
    assert not llm.is_sleeping() and llm.memory()["cached"] > 0
    assert outputs(llm) == before


def raising(error):
    def call(*_):
        raise error

    return call


def test_models_that_could_be_used_again_are_dropped_too(llm, tmp_path):
    with loaded(tiny_checkpoint(tmp_path / "spare", seed=2)) as other:
        spare, already = other.weights.target, num_lost(other)
        control = Control(llm.loaded, [*llm.weights, spare])
        control.sleep(2)
        assert num_lost(other) > already and control.known == []
        control.wake_up(["weights", "kv_cache"])


def test_a_fork_server_drops_its_weights(folder):
    """Also those of models that refer to themselves, which would stay in memory."""
    with loaded(folder) as llm:
        already = num_lost(llm)
        assert released(Shared(llm.weights)) == NOTHING
        assert num_lost(llm) > already


@pytest.mark.parametrize("ops", [reference, cpu])
def test_released_memory_has_the_same_address_and_neighbors_keep_their_bytes(ops):
    memory = torch.ones(5 * 4096 + 100, dtype=torch.uint8)
    inner = memory[50 : 3 * 4096]
    at = inner.data_ptr()
    ops.release([inner])
    ops.renew(inner)
    assert memory.data_ptr() + 50 == at
    first, last = -at % 4096, len(inner) - (at + len(inner)) % 4096
    assert not inner[first:last].any() and last > first
    assert inner[:first].all() and inner[last:].all() and memory[3 * 4096 :].all()


def test_a_host_tier_keeps_the_prefix_cache_over_a_sleep(tmp_path):
    settings = {"memory.host_bytes": 1 << 24, "memory.block_size": 4, "drafter.name": "none"}
    with closing(loaded(tiny_checkpoint(tmp_path / "m"), **settings)) as llm:
        first = outputs(llm)
        found = []
        for level in (1, 2):
            llm.sleep(level)
            assert not llm.engine.pool.cached and llm.engine.pool.is_whole
            llm.wake_up()
            hits = llm.engine.scheduler.tiers.stats["host"].hits
            assert outputs(llm) == first
            found.append(llm.engine.scheduler.tiers.stats["host"].hits - hits)
            llm.engine.scheduler.check([])
    assert min(found) > 0, "prompts came back from the tier"
