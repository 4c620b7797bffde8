"""The offline API: what comes back, in which order, and what is refused."""

import json
import shutil
import signal
from array import array
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import msgspec
import numpy as np
import pytest
import torch

from specserve import LLM, SamplingParams, Slo, SpeculationParams, StructuredOutputsParams
from specserve.api.outputs import Generation
from specserve.errors import ConfigError, Overloaded, PromptTooLong, RequestError
from tests.checkpoints import EOS, tiny_checkpoint, tiny_tokenizer

SETTINGS = {"model.threads": 1, "memory.kv_bytes": 1 << 26}
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, set=SETTINGS, progress=False) as llm:
        yield llm


def load(folder, **settings):
    return LLM(folder, set=SETTINGS | settings, progress=False)


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = ["the cat", "def read", "with open(path) as file", "a"]
    each = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 2, 5, 1)]
    outputs = llm.generate(prompts, each)
    assert [len(o.token_ids) for o in outputs] == [9, 2, 5, 1]
    assert [llm.generate([p], q)[0].token_ids for p, q in zip(prompts, each, strict=True)] == [
        o.token_ids for o in outputs
    ]


def test_an_output_reports_all_that_there_is_to_know(llm):
    (o,) = llm.generate("the cat sat on the mat", GREEDY)
    assert o.prompt_token_ids == tiny_tokenizer()("the cat sat on the mat")["input_ids"]
    assert o.text == llm.tokenizer.decode(o.token_ids)
    assert (o.finish_reason, o.usage.completion_tokens) == ("length", 12)
    assert o.usage.total_tokens == o.usage.prompt_tokens + 12
    assert 0 < o.timing.ttft_ms <= o.timing.total_ms
    assert o.timing.tpot_ms == pytest.approx((o.timing.total_ms - o.timing.ttft_ms) / 11)
    assert o.speculation.drafter == "auto"


def test_the_text_is_the_same_whatever_is_asked_of_speculation(llm):
    want = [o.token_ids for o in llm.generate("the cat sat", GREEDY)]
    for asked in ({"enabled": False}, {"sources": ()}, {"max_nodes": 1}, {"max_depth": 1}):
        speculation = SpeculationParams(**asked)
        params = msgspec.structs.replace(GREEDY, speculation=speculation, slo=Slo(tpot_ms=0.01))
        assert [o.token_ids for o in llm.generate("the cat sat", params)] == want


def test_every_step_is_reported_to_who_asks(llm):
    params = msgspec.structs.replace(GREEDY, return_speculation_details=True)
    (o,) = llm.generate("the cat sat on the mat", params)
    assert [token for step in o.speculation.details for token in step.tokens] == o.token_ids
    assert o.speculation.details[-1].ends[-1] == len(o.text)
    assert llm.generate("the cat", GREEDY)[0].speculation.details == []


def test_logprobs_are_reported_as_vllm_reports_them(llm):
    params = msgspec.structs.replace(GREEDY, logprobs=2, prompt_logprobs=1)
    (o,) = llm.generate("the cat sat on the mat", params)
    assert len(o.logprobs) == 12 and o.logprobs == o.choices[0].logprobs
    for token, table in zip(o.token_ids, o.logprobs, strict=True):
        assert next(iter(table)) == token
        assert [entry.rank for entry in table.values()] == [1, 2]  # the likeliest is taken
        assert table[token].decoded_token == llm.tokenizer.decode([token], False)
    each = zip(o.token_ids, o.logprobs, strict=True)
    assert o.cumulative_logprob == sum(table[token].logprob for token, table in each)
    first, *others = o.prompt_logprobs
    assert first is None and len(others) == len(o.prompt_token_ids) - 1
    for token, table in zip(o.prompt_token_ids[1:], others, strict=True):
        ranks = [entry.rank for entry in table.values()]
        assert next(iter(table)) == token and ranks in ([1], [ranks[0], 1])
    (own,) = llm.generate("the cat", msgspec.structs.replace(GREEDY, logprobs=True, n=2))
    assert [[*table] for table in own.choices[1].logprobs] == [
        [t] for t in own.choices[1].token_ids
    ]
    (none,) = llm.generate("the cat", msgspec.structs.replace(GREEDY, logprobs=False))
    assert none.logprobs is none.cumulative_logprob is none.prompt_logprobs is None


def test_the_logprobs_of_a_prompt_are_those_of_its_tokens_when_generated(llm):
    asked = msgspec.structs.replace(GREEDY, logprobs=0, ignore_eos=True)
    (o,) = llm.generate("the cat sat on", asked)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (again,) = llm.generate(o.prompt_token_ids + o.token_ids, params)
    for told, known in zip(again.prompt_logprobs[-12:], o.logprobs, strict=True):
        assert [*told] == [*known]
        for token, entry in told.items():
            assert entry.logprob == pytest.approx(known[token].logprob, abs=1e-5)


def test_the_best_choices_are_given_and_the_others_counted(llm):
    hot = {"temperature": 2, "seed": 2, "max_tokens": 10, "ignore_eos": True}
    (all,) = llm.generate("the cat", SamplingParams(**hot, n=6, logprobs=0))
    (best,) = llm.generate("the cat", SamplingParams(**hot, n=2, best_of=6))
    order = sorted(range(6), key=lambda c: (-all.choices[c].cumulative_logprob, c))
    assert order[:2] != [0, 1]
    assert [c.text for c in best.choices] == [all.choices[c].text for c in order[:2]]
    assert [c.index for c in best.choices] == [0, 1] and best.usage.completion_tokens == 60
    assert best.token_ids == best.choices[0].token_ids
    assert best.logprobs is best.choices[0].cumulative_logprob is None
    with pytest.raises(RequestError, match="best_of = 2 is less than n = 3"):
        llm.generate("a", SamplingParams(n=3, best_of=2))
    with pytest.raises(RequestError, match="best_of: a stream returns one choice"):
        llm.stream("a", SamplingParams(best_of=2))


def test_a_streams_output_reports_logprobs_too(llm):
    params = msgspec.structs.replace(GREEDY, logprobs=1, prompt_logprobs=0)
    stream = llm.stream("the cat", params)
    with pytest.raises(StopIteration) as end:
        while True:
            next(stream)
    output = end.value.value
    (want,) = llm.generate("the cat", params)
    assert (output.logprobs, output.prompt_logprobs) == (want.logprobs, want.prompt_logprobs)
    assert want.logprobs and want.prompt_logprobs
    assert output.prompt == want.prompt == "the cat"


def test_a_streams_output_reports_every_step_too(llm):
    params = msgspec.structs.replace(GREEDY, return_speculation_details=True)
    stream = llm.stream("the cat sat", params)
    with pytest.raises(StopIteration) as end:
        while True:
            next(stream)
    told = end.value.value.speculation.details
    assert [token for step in told for token in step.tokens] == end.value.value.token_ids


def test_an_output_has_vllms_names_too(llm):
    params = SamplingParams(n=2, max_tokens=5, seed=1, ignore_eos=True)
    text, ids = llm.generate(["the cat", [5, 6]], params, use_tqdm=False)
    assert (text.prompt, ids.prompt, ids.prompt_token_ids) == ("the cat", None, [5, 6])
    assert text.outputs is text.choices and [c.index for c in text.outputs] == [0, 1]
    assert text.finished and text.num_cached_tokens == text.usage.cached_tokens
    assert text.outputs[0].text == text.text and text.outputs[1].text != text.text
    assert isinstance(text.request_id, str) and text.request_id != ids.request_id


def test_parameters_and_prompts_come_by_vllms_names_too(llm):
    want = [o.token_ids for o in llm.generate(["the cat", [5, 6]], GREEDY)]
    prompts = [{"prompt": "the cat"}, {"prompt_token_ids": [5, 6]}]
    assert [o.token_ids for o in llm.generate(prompts, sampling_params=GREEDY)] == want
    assert llm.generate(prompts[1], sampling_params=[GREEDY])[0].token_ids == want[1]
    message = [{"role": "user", "content": "hi"}]
    (chat,) = llm.chat(message, sampling_params=GREEDY, use_tqdm=False)
    assert chat.token_ids == llm.chat([message], GREEDY)[0].token_ids
    with pytest.raises(RequestError, match="Pass one"):
        llm.generate("the cat", GREEDY, sampling_params=GREEDY)


def test_progress_is_shown_where_it_is_not_turned_off(folder, capsys):
    with LLM(folder, set=SETTINGS) as llm:
        capsys.readouterr()
        for use_tqdm in (False, True):
            llm.generate(["a", "b"], GREEDY, use_tqdm=use_tqdm)
            assert bool(capsys.readouterr().err) == use_tqdm


SCRIPT = """
from vllm import LLM, SamplingParams, TokensPrompt

prompts = ["the cat sat on", "def read_lines(path):", "and the other"]
sampling_params = SamplingParams(
    n=2, temperature=0.8, top_p=0.95, top_k=40, min_p=0.01, seed=42, max_tokens=12, stop=["###"],
    stop_token_ids=[3], ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False,
    spaces_between_special_tokens=True, truncate_prompt_tokens=100,
)
llm = LLM(model=MODEL, dtype="float32", trust_remote_code=True, swap_space=4)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    first = output.outputs[0]
    print(f"{output.request_id} {output.prompt!r} {output.prompt_token_ids} {first.text!r}")
    print(first.index, first.token_ids, first.finish_reason, first.stop_reason, output.finished)

conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
for given in (conversation, [conversation, conversation]):
    for output in llm.chat(given, sampling_params=sampling_params, use_tqdm=False):
        print(output.outputs[0].text, len(output.outputs), output.num_cached_tokens)
tokenizer = llm.get_tokenizer()
text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
prompt = TokensPrompt(prompt_token_ids=tokenizer.encode(text), prompt=text)
short = sampling_params.clone()
[output] = llm.generate(prompt, short, lora_request=None)
[chat] = llm.chat(conversation, short, chat_template=None, tools=None)
assert output.prompt == chat.prompt and output.outputs[0].text == chat.outputs[0].text
assert output.metrics is None and llm.get_default_sampling_params().temperature == 1
[output] = llm.generate("a", use_tqdm=False)
assert output.finished and output.outputs[0].finish_reason in ("stop", "length")
"""


def test_a_script_for_vllm_runs_once_it_imports_this_package(folder, capsys):
    names = {"MODEL": str(folder)}
    exec(compile(SCRIPT.replace("from vllm", "from specserve"), "script.py", "exec"), names)
    names["llm"].close()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 * 2 + 3
    ids = [*names["outputs"][0].prompt_token_ids]
    assert names["llm"].tokenizer.decode(ids) == "the cat sat on" and f"{ids}" in said[0]


def test_what_speculation_goes_by_can_be_asked_for(llm):
    state = llm.speculation()
    assert (state.max_nodes, state.sources) == (
        llm.config.max_nodes,
        ("ngram", "grammar", "prediction"),
    )


def test_without_draft_tokens_the_acceptance_length_is_1(folder):
    with load(folder, **{"speculation.max_nodes": 0}) as llm:
        (o,) = llm.generate("the cat the cat the cat", GREEDY)
    assert o.speculation.mean_acceptance_length == 1
    assert (o.speculation.drafter, o.speculation.steps) == ("none", 11)


def test_acceptance_length_counts_the_bonus_token(tmp_path):
    folder = tiny_checkpoint(tmp_path, seed=1, vocab_size=300)  # of which each id has a token
    options = {"drafter.options.width": 1, "drafter.options.min_gain": 0.0}
    options["drafter.options.min_value"] = 0.0
    with LLM(folder, folder, drafter="model", set=SETTINGS | options, progress=False) as llm:
        (o,) = llm.generate("the cat", SamplingParams(temperature=0, max_tokens=28))
    # 27 tokens after the first, in steps of at most 8 guesses and the bonus token.
    assert o.speculation.mean_acceptance_length == 27 / o.speculation.steps == 9


def test_a_seed_is_drawn_once_and_gives_the_same_text_again(llm):
    (first,) = llm.generate("the cat", SamplingParams(max_tokens=20))
    (again,) = llm.generate("the cat", SamplingParams(max_tokens=20, seed=first.seed))
    (other,) = llm.generate("the cat", SamplingParams(max_tokens=20))
    assert again.token_ids == first.token_ids
    assert other.seed != first.seed and other.token_ids != first.token_ids


def test_a_stream_yields_what_generate_returns(llm):
    params = SamplingParams(max_tokens=30, seed=4)
    stream, texts, ids = llm.stream("the cat", params), [], []
    try:
        while True:
            text, token_ids = next(stream)
            texts.append(text)
            ids += token_ids
    except StopIteration as end:
        output = end.value
    (want,) = llm.generate("the cat", params)
    assert ("".join(texts), ids) == (want.text, want.token_ids) == (output.text, output.token_ids)


def test_a_stream_that_is_dropped_gives_its_blocks_back(llm):
    stream = llm.stream("the cat", SamplingParams(max_tokens=400, seed=0, ignore_eos=True))
    next(stream)
    assert llm.memory()["target"] > 0
    stream.close()
    assert llm.memory()["target"] == 0 and llm.engine.is_idle


def test_two_streams_take_turns(llm):
    params = SamplingParams(max_tokens=10, seed=1)
    a, b = llm.stream("the cat", params), llm.stream("def read", params)
    pieces = {a: [], b: []}
    for _ in range(10):
        for s in (a, b):
            pieces[s] += next(s, ("", []))[1]
    assert pieces[a] == llm.generate("the cat", params)[0].token_ids
    assert pieces[b] == llm.generate("def read", params)[0].token_ids


def test_a_stop_string_ends_the_text_before_it(llm):
    (whole,) = llm.generate("the cat", SamplingParams(seed=2, max_tokens=30))
    stop = whole.text[8:11]
    (cut,) = llm.generate("the cat", SamplingParams(seed=2, max_tokens=30, stop=stop))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert cut.usage.completion_tokens == len(cut.token_ids) < 30


def test_a_stop_string_may_stay_in_the_text_and_is_reported(llm):
    params = SamplingParams(seed=2, max_tokens=30)
    (whole,) = llm.generate("the cat", params)
    stop = whole.text[8:11]
    kept = msgspec.structs.replace(params, stop=stop, include_stop_str_in_output=True)
    (cut,) = llm.generate("the cat", kept)
    assert cut.text == whole.text[: whole.text.index(stop)] + stop
    assert (cut.stop_reason, whole.stop_reason) == (stop, None)


def test_a_stop_id_is_reported_and_has_text_only_where_that_is_asked_for(llm):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (whole,) = llm.generate("the cat", params)
    texts = [llm.tokenizer.decode([token]) for token in whole.token_ids]
    n = next(i for i, text in enumerate(texts) if i > 3 and text.isalpha())
    token = whole.token_ids[n]
    ids = whole.token_ids[: whole.token_ids.index(token) + 1]
    for keeps, shown in ((False, ids[:-1]), (True, ids)):
        asked = {"stop_token_ids": (token,), "include_stop_str_in_output": keeps}
        (o,) = llm.generate("the cat", msgspec.structs.replace(params, **asked))
        assert (o.text, o.token_ids) == (llm.tokenizer.decode(shown), ids)
        assert (o.finish_reason, o.stop_reason, o.choices[0].stop_reason) == ("stop", token, token)


def test_the_models_own_end_is_no_stop_reason_unless_it_is_asked_for_as_a_stop(llm):
    eos = llm.tokenizer.get_vocab()[EOS]
    params = SamplingParams(seed=9, max_tokens=600, stop_token_ids=(eos,))
    (ended,) = llm.generate("a", params)
    (asked,) = llm.generate("a", msgspec.structs.replace(params, ignore_eos=True))
    assert ended.token_ids == asked.token_ids and ended.token_ids[-1] == eos
    assert (ended.stop_reason, asked.stop_reason) == (None, eos)


def test_special_tokens_are_in_the_text_where_they_are_not_skipped(llm):
    params = SamplingParams(seed=9, max_tokens=600, ignore_eos=True, skip_special_tokens=False)
    (free,) = llm.generate("a", params)
    assert EOS in free.text and free.text == llm.tokenizer.decode(free.token_ids, False)
    ended = msgspec.structs.replace(params, ignore_eos=False)
    assert EOS not in llm.generate("a", ended)[0].text
    kept = msgspec.structs.replace(ended, include_stop_str_in_output=True)
    assert llm.generate("a", kept)[0].text.endswith(EOS)


def test_text_held_back_for_a_stop_string_comes_at_the_end_after_all(llm):
    (whole,) = llm.generate("the cat", SamplingParams(seed=2, max_tokens=30))
    stop = whole.text[-1] + "\0 is never said"
    (same,) = llm.generate("the cat", SamplingParams(seed=2, max_tokens=30, stop=stop))
    assert (same.text, same.finish_reason) == (whole.text, "length")


def test_the_pool_is_no_larger_than_all_that_may_run_can_need(folder):
    with load(folder, **{"scheduler.max_running": 2}) as llm:
        assert llm.memory() == {"target": 0, "draft": 0, "cached": 0, "free": 18}


def test_an_eos_token_ends_the_text_unless_ignored(folder, llm):
    eos = llm.tokenizer.get_vocab()[EOS]
    (free,) = llm.generate("a", SamplingParams(seed=9, max_tokens=600, ignore_eos=True))
    assert eos in free.token_ids
    (ended,) = llm.generate("a", SamplingParams(seed=9, max_tokens=600))
    assert ended.token_ids == free.token_ids[: free.token_ids.index(eos) + 1]
    assert ended.finish_reason == "stop" and EOS not in ended.text


def test_max_tokens_unset_is_the_rest_of_the_context(folder):
    with load(folder, **{"scheduler.max_model_len": 40}) as llm:
        params = SamplingParams(temperature=0, ignore_eos=True)
        (o,) = llm.generate([[5] * 30], params)
    assert (o.usage.completion_tokens, o.finish_reason) == (10, "length")


def test_chat_answers_through_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    (chat,) = llm.chat(messages, GREEDY)
    ids = tiny_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert chat.token_ids == llm.generate([ids], GREEDY)[0].token_ids
    assert len(llm.chat([messages, messages], GREEDY)) == 2


def test_the_beginning_of_prompts_and_chats_can_be_left_out(llm):
    ids = [*range(5, 300)] * 3
    (cut,) = llm.generate([ids], SamplingParams(temperature=0, truncate_prompt_tokens=40))
    assert cut.prompt_token_ids == ids[-40:] and cut.usage.prompt_tokens == 40
    assert cut.token_ids == llm.generate([ids[-40:]], SamplingParams(temperature=0))[0].token_ids
    fit = SamplingParams(temperature=0, max_tokens=12, truncate_prompt_tokens=-1)
    messages = [{"role": "user", "content": "the cat sat on the mat " * 5000}]
    (chat,) = llm.chat(messages, fit)
    assert chat.usage.prompt_tokens == 500 and chat.usage.completion_tokens == 12
    end = llm.tokenizer.decode(chat.prompt_token_ids, False)
    assert end.endswith("on the mat <|end|>\nassistant: ")


def test_a_chat_may_end_inside_its_last_message_or_before_an_answer_begins(llm):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the cat"}]
    for options, end in (
        ({"continue_final_message": True}, "assistant: the cat"),
        ({"add_generation_prompt": False}, "assistant: the cat<|end|>\n"),
        ({}, "assistant: the cat<|end|>\nassistant: "),
    ):
        (chat,) = llm.chat(messages, GREEDY, **options)
        assert llm.tokenizer.decode(chat.prompt_token_ids, False) == f"user: hi<|end|>\n{end}"
    with pytest.raises(RequestError, match="It reads: none"):
        llm.chat(messages, GREEDY, chat_template_kwargs={"mood": 1})


def test_a_chat_shows_its_tools_to_the_template(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ tools }} {{ messages[0].content }}")
    tools = [{"type": "function", "function": {"name": "now"}}]
    asked = {"conversation": [{"role": "user", "content": "hi"}]}
    with load(tmp_path) as llm:
        for given, text in ((tools, f"{tools} hi"), ([], "None hi"), (None, "None hi")):
            (chat,) = llm.chat(asked["conversation"], GREEDY, tools=given)
            assert llm.tokenizer.decode(chat.prompt_token_ids) == text
            written = llm.tokenizer.apply_chat_template(**asked, tools=given, tokenize=False)
            assert written == text


def test_a_chat_template_may_be_a_file(folder, tmp_path):
    (tmp_path / "own").write_text("own {{ messages[0].content }}<|end|>")
    with LLM(folder, chat_template=tmp_path / "own", set=SETTINGS, progress=False) as llm:
        (chat,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
        assert chat.prompt == "own hi<|end|>"


def test_a_form_ends_where_only_the_chat_template_names_an_end(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model", dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = tmp_path / "model" / name
        fields = json.loads(path.read_text())
        fields |= {"eos_token_id": None, "eos_token": None}
        path.write_text(json.dumps(fields))
    (tmp_path / "own").write_text("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    form = StructuredOutputsParams(choice=["cat", "dog"])
    said = [{"role": "user", "content": "hi"}]
    given = {"set": SETTINGS, "progress": False}
    with LLM(tmp_path / "model", chat_template=tmp_path / "own", **given) as llm:
        (chat,) = llm.chat(said, SamplingParams(structured_outputs=form, max_tokens=20))
        assert chat.text in ("cat", "dog") and chat.finish_reason == "stop"


def test_a_text_ends_at_a_stop_string_that_is_a_special_token(folder):
    """The model says it among other text, and nothing of it is shown."""
    bias = SamplingParams(seed=7, max_tokens=60, temperature=1, logit_bias={1: 12}, ignore_eos=True)
    with load(folder) as llm:
        (free,) = llm.generate("the cat", bias)
        end = free.token_ids.index(1)
        before = llm.tokenizer.decode(free.token_ids[:end])
        for drafter in ("none", "ngram"):
            with load(folder, **{"drafter.name": drafter}) as other:
                (cut,) = other.generate("the cat", bias.clone(stop=["<|end|>"]))
                assert cut.token_ids == free.token_ids[: end + 1]
                assert (cut.text, cut.finish_reason) == (before, "stop")
                assert cut.stop_reason == "<|end|>"
        streamed = "".join(text for text, _ in llm.stream("the cat", bias.clone(stop=["<|end|>"])))
        assert streamed == before


def test_a_stream_ends_when_the_llm_is_closed(folder):
    with load(folder) as llm:
        stream = llm.stream("the cat", SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
    with pytest.raises(StopIteration) as end:
        next(stream)
    assert end.value.value.finish_reason == "abort"
    llm.close()
    assert llm.memory()["target"] == 0


def test_a_stream_is_checked_when_it_is_asked_for(llm):
    with pytest.raises(RequestError):
        llm.stream("")


def test_ctrl_c_waits_for_the_step_and_costs_other_streams_nothing(llm):
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    (want,) = llm.generate("the cat", params)
    stream, step = llm.stream("the cat", params), llm.engine.step
    said = next(stream)[1]

    def interrupted():
        signal.raise_signal(signal.SIGINT)
        return step()

    llm.engine.step = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate("def read", params)
    finally:
        llm.engine.step = step
    assert said + [t for _, ids in stream for t in ids] == want.token_ids
    assert llm.engine.is_idle and llm.engine.pool.is_whole


def test_threads_may_share_an_llm(llm):
    prompts = ["the cat", "def read", "with open", "a", "sat on the mat", "file"]
    params = SamplingParams(max_tokens=20, seed=3)
    want = [o.token_ids for o in llm.generate(prompts, params)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(lambda p: llm.generate(p, params)[0].token_ids, prompts))
    assert got == want
    assert llm.engine.pool.is_whole


def test_a_stream_loses_nothing_to_a_step_of_another_thread(llm, monkeypatch):
    class SteppedOnRead(Generation):
        """Its text is followed by a step of another thread, wherever the lock lets one in."""

        @property
        def text(self):
            text = self.read
            in_thread(step_if_free)
            return text

        @text.setter
        def text(self, text):
            self.read = text

    def step_if_free():
        if llm.lock.acquire(blocking=False):
            llm.step()
            llm.lock.release()

    monkeypatch.setattr("specserve.api.llm.Generation", SteppedOnRead)
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    pieces = list(llm.stream("the cat", params))
    (want,) = llm.generate("the cat", params)
    assert "".join(text for text, _ in pieces) == want.text
    assert [token for _, ids in pieces for token in ids] == want.token_ids


def in_thread(function):
    thread = Thread(target=function)
    thread.start()
    thread.join()


def test_ids_of_any_integer_type_are_ids(llm):
    ids = [5, 17, 42]
    want = llm.generate([ids], GREEDY)
    for same in (ids, np.array(ids), list(np.array(ids)), tuple(ids), array("i", ids)):
        for prompts in (same, [same]):
            assert llm.generate(prompts, GREEDY)[0].token_ids == want[0].token_ids


REFUSED = {
    "nothing": ("", None, "no tokens"),
    "bytes": (b"abc", None, "neither a string nor a list of token ids"),
    "no prompt at all": (None, None, "neither a string nor a list of token ids"),
    "a mapping": ([{"text": "a"}], None, "neither a string nor a list of token ids"),
    "a truth value": ([[True]], None, "True is not a token id"),
    "params that are none": ("a", 0, "0 is not a SamplingParams"),
    "params as a dict": ("a", {"temperature": 0}, "not a SamplingParams"),
    "an id beyond the vocabulary": ([[320]], None, r"\[0, 320\)"),
    "a negative id": ([[-1]], None, r"\[0, 320\)"),
    "a number that is no id": ([[1.5]], None, r"1\.5 is not a token id"),
    "a lone surrogate": ("\ud800", None, "valid text"),
    "a temperature below zero": ("a", SamplingParams(temperature=-1), "temperature"),
    "two parameters for one prompt": ("a", [GREEDY, GREEDY], "1 prompts and 2"),
}


@pytest.mark.parametrize(("prompt", "params", "complaint"), REFUSED.values(), ids=REFUSED)
def test_refused(llm, prompt, params, complaint):
    with pytest.raises(RequestError, match=complaint):
        llm.generate(prompt, params)
    assert llm.engine.is_idle


def test_one_bad_prompt_among_many_runs_none(llm):
    with pytest.raises(RequestError):
        llm.generate(["the cat", ""])
    assert llm.engine.is_idle


def test_a_prompt_longer_than_the_context_names_both_numbers(llm):
    with pytest.raises(PromptTooLong, match=r"length is 512 tokens\. .* has 600 tokens"):
        llm.generate([[5] * 600])


WRONG = {
    "a folder that is not there": ("no/such/folder", {}, "no/such/folder"),
    "longer than the model": (..., {"scheduler.max_model_len": 9999}, "512 positions"),
    "a pool too small for one request": (..., {"memory.kv_bytes": 1 << 17}, "at most 192, or"),
    "a pool too small for anything": (..., {"memory.kv_bytes": 4096}, "raise memory.kv_bytes"),
    "an unknown drafter": (..., {"drafter.name": "nobody"}, "nobody"),
    "an unknown option": (..., {"drafter.options.max_gram": 3}, "max_gram"),
}


@pytest.mark.parametrize(("model", "settings", "complaint"), WRONG.values(), ids=WRONG)
def test_a_wrong_setting_is_named(folder, model, settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        LLM(folder if model is ... else model, set=SETTINGS | settings, progress=False)


@pytest.mark.parametrize("max_model_len", [2, 3, 5])
def test_the_shortest_contexts_serve(folder, max_model_len):
    settings = {"scheduler.max_model_len": max_model_len, "memory.kv_bytes": 1 << 22}
    with LLM(folder, set=settings, progress=False) as llm:  # threads are timed
        (o,) = llm.generate([[7]], SamplingParams(temperature=0, ignore_eos=True))
    assert o.usage.completion_tokens == max_model_len - 1


def test_a_draft_model_of_a_shorter_context_is_timed_within_its_own(folder, tmp_path):
    draft = tiny_checkpoint(tmp_path, seed=1, max_position_embeddings=20)
    with LLM(folder, draft, set={"memory.kv_bytes": 1 << 26}, progress=False) as llm:
        runner = llm.engine.draft_model.runner
        assert len(runner.decoder.rotary.cos) == 20 + 64
        (o,) = llm.generate([[7] * 10], SamplingParams(temperature=0, max_tokens=60))
    assert o.usage.completion_tokens == 60 and llm.engine.stats.drafter_errors == 0


def test_more_draft_tokens_a_block_than_fit_are_refused(folder):
    settings = SETTINGS | {"memory.draft_block_size": 99}
    with pytest.raises(ConfigError, match="99 exceeds the 64"):
        LLM(folder, folder, set=settings, progress=False)


def test_settings_that_are_no_mapping_are_refused(folder):
    with pytest.raises(ConfigError, match="is not a mapping"):
        LLM(folder, set=["speculation.max_nodes"])


@pytest.mark.parametrize(
    ("arguments", "origin"),
    [
        ({"set": {"memory.block_size": 0}}, "LLM(set): memory.block_size = 0"),
        ({"dtype": "fp16"}, "LLM(dtype): model.dtype = 'fp16'"),
        ({"draft_model": "d", "drafter": "ngram"}, "LLM(draft_model), LLM(drafter): drafter.name"),
    ],
)
def test_a_mistake_is_blamed_on_the_argument(arguments, origin):
    with pytest.raises(ConfigError) as e:
        LLM("m", **arguments)
    assert str(e.value).startswith(origin)


def test_a_draft_model_of_another_tokenizer_is_refused(folder, tmp_path):
    draft = tiny_checkpoint(tmp_path)
    path = draft / "tokenizer.json"
    path.write_text(path.read_text().replace("<|pad|>", "<|fill|>"))
    with pytest.raises(ConfigError, match=r"'<\|fill\|>' \(0 there, None in the target\)"):
        LLM(folder, draft, set=SETTINGS, progress=False)


@pytest.mark.parametrize("messages", [5, "hi", iter([]), [], ["hi"]])
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(RequestError):
        llm.chat(messages)


def test_without_a_chat_template_chat_says_so(folder, llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(RequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_choices_are_those_of_their_seeds_and_count_their_prompt_once(llm):
    asked = {"temperature": 1, "max_tokens": 9, "ignore_eos": True}
    (o,) = llm.generate("the cat sat on the mat", SamplingParams(n=5, seed=2, **asked))
    alone = [
        llm.generate("the cat sat on the mat", SamplingParams(seed=c.seed, **asked))[0]
        for c in o.choices
    ]
    assert [c.text for c in o.choices] == [a.text for a in alone]
    assert len({c.seed for c in o.choices}) == 5 and o.choices[0].seed == 2
    assert (o.text, o.token_ids, o.seed) == (o.choices[0].text, o.choices[0].token_ids, 2)
    assert o.usage.total_tokens == len(o.prompt_token_ids) + 5 * 9


def test_a_stream_is_of_one_choice(llm):
    with pytest.raises(RequestError, match="n: a stream returns one choice"):
        llm.stream("the cat", SamplingParams(n=2))


def test_what_was_asked_before_is_found_until_the_cache_is_reset(llm):
    prompt = "the cat sat on the mat, and the other cat sat on the other mat" * 3
    salted = SamplingParams(max_tokens=2, cache_salt="of this test")
    found = [llm.generate(prompt, salted)[0].usage.cached_tokens for _ in range(2)]
    llm.reset_cache()
    memory = llm.memory()
    found.append(llm.generate(prompt, salted)[0].usage.cached_tokens)
    assert found[0] == found[2] == 0 < found[1]
    assert (memory["cached"], memory["target"], memory["draft"]) == (0, 0, 0)


def test_a_salt_that_is_no_text_is_refused_by_its_name(llm):
    with pytest.raises(RequestError, match="cache_salt") as raised:
        llm.generate(["a", "b"], [GREEDY, SamplingParams(cache_salt="\ud800")])
    assert raised.value.param == "cache_salt"
    assert not llm.live and llm.engine.is_idle


def test_where_one_cannot_start_those_before_it_are_given_up(llm, monkeypatch):
    start, started = llm.start, []

    def failing(*asked):
        if started:
            raise MemoryError
        started.append(asked)
        return start(*asked)

    monkeypatch.setattr(llm, "start", failing)
    with pytest.raises(MemoryError):
        llm.generate(["a", "b"], GREEDY)
    assert not llm.live and llm.engine.is_idle


def test_a_step_out_of_memory_ends_its_requests_and_the_next_is_served(folder, monkeypatch):
    def fail(step):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with load(folder) as llm:
        (want,) = llm.generate("the cat", GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.target, "launch", fail)
            for ask in (llm.generate, lambda *args: list(llm.stream(*args))):
                with pytest.raises(Overloaded, match=r"lower memory\.kv_fraction"):
                    ask("the cat", GREEDY)
        assert not llm.live and llm.engine.is_idle
        assert llm.generate("the cat", GREEDY)[0].token_ids == want.token_ids


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there_is_refused_before_a_model_is_looked_for():
    with pytest.raises(ConfigError, match=r"^model\.device = 'cuda': "):
        LLM("nobody/has-this-model", set={"model.device": "cuda"}, progress=False)


def test_the_prompts_of_one_generate_are_one_call_and_choices_are_of_theirs(llm, monkeypatch):
    calls, add = [], llm.engine.scheduler.add
    monkeypatch.setattr(
        llm.engine.scheduler, "add", lambda r: calls.append(r.caller.call) or add(r)
    )
    llm.generate(["a", "b"], SamplingParams(n=2, max_tokens=1))
    llm.generate("a", SamplingParams(max_tokens=1))
    first, *rest = calls
    assert rest == [first] * 3 + [first + 4]


def test_prompts_are_hashed_while_other_threads_may_step(llm, monkeypatch):
    seen, hash_prompt = [], llm.engine.tables.prompt_keys

    def take_lock():
        seen.append(llm.lock.acquire(blocking=False))
        if seen[-1]:
            llm.lock.release()

    def watched(*args):
        other = Thread(target=take_lock)
        other.start()
        other.join()
        return hash_prompt(*args)

    monkeypatch.setattr(llm.engine.tables, "prompt_keys", watched)
    llm.generate("a", SamplingParams(max_tokens=1))
    assert seen == [True]


def test_logits_processors_take_draft_tokens_away_and_say_so(llm):
    def only_even(ids, logits):
        logits[1::2] = float("-inf")
        return logits

    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    [plain] = llm.generate("ab ab ab ab", params)
    [even] = llm.generate("ab ab ab ab", params, logits_processors=[only_even])
    assert len(even.token_ids) == 12 and not any(token % 2 for token in even.token_ids)
    assert any(token % 2 for token in plain.token_ids)
    told = even.speculation
    assert (told.drafted, told.disabled_by) == (0, "logits_processors")
    assert plain.speculation.disabled_by is None
    stream = llm.stream("ab ab ab ab", params, logits_processors=[only_even])
    assert [token for _, ids in stream for token in ids] == even.token_ids


def test_an_error_of_a_logits_processor_is_the_callers(llm, caplog):
    def broken(ids, logits):
        return 1 / 0

    with pytest.raises(RequestError, match="logits_processors: ZeroDivisionError"):
        llm.generate("ab", SamplingParams(max_tokens=3), logits_processors=[broken])
    assert "in broken" in caplog.text
    assert llm.generate("ab", SamplingParams(max_tokens=3))[0].token_ids


def test_a_logits_processor_cannot_generate_with_the_same_llm(llm):
    """It would run in the middle of a step."""

    def ask(ids, logits):
        llm.generate("ab", SamplingParams(max_tokens=3))
        return logits

    stream = llm.stream("ab", GREEDY)
    first = next(stream)
    with pytest.raises(RequestError, match="cannot use the same LLM"):
        llm.generate("ab", SamplingParams(max_tokens=3), logits_processors=[ask])
    said = [token for _, ids in (first, *stream) for token in ids]
    assert said == llm.generate("ab", GREEDY)[0].token_ids


def test_a_saved_cache_serves_the_next_start_with_the_same_weights(folder, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    tiers = {
        "memory.host_bytes": 1 << 20,
        "memory.disk_path": str(tmp_path / "kv"),
        "memory.disk_bytes": 1 << 22,
    }
    prompt = "the cat sat on the mat and read the file " * 9

    def cached_tokens():
        with load(model, **tiers) as llm:
            (output,) = llm.generate(prompt, GREEDY)
            llm.save_cache()
            return output.token_ids, output.usage.cached_tokens

    text, before = cached_tokens()
    again, hits = cached_tokens()
    assert (again, before) == (text, 0) and hits >= 64
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    assert cached_tokens() == (text, 0), "the weights may be others"
    with load(model, **tiers) as llm:
        llm.engine.scheduler.tiers.disk.failure = "No space left"
        llm.generate("another prompt " * 20, GREEDY)
        with pytest.raises(ConfigError, match="No space left"):
            llm.save_cache()
    with load(folder) as llm, pytest.raises(ConfigError, match=r"memory\.disk_path"):
        llm.save_cache()
