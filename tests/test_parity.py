"""Greedy tokens are those that transformers' models hold likeliest, alone and in a mixed batch."""

from functools import lru_cache

import pytest
import torch

from specserve import LLM, SamplingParams
from tests.checkpoints import MULTIMODAL, draft_checkpoint, oracle, tiny_checkpoint

CASES = {  # family, what departs from its tiny checkpoint
    "llama": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "mistral, a window shorter than the prompt": ("mistral", {"sliding_window": 9}),
    "qwen2, 7 query heads a KV head": ("qwen2", {"num_attention_heads": 14}),
    "qwen3, heads of 80": ("qwen3", {"head_dim": 80}),
    "smollm, odd vocabulary": ("smollm", {"vocab_size": 307}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "phi3, a window, half of a head rotates": (
        "phi3",
        {"sliding_window": 9, "partial_rotary_factor": 0.5},
    ),
}
CASES |= {
    name: (name, {})
    for name in (
        *(
            "gemma2",
            "gemma3",
            "gemma3n",
            "gemma4",
            "gemma4_moe",
            "olmo2",
            "granite",
            "glm4",
            "cohere2",
            "exaone4",
        ),
        *("olmo3", "seed_oss", "ernie4_5", "hunyuan", "ministral3", "cohere", "command_r_plus"),
        *("starcoder2", "stablelm", "nemotron", "arcee", "apertus"),
        *("granite_moe", "minimax_m2", "ernie4_5_moe", "glm4_moe", *MULTIMODAL),
        *("lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"),
    )
}
# By transformers' modules: those that native code lacks, and one where they are asked for.
FOREIGN = {
    "starcoder2, a window": ("llama", {"model_type": "starcoder2", "sliding_window": 9}),
    "gemma3_text": ("llama", {"model_type": "gemma3_text", "sliding_window": 9}),
    "cohere2 by transformers": ("llama", {"model_type": "cohere2", "sliding_window": 9}),
    "gpt2": ("llama", {"model_type": "gpt2", "num_key_value_heads": 4}),
    "qwen3 by transformers": ("qwen3", {}),
}
NEW = 24
PROMPTS = [[(7 * i * i + n) % 300 + 2 for i in range(n)] for n in (1, 5, 15, 16, 17, 40, 70, 100)]
PROMPTS[3] = [9, 8, 7, 6] * 4  # for the lookup drafter


@pytest.fixture(scope="module", params=[*CASES.values(), *FOREIGN.values()], ids=CASES | FOREIGN)
def case(request, tmp_path_factory):
    """A target, a draft model of the same family, whose code is to compute the target, and
    transformers' model.
    """
    family, overrides = request.param
    root = tmp_path_factory.mktemp("models")
    target = tiny_checkpoint(root / "target", family, seed=1, **overrides)
    draft = draft_checkpoint(root / "draft", family, **overrides)
    model = oracle(target)
    asked = "transformers" if request.param in FOREIGN.values() else "auto"
    return target, draft, asked, model


def likeliest(model, prompt, text):
    """After each token but the last, from the prompt's last on. A text that is equal to these is
    what `generate` says, token by token, and one forward is a text's whole work.
    """
    return likeliest_tokens(model, tuple(prompt), tuple(text))


@lru_cache(2 * len(PROMPTS))  # all drafters of a model should have the same texts
def likeliest_tokens(model, prompt, text):
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *text]])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(1).tolist()


def ends_in_time(model, text):
    """At the first end token, or else at the limit."""
    end = model.config.get_text_config().eos_token_id
    return end not in text[:-1] and (text[-1] == end or len(text) == NEW)


def test_a_text_of_the_likeliest_tokens_is_what_transformers_generates(case):
    *_, model = case
    prompt = torch.tensor([PROMPTS[2]])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW
    )
    text = out[0, prompt.shape[1] :].tolist()
    assert ends_in_time(model, text) and likeliest(model, PROMPTS[2], text) == text


@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_greedy_tokens_are_those_of_transformers(case, drafter):
    target, draft, implementation, model = case
    settings = {
        "model.implementation": implementation,
        "scheduler.max_batched_tokens": 65,
        "scheduler.prefill_chunk": 16,
    }
    settings |= {"model.threads": 1, "memory.kv_bytes": 1 << 26}
    params = SamplingParams(temperature=0, max_tokens=NEW)
    draft_model = draft if drafter == "model" else None
    with LLM(target, draft_model, drafter, set=settings, progress=False) as llm:
        assert llm.loaded.drafter == drafter
        alone = [llm.generate([p], params)[0].token_ids for p in PROMPTS]
        together = [o.token_ids for o in llm.generate(PROMPTS, params)]
    assert alone == [likeliest(model, p, text) for p, text in zip(PROMPTS, alone, strict=True)]
    assert together == alone
    assert all(ends_in_time(model, text) for text in alone)
