"""Arguments of vLLM's classes: taken, accepted as they change nothing, or refused."""

import pytest

from specserve import LLM, AsyncLLM, CompletionOutput, RequestOutput, SamplingParams
from specserve.errors import ConfigError
from specserve.vllm_arguments import seeds_from
from tests.checkpoints import tiny_checkpoint

SETTINGS = {"model.threads": 1, "memory.kv_bytes": 1 << 26}
NOTHING_SPECIAL = {
    "tensor_parallel_size": 1,
    "trust_remote_code": False,
    "disable_log_stats": True,
    "enforce_eager": False,
    "cpu_offload_gb": 0,
    "quantization": None,
    "revision": None,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=1)


def test_a_script_for_vllm_runs(folder):
    """With keywords and nulls as such scripts have them."""
    llm = LLM(
        model=str(folder),
        tokenizer=str(folder),
        max_model_len=64,
        max_num_seqs=3,
        seed=0,
        set=SETTINGS,
        **NOTHING_SPECIAL,
    )
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=5, stop=None, bad_words=None)
    outputs = llm.generate(["the cat", "def read"], params, use_tqdm=False)
    for output in outputs:
        assert isinstance(output, RequestOutput) and isinstance(output.outputs[0], CompletionOutput)
        assert output.outputs[0].text == output.text and output.finished
    assert (llm.config.scheduler.max_model_len, llm.config.scheduler.max_running) == (64, 3)
    seeds = seeds_from("LLM", 0)
    assert [o.seed for o in outputs] == [seeds.randrange(2**53) for _ in range(2)]
    assert llm.generate(["a"], SamplingParams(seed=4, max_tokens=1))[0].seed == 4
    llm.close()


TAKEN = {  # vLLM's argument, its value -> what the config has
    "block_size": (8, "memory", "block_size", 8),
    "device": ("cpu", "model", "device", "cpu"),
    "enable_prefix_caching": (False, "memory", "prefix_cache", False),
    "gpu_memory_utilization": (0.8, "memory", "kv_fraction", 0.8),
    "kv_cache_dtype": ("fp8_e4m3", "memory", "kv_dtype", "fp8"),
    "kv_cache_memory_bytes": (1 << 20, "memory", "kv_bytes", 1 << 20),
    "max_model_len": (99, "scheduler", "max_model_len", 99),
    "max_num_batched_tokens": (999, "scheduler", "max_batched_tokens", 999),
    "max_num_seqs": (9, "scheduler", "max_running", 9),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_has_an_equal_setting_is_taken(folder, name):
    value, section, key, want = TAKEN[name]
    llm = AsyncLLM(folder, **{name: value}, **NOTHING_SPECIAL)
    assert getattr(getattr(llm.config, section), key) == want


REFUSED = {  # argument, value -> words
    "two GPUs": ({"tensor_parallel_size": 2}, "tensor_parallel_size=2.*no equal here; leave"),
    "true for one": ({"tensor_parallel_size": True}, "tensor_parallel_size=True"),
    "code of the model": ({"trust_remote_code": True}, "never run; leave trust_remote_code out"),
    "another tokenizer": ({"tokenizer": "elsewhere"}, "tokenizer='elsewhere'"),
    "weights of its own": ({"quantization": "awq"}, "checkpoint says"),
    "guesses": ({"speculative_config": {"method": "ngram"}}, "say drafter and draft_model"),
    "a wrong value": ({"max_model_len": "long"}, r"LLM\(max_model_len\)"),
    "a negative seed": ({"seed": -1}, r"LLM\(seed=-1\)"),
}


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_had_is_refused_by_name(folder, kind, given, words):
    with pytest.raises(ConfigError, match=words):
        kind(folder, **given)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_name_that_nobody_has_is_a_mistake_of_the_call(folder, kind):
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(\) got .* 'max_model_length'"):
        kind(folder, max_model_length=5)
