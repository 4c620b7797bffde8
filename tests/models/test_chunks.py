"""Attention in chunks, as in Llama 4: the text is that of transformers, whoever drafts tokens."""

import pytest
import torch

from specserve import LLM, SamplingParams
from tests.checkpoints import oracle, tiny_checkpoint

NEW, SIZE = 24, 16  # tokens of a response, and of a chunk
PROMPTS = [[(7 * i * i + n) % 300 + 2 for i in range(n)] for n in (1, SIZE - 1, SIZE, 40)]


def greedy(model, ids):
    ids = list(ids)
    for _ in range(NEW):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-NEW:]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target and a draft model, and the text of transformers after each prompt."""
    folder, fields = tmp_path_factory.mktemp("models"), {"attention_chunk_size": SIZE, "seed": 1}
    layers = {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}
    target = tiny_checkpoint(folder / "a", "llama4", **fields, **layers)
    layers = {"num_hidden_layers": 1, "no_rope_layers": [1]}
    draft = tiny_checkpoint(folder / "b", "llama4", **fields, **layers)
    model = oracle(target)
    with torch.inference_mode():
        return target, draft, [greedy(model, ids) for ids in PROMPTS]


@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_greedy_tokens_are_those_of_transformers(models, drafter):
    target, draft, want = models
    settings = {"model.threads": 1, "memory.kv_bytes": 1 << 26, "model.dtype": "fp32"}
    params = SamplingParams(temperature=0, max_tokens=NEW)
    draft = draft if drafter == "model" else None
    with LLM(target, draft, drafter, set=settings, progress=False) as llm:
        assert [out.token_ids for out in llm.generate(PROMPTS, params)] == want
