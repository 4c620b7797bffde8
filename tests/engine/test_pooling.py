"""Embeddings and scores: those of transformers, with the same bits in every step."""

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from specserve.config import load_config
from specserve.engine.build import assemble
from specserve.engine.pool_plan import Models
from specserve.exchange.sampling_params import Pooling, Sampling, pooled
from specserve.scheduling.request import LOGITS_NOT_FINITE
from tests.adapters import write_adapter
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import MAX_LEN, engine_for, in_chunks, load_small
from tests.engine.ranks import Shards
from tests.engine.test_adapters import finish, load

PROMPTS = [[5, 9, 9, 7, 120, 9, 9, 7, 31], [17], [*range(3, 90)], [5, 9, 9, 7, 120, 8]]
KINDS = {  # the auto class of the checkpoint, by what is pooled
    "last": AutoModel,
    "mean": AutoModel,
    "score": AutoModelForSequenceClassification,
    "logits": AutoModelForCausalLM,
}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # fp32 sums in another order
STREAM = Sampling(max_tokens=40, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@pytest.fixture(scope="module", params=["qwen3", "llama", "gemma2"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folders(family, tmp_path_factory):
    """A checkpoint of every kind, of the same family."""
    return {
        kind: tiny_checkpoint(
            tmp_path_factory.mktemp(kind), family, seed=1, kind=auto, num_labels=3
        )
        for kind, auto in KINDS.items()
    }


def pooling_of(kind):
    return Pooling(kind, (7, 40) if kind == "logits" else ())


def expected(folder, kind, prompt):
    """The vector by transformers, in the float32 of its own model."""
    model = KINDS[kind].from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(torch.tensor([prompt]))
    match kind:
        case "last":
            return out.last_hidden_state[0, -1].numpy()
        case "mean":
            return out.last_hidden_state[0].mean(0).numpy()
        case "score":
            return out.logits[0].numpy()
        case "logits":
            return out.logits[0, -1, [7, 40]].numpy()


def vectors(engine, prompts, kind, beside=()):
    """The vectors of prompts that run together, next to streams with other prompts."""
    streams = [engine.add(each, STREAM) for each in beside]
    ids = [engine.add(prompt, pooled(pooling_of(kind))).id for prompt in prompts]
    found, texts = {}, {stream.id: [] for stream in streams}
    while not engine.is_idle:
        for output in engine.step():
            engine.check()
            if output.id in texts:
                texts[output.id] += output.tokens
            else:
                assert not output.tokens and output.finish_reason == "stop"
                found[output.id] = np.frombuffer(output.pooled, "<f4")
    return [found[id] for id in ids], [*texts.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_pooled_as_by_transformers(folders, kind):
    engine = engine_for(load_small(folders[kind]))
    found, _ = vectors(engine, PROMPTS, kind)
    for prompt, vector in zip(PROMPTS, found, strict=True):
        np.testing.assert_allclose(vector, expected(folders[kind], kind, prompt), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_has_the_same_bits_in_every_step(folders, kind):
    """However the prompt is cut, whatever is cached, and with whatever it shares its steps."""
    model = load_small(folders[kind])
    alone = [vectors(engine_for(model), [each], kind)[0][0] for each in PROMPTS]
    for engine in (engine_for(model, **in_chunks(9)), engine_for(model, drafter="auto")):
        for _ in range(2):  # the second time, prompts are cached
            found, texts = vectors(engine, PROMPTS, kind, beside=[PROMPTS[2][:50], [9, 8, 7]])
            assert [v.tobytes() for v in found] == [v.tobytes() for v in alone]
            assert texts == plain_texts(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keeps_cache", [True, False])
def test_a_vector_has_the_same_bits_after_preemption(folders, kind, keeps_cache):
    model = load_small(folders[kind])
    [[alone], _] = vectors(engine_for(model), [PROMPTS[2]], kind)
    engine = engine_for(model, **in_chunks(20))
    request, outputs = engine.add(PROMPTS[2], pooled(pooling_of(kind))), []
    for _ in range(2):
        engine.step()
    assert request.num_computed == 40
    engine.scheduler.release_kv()
    if not keeps_cache:
        engine.reset_cache()
    while not engine.is_idle:
        outputs += engine.step()
    assert [output.pooled for output in outputs] == [alone.tobytes()]


def plain_texts(model):
    return vectors(engine_for(model), [], "last", beside=[PROMPTS[2][:50], [9, 8, 7]])[1]


def test_hidden_states_have_no_scale_of_logits(tmp_path):
    """The loader moves the scale of Granite's logits into the final norm."""
    folder = tiny_checkpoint(tmp_path / "granite", "granite")
    found, _ = vectors(engine_for(load_small(folder)), PROMPTS[:1], "last")
    np.testing.assert_allclose(found[0], expected(folder, "last", PROMPTS[0]), **CLOSE)


def test_pooled_rows_compute_no_logits(folders):
    engine = engine_for(load_small(folders["last"]))
    engine.target.program.logits = None
    engine.add(PROMPTS[0], pooled(Pooling("last")))
    engine.step()
    assert engine.is_idle and engine.target.outputs.logits is None


def test_a_cached_prompt_is_pooled_from_its_last_row(folders):
    engine = engine_for(load_small(folders["last"]))
    vectors(engine, [PROMPTS[2]], "last")
    rows = engine.stats.num_rows
    vectors(engine, [PROMPTS[2]], "last")
    assert engine.stats.num_rows - rows < 16  # the rest of the last block


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_a_model_saved_without_prefix_and_head_is_read(tmp_path, kind):
    """Some causal models are saved by the class of their layers alone."""
    folder = tiny_checkpoint(tmp_path / "bare", kind=AutoModel)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("Qwen3Model", "Qwen3ForCausalLM"))
    model = load_small(folder)
    assert not model.has_head
    found, _ = vectors(engine_for(model), PROMPTS[:1], kind)
    np.testing.assert_allclose(found[0], expected(folder, kind, PROMPTS[0]), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_that_is_not_finite_fails_its_request_alone(folders, kind):
    model = load_small(folders[kind])
    sound = vectors(engine_for(model), [PROMPTS[0]], kind)[0][0].tobytes()
    embedding = model.weights.embedding.clone()
    embedding[200] = torch.nan
    weights = model.weights._replace(embedding=embedding)
    engine = engine_for(type(model)(model.config, model.ops, model.rotary, weights))
    ids = [engine.add(p, pooled(pooling_of(kind))).id for p in ([5, 200, 9], PROMPTS[0])]
    outputs = {out.id: out for out in engine.step()}
    assert engine.is_idle
    assert outputs[ids[0]].failure == LOGITS_NOT_FINITE and not outputs[ids[0]].pooled
    assert outputs[ids[1]].pooled == sound


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_has_the_same_bits_in_ranks(folders, kind):
    want, texts = vectors(engine_for(load_small(folders[kind])), PROMPTS, kind, beside=[[9, 8, 7]])
    shards = Shards(folders[kind], 2, 1)
    engine = engine_for(shards.target, shards=shards, **in_chunks(9))
    try:
        found, beside = vectors(engine, PROMPTS, kind, beside=[[9, 8, 7]])
    finally:
        engine.followers.close()
    assert [v.tobytes() for v in found] == [v.tobytes() for v in want] and beside == texts


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_of_an_adapter_has_the_same_bits_next_to_others(folders, kind, tmp_path):
    write_adapter(tmp_path / "a", folders[kind], 1, 4, scale=0.3)
    target, given = load_small(folders[kind]), {"lora.max_loras": 1, "lora.max_rank": 4}

    def run(each):
        config = load_config(None, given | {"memory.kv_bytes": 1 << 26})
        engine = assemble(config, Models(target), MAX_LEN)
        ref = load(engine, tmp_path / "a")
        sampling = pooled(pooling_of(kind))
        ids = [
            engine.add_choices(PROMPTS[2], [sampling], adapter=ref if has else None)[0].id
            for has in each
        ]
        found = finish(engine)
        engine.close()
        return [found[id][0].pooled for id in ids]

    [plain], [adapted] = run([False]), run([True])
    assert plain != adapted
    assert run([True, False, True, False]) == [adapted, plain, adapted, plain]
