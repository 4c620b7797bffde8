"""Quantized checkpoints of every format: the text of their values, whatever a drafter does."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from specserve.exchange.sampling_params import Sampling
from specserve.models.weight import Rounding
from tests.engine.engines import (
    Case,
    Scripted,
    Watch,
    bush,
    draft_of,
    engine_for,
    load_small,
    plain,
)
from tests.models import formats
from tests.models.formats import FORMATS
from tests.models.forward import recorded_and_eager
from tests.models.gguf_files import WIDE, write

FORMS = [  # every form of a map that a reader makes
    "compressed-w4a16",
    "compressed-w4a16-asym",
    "compressed-w8a16",
    "compressed-w8a8",
    "compressed-w8a8-static",
    "compressed-fp8-static",
    "compressed-mixed",
    "gptq-v1",
    "gptq-reordered",
    "awq",
    "fp8-block",
    "gguf",
    "gguf-q4_k_m",
    "gguf, int8",
    "gguf-q4_k_m, int8",
    "compressed-w4a16-asym, int8",
]
MIXED = {  # the types of a file's maps, by the names of those
    "attn_q": "Q4_0",
    "attn_k": "Q5_0",
    "attn_v": "Q6_K",
    "attn_output": "Q8_0",
    "ffn_gate": "Q4_K",
    "ffn_up": "Q5_K",
    "ffn_down": "Q6_K",
    "token_embd": "Q6_K",
    "output": "Q8_0",
}
FEW_BITS = {name: "Q4_K" for name in MIXED} | dict.fromkeys(
    ("attn_v", "ffn_down", "output"), "Q6_K"
)
GGUF = {"gguf": MIXED, "gguf-q4_k_m": FEW_BITS}
GREEDY = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
LENGTH = 24


def cases():
    """The second prompt begins as the first, the fourth is the first again."""
    shared = [(i * 7919) % 318 + 1 for i in range(70)]
    prompts = [shared, [*shared[:40], *range(5, 35)], [7, 8, 9] * 9, shared]
    temperatures = [0.0, 0.0, 0.0, 0.9]
    return [
        Case(ids, Sampling(max_tokens=LENGTH, temperature=t, seed=i, **GREEDY), arrives=3 * i)
        for i, (ids, t) in enumerate(zip(prompts, temperatures, strict=True))
    ]


@pytest.fixture(scope="module", params=FORMS)
def load(request, tmp_path_factory):
    """Loads a checkpoint of this form, with these activations."""
    name, _, activations = request.param.partition(", ")
    folder = quantized(name, tmp_path_factory.mktemp("models"))
    return partial(load_small, folder, rounding=Rounding(activations=activations or "auto"))


def quantized(name, models):
    if name in GGUF:
        types = GGUF[name]
        return write(
            models, "llama", lambda name: types.get(name.split(".")[-2], "F32"), **WIDE
        ).file
    return formats.quantized(models / "quantized", name)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def target(request, load):
    return load(request.param)


@pytest.fixture(scope="module")
def texts(target):
    return plain(target, cases())


@pytest.mark.parametrize("name", FORMATS)
def test_greedy_text_is_that_of_transformers_on_the_values(name, tmp_path):
    folder = formats.quantized(tmp_path / "quantized", name, told=formats.weights_only(name))
    texts = plain(load_small(folder), cases())
    model = AutoModelForCausalLM.from_pretrained(
        formats.plain(tmp_path / "plain", folder), dtype=torch.float32
    )
    for case, text in zip(cases(), texts, strict=True):
        if case.sampling.temperature == 0:
            with torch.inference_mode():
                answers = model(torch.tensor([text[:-1]])).logits[0].argmax(-1).tolist()
            assert text[len(case.prompt) :] == answers[len(case.prompt) - 1 :]


@pytest.mark.parametrize("drafter", ["ngram", "model", "auto", bush])
def test_a_drafter_changes_no_text(target, texts, drafter):
    """Beside other requests, in chunks, after prefix hits and preemption."""
    engine = engine_for(
        target,
        draft_of(target, drafter),
        drafter if isinstance(drafter, str) else Scripted(drafter, dict(enumerate(texts))),
        max_nodes=6,
        prefill_chunk=16,
        block_size=16,
    )
    watch = Watch(engine)
    got = watch.run(cases(), {8: "preempt", 11: "squeeze", 15: "preempt"})
    assert [r.token_ids.tolist() for r in got] == texts
    assert watch.seen["found"] and watch.seen["preempted"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_recorded_forward_has_the_bits_of_the_eager_one(load, dtype):
    ids = torch.arange(37)
    program, recorded, eager = recorded_and_eager(load(dtype), ids, (23, 24))
    assert all(torch.equal(a, b) for a, b in zip(recorded, eager, strict=True))
    assert program.host_ops == []
