"""Prefix hits and KV of 8 bits of SmolLM2."""

import pytest
import torch

from specserve import SamplingParams
from specserve_bench.perplexity import perplexity, window_logits


@pytest.fixture(scope="module")
def programs(problems):
    return [each["prompt"] + each["canonical_solution"] for each in problems]


TEMPERATURES = pytest.mark.parametrize(
    "temperature", [0.8, pytest.param(0, marks=pytest.mark.slow)]
)


@TEMPERATURES
def test_a_prefix_hit_gives_the_text_and_logprobs_of_a_computed_prompt(load, programs, temperature):
    llm = load(settings={"memory.prefix_cache": True})
    shared = "\n".join(programs[:3])
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, logprobs=2)
    for end in (programs[3][:80], programs[4][:90]):
        llm.reset_cache()
        [computed] = llm.generate(shared + end, params)
        assert computed.num_cached_tokens == 0
        llm.reset_cache()
        llm.generate(shared + programs[9], params)
        [found] = llm.generate(shared + end, params)
        assert found.num_cached_tokens > 300
        assert found.token_ids == computed.token_ids and found.logprobs == computed.logprobs


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_kv_of_8_bits_changes_logits_and_perplexity_a_little(load, plain, programs, kv_dtype):
    llm = load(settings={"memory.kv_dtype": kv_dtype})
    ids = plain.tokenizer.encode("\n".join(programs[:4]))[:400]
    got, want = (window_logits(each, ids).float() for each in (llm, plain))
    assert not torch.equal(got, want)
    assert (got - want).abs().mean() < 0.05 * want.std()
    assert perplexity(llm, programs[:4]) == pytest.approx(perplexity(plain, programs[:4]), rel=0.02)
    llm.close()


@TEMPERATURES
def test_drafting_does_not_change_a_text_with_kv_of_8_bits(load, programs, temperature):
    settings = {"memory.kv_dtype": "int8", "speculation.max_nodes": 8}
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=32)
    prompts = [programs[0] + programs[0][:60], "one two three " * 20]
    texts = []
    for drafter in ("none", "ngram"):
        llm = load(drafter, settings)
        texts.append([output.token_ids for output in llm.generate(prompts, params)])
        drafted = llm.engine.stats.num_drafted if drafter == "ngram" else 0
        llm.close()
    assert texts[0] == texts[1] and drafted > 0
