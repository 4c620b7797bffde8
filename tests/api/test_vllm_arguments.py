"""Arguments of vLLM's classes: taken, accepted as they change nothing, or refused."""

import json
import shutil

import pytest

from specserve import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    CompletionOutput,
    ConfigError,
    RequestError,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from specserve.api.input_processor import load_text_files, make_input_processor
from tests.checkpoints import tiny_checkpoint, tiny_tokenizer

SETTINGS = {"model.threads": 1, "memory.kv_bytes": 1 << 26}
NOTHING_SPECIAL = {
    "tensor_parallel_size": 1,
    "trust_remote_code": True,
    "logits_processors": [],
    "logprobs_mode": "raw_logprobs",
    "max_logprobs": 20,
    "scheduling_policy": "priority",
    "swap_space": 4,
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
    seeds = AsyncLLM(seed=0).seeds
    assert [o.seed for o in outputs] == [seeds.randrange(2**53) for _ in range(2)]
    for seed in (4, 2**63 - 1, -(2**63)):
        assert llm.generate(["a"], SamplingParams(seed=seed, max_tokens=1))[0].seed == seed
    llm.close()


def test_a_negative_seed_of_a_model_gives_other_seeds_than_a_positive_one():
    drawn = [AsyncLLM(seed=seed).seeds.randrange(2**53) for seed in (5, -5, -(2**63), -6)]
    assert len({*drawn}) == 4
    assert AsyncLLM(seed=-1).seeds is None


TAKEN = {  # vLLM's argument, its value -> what the config has
    "block_size": (8, "memory", "block_size", 8),
    "device": ("cpu", "model", "device", "cpu"),
    "enable_expert_parallel": (True, "parallel", "expert", True),
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
    ranks = {"tensor_parallel_size": 2} if name == "enable_expert_parallel" else {}
    llm = AsyncLLM(folder, **{name: value}, **(NOTHING_SPECIAL | ranks))
    assert getattr(getattr(llm.config, section), key) == want


REFUSED = {  # argument, value -> words
    "true for one": ({"tensor_parallel_size": True}, r"LLM\(tensor_parallel_size\)"),
    "functions": ({"logits_processors": [print]}, "pass them to LLM.generate"),
    "another name": ({"served_model_name": "mine"}, "the option of `specserve serve`"),
    "processed logprobs": ({"logprobs_mode": "processed_logprobs"}, "Omit logprobs_mode"),
    "room to swap": ({"swap_space": 8}, "swap_space=8"),
    "another tokenizer": ({"tokenizer": "elsewhere"}, "tokenizer='elsewhere'"),
    "weights of its own": ({"quantization": "awq"}, "checkpoint defines"),
    "guesses": ({"speculative_config": {"method": "ngram"}}, "set drafter, and draft_model"),
    "a wrong value": ({"max_model_len": "long"}, r"LLM\(max_model_len\)"),
    "a seed of 65 bits": ({"seed": 2**63}, f"LLM\\(seed={2**63}\\)"),
}


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_had_is_refused_by_name(folder, kind, given, words):
    with pytest.raises(ConfigError, match=words):
        kind(folder, **given)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_name_that_nobody_has_is_a_mistake_of_the_call(folder, kind):
    words = rf"{kind.__name__}\(\) got .* 'max_model_length': did you mean max_model_len\?"
    with pytest.raises(TypeError, match=words):
        kind(folder, max_model_length=5)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_no_graphs_can_be_asked_for_where_there_are_none(folder, monkeypatch, has_gpu):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    AsyncLLM(folder, enforce_eager=True, device="cpu")
    if not has_gpu:
        AsyncLLM(folder, enforce_eager=True)
        return
    with pytest.raises(
        ConfigError, match=r"steps on a GPU may use CUDA graphs\. Omit enforce_eager"
    ):
        AsyncLLM(folder, enforce_eager=True)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, set=SETTINGS, progress=False) as llm:
        yield llm


@pytest.fixture(params=["LLM.generate", "LLM.chat", "AsyncLLM.generate", "AsyncLLM.chat"])
def call(request, folder, llm):
    kind, method = request.param.split(".")
    return getattr(llm if kind == "LLM" else AsyncLLM(folder), method)


CALLS = {
    "an adapter": ({"lora_request": 1}, "lora_request: 1 is not the name of an adapter"),
    "a template": ({"chat_template": "{{ 1 }}"}, r"pass a file to LLM\(chat_template"),
    "priorities": ({"priority": [1]}, r"SamplingParams\(priority=\.\.\.\)"),
    "a function by itself": ({"logits_processors": print}, "logits_processors"),
}


@pytest.mark.parametrize(("given", "words"), CALLS.values(), ids=CALLS)
def test_an_argument_of_a_call_that_cannot_be_had_is_refused_by_name(call, given, words):
    with pytest.raises(RequestError, match=words) as e:
        call([{"role": "user", "content": "a"}], **given)
    assert [e.value.param] == [*given]


def test_a_misspelt_argument_of_a_call_is_reported_the_nearest_name(call):
    with pytest.raises(TypeError, match=r"'lora_reqest': did you mean lora_request\?"):
        call("a", lora_reqest=None)


def test_functions_cannot_go_to_another_process(folder):
    with pytest.raises(RequestError, match=r"another process; call LLM\.generate"):
        AsyncLLM(folder).generate("a", logits_processors=[print])


def test_arguments_may_be_kept_for_later(folder):
    args = AsyncEngineArgs(model=str(folder), max_model_len=99, enable_lora=False)
    llm = AsyncLLM.from_engine_args(args)
    assert (llm.config.model.path, llm.config.scheduler.max_model_len) == (args.model, 99)


def test_what_the_model_has_for_unset_parameters_can_be_asked_for(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    written = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1}
    written["repetition_penalty"] = 1.1
    given = json.dumps(written | {"max_new_tokens": 9})
    (tmp_path / "model/generation_config.json").write_text(given)
    processor = make_input_processor(load_text_files(tmp_path / "model"), 320, 64)
    assert processor.default_params() == SamplingParams(max_tokens=9, **written)
    kept = processor.num_kept(SamplingParams(truncate_prompt_tokens=-1))
    assert kept == 64 - 9, "beside the model's own max_tokens"


CONVERSATION = [{"role": "user", "content": "hi"}]


def test_the_tokenizer_applies_the_chat_template(llm):
    ours, theirs = llm.get_tokenizer(), tiny_tokenizer()
    for asked in ({}, {"add_generation_prompt": True}, {"tokenize": False}):
        want = theirs.apply_chat_template(CONVERSATION, return_dict=False, **asked)
        assert ours.apply_chat_template(CONVERSATION, **asked) == want


def test_a_chats_prompt_is_its_text(llm):
    [output] = llm.chat(CONVERSATION, SamplingParams(max_tokens=1), chat_template=None, tools=None)
    kwargs = {"tokenize": False, "add_generation_prompt": True}
    assert output.prompt == tiny_tokenizer().apply_chat_template(CONVERSATION, **kwargs)
    assert output.metrics is None


def test_of_a_prompt_with_text_and_ids_the_ids_run(llm):
    params = SamplingParams(max_tokens=1, temperature=0)
    both = TokensPrompt(prompt_token_ids=[5, 6], prompt="the cat")
    outputs = llm.generate([both, TextPrompt(prompt="the cat")], params, lora_request=None)
    assert [o.prompt for o in outputs] == ["the cat", "the cat"]
    assert outputs[0].prompt_token_ids == [5, 6] != outputs[1].prompt_token_ids
    empty = {"prompt": "the cat", "prompt_token_ids": None}
    assert llm.generate(empty, params)[0].prompt_token_ids == outputs[1].prompt_token_ids


def test_a_stream_takes_what_generate_takes(llm):
    params, prompt = SamplingParams(max_tokens=4, seed=1), {"prompt_token_ids": [5, 6]}
    stream = llm.stream(prompt, sampling_params=params)
    [want] = llm.generate(prompt, params)
    assert [token for _, ids in stream for token in ids] == want.token_ids


def test_parameters_are_copied_and_changed_by_clone():
    params = SamplingParams(max_tokens=4, seed=1)
    assert params.clone() == params
    assert params.clone(max_tokens=5) == SamplingParams(max_tokens=5, seed=1)


NEUTRAL = {"detokenize": True, "structured_outputs": None, "guided_decoding": None}
NEUTRAL |= {"extra_args": None, "flat_logprobs": False, "logits_processors": None}


def test_parameters_without_effect_are_taken():
    assert SamplingParams(max_tokens=4, **NEUTRAL) == SamplingParams(max_tokens=4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"detokenize": False}, "not supported. Omit detokenize"),
        ({"guided_decoding": "x"}, "use structured_outputs=StructuredOutputsParams"),
        ({"logits_processors": [print]}, "pass them to LLM.generate"),
    ],
    ids=str,
)
def test_parameters_with_an_effect_that_cannot_be_had_are_refused(given, words):
    with pytest.raises(RequestError, match=words) as e:
        SamplingParams(**given)
    assert [e.value.param] == [*given] and isinstance(e.value, ValueError)


@pytest.mark.parametrize(
    ("name", "near"), [("max_new_tokens", "max_tokens"), ("temprature", "temperature")]
)
def test_a_parameter_by_another_name_is_reported_ours(name, near):
    with pytest.raises(TypeError, match=rf"'{name}': did you mean {near}\?"):
        SamplingParams(**{name: 1})
