"""Adapters of requests: each has the text that it has alone, whatever comes and goes beside it."""

import gc
import json
import os
import shutil
import threading
from concurrent.futures import wait
from random import Random
from types import SimpleNamespace

import pytest
import torch

from specserve.config import load_config
from specserve.engine.adapters import AHEAD, GONE
from specserve.engine.build import assemble
from specserve.engine.pool_plan import Models
from specserve.engine.process import loaded_adapters, report
from specserve.errors import ConfigError
from specserve.exchange.messages import Caller, ResumeState, frame
from specserve.exchange.sampling_params import Sampling
from specserve.models.adapters import PackedAdapter
from tests.adapters import write_adapter
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import ask_always, load_small, plan_by_chance

VOCAB, MAX_LEN, RANK = 320, 288, 4
EVERY = ["ngram", "prediction", "suffix", "recycle", "model"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A target, a draft model, and four adapters that change texts."""
    root = tmp_path_factory.mktemp("models")
    base = tiny_checkpoint(root / "target", seed=1, tie_word_embeddings=False)
    tiny_checkpoint(root / "draft", seed=1, num_hidden_layers=1)
    for seed in range(4):
        write_adapter(root / f"adapter-{seed}", base, seed, scale=0.3)
    return root


@pytest.fixture(scope="module")
def models(root):
    return load_small(root / "target"), load_small(root / "draft")


def engine_with(models, num_slots=4, sources=None, **overrides):
    target, draft = models
    settings = {
        "memory.kv_bytes": 1 << 26,
        "lora.max_loras": num_slots,
        "lora.max_rank": RANK,
        "scheduler.max_running": 12,
        **({"drafter.name": "none"} if sources is None else {}),
        **overrides,
    }
    if sources is not None:
        settings |= {"drafter.model": "loaded", "drafter.options": {"sources": sources}}
    draft = draft if sources else None
    return assemble(load_config(None, settings), Models(target, draft), MAX_LEN)


def sampling(max_tokens, **own):
    plain = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    return Sampling(max_tokens=max_tokens, **plain | own)


def load(engine, folder):
    return engine.adapters.welcome(str(folder), engine.adapters.read(folder))


def finish(engine):
    """Step until all requests have ended; their outputs, by request."""
    outputs = {}
    while not engine.is_idle:
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
        engine.check()
    assert engine.pool.is_whole, "blocks held at idle"
    return outputs


def told(outputs):
    """A request's tokens, and their logprobs bit by bit."""
    tokens = [token for output in outputs for token in output.tokens]
    return tokens, [one.logprob for output in outputs for one in output.logprobs]


def asked(seed, length=40, **others):
    rng = Random(seed)
    pattern = [rng.randrange(VOCAB) for _ in range(9)]
    prompt = [*pattern, *pattern, rng.randrange(VOCAB), *pattern][: 19 + seed % 9]
    own = {"temperature": 0.8 if seed % 2 else 0.0, "seed": seed, "logprobs": 0}
    return prompt, sampling(length, **own | others)


def alone(models, ref, prompt, how):
    engine = engine_with(models)
    request = engine.add_choices(prompt, [how], adapter=ref)[0]
    return told(finish(engine)[request.id])


@pytest.mark.parametrize("sources", [None, EVERY], ids=["plain", "every source"])
def test_eight_that_mix_four_adapters_and_none_have_what_each_has_alone(models, root, sources):
    plain = engine_with(models)
    refs = [load(plain, root / f"adapter-{i % 4}") if i % 5 < 4 else None for i in range(8)]
    cases = [asked(seed) for seed in range(8)]
    want = [alone(models, ref, *case) for ref, case in zip(refs, cases, strict=True)]
    assert len({tuple(tokens) for tokens, _ in want}) == 8
    engine = engine_with(models, sources=sources)
    if sources is not None:
        plan_by_chance(engine, seed=3)
        ask_always(engine)
    for _ in range(2):  # the second finds KV, and what sources have learnt
        each = zip(cases, refs, strict=True)
        ids = [engine.add_choices(p, [s], adapter=ref)[0].id for (p, s), ref in each]
        outputs = finish(engine)
        assert [told(outputs[id]) for id in ids] == want
    if sources is not None:
        assert engine.stats.num_accepted > 5
        assert {n for n, s in engine.stats.sources.items() if s.verified} >= {"ngram", "model"}


def test_choices_of_one_prompt_have_its_adapter(models, root):
    engine = engine_with(models)
    ref, (prompt, how) = load(engine, root / "adapter-1"), asked(4)
    samplings = [how, sampling(40, temperature=0.8, seed=5, logprobs=0)]
    first, second = engine.add_choices(prompt, samplings, adapter=ref)
    outputs = finish(engine)
    assert told(outputs[first.id]) == alone(models, ref, prompt, samplings[0])
    assert told(outputs[second.id]) == alone(models, ref, prompt, samplings[1])


def test_a_prefix_hit_never_crosses_adapters(models, root):
    engine = engine_with(models)
    one, other = (load(engine, root / f"adapter-{i}") for i in (0, 1))
    prompt, brief = [*range(100)], sampling(4)

    def num_cached(ref):
        request = engine.add_choices(prompt, [brief], adapter=ref)[0]
        finish(engine)
        return request.num_cached

    assert [num_cached(ref) for ref in (one, None, other)] == [0, 0, 0]
    assert [num_cached(ref) for ref in (one, None, other)] == [99, 99, 99]


def test_other_content_under_the_same_folder_never_sees_old_kv(models, root, tmp_path):
    folder = shutil.copytree(root / "adapter-0", tmp_path / "adapter")
    engine = engine_with(models)
    prompt, how = [*range(100)], sampling(20, logprobs=0)
    before = load(engine, folder)
    engine.add_choices(prompt, [how], adapter=before)
    finish(engine)
    shutil.copytree(root / "adapter-1", folder, dirs_exist_ok=True)
    after = load(engine, folder)
    engine.adapters.forget(before.digest)
    request = engine.add_choices(prompt, [how], adapter=after)[0]
    got = told(finish(engine)[request.id])
    assert request.num_cached == 0
    assert got == alone(models, load(engine, root / "adapter-1"), prompt, how)


def test_draft_tokens_learn_from_texts_of_the_same_adapter_alone(models, root):
    engine = engine_with(models, sources=["suffix"])
    one, other = (load(engine, root / f"adapter-{i}") for i in (0, 1))
    (prompt, how) = asked(2, length=60)

    def drafted(ref):
        before = engine.stats.num_drafted
        engine.add_choices(prompt, [how], adapter=ref)
        finish(engine)
        return engine.stats.num_drafted - before

    ask_always(engine)
    drafted(one)
    assert engine.speculator.acceptance.find((0, "", one.digest)) is not None
    assert engine.speculator.acceptance.find((0, "", other.digest)) is None
    assert engine.speculator.acceptance.find((0, "", "")) is None


def test_more_adapters_than_slots_take_turns(models, root):
    engine = engine_with(models, num_slots=2)
    refs = [load(engine, root / f"adapter-{i}") for i in range(4)]
    cases = [asked(seed, length=12) for seed in range(12)]
    ids = [
        engine.add_choices(*(p, [s]), adapter=refs[i % 4])[0].id for i, (p, s) in enumerate(cases)
    ]
    assert report(engine, []).num_waiting == len(cases)  # routers are told of those, too
    outputs = finish(engine)
    for i, (id, case) in enumerate(zip(ids, cases, strict=True)):
        assert told(outputs[id]) == alone(models, refs[i % 4], *case)
    assert len(engine.adapters.residents) == 2
    assert not (engine.adapters.coming or engine.adapters.waiting)


def test_an_adapter_with_a_stream_of_requests_makes_room_for_another(models, root):
    engine = engine_with(models, num_slots=1)
    busy, other = (load(engine, root / f"adapter-{i}") for i in (0, 1))
    prompt, how = asked(0, length=10)
    waiting, steps = None, 0
    while waiting is None or waiting.num_output < 10:
        if steps % 3 == 0:
            engine.add_choices(prompt, [how], adapter=busy)
        if steps == 4:
            waiting = engine.add_choices(prompt, [how], adapter=other)[0]
        engine.step()
        steps += 1
        assert steps < 2000, "it waits for ever"
    finish(engine)


def test_one_adapter_that_waits_for_a_slot_holds_up_one_other(models, root):
    engine = engine_with(models, num_slots=2)
    fewer, more, other = (load(engine, root / f"adapter-{i}") for i in (0, 1, 2))
    prompt, how = asked(0, length=250)
    for ref in (fewer, more, more):
        engine.add_choices(prompt, [how], adapter=ref)
    engine.step()
    for _ in range(3):
        last = engine.add_choices(prompt, [how], adapter=other)[0]
    engine.step()
    engine.adapters.wait(60)
    held, free = (engine.add_choices(prompt, [how], adapter=ref)[0] for ref in (fewer, more))
    engine.step()
    engine.step()
    assert (last.slot, held.slot, free.num_output > 0) == (-1, -1, True)
    finish(engine)


def test_requests_without_an_adapter_do_not_wait_for_those_of_others(models, root):
    engine = engine_with(models, num_slots=1)
    busy, other = (load(engine, root / f"adapter-{i}") for i in (0, 1))
    prompt, how = asked(0, length=50)
    engine.add_choices(prompt, [how], adapter=busy)
    engine.step()
    late = engine.add_choices(prompt, [how], adapter=other)[0]
    plain = engine.add_choices(prompt, [how])[0]
    for _ in range(3):
        engine.step()
    assert plain.num_output > 0 and late.num_output == 0
    finish(engine)
    assert late.num_output == 50


def test_the_last_request_frees_an_adapter_that_was_forgotten(models, root):
    engine = engine_with(models, num_slots=2)
    adapters, ref = engine.adapters, load(engine, root / "adapter-0")
    prompt, how = asked(1)
    running = engine.add_choices(prompt, [how], adapter=ref)[0]
    [first] = engine.step()
    adapters.forget(ref.digest)
    assert ref.digest in adapters.residents
    outputs = finish(engine)
    assert not adapters.residents and len(adapters.free) == 2 and not adapters.forgotten
    assert told([first, *outputs[running.id]]) == alone(models, ref, prompt, how)


def test_an_idle_adapter_that_is_forgotten_is_freed_at_once(models, root):
    engine = engine_with(models, num_slots=2)
    ref = load(engine, root / "adapter-0")
    engine.adapters.forget(ref.digest)
    assert not engine.adapters.residents and not engine.adapters.forgotten


def test_an_adapter_that_was_forgotten_and_loaded_again_stays(models, root):
    engine = engine_with(models, num_slots=2)
    ref = load(engine, root / "adapter-0")
    engine.add_choices([1, 2], [sampling(5)], adapter=ref)
    engine.step()
    engine.adapters.forget(ref.digest)
    assert load(engine, root / "adapter-0") == ref
    finish(engine)
    assert ref.digest in engine.adapters.residents


def test_files_that_have_changed_end_their_own_requests_alone(models, root, tmp_path, caplog):
    folder = shutil.copytree(root / "adapter-0", tmp_path / "adapter")
    engine = engine_with(models, num_slots=1)
    ref, prompt = load(engine, folder), [1, 2, 3]
    engine.adapters.forget(ref.digest)
    other = load(engine, root / "adapter-2")
    shutil.copytree(root / "adapter-1", folder, dirs_exist_ok=True)
    bad, gone = (engine.add_choices(prompt, [sampling(5)], adapter=ref)[0], None)
    good = engine.add_choices(prompt, [sampling(5)], adapter=other)[0]
    outputs = finish(engine)
    assert outputs[bad.id][-1].failure == GONE and "weights have changed" in caplog.text
    assert outputs[bad.id][-1].blamed == "model"
    assert good.num_output == 5
    shutil.rmtree(folder)
    gone = engine.add_choices(prompt, [sampling(5)], adapter=ref)[0]
    assert finish(engine)[gone.id][-1].failure == GONE and "missing" in caplog.text


def test_an_adapter_that_is_loaded_while_a_request_s_own_reading_waits_is_read_once(models, root):
    engine = engine_with(models, num_slots=2)
    refs = [load(engine, root / f"adapter-{i}") for i in range(4)]
    for ref in refs:
        engine.adapters.forget(ref.digest)
    for i in range(3):  # each leaves its slot, is asked for, and is loaded meanwhile
        request = engine.add_choices([1, 2], [sampling(5)], adapter=refs[i])[0]
        engine.step()
        load(engine, root / f"adapter-{i}")
        finish(engine)
        assert request.num_output == 5 and not engine.adapters.coming
        engine.adapters.forget(refs[i].digest)


@pytest.mark.parametrize("text", ["\ud800x", "a" * 10_000])
def test_what_a_file_says_can_be_reported_whatever_it_is(models, root, tmp_path, text):
    folder = shutil.copytree(root / "adapter-0", tmp_path / "adapter")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", text: 1}))
    engine = engine_with(models)
    engine.adapters.load(str(folder))
    engine.adapters.wait(60)
    [answer] = loaded_adapters(engine)
    assert answer.adapter is None and len(frame(answer)) < 2000


def test_a_request_that_leaves_while_its_adapter_is_read_leaves_nothing(models, root):
    engine = engine_with(models, num_slots=1)
    ref = load(engine, root / "adapter-0")
    engine.adapters.forget(ref.digest)
    request = engine.add_choices([1, 2], [sampling(5)] * 2, adapter=ref)[0]
    engine.step()
    engine.finish(request.id)
    finish(engine)
    engine.adapters.wait(10)
    assert not (engine.adapters.waiting or engine.adapters.coming)


@pytest.mark.parametrize("sources", [None, EVERY], ids=["plain", "every source"])
def test_a_request_goes_on_in_another_engine_with_its_adapter(models, root, sources):
    first = engine_with(models)
    ref, (prompt, how) = load(first, root / "adapter-3"), asked(3, length=30)
    want = alone(models, ref, prompt, how)
    engine = engine_with(models, sources=sources)  # it has not heard of the adapter
    resume = ResumeState(want[0][:11])
    request = engine.add_choices(prompt, [how], adapter=ref, resume=resume)[0]
    tokens, logprobs = told(finish(engine)[request.id])
    assert (tokens, logprobs) == (want[0][11:], want[1][11:])


def test_loading_and_unloading_next_to_streams_changes_no_text_and_keeps_memory_flat(models, root):
    engine = engine_with(models, num_slots=2, sources=EVERY)
    kept = load(engine, root / "adapter-0")
    rng, running = Random(0), {}
    cases = [asked(seed, length=30) for seed in range(8)]
    wanted = [alone(models, kept if i % 2 else None, *case) for i, case in enumerate(cases)]

    def num_tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    outputs, sizes = {}, []
    for benefit in range(200):
        if not engine.requests:
            for i, (prompt, how) in enumerate(cases):
                ref = kept if i % 2 else None
                running[engine.add_choices(prompt, [how], adapter=ref)[0].id] = i
        other = load(engine, root / f"adapter-{1 + benefit % 3}")
        brief = engine.add_choices([benefit % VOCAB], [sampling(2)], adapter=other)[0]
        for _ in range(rng.randrange(3)):
            for output in engine.step():
                outputs.setdefault(output.id, []).append(output)
        engine.adapters.forget(other.digest)
        while brief.id in engine.requests:
            for output in engine.step():
                outputs.setdefault(output.id, []).append(output)
        if benefit in (40, 199):
            sizes.append(num_tensors())
    outputs |= {id: outputs.get(id, []) + more for id, more in finish(engine).items()}
    assert len(running) > 16
    assert all(told(outputs[id]) == wanted[i] for id, i in running.items())
    assert [*engine.adapters.residents] == [kept.digest]
    assert sizes[1] <= sizes[0] + 50, "tensors are left of adapters"


def test_a_model_of_transformers_takes_no_adapters(tmp_path):
    target = SimpleNamespace(state_layouts=lambda: ())
    with pytest.raises(ConfigError, match=r"cannot have adapters\. Remove \[lora\]"):
        assemble(load_config(None, {"lora.max_loras": 2}), Models(target), MAX_LEN)


class Held:
    """Reads no adapter until `go` is set; notes which were asked for."""

    def __init__(self, engine):
        self.read, self.go, self.asked = engine.adapters.read, threading.Event(), []
        engine.adapters.read = self

    def __call__(self, folder):
        self.asked.append(folder.name)
        assert self.go.wait(10)
        return self.read(folder)


def test_adapters_of_one_tenant_hold_up_no_other_tenants(models, root):
    plain = engine_with(models)
    refs = [load(plain, root / f"adapter-{i}") for i in range(4)]
    engine, (prompt, how) = engine_with(models), asked(0, length=4)
    held = Held(engine)
    for number, ref in enumerate(refs[:3]):
        engine.add_choices(prompt, [how], adapter=ref, caller=Caller(number, tenant=1))
    engine.step()
    assert len(engine.adapters.coming) == AHEAD - 1, "one place stays for other tenants"
    engine.add_choices(prompt, [how], adapter=refs[3], caller=Caller(9, tenant=2))
    engine.step()
    held.go.set()
    finish(engine)
    assert held.asked == ["adapter-0", "adapter-1", "adapter-3", "adapter-2"]


def test_the_thread_that_reads_has_the_usual_priority(models, root):
    """A niced thread that holds the GIL holds up steps for as long as it gets no CPU."""
    engine, found = engine_with(models), []

    def read(folder):
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return PackedAdapter("", 1, ())

    engine.adapters.read = read
    engine.adapters.load(str(root / "adapter-0"))
    wait([future for _, future in engine.adapters.loading])
    assert found == [os.getpriority(os.PRIO_PROCESS, 0)]
