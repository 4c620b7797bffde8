"""The engine on the build for GPUs generates the text of the CPU's build.

On a GPU if there is one, else in Triton's interpreter.
"""

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

from specserve.config import load_config
from specserve.engine import build, loading
from specserve.engine import engine as step_loop
from specserve.engine.runner import RowGroup
from specserve.engine.sleep import Sleeper
from specserve.engine.tuning import choose_threads
from specserve.errors import ConfigError
from specserve.exchange.sampling_params import Sampling
from specserve.memory.blocks import BlockPool, BlockTable
from specserve.models.eagle_head import load_eagle_head
from specserve.models.loader import load_decoder
from specserve.speculation import head_model
from specserve_kernels import DeviceError, cpu
from specserve_kernels.codes import quantize
from specserve_kernels.cuda import ops as cuda_ops
from specserve_kernels.cuda import paged
from specserve_kernels.cuda.graphs import ChildGraphs
from specserve_kernels.ops import EagerProgram
from tests.checkpoints import tiny_checkpoint
from tests.engine.clock import Clock
from tests.engine.engines import (
    Case,
    Scripted,
    Watch,
    bush,
    draft_of,
    engine_for,
    hedge,
    in_chunks,
    load_small,
    logits_of,
    plain,
)
from tests.engine.heads import Oracle, close
from tests.kernels.builds import DEVICE, HAS_GPU, INTERPRETED, ON_GPU, cuda, recorded
from tests.kernels.fake_flashinfer import BatchPrefillWithPagedKVCacheWrapper
from tests.kernels.random_steps import row_errors
from tests.kernels.rerun import rerun
from tests.models.eagle_heads import write_head

pytestmark = ON_GPU
MAX_LEN = 288


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Target and draft, by the CPU's build and by the one for the GPU."""
    root = tmp_path_factory.mktemp("models")
    target = tiny_checkpoint(root / "target", seed=1, tie_word_embeddings=False)
    draft = tiny_checkpoint(root / "draft", seed=1, num_hidden_layers=1)
    there = [load_decoder(f, "fp32", cuda, MAX_LEN) for f in (target, draft)]
    return load_small(target), *there


def sampling(temperature, seed):
    return Sampling(
        max_tokens=5, temperature=temperature, top_k=40, top_p=0.95, min_p=0.01, seed=seed
    )


def cases():
    """Prompts of more than a chunk and of a token; the last begins as the first does."""
    prompts = [[*range(1, 20)], [7], [5, 6, 7] * 4, [*range(1, 18)]]
    return [Case(p, sampling(i % 2, i), arrives=2 * i) for i, p in enumerate(prompts)]


@pytest.fixture(autouse=True)
def op_by_op(monkeypatch):
    """Steps are not recorded, unless `in_graphs` is used as well."""

    def program(model, kv, max_rows, max_read, aux_layer_ids=()):
        return EagerProgram(model, kv, aux_layer_ids)

    monkeypatch.setattr(cuda, "program", program)


@pytest.fixture
def in_graphs(monkeypatch):
    """Steps run in CUDA graphs; without a GPU, as if they were."""
    monkeypatch.setattr(cuda, "program", recorded)
    if not HAS_GPU:
        monkeypatch.setattr(cuda, "child_graphs", ChildGraphs(DEVICE, rerun))
        monkeypatch.setattr(paged, "PROGRAMS", 4)  # the interpreter runs one after the other


@pytest.mark.parametrize(
    "drafter",
    [
        *("auto", bush),  # n-grams and the draft model, and trees
        *(
            pytest.param(drafter, marks=pytest.mark.slow)
            for drafter in ("ngram", "model", "none", hedge)
        ),
    ],
)
def test_the_text_is_the_cpus_own_with_every_drafter(models, drafter, monkeypatch):
    Clock(monkeypatch)  # so that auto is sure to guess
    the_text_is_the_cpus_own(models, drafter, cases())


@pytest.mark.parametrize("drafter", ["auto", pytest.param(bush, marks=pytest.mark.slow)])
def test_the_text_of_recorded_steps_is_the_cpus_own(models, drafter, in_graphs, monkeypatch):
    Clock(monkeypatch)  # so that auto is sure to guess
    late = msgspec.structs.replace(cases()[0], arrives=10)  # for enough steps, as auto takes few
    engine = the_text_is_the_cpus_own(models, drafter, [*cases()[:2], late])
    program = engine.target.program
    assert HAS_GPU or program.capture.num_recorded == len(program.recordings)
    assert {kind.size for kind in program.recordings} > {1, 16}
    assert program.eager.residual is None, "a step was not recorded"
    assert engine.stats.num_steps > 2 * len(program.recordings)


def test_recorded_steps_draw_from_edited_and_masked_rows_next_to_others(models, in_graphs):
    first, second = (Case([7, i], sampling(i, i)) for i in range(2))
    how = {"presence_penalty": 2.0, "logit_bias": {9: 8.0}, "allowed_ids": (9, *range(80, 320))}
    first = msgspec.structs.replace(first, sampling=msgspec.structs.replace(first.sampling, **how))
    engine = the_text_is_the_cpus_own(models, bush, [first, second])
    assert engine.target.program.eager.residual is None, "a step was not recorded"


@pytest.mark.slow
def test_a_head_goes_on_from_what_the_cpus_has(models, in_graphs, tmp_path, monkeypatch):
    """In recorded steps, with guesses that are run level by level, after rows that are written."""
    monkeypatch.setattr(head_model, "MANY", 2)
    on_cpu, target, _ = models
    write_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1])
    head, on_gpu = (load_eagle_head(tmp_path / "head", x) for x in (on_cpu, target))
    options = {"width": 2, "max_depth": 2, "min_gain": 0.0, "min_value": 0.0}
    engine = engine_for(target, None, "eagle", head=on_gpu, max_nodes=4, options=options)
    model, seen = engine.head, []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(cuda_ops, "SIZES", (1, 4))
    choose_threads(model.runner, engine.pool, load_config(None, {"model.threads": 1}), MAX_LEN)
    recordings = model.runner.program.recordings
    assert recordings and all(kind.has_residual for kind in recordings)
    extend = model.extend

    def checked(items):
        found = extend(items)
        for place in found[0]:
            hidden = model.last[items[place].id].hidden
            oracle = Oracle(on_cpu, head, items[place].token_ids.tolist())
            close(model.logits(hidden)[0], oracle.logits)
            seen.append(place)
        return found

    written, write = [], model.write_rows
    model.extend = checked
    model.write_rows = lambda *given: (written.append(1), write(*given))
    asked = cases()[2:3]
    assert [r.token_ids.tolist() for r in Watch(engine).run(asked)] == plain(on_cpu, asked)
    assert len(seen) >= 3 and engine.stats.num_drafted > 0 < len(written)
    assert not engine.stats.sources["eagle"].errors
    for runner in (engine.target, engine.head.runner):
        assert runner.program.eager.residual is None, "a step was not recorded"


HYBRIDS = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
    # Attention and Mamba-2 in each layer
    "falcon_h1": {"num_hidden_layers": 1, "mamba_n_heads": 2, "mamba_d_ssm": 24},
}
SLOW_HERE = () if HAS_GPU else pytest.mark.slow  # some of them suffice in the interpreter


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("falcon_h1", "in_graphs"),
        ("lfm2", "op_by_op"),
        ("qwen3_5", "op_by_op"),
        pytest.param("lfm2", "in_graphs", marks=SLOW_HERE),
        pytest.param("qwen3_5", "in_graphs", marks=SLOW_HERE),
    ],
)
def test_the_text_of_a_model_with_states_is_the_cpus_own(family, way, request, tmp_path):
    """With trees, replays, and a prompt that begins with another one's state."""
    request.getfixturevalue(way)
    sizes = {"num_hidden_layers": 2} | HYBRIDS[family]
    folder = tiny_checkpoint(tmp_path, family, seed=1, **sizes)
    models = load_small(folder), load_decoder(folder, "fp32", cuda, MAX_LEN), None
    later = msgspec.structs.replace(cases()[3], arrives=8)
    engine = the_text_is_the_cpus_own(models, bush, [cases()[0], later])
    assert engine.pool.num_checkpoint_hits > 0


def the_text_is_the_cpus_own(models, drafter, cases):
    on_cpu, target, draft = models
    want = plain(on_cpu, cases)
    engine = engine_for(
        target,
        draft_of(draft, drafter),
        drafter if isinstance(drafter, str) else Scripted(drafter, dict(enumerate(want))),
        max_nodes=6,
        **in_chunks(16),
        options={"width": 2, "max_depth": 3} if drafter == "model" else {},
    )
    watch = Watch(engine)
    got = watch.run(cases)
    assert [r.token_ids.tolist() for r in got] == want
    assert drafter in ("none", "ngram", "auto") or engine.stats.num_accepted > 0
    assert drafter != "auto" or engine.stats.num_drafted > 0
    assert drafter not in (bush, hedge) or watch.seen["moved"] > 0
    return engine


@pytest.mark.parametrize("kv_dtype", [pytest.param("int8", marks=pytest.mark.slow), "fp8"])
def test_the_text_over_kv_of_8_bits_is_the_cpus_own(models, kv_dtype):
    the_text_over_kv_of_8_bits_is_the_cpus_own(models, kv_dtype)


@pytest.mark.slow
def test_the_text_of_recorded_steps_over_kv_of_8_bits_is_the_cpus_own(models, in_graphs):
    the_text_over_kv_of_8_bits_is_the_cpus_own(models, "int8")


def the_text_over_kv_of_8_bits_is_the_cpus_own(models, kv_dtype):
    on_cpu, target, _ = models
    few = cases()[:2]
    want = plain(on_cpu, few, kv_dtype=kv_dtype)
    drafter = Scripted(bush, dict(enumerate(want)))
    engine = engine_for(target, None, drafter, max_nodes=6, kv_dtype=kv_dtype, **in_chunks(16))
    watch = Watch(engine)
    got = watch.run(few)
    assert [r.token_ids.tolist() for r in got] == want
    assert watch.seen["moved"] > 0


def test_a_step_takes_one_copy_up_and_draws_all_its_tokens_at_once(models, monkeypatch):
    _, target, _ = models
    draws = Counter()
    monkeypatch.setattr(cuda, "sample", counting(draws, "sample", cuda.sample))
    monkeypatch.setattr(cuda, "move_kv", counting(draws, "move", cuda.move_kv))
    engine = engine_for(target, None, "ngram", max_nodes=4, **in_chunks(16))
    engine.add([5, 6, 7] * 11, sampling(1.0, 3))
    while not engine.is_idle:
        before = cuda.staging.num_uploads, draws["sample"], draws["move"]
        engine.step()
        num_moves = draws["move"] - before[2]
        assert cuda.staging.num_uploads - before[0] == 1 + num_moves
        assert draws["sample"] - before[1] <= 1
    assert draws["sample"] < engine.stats.num_steps  # chunks of the prompt draw nothing


def counting(counter, name, call):
    def counted(*args, **kwargs):
        counter[name] += 1
        return call(*args, **kwargs)

    return counted


@INTERPRETED
def test_attention_is_planned_once_a_forward_and_run_once_a_layer(tmp_path, monkeypatch):
    """A bfloat16 model with heads of 64: FlashInfer's, in its two parts."""
    shape = {"head_dim": 64, "num_hidden_layers": 3, "dtype": torch.bfloat16}
    folder = tiny_checkpoint(tmp_path, seed=2, **shape)
    decoders = [load_decoder(folder, "bf16", ops, MAX_LEN) for ops in (cpu, cuda)]
    calls, made = Counter(), BatchPrefillWithPagedKVCacheWrapper
    for name in ("plan", "run"):
        monkeypatch.setattr(made, name, counting(calls, name, getattr(made, name)))
    logits = []
    for decoder in decoders:
        runner = engine_for(decoder).target
        pool = BlockPool(runner.kv.layers[0].k.shape[0])
        tables = [BlockTable(pool, 16) for _ in range(2)]
        assert all(table.try_reserve(60) for table in tables)
        with torch.inference_mode():
            logits_of(runner, [RowGroup(table, [*range(40)], 0, 0) for table in tables])
            calls.clear()  # the first forward has checked FlashInfer, too
            tree = RowGroup(tables[1], [7, 8, 9], 40, 3, 40, [0b1, 0b11, 0b101])
            logits.append(logits_of(runner, [RowGroup(tables[0], [3], 40, 1), tree]))
    assert row_errors(logits[1], logits[0]).max() < 0.03
    assert calls == {"plan": 2, "run": 3 * 2}


def test_a_model_of_codes_gives_the_cpus_logits(tmp_path, monkeypatch):
    """For a chunk of more rows than one program takes, and for a row."""
    folder, logits = tiny_checkpoint(tmp_path, num_hidden_layers=1, vocab_size=300), []
    for ops in (cpu, cuda):
        with monkeypatch.context() as patch:
            patch.setattr(ops, "prepack", prepacks_codes(ops.prepack))
            runner = engine_for(load_decoder(folder, "fp32", ops, MAX_LEN)).target
        table = BlockTable(BlockPool(runner.kv.layers[0].k.shape[0]), 16)
        assert table.try_reserve(21)
        with torch.inference_mode():
            groups = [RowGroup(table, [*range(20)], 0, 2), RowGroup(table, [3], 20, 1)]
            logits.append(torch.cat([logits_of(runner, [group]).clone() for group in groups]))
    assert row_errors(logits[1], logits[0]).max() < 1e-5


def prepacks_codes(prepack):
    return lambda weight, is_gated=False: prepack(quantize(weight, 4), is_gated)


def test_a_load_runs_what_a_later_step_would_compile_and_reports_who_attends(models, monkeypatch):
    """A tree, a KV move, a choice and its children: none waits for a compiler in mid-stream."""
    _, target, _ = models
    engine, calls = engine_for(target), Counter()
    for name in ("attention", "move_kv", "sample", "top_children"):
        monkeypatch.setattr(cuda, name, counting(calls, name, getattr(cuda, name)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(cuda_ops, "SIZES", (1, 4))
    masks = []
    plan = cuda.plan
    monkeypatch.setattr(
        cuda, "plan", lambda rows, *args: masks.append(rows.mask.any()) or plan(rows, *args)
    )
    config = load_config(None, {"model.threads": 1})
    _, words = choose_threads(engine.target, engine.pool, config, MAX_LEN)
    assert calls.keys() == {"attention", "move_kv", "sample", "top_children"}
    assert any(masks) and not all(masks)
    assert words == "a GPU, attention by Triton, 1 CPU threads"
    assert engine.pool.is_whole


def test_a_load_records_steps_with_adapters_if_there_are_slots(models, in_graphs, monkeypatch):
    _, target, _ = models
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(cuda_ops, "SIZES", (1, 4))
    few = {"max_batched_tokens": 4, "prefill_chunk": 4, "max_running": 1}
    few = {f"scheduler.{name}": number for name, number in few.items()}
    config = load_config(None, {"model.threads": 1} | few)
    for num_slots in (0, 2):
        engine = engine_for(target)
        choose_threads(engine.target, engine.pool, config, 8, num_slots)
        recorded_slots = {kind.num_slots for kind in engine.target.program.recordings}
        assert recorded_slots == {0, num_slots}


class OutOfMemory:
    """Stands in for a runner's launch, once."""

    def __init__(self, runner):
        self.runner, self.launch = runner, runner.launch
        runner.launch = self

    def __call__(self, step):
        self.runner.launch = self.launch
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_step_out_of_memory_ends_its_own_requests_and_nothing_else(models, caplog):
    on_cpu, target, _ = models
    first, second, later = cases()[:3]
    engine = engine_for(target, None, "none", max_running=2)
    requests = [engine.add(c.prompt, c.sampling) for c in (first, second, later)]
    engine.step()
    OutOfMemory(engine.target)
    failed = engine.step()
    assert {e.id for e in failed} == {requests[0].id, requests[1].id}
    assert all(
        e.finish_reason == "error" and "lower memory.kv_fraction" in e.failure for e in failed
    )
    assert "Tried to allocate 2.00 GiB" in caplog.messages[0]
    while not engine.is_idle:
        engine.step()
        engine.check()
    assert requests[2].token_ids.tolist() == plain(on_cpu, [later])[0]
    assert engine.pool.is_whole


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_one_clear_line():
    with pytest.raises(ConfigError) as e:
        build.build(load_config(None, {"model.device": "cuda"}))
    assert str(e.value).startswith("model.device = 'cuda': ")
    assert "or use 'cpu'" in str(e.value) and "\n" not in str(e.value)


def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 9.50 GiB. GPU 0 has a total capacity of "
        "139.00 GiB of which 1.25 GiB is free. Including non-PyTorch memory, this process has more"
    )


PLACES = {  # where memory runs out at load -> what is said of it
    "weights": (loading, "load_decoder", ["GiB of weights", "set model.dtype"]),
    "pool": (cpu, "allocate", ["bytes for the KV pool", "Lower memory.kv_bytes"]),
    "step": (cpu, "tune", ["a step of 512 rows", "Lower memory.kv_bytes", "max_batched"]),
}


@pytest.mark.parametrize(("where", "name", "words"), PLACES.values(), ids=PLACES)
def test_memory_that_runs_out_at_load_says_what_was_asked_and_what_to_lower(
    where, name, words, monkeypatch
):
    monkeypatch.setattr(where, name, no_memory)
    with pytest.raises(ConfigError) as e:
        build.build(load_config(None, {"model.device": "cpu", "memory.kv_bytes": 1 << 26}))
    assert not [
        part
        for part in ["allocate 9.50 GiB", "of which 1.25 GiB is free)", *words]
        if part not in str(e.value)
    ]


def test_the_memory_of_weights_is_reported_and_refused_before_they_are_loaded(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "specserve")
    settings = {"model.device": "cpu", "model.threads": 1, "memory.kv_bytes": 1 << 26}
    build.build(load_config(None, settings))
    assert any("its weights need 0.0" in text for text in caplog.messages)
    monkeypatch.setattr(cpu, "free_memory", lambda: 1 << 20)
    monkeypatch.setattr(loading, "load_decoder", pytest.fail)
    with pytest.raises(ConfigError, match=r"need 0\.0 GiB, but only 0\.0 GiB are free\. Free some"):
        build.build(load_config(None, settings))


def test_a_system_that_does_not_report_its_free_memory_loads_where_the_pool_is_sized(monkeypatch):
    def untold():
        raise DeviceError("this system does not tell its free memory")

    monkeypatch.setattr(cpu, "free_memory", untold)
    settings = {"model.device": "cpu", "model.threads": 1}
    build.build(load_config(None, settings | {"memory.kv_bytes": 1 << 26}))
    with pytest.raises(ConfigError, match=r"^this system does not tell .*\. Set memory\.kv_bytes$"):
        build.build(load_config(None, settings))


def test_a_step_holds_the_lock_of_its_device_from_draft_to_verify(models, monkeypatch):
    """Two engines on one GPU share staging buffers and workspaces."""
    _, target, draft = models
    engine = engine_for(target, draft, "model", max_nodes=4)
    engine.add([5, 6, 7] * 4, sampling(0.0, 3))
    held = []
    parts = (engine, "draft"), (engine.target, "launch"), (step_loop, "accepted_paths")
    for scope, name in parts:
        method = getattr(scope, name)

        def heard(*args, method=method):
            held.append(not free_for_others(cuda.lock))
            return method(*args)

        monkeypatch.setattr(scope, name, heard)
    engine.step()
    assert held == [True] * 3 and free_for_others(cuda.lock)


def free_for_others(lock):
    """Whether another thread could take it now."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(taken_and_given_back, lock).result()


def taken_and_given_back(lock):
    if not lock.lock.acquire(blocking=False):
        return False
    lock.lock.release()
    return True


def texts_of(engine):
    """The texts of two prompts, next to requests that the engine has already."""
    requests = [engine.add(ids, sampling(0, 0)) for ids in ([7, 8, 9], [*range(17)])]
    while not engine.is_idle:
        engine.step()
    return [request.token_ids.tolist() for request in requests]


@pytest.mark.parametrize("level", [1, 2])
def test_a_gpu_holds_no_weights_and_no_kv_while_the_engine_sleeps(
    tmp_path, in_graphs, level, monkeypatch
):
    if not HAS_GPU:  # memory of mapped files cannot be resized
        monkeypatch.setattr(cuda, "place", torch.clone)
    folder = tiny_checkpoint(tmp_path / "m", "llama", seed=1)
    aux = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    write_head(tmp_path / "head", without=["embed_tokens.weight"], **aux)
    key = loading.ModelKey(str(folder), "cuda", "auto", "fp32", MAX_LEN)
    target = loading.Model(key, lambda _: load_decoder(folder, "fp32", cuda, MAX_LEN))
    head = loading.Model(
        key, lambda _: load_eagle_head(tmp_path / "head", target.decoder), base=target
    )
    engine = engine_for(target.decoder, drafter="eagle", head=head.decoder, max_nodes=2)
    loaded = build.Loaded(engine, loading.Weights(target, None, head), MAX_LEN, "eagle", {})
    memory = [*target.storages, *head.storages]
    before, values = texts_of(engine), [x.clone() for x in memory]
    program, sleeper = engine.target.program, Sleeper(loaded)
    assert program.recordings and engine.pool.cached
    kept = engine.add([7, 8, 9], sampling(0, 0))
    engine.step()
    sleeper.sleep(loaded, level)
    arena = engine.target.arena.blocks
    assert not any(x.untyped_storage().nbytes() for x in (*memory, arena))
    assert not program.recordings and not engine.pool.cached
    sleeper.wake_up(loaded, ["kv_cache"])
    assert sleeper.state.tags == ("weights",) and arena.untyped_storage().nbytes() > 0
    sleeper.wake_up(loaded)
    assert sleeper.state.level == 0
    assert all(map(torch.equal, memory, values))
    assert texts_of(engine) == before
    assert kept.token_ids.tolist() == before[0]
