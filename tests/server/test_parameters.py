"""What a body may ask for, what it may leave, and what it may not say."""

import re

import pytest

from specserve import RequestError, SamplingParams
from specserve.server.chat import read_message
from tests.checkpoints import EOS, tiny_tokenizer
from tests.server.asking import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    chat_body,
    completion_body,
    in_process,
    rendered,
    streamed,
    whole,
)


@pytest.mark.parametrize(
    "asked",
    [
        {"max_tokens": 5},
        {"stop": "in"},
        {"stop": ["never", *"aeiou"]},
        {"stop": [*(f"never {i}" for i in range(300)), "in"]},
        {"stop_token_ids": [150, 280, 281, 282, 319]},
        {"stop": "in", "include_stop_str_in_output": True},
        {"skip_special_tokens": False, "max_tokens": 300},
        {"top_k": 1},
        {"top_k": 3},
        {"top_p": 0.1},
        {"min_p": 0.5},
        {"temperature": 0.3},
        {"temperature": 3},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"presence_penalty": 2},
        {"frequency_penalty": -2},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"105": 90, "106": 90.5}},
        {"allowed_token_ids": [105, 106, 107]},
        {"bad_words": ["a", "b", "c", "in"]},
        {"stop": ["in", *"aeiou"], "min_tokens": 20},
        {"stop_token_ids": [*range(100, 320)], "min_tokens": 20},
    ],
    ids=str,
)
def test_each_reaches_the_engine(server, llm, asked):
    base = {"temperature": 1, "seed": 7, "max_tokens": 60, "ignore_eos": True}
    want = in_process(llm.generate("the cat", SamplingParams(**base | asked)))
    assert want != in_process(llm.generate("the cat", SamplingParams(**base)))
    body = {"prompt": "the cat"} | base | asked
    assert whole(server, COMPLETIONS, body) == streamed(server, COMPLETIONS, body) == want


def test_the_end_of_text_can_be_ignored(server, llm):
    texts = ((s, llm.generate("the cat", SamplingParams(seed=s))[0]) for s in range(100))
    seed, output = next((s, o) for s, o in texts if o.finish_reason == "stop")
    body = {"prompt": "the cat", "seed": seed}
    assert whole(server, COMPLETIONS, body) == in_process([output])
    [(text, reason, _)], usage = whole(server, COMPLETIONS, body | {"ignore_eos": True})
    assert reason == "length" and usage["total_tokens"] == 512
    assert text.startswith(output.text) and EOS not in text


def test_chat_takes_both_names_of_the_limit(server):
    body = {"messages": MESSAGES, "temperature": 0}
    for limit in ({"max_tokens": 7}, {"max_completion_tokens": 7}):
        assert whole(server, CHAT, body | limit)[1]["completion_tokens"] == 7
    both = {"max_tokens": 7, "max_completion_tokens": 7}
    assert whole(server, CHAT, body | both)[1]["completion_tokens"] == 7
    answer = server.post(CHAT, body | both | {"max_tokens": 8})
    assert (answer.status, answer.body["error"]["param"]) == (400, "max_completion_tokens")


def test_only_the_end_of_a_long_prompt_may_be_asked_for(server, llm):
    base = {"seed": 3, "max_tokens": 8, "truncate_prompt_tokens": 30}
    text = "the cat sat on the mat, " * 400
    want = in_process(llm.generate([text, [7] * 600], SamplingParams(**base)))
    assert want[1]["prompt_tokens"] == 60
    for prompt in ([text], [[7] * 600]):
        want = in_process(llm.generate(prompt, SamplingParams(**base)))
        body = {"prompt": prompt} | base
        assert whole(server, COMPLETIONS, body) == streamed(server, COMPLETIONS, body) == want
    messages = [{"role": "user", "content": text}]
    want = in_process(llm.chat(messages, SamplingParams(**base)))
    assert whole(server, CHAT, {"messages": messages} | base) == want


def all_ids(pieces, index):
    return [i for c in pieces if c["index"] == index for i in c.get("token_ids", [])]


@pytest.mark.parametrize("asked", [{}, {"stop": "e"}, {"stop": "\0", "max_tokens": 3}], ids=str)
def test_token_ids_of_completions_come_with_each_choice_and_once_its_prompt(server, llm, asked):
    base = {"seed": 7, "max_tokens": 20, "n": 2} | asked
    prompts = ["the cat", "def read"]
    outputs = llm.generate(prompts, SamplingParams(**base))
    want = [(o.prompt_token_ids, c.token_ids) for o in outputs for c in o.choices]
    body = {"prompt": prompts, "return_token_ids": True} | base
    answer = server.post(COMPLETIONS, body).body
    assert [(c["prompt_token_ids"], c["token_ids"]) for c in answer["choices"]] == want
    *chunks, _ = server.stream(COMPLETIONS, body)
    pieces = [c for chunk in chunks for c in chunk["choices"]]
    for index, (prompt, ids) in enumerate(want):
        own = [c for c in pieces if c["index"] == index]
        told = [c["prompt_token_ids"] for c in own if "prompt_token_ids" in c]
        assert (told, all_ids(pieces, index)) == ([prompt], ids)
    plain = server.post(COMPLETIONS, body | {"return_token_ids": False}).body["choices"]
    assert not any("token_ids" in key for c in plain for key in c)


def test_token_ids_of_a_chat_come_with_each_choice_and_its_prompt_with_the_answer(server, llm):
    base = {"seed": 7, "max_tokens": 20, "n": 2}
    [output] = llm.chat(MESSAGES, SamplingParams(**base))
    body = {"messages": MESSAGES, "return_token_ids": True} | base
    answer = server.post(CHAT, body).body
    assert answer["prompt_token_ids"] == output.prompt_token_ids
    assert [c["token_ids"] for c in answer["choices"]] == [c.token_ids for c in output.choices]
    *chunks, _ = server.stream(CHAT, body)
    told = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert told == [output.prompt_token_ids] and "prompt_token_ids" in chunks[0]
    pieces = [c for chunk in chunks for c in chunk["choices"]]
    assert [all_ids(pieces, i) for i in (0, 1)] == [c.token_ids for c in output.choices]


def test_what_stopped_a_choice_is_reported_with_its_end(server):
    body = completion_body(temperature=1, seed=7, max_tokens=60)
    [text] = [c["text"] for c in server.post(COMPLETIONS, body).body["choices"]]
    for asked, reason in (({"stop": text[5:7]}, text[5:7]), ({}, None)):
        [choice] = server.post(COMPLETIONS, body | asked).body["choices"]
        *_, last, _ = server.stream(COMPLETIONS, body | asked)
        assert choice["stop_reason"] == last["choices"][0]["stop_reason"] == reason


@pytest.mark.parametrize(
    "prompt",
    [
        "the cat",
        ["the cat"],
        ["the cat", "def read", "the cat"],
        [7, 150, 319],
        [[7, 150], [9]],
        [[7, 150, 319]],
    ],
    ids=str,
)
def test_prompts_of_every_form_are_answered_in_order(server, llm, prompt):
    asked = {"temperature": 1, "seed": 3, "max_tokens": 20}
    prompts = prompt if isinstance(prompt[0], str | list) and prompt != "the cat" else [prompt]
    want = in_process(llm.generate(prompts, SamplingParams(**asked)))
    assert whole(server, COMPLETIONS, {"prompt": prompt} | asked) == want
    assert streamed(server, COMPLETIONS, {"prompt": prompt} | asked) == want


def test_text_in_parts_is_joined_by_lines(server):
    parts = [{"type": "text", "text": "the cat"}, {"type": "text", "text": "sat"}]
    want = whole(
        server, CHAT, chat_body(messages=[{"role": "user", "content": "the cat\nsat"}], seed=1)
    )
    body = chat_body(messages=[{"role": "user", "content": parts}], seed=1)
    assert whole(server, CHAT, body) == want


@pytest.mark.parametrize("thought", ["so\nthen", [{"type": "text", "text": "so\nthen"}]])
def test_a_thinking_part_of_an_answer_is_its_reasoning(thought):
    parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "yes"}]
    given = {"role": "assistant", "content": parts}
    want = {"role": "assistant", "content": "yes", "reasoning_content": "so\nthen"}
    assert read_message(given, "messages[1]") == want
    with pytest.raises(RequestError, match="'thinking' is not supported") as e:
        read_message(given | {"role": "user"}, "messages[1]")
    assert e.value.param == "messages[1].content[0].type"
    with pytest.raises(RequestError) as e:
        read_message(given | {"content": [{"type": "thinking"}]}, "messages[1]")
    assert e.value.param == "messages[1].content[0].thinking"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal", None])
def test_parts_of_another_kind_are_refused(server, kind):
    parts = [{"type": "text", "text": "the cat"}, {"type": kind, "text": "x"}]
    answer = server.post(CHAT, chat_body(messages=[{"role": "user", "content": parts}]))
    assert answer.status == 400
    assert answer.body["error"]["param"] == "messages[0].content[1].type"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
    ],
    ids=str,
)
def test_a_chat_ends_where_it_is_reported_to(server, llm, options):
    asked = {"seed": 3, "max_tokens": 9}
    want = in_process(llm.chat(MESSAGES[:3], SamplingParams(**asked), **options))
    body = {"messages": MESSAGES[:3]} | options
    assert whole(server, CHAT, body | asked) == streamed(server, CHAT, body | asked) == want
    assert server.post("/tokenize", body).body["count"] == want[1]["prompt_tokens"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"continue_final_message": True}, "messages[3].role"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ],
    ids=str,
)
def test_options_of_a_chat_that_do_not_fit_are_refused_by_name(server, options, param):
    for path in (CHAT, "/tokenize"):
        answer = server.post(path, {"messages": MESSAGES} | options)
        assert (answer.status, answer.body["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("message", "same"),
    [
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "user", "content": "x", "name": "ann"}, {"role": "user", "content": "x"}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        (
            {"role": "assistant", "content": "x", "refusal": None, "annotations": []},
            {"role": "assistant", "content": "x"},
        ),
        (
            {"role": "assistant", "content": "x", "reasoning_content": "y"},
            {"role": "assistant", "content": "x"},
        ),
    ],
    ids=str,
)
def test_messages_that_clients_send_read_like_plain_ones(server, message, same):
    last = {"role": "user", "content": "and?"}
    ids = [
        server.post("/tokenize", {"messages": [m, last]}).body["tokens"] for m in (message, same)
    ]
    assert ids[0] == ids[1] == tiny_tokenizer()(rendered([same, last]))["input_ids"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "role"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "function", "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
        ({"role": "user", "content": "x", "colour": 1}, "colour"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool_calls[0]"),
    ],
    ids=str,
)
def test_other_messages_are_refused_by_their_place(server, message, param):
    answer = server.post(CHAT, chat_body(messages=[MESSAGES[0], message]))
    assert (answer.status, answer.body["error"]["param"]) == (400, f"messages[1].{param}")


NOTHING = {
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), "ann"),
    **{"metadata": {"a": "b"}, "service_tier": "auto", "verbosity": "low"},
    **{"n": 1, "store": True, "logprobs": False, "top_logprobs": None, "logit_bias": {}},
    **{"bad_words": [], "allowed_token_ids": None, "min_tokens": 0},
    **{"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    **{"spaces_between_special_tokens": False, "include_stop_str_in_output": False},
    **{"tool_choice": "auto", "tools": None, "parallel_tool_calls": True, "prediction": None},
    "include_reasoning": True,
    "response_format": {"type": "text"},
    # vLLM's router adds these to whatever it passes on.
    **{"no_stop_trim": False, "separate_reasoning": True, "stream_reasoning": True},
    "return_hidden_states": False,
}


def test_fields_that_ask_for_nothing_are_read_past(server):
    want = whole(server, CHAT, chat_body(seed=1))
    assert whole(server, CHAT, chat_body(seed=1) | NOTHING) == want


FOREIGN = {"session_id": "a", "chat_id": ["b"], "features": {"web_search": False}}


def test_what_frontends_send_for_themselves_is_read_past_and_reported(server):
    for path, body in ((CHAT, chat_body(seed=1)), (COMPLETIONS, completion_body(seed=1))):
        assert whole(server, path, body | FOREIGN) == whole(server, path, body)
        told = '299 specserve "ignored: session_id, chat_id, features"'
        assert server.post(path, body | FOREIGN).headers["warning"] == told
        assert server.post(path, body | FOREIGN | {"stream": True}).headers["warning"] == told
        assert "warning" not in server.post(path, body).headers
        refused = server.post(path, body | FOREIGN | {"read_past": ["x"]})
        assert (refused.status, refused.body["error"]["param"]) == (400, "read_past")


TALK = [{"role": "user", "content": "a"}]
MESSAGE_FIELDS = {  # what clients send -> the paths that the header names
    "a cached message": ([TALK[0] | {"cache_control": {"type": "ephemeral"}}], ["cache_control"]),
    "a cached part": (
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a", "cache_control": {}, "id": 1}],
            }
        ],
        ["content.id"],
    ),
    "Anthropic's thoughts": (
        [*TALK, {"role": "assistant", "content": "b", "thinking_blocks": [{}], "id": "x"}, *TALK],
        ["id", "thinking_blocks"],
    ),
    "an answer of the openai package": (
        [
            *TALK,
            {"role": "assistant", "content": "b", "refusal": None, "annotations": [{"type": "u"}]}
            | {"audio": None, "function_call": None, "tool_calls": None, "images": []},
            *TALK,
        ],
        ["annotations"],
    ),
    "a call with a signature": (
        [
            *TALK,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "extra_content": {"google": {"thought_signature": "x"}},
                        "function": {"name": "f", "arguments": "{}", "thought_signature": "x"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "1", "status": "success"},
        ],
        ["status", "tool_calls.extra_content", "tool_calls.function.thought_signature"],
    ),
    "an earlier beginning": (
        [*TALK, {"role": "assistant", "content": "b", "prefix": True}, *TALK],
        ["prefix"],
    ),
    "no beginning": ([*TALK, {"role": "assistant", "content": "b", "prefix": False}], []),
}


@pytest.mark.parametrize(("messages", "paths"), MESSAGE_FIELDS.values(), ids=MESSAGE_FIELDS)
def test_fields_of_messages_for_other_servers_are_read_past_and_reported(server, messages, paths):
    told = ", ".join(f"messages.{path}" for path in paths)
    want = f'299 specserve "ignored: {told}"' if paths else None
    for path, body in ((CHAT, {"max_tokens": 1}), ("/tokenize", {})):
        answer = server.post(path, {"messages": messages} | body)
        assert (answer.status, answer.headers.get("warning")) == (200, want)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "a", "images": ["iVBO"]}, "messages[0].images"),
        ({"role": "user", "content": "a", "cache_contrl": {}}, "messages[0].cache_contrl"),
        ({"role": "user", "content": "a", "audio": {"id": "x"}}, "messages[0].audio"),
        (
            {"role": "user", "content": [{"text": "a", "cache_control": {}}]},
            "messages[0].content[0].type",
        ),
    ],
    ids=["images", "a typing error", "audio", "no type"],
)
def test_other_fields_of_messages_are_refused_by_name(server, message, param):
    answer = server.post(CHAT, {"messages": [message]})
    assert (answer.status, answer.body["error"]["param"]) == (400, param)


@pytest.mark.parametrize("field", ["prefix", "partial"])
def test_a_last_message_that_is_a_beginning_is_continued(server, field):
    started = [*TALK, {"role": "assistant", "content": "once upon"}]
    want = server.post("/tokenize", {"messages": started, "continue_final_message": True}).body
    started[-1][field] = True
    got = server.post("/tokenize", {"messages": started})
    assert (got.body, got.headers.get("warning")) == (want, None)
    asked = {"max_tokens": 5, "temperature": 0}
    continued = server.post(CHAT, {"messages": started} | asked)
    assert continued.status == 200
    assert continued.body["usage"]["prompt_tokens"] == want["count"]


def test_the_fields_of_items_for_other_servers_are_read_past_and_reported(server):
    part = {"type": "input_text", "text": "a", "cache_control": {"type": "ephemeral"}}
    item = {"role": "user", "content": [part], "timestamp": 5}
    answer = server.post(RESPONSES, {"input": [item], "max_output_tokens": 1})
    told = '299 specserve "ignored: input.content.cache_control, input.timestamp"'
    assert (answer.status, answer.headers["warning"]) == (200, told)


@pytest.mark.parametrize(
    ("path", "asked", "told"),
    [
        (CHAT, {"messages": TALK, "reasoning_effort": "high"}, "reasoning_effort"),
        (COMPLETIONS, {"prompt": "a", "reasoning_effort": "low"}, "reasoning_effort"),
        (RESPONSES, {"input": "a", "reasoning": {"effort": "minimal"}}, "reasoning.effort"),
        (CHAT, {"messages": TALK, "reasoning_effort": "none"}, None),
        (CHAT, {"messages": TALK, "cache_control": {"type": "ephemeral"}}, "cache_control"),
    ],
    ids=range(5),
)
def test_an_effort_that_no_template_reads_is_reported(server, path, asked, told):
    most = "max_output_tokens" if path == RESPONSES else "max_tokens"
    for stream in (False, True):
        answer = server.post(path, asked | {most: 1, "stream": stream})
        want = told and f'299 specserve "ignored: {told}"'
        assert (answer.status, answer.headers.get("warning")) == (200, want)


@pytest.mark.parametrize(
    ("path", "body", "field", "some"),
    [
        (CHAT, {"messages": TALK, "reasoning_effort": "huge"}, "reasoning_effort", "minimal, low"),
        (CHAT, {"messages": TALK, "response_format": {"type": "xml"}}, "response_format.type",
            "text, json_object"),
        (CHAT, {"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role", "user"),
        (RESPONSES, {"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort", "high"),
        (COMPLETIONS, {"prompt": "a", "early_stopping": "x"}, "early_stopping",
            "true, false, never"),
    ],
)  # fmt: skip
def test_the_error_for_a_wrong_choice_lists_the_choices(server, path, body, field, some):
    error = server.post(path, body).body["error"]
    assert error["param"] == field and some in error["message"].partition("send one of")[2]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_minus_one_leaves_a_limit_out(server, field):
    for path, body in ((CHAT, chat_body(seed=1)), (COMPLETIONS, completion_body(seed=1))):
        left_out = {k: v for k, v in body.items() if k != "max_tokens"}
        assert whole(server, path, left_out | {field: -1}) == whole(server, path, left_out)
        assert server.post(path, body | {field: -2}).status == 400
        assert server.post(path, body | {field: -1.5}).status == 400


def test_a_seed_of_minus_one_is_drawn(server):
    body = completion_body(seed=-1, temperature=1)
    seeds = {server.post(COMPLETIONS, body).body["choices"][0]["seed"] for _ in range(3)}
    assert len(seeds) == 3 and min(seeds) >= 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", True),
        ("top_logprobs", 3),
        ("functions", []),
        ("function_call", "none"),
        ("tool_choice", "required"),
        ("reasoning_effort", "enormous"),
        ("suffix", "x"),
        ("guided_json", {}),
        ("chat_template", "x"),
        ("no_stop_trim", True),
        ("separate_reasoning", False),
        ("stream_reasoning", False),
        ("return_hidden_states", True),
    ],
)
def test_a_field_that_would_have_to_do_something_is_refused_by_name(server, field, value):
    for path, body in ((CHAT, chat_body()), (COMPLETIONS, completion_body())):
        answer = server.post(path, body | {field: value})
        assert (answer.status, answer.body["error"]["param"]) == (400, field)
        assert field in answer.body["error"]["message"]


def test_completions_have_no_tools(server):
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = server.post(COMPLETIONS, completion_body(tools=tools))
    assert (answer.status, answer.body["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("field", "near"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("stop_tokens_ids", "stop_token_ids"),
        ("frequency_penalties", "frequency_penalty"),
        ("metdata", "metadata"),
        ("stop_sequences", "stop"),
        ("n_predict", "max_tokens"),
        ("num_predict", "max_tokens"),
        ("max_length", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("num_return_sequences", "n"),
        ("random_seed", "seed"),
        ("do_sample", "temperature"),
        ("flat_logprobs", "logprobs"),
    ],
)
def test_an_unknown_field_is_reported_the_nearest_name(server, field, near):
    answer = server.post(CHAT, chat_body(**{field: 1}))
    assert answer.status == 400
    error = answer.body["error"]
    assert (error["param"], error["code"]) == (field, "unknown_parameter")
    assert f"Did you mean {near}?" in error["message"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": 1e-5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x" * 1000] * 17}, "stop"),
        ({"stop_token_ids": [320]}, "stop_token_ids"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"cat": 1}}, "logit_bias"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, 320]}, "allowed_token_ids"),
        ({"allowed_token_ids": [319], "bad_words": ["é" * 33]}, "bad_words[0]"),
        ({"bad_words": ["a", ""]}, "bad_words[1]"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_tokens": 512, "max_tokens": 600}, "min_tokens"),
        ({"add_special_tokens": 1}, "add_special_tokens"),
        ({"skip_special_tokens": 0}, "skip_special_tokens"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 512}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 512}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"model": "nobody"}, "model"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_before_the_first_byte(server, asked, param):
    for path, body in ((CHAT, chat_body()), (COMPLETIONS, completion_body())):
        answer = server.post(path, body | asked)
        assert answer.status == (404 if param == "model" else 400)
        assert answer.body["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "the cat " * 300}]}),
        (COMPLETIONS, {"prompt": [7] * 512}),
        (COMPLETIONS, {"prompt": ["the cat", "the cat " * 300]}),
        (COMPLETIONS, {"prompt": "the cat " * 30_000}),
        (RESPONSES, {"input": "the cat " * 300}),
    ],
    ids=range(5),
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_is_refused_in_openais_words(server, path, body, stream):
    answer = server.post(path, body | {"stream": stream})
    error = answer.body["error"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
    # As opencode reads it; LiteLLM and LangChain look for a part of it, or for the code.
    numbers = (
        r"This model's maximum context length is 512 tokens\. .* has (?:at least )?(\d+) tokens"
    )
    assert int(re.match(numbers, error["message"])[1]) >= 512


def test_a_prompt_that_leaves_room_for_one_token_is_answered(server):
    answer = server.post(COMPLETIONS, {"prompt": [7] * 511, "seed": 1})
    assert (answer.status, answer.body["usage"]["completion_tokens"]) == (200, 1)
