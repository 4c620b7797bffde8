"""Tool calls and reasoning over HTTP: what is asked, what the model sees, what comes back."""

import asyncio
import itertools
import json
import re

import jsonschema
import openai
import pytest
from tokenizers import AddedToken

from specserve.server import chat
from specserve.text.grammars.compiled import compile_grammar, vocabulary_of
from tests.checkpoints import EOS, tiny_tokenizer
from tests.server.asking import CHAT, COMPLETIONS, chat_body, started
from tests.server.scripted import Grammars, scripted, with_template
from tests.server.server_process import eventually
from tests.text.answer.outputs import JSON_TEMPLATE, TOOLS

QWEN = (
    "{% if tools %}tools: {{ tools | tojson }}\n<tool_call> {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.city }}"
    " {{ c.id }}{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }} {{ m.name }}){% endif %}"
    "{{ '\n' }}{% endfor %}"
    "assistant: {% if think %}<think>\n{% endif %}"
)
MISTRAL = QWEN.replace("<tool_call>", "[TOOL_CALLS][ARGS]").replace("<think>\n", "")
MISTRAL = MISTRAL.replace("<think>", "").replace("</think>", "")
ASK = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [*TOOLS]}
TEXT = (
    "<think>\nParis.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "P}\\"é", "days": 2}}\n</tool_call>'
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
ARGUMENTS = '{"city": "P}\\"é", "days": 2}'
CALL = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'


def backend(special=()):
    made = tiny_tokenizer().backend_tokenizer
    made = made.from_str(made.to_str())
    made.add_tokens([AddedToken(text, special=True) for text in special])
    return made


@pytest.fixture(scope="module")
def qwen():
    with scripted(with_template(backend(), QWEN)) as server:
        yield server


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/api/chat"])
def test_strict_that_no_grammar_can_enforce_is_ignored_with_a_warning(path):
    """Qwen3-Coder's calls have no JSON. Without `auto`, calls are in another format."""
    template = QWEN.replace("<tool_call>", "<function=<parameter=")
    function = TOOLS[0]["function"] | {"strict": True}
    flat = {"type": "function"} | function
    anthropic = {"name": "now", "input_schema": {"type": "object"}, "strict": True}
    tools = {"/v1/messages": anthropic, "/v1/responses": flat}
    asked = ASK | {"tools": [tools.get(path, {"type": "function", "function": function})]}
    if path == "/v1/responses":
        asked["input"] = asked.pop("messages")
    with scripted(with_template(backend(), template)) as server, server.saying("Now."):
        answer = server.post(path, asked | {"stream": False})
        assert answer.status == 200 and "ignored: tools.strict" in answer.headers["Warning"]
        assert server.last.sampling.grammar == ""
        if path == CHAT:
            answer = server.post(path, asked | {"tool_choice": "required"})
            assert "Warning" not in answer.headers and server.last.sampling.grammar


@pytest.mark.parametrize("is_strict", [False, True])
def test_strict_tools_are_enforced_within_text(qwen, is_strict):
    function = TOOLS[0]["function"] | {"strict": is_strict}
    with qwen.saying("Now."):
        asked = ASK | {"tools": [{"type": "function", "function": function}]}
        answer = qwen.post(CHAT, asked)
    assert "Warning" not in answer.headers and bool(qwen.last.sampling.grammar) == is_strict


@pytest.fixture(scope="module")
def mistral():
    special = ["[TOOL_CALLS]", "[ARGS]", "[OTHER]"]
    with scripted(with_template(backend(special), MISTRAL)) as server:
        yield server


@pytest.fixture(scope="module")
def unknown():
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with scripted(with_template(backend(), source)) as server:
        yield server


CALLS = (
    "{% for m in messages %}{{ m.content is none and 'null' or m.content }} "
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }} {{ c.id }}|{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}"
)


@pytest.fixture(scope="module")
def plain_calls():
    with scripted(with_template(backend(), CALLS)) as server:
        yield server


@pytest.fixture(scope="module")
def unwritable():
    source = "{% for c in messages[1].tool_calls %}{{ c.function.arguments.city.x }}{% endfor %}"
    with scripted(with_template(backend(), source)) as server:
        yield server


@pytest.fixture(scope="module")
def with_list():
    default = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with scripted(with_template(backend(), default, tool_use=QWEN)) as server:
        yield server


def streamed(server, **asked):
    """The chunks' choices, and the last chunk."""
    body = ASK | asked | {"stream_options": {"include_usage": True}}
    *chunks, done = server.stream(CHAT, body)
    assert done == "[DONE]" and chunks[-1]["choices"] == []
    return [c for chunk in chunks for c in chunk["choices"]], chunks[-1]


def put_together(choices):
    """A message from the deltas of one choice, and why it ended. Deltas have to keep the rules."""
    whole, calls = {"content": "", "reasoning": ""}, []
    assert choices[0]["delta"]["role"] == "assistant"
    for choice in choices:
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        whole["content"] += delta.get("content") or ""
        whole["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["type"] == "function" and call["function"]["arguments"] == ""
                assert re.fullmatch("call_[0-9a-f]{24}", call["id"])
                calls.append([call["function"]["name"], ""])
            else:
                assert call.keys() == {"index", "function"} and call["index"] == len(calls) - 1
                assert call["function"].keys() == {"arguments"}
                calls[-1][1] += call["function"]["arguments"]
    *others, last = [choice["finish_reason"] for choice in choices]
    assert {*others} <= {None}
    return whole | {"calls": calls}, last


def as_reported(choice):
    """The same of a whole choice."""
    message = choice["message"]
    calls = [
        [c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())
    ]
    told = {"content": message["content"] or "", "reasoning": message.get("reasoning", "")}
    assert message.get("reasoning") == message.get("reasoning_content")
    return told | {"calls": calls}, choice["finish_reason"]


WANT = {
    "content": "Let me see.",
    "reasoning": "Paris.",
    "calls": [["get_weather", ARGUMENTS], ["now", "{}"]],
}


def test_a_whole_answer(qwen):
    with qwen.saying(TEXT) as num_tokens:
        answer = qwen.post(CHAT, ASK).body
    [choice] = answer["choices"]
    assert as_reported(choice) == (WANT, "tool_calls")
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
    usage = answer["usage"]
    assert usage["completion_tokens"] == num_tokens
    thought = len(qwen.tokenizer.encode("<think>\nParis.\n</think>", False))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": thought}


def test_calls_split_over_accepted_blocks_in_every_possible_place(qwen):
    with qwen.saying(TEXT) as num_tokens:
        pass
    for i in range(1, num_tokens):
        with qwen.saying(TEXT, ends=[i, i + 1 + i % 7]):
            choices, last = streamed(qwen)
        assert put_together(choices) == (WANT, "tool_calls"), i
    counted = last["usage"]["completion_tokens_details"]["reasoning_tokens"]
    for size in (1, 2, 5, 16):
        with qwen.saying(TEXT, size):
            choices, last = streamed(qwen)
        assert put_together(choices) == (WANT, "tool_calls")
        assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": counted}


def test_arguments_are_streamed(qwen):
    with qwen.saying(TEXT, 1):
        choices, _ = streamed(qwen)
    pieces = [c["delta"] for c in choices if "tool_calls" in c["delta"]]
    assert len(pieces) > 12


def test_a_call_alone_has_no_content(qwen):
    with qwen.saying(CALL):
        [choice] = qwen.post(CHAT, ASK).body["choices"]
        assert choice["message"]["content"] is None
        choices, _ = streamed(qwen)
    assert choices[0]["delta"]["content"] is None and choices[0]["delta"]["tool_calls"]


def test_a_call_that_is_cut_by_max_tokens(qwen):
    with qwen.saying(TEXT, 3) as num_tokens:
        for most in range(1, num_tokens):
            choices, last = streamed(qwen, max_tokens=most)
            told, reason = put_together(choices)
            [whole] = qwen.post(CHAT, ASK | {"max_tokens": most}).body["choices"]
            assert reason == "length" and as_reported(whole) == (told, "length")
            assert "Paris.\n</think>".startswith(told["reasoning"])
            for call, want in zip(told["calls"], WANT["calls"], strict=False):
                assert call[0] == want[0] and want[1].startswith(call[1].rstrip("\ufffd"))
            usage = last["usage"]
            assert usage["completion_tokens_details"]["reasoning_tokens"] <= most
    assert told["calls"] == WANT["calls"]


@pytest.mark.parametrize("asked", [{"tools": []}, {"tool_choice": "none"}, {"tools": None}])
def test_nothing_is_asked_for(qwen, asked):
    with qwen.saying(CALL):
        [choice] = qwen.post(CHAT, ASK | asked).body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert "tools:" not in qwen.tokenizer.decode(qwen.last.prompt)
    assert qwen.last.sampling.grammar == ""


def test_the_template_shows_tools_and_results(qwen):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather"}}
    call["function"]["arguments"] = '{"city": "Oslo"}'
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "rain"},
    ]
    with qwen.saying("Rain."):
        assert qwen.post(CHAT, ASK | {"messages": messages}).status == 200
    prompt = qwen.tokenizer.decode(qwen.last.prompt)
    assert prompt.startswith(f"tools: {json.dumps(TOOLS)}")
    assert "assistant: <think>Hm.</think>get_weather Oslo call_1\n" in prompt
    assert "tool: rain(call_1 get_weather)\n" in prompt
    body = {"messages": messages, "tools": [*TOOLS]}
    assert qwen.post("/tokenize", body).body["tokens"] == [*qwen.last.prompt]


CUT_CALL = {"name": "get_weather", "arguments": '{"city": "Trond'}
CUT_TURNS = {  # of a call that max_tokens cut, by route
    CHAT: {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": CUT_CALL}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "broken"},
        ]
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "Weather?"},
            {"type": "function_call", "call_id": "a", **CUT_CALL},
            {"type": "function_call_output", "call_id": "a", "output": "broken"},
        ]
    },
}


@pytest.mark.parametrize("route", CUT_TURNS)
def test_a_conversation_goes_on_after_a_call_that_was_cut(plain_calls, route):
    with plain_calls.saying("Again."):
        assert plain_calls.post(route, CUT_TURNS[route]).status == 200
    prompt = plain_calls.tokenizer.decode(plain_calls.last.prompt)
    assert prompt == 'Weather? null {"city": "Trond a|broken a'


def test_a_template_that_can_write_no_cut_call_is_a_400(unwritable):
    refused = unwritable.post(CHAT, CUT_TURNS[CHAT])
    assert refused.status == 400
    assert "no attribute 'city'" in refused.body["error"]["message"]


def test_tools_are_shown_by_a_template_of_their_own(with_list):
    assert with_list.get("/v1/models").body["data"][0]["tool_parser"] == "hermes"
    for choice in ("auto", "required", NAMED):
        with with_list.saying(CALL):
            answer = with_list.post(CHAT, ASK | {"tool_choice": choice})
        assert answer.body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"
        assert with_list.tokenizer.decode(with_list.last.prompt).startswith("tools: [{")
    for without in ({"tool_choice": "none"}, {"tools": []}):
        with with_list.saying("Rain."):
            assert with_list.post(CHAT, ASK | without).status == 200
        assert with_list.tokenizer.decode(with_list.last.prompt) == "Weather?"
    body = {"messages": ASK["messages"], "tools": [*TOOLS]}
    tokens = with_list.post("/tokenize", body).body["tokens"]
    assert with_list.tokenizer.decode(tokens).startswith("tools: [{")


def test_a_prompt_that_begins_the_reasoning(qwen):
    with qwen.saying("Hm.\n</think>\n\nYes."):
        asked = {"chat_template_kwargs": {"think": True}}
        [choice] = qwen.post(CHAT, ASK | asked).body["choices"]
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["content"] == "Yes."


def test_reasoning_can_be_left_out(qwen):
    with qwen.saying(TEXT):
        answer = qwen.post(CHAT, ASK | {"include_reasoning": False}).body
    assert as_reported(answer["choices"][0]) == (WANT | {"reasoning": ""}, "tool_calls")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_one_call_at_most(qwen):
    with qwen.saying(TEXT, 4):
        choices, _ = streamed(qwen, parallel_tool_calls=False)
    assert put_together(choices) == (WANT | {"calls": WANT["calls"][:1]}, "tool_calls")


NAMED = {"type": "function", "function": {"name": "now"}}


def test_what_is_cut_of_a_call_that_had_to_be_made_is_no_content(qwen):
    with qwen.saying(CALL) as num_tokens:
        for n in range(1, num_tokens):
            asked = ASK | {"tool_choice": "required", "max_tokens": n}
            [whole] = qwen.post(CHAT, asked).body["choices"]
            choices, _ = streamed(qwen, tool_choice="required", max_tokens=n)
            assert not whole["message"]["content"], n
            assert not any(choice["delta"].get("content") for choice in choices), n


@pytest.mark.parametrize(
    ("choice", "reason"), [("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")]
)
def test_the_reason_reports_who_chose_the_call(qwen, choice, reason):
    with qwen.saying(CALL):
        [whole] = qwen.post(CHAT, ASK | {"tool_choice": choice}).body["choices"]
        choices, _ = streamed(qwen, tool_choice=choice)
    assert whole["finish_reason"] == choices[-1]["finish_reason"] == reason
    assert bool(qwen.last.sampling.grammar) == (choice != "auto")


def test_grammars_are_of_the_tools_that_may_be_called(qwen):
    with qwen.saying(CALL):
        qwen.post(CHAT, ASK | {"tool_choice": "required"})
        both = qwen.last.sampling.grammar
        qwen.post(CHAT, ASK | {"tool_choice": NAMED})
        one = qwen.last.sampling.grammar
        strict = TOOLS[0]["function"] | {"strict": True}
        qwen.post(CHAT, ASK | {"tools": [{"type": "function", "function": strict}]})
    assert "get_weather" in both and "call_1)*" in both.replace("call)*", "call_1)*")
    assert "get_weather" not in one and "now" in one and "call)*" not in one
    assert "triggered" in qwen.last.sampling.grammar
    assert "strict" not in qwen.tokenizer.decode(qwen.last.prompt)


def test_an_answer_is_calls_or_of_the_form_that_is_asked_for(qwen):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "sunny"}}}
    with qwen.saying(CALL):
        [calls] = qwen.post(CHAT, ASK | {"response_format": form}).body["choices"]
    assert calls["finish_reason"] == "tool_calls" and "sunny" in qwen.last.sampling.grammar
    assert "get_weather" in qwen.last.sampling.grammar
    with qwen.saying('"sunny"'):
        [text] = qwen.post(CHAT, ASK | {"response_format": form}).body["choices"]
    assert text["finish_reason"] == "stop" and text["message"]["content"] == '"sunny"'
    with qwen.saying('"sunny"'):
        qwen.post(CHAT, ASK | {"response_format": form, "tool_choice": "none"})
    assert "get_weather" not in qwen.last.sampling.grammar


THINKING = {"chat_template_kwargs": {"think": True}}
NUMBER = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 7}}}


def test_a_form_comes_after_the_reasoning_that_the_prompt_begins(qwen):
    asked = {"messages": ASK["messages"], "response_format": NUMBER} | THINKING
    with qwen.saying("Hm.</think>\n\n7"):
        [choice] = qwen.post(CHAT, asked).body["choices"]
    told = choice["message"]
    assert (told["content"], told["reasoning_content"]) == ("7", "Hm.")
    tokenizer = qwen.tokenizer
    size, end = tokenizer.backend.get_vocab_size(), tokenizer.get_vocab()[EOS]
    vocabulary = vocabulary_of(tokenizer, size, [end])
    matcher = compile_grammar(vocabulary, qwen.last.sampling.grammar)
    ids = tokenizer.encode("Hm.</think>\n\n7", add_special_tokens=False)
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    matcher.reset()
    assert matcher.try_consume_tokens(ids[:3]) == 3 and not matcher.is_accepting()


def test_a_form_that_is_no_json_leaves_no_room_for_reasoning(qwen):
    asked = {"messages": ASK["messages"], "structured_outputs": {"choice": ["yes"]}} | THINKING
    with qwen.saying("yes"):
        [choice] = qwen.post(CHAT, asked).body["choices"]
    assert choice["message"]["content"] == "yes" and "reasoning" not in choice["message"]


def test_several_choices_and_all_details(qwen):
    asked = {"n": 2, "logprobs": True, "return_token_ids": True}
    with qwen.saying(TEXT, 5) as num_tokens:
        answer = qwen.post(CHAT, ASK | asked).body
        choices, _ = streamed(qwen, **asked)
    for index, whole in enumerate(answer["choices"]):
        own = [c for c in choices if c["index"] == index]
        assert put_together(own) == as_reported(whole) == (WANT, "tool_calls")
        ids = list(itertools.chain.from_iterable(c.get("token_ids", ()) for c in own))
        told = [t for c in own if c["logprobs"] for t in c["logprobs"]["content"]]
        assert ids == whole["token_ids"] and len(ids) == num_tokens
        assert told == whole["logprobs"]["content"] and len(told) == num_tokens


def test_a_stop_string_ends_an_answer_before_it_is_parsed(qwen):
    with qwen.saying(TEXT, 3):
        choices, _ = streamed(qwen, stop="</think>", include_stop_str_in_output=True)
        told, reason = put_together(choices)
        assert (told, reason) == ({"content": "", "reasoning": "Paris.", "calls": []}, "stop")


def test_special_tokens_reach_the_parser_and_no_text(mistral):
    text = f"[OTHER]Well.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[OTHER][TOOL_CALLS]now[ARGS]{{}}"
    for size in (1, 3, None):
        with mistral.saying(text, size):
            [whole] = mistral.post(CHAT, ASK).body["choices"]
            chunks, _ = streamed(mistral)
        want = {"content": "Well.", "reasoning": "", "calls": WANT["calls"]}
        assert as_reported(whole) == (want, "tool_calls")
        ids = [
            c["id"] for chunk in chunks for c in chunk["delta"].get("tool_calls", ()) if "id" in c
        ]
        assert all(re.fullmatch("[a-zA-Z0-9]{9}", id) for id in ids)
    with mistral.saying(text):
        [whole] = mistral.post(CHAT, {"messages": ASK["messages"]}).body["choices"]
    assert "[TOOL_CALLS]" not in whole["message"]["content"]


def test_a_models_own_response_template():
    source = "{{ messages[0].content }}<|im_start|>assistant\n"
    tokenizer = with_template(backend(["<|im_end|>"]), source, JSON_TEMPLATE)
    with scripted(tokenizer) as server:
        card = server.get("/v1/models").body["data"][0]
        assert (card["tool_parser"], card["reasoning_parser"]) == ("template", "template")
        with server.saying(TEXT + "<|im_end|>", 3):
            assert put_together(streamed(server)[0]) == (WANT, "tool_calls")
            [whole] = server.post(CHAT, {"messages": ASK["messages"]}).body["choices"]
        assert whole["message"]["reasoning"] == "Paris."
        assert whole["message"]["content"].startswith("Let me see.\n<tool_call>")


def test_a_model_that_is_not_known_to_call_gets_a_prompt_and_a_grammar(unknown):
    """The grammar allows any text, and only right calls."""
    for choice, words in (("auto", "Well. "), ("required", "")):
        with unknown.saying(words + CALL):
            [whole] = unknown.post(CHAT, ASK | {"tool_choice": choice}).body["choices"]
        told, reason = as_reported(whole)
        assert (told["calls"], reason) == ([["now", '{"a": 1}']], "tool_calls")
        assert told["content"] == words.strip()
        prompt = unknown.tokenizer.decode(unknown.last.prompt)
        assert "You can call these functions" in prompt
        assert json.dumps(TOOLS[0]["function"]) in prompt
        grammar = unknown.last.sampling.grammar
        assert "get_weather" in grammar and ("triggered" in grammar) == (choice == "auto")
    assert unknown.post("/tokenize", {k: ASK[k] for k in ASK}).body["tokens"] == [
        *unknown.last.prompt
    ]
    with unknown.saying("Hm."):
        assert unknown.post(CHAT, ASK | {"tools": None}).status == 200
    assert unknown.last.sampling.grammar == ""


def test_an_operator_may_turn_tools_off():
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with scripted(with_template(backend(), source), **{"server.tool_parser": "none"}) as server:
        refused = server.post(CHAT, ASK)
        assert refused.status == 400 and "server.tool_parser" in refused.body["error"]["message"]


CHANNELS = QWEN.replace("<tool_call> ", "<|channel|>analysis<|message|>")
SPECIAL = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"]
HARMONY = (
    "<|channel|>analysis<|message|>Paris.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    f"<|constrain|>json<|message|>{ARGUMENTS}"
)


def test_the_channels_of_gpt_oss_are_reasoning_text_and_calls():
    with scripted(with_template(backend(SPECIAL), CHANNELS)) as server:
        want = {"content": "Let me see.", "reasoning": "Paris."}
        want["calls"] = [["get_weather", ARGUMENTS]]
        for size in (1, 3, 50):
            with server.saying(HARMONY, size):
                choices, _ = streamed(server)
                assert put_together(choices) == (want, "tool_calls")
                [whole] = server.post(CHAT, ASK).body["choices"]
            assert as_reported(whole) == (want, "tool_calls")
        final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
        with server.saying(f"{final}<|message|>Yes."):
            [whole] = server.post(CHAT, {"messages": ASK["messages"]}).body["choices"]
            assert whole["message"]["content"] == "Yes."
            hidden = {"messages": ASK["messages"], "include_reasoning": False}
            [whole] = server.post(CHAT, hidden).body["choices"]
            assert "reasoning" not in whole["message"]
        with server.saying('{"a": 1}'):  # the form leaves no room for channels
            form = {"messages": ASK["messages"], "response_format": {"type": "json_object"}}
            [whole] = server.post(CHAT, form).body["choices"]
            assert whole["message"]["content"] == '{"a": 1}'
        forced = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
        with server.saying(forced):
            [whole] = server.post(CHAT, ASK | {"tool_choice": "required"}).body["choices"]
            assert as_reported(whole)[0]["calls"] == [["now", "{}"]]


def test_the_operator_may_name_the_parser():
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = with_template(backend(), source)
    settings = {"server.tool_parser": "llama3_json", "server.reasoning_parser": "think"}
    text = '<think>Hm.</think>{"name": "now", "parameters": {}}'
    with scripted(tokenizer, **settings) as server, server.saying(text):
        [whole] = server.post(CHAT, ASK).body["choices"]
    told = {"content": "", "reasoning": "Hm.", "calls": [["now", "{}"]]}
    assert as_reported(whole) == (told, "tool_calls")


def named(**function):
    return [{"type": "function", "function": {"name": "f"} | function}]


def calling(**call):
    whole = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}} | call
    return {"role": "assistant", "tool_calls": [whole]}


def said(*messages):
    return {"messages": [*ASK["messages"], *messages], "tools": None}


DEEP = json.loads('{"a":' * 100 + "1" + "}" * 100)
REFUSED = {
    "a name with a space": ({"tools": named(name="a b")}, "tools[0].function.name"),
    "a name with a line break": ({"tools": named(name="a\n")}, "tools[0].function.name"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
    "no function": ({"tools": [{"type": "function"}]}, "tools[0]"),
    "another type": ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
    "no object": ({"tools": ["now"]}, "tools[0]"),
    "an unknown key": ({"tools": named(colour=1)}, "tools[0].function.colour"),
    "a key beside function": ({"tools": [named()[0] | {"name": "f"}]}, "tools[0].name"),
    "parameters that are no object": (
        {"tools": named(parameters={"type": "string"})},
        "tools[0].function.parameters.type",
    ),
    "parameters in a list": ({"tools": named(parameters=[])}, "tools[0].function.parameters"),
    "deep parameters": ({"tools": named(parameters=DEEP)}, "tools[0].function.parameters"),
    "two of a name": ({"tools": [*named(), *named()]}, "tools[1].function.name"),
    "many": ({"tools": [named(name=f"f{i}")[0] for i in range(129)]}, "tools"),
    "large": ({"tools": named(description="a" * 300_000)}, "tools"),
    "a schema that no grammar has": (
        {
            "tools": named(parameters={"properties": {"a": {"type": "sum"}}}),
            "tool_choice": "required",
        },
        "tools",
    ),
    "a form of a text that has to be a call": (
        {"response_format": {"type": "json_object"}, "tool_choice": "required"},
        "tools",
    ),
    "a form that is no JSON": ({"structured_outputs": {"choice": ["yes", "no"]}}, "tools"),
    "an unknown choice": ({"tool_choice": "all"}, "tool_choice"),
    "a key beside the choice's function": (
        {"tool_choice": {"type": "function", "function": {"name": "now"}, "a": 1}},
        "tool_choice.a",
    ),
    "a key beside the choice's name": (
        {"tool_choice": {"type": "function", "function": {"name": "now", "a": 1}}},
        "tool_choice.function.a",
    ),
    "a choice of another type": ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    "an unknown function": (
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice.function.name",
    ),
    "a choice without tools": ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    "functions of another type": ({"functions": "f"}, "functions"),
    "functions and tools": ({"functions": [{"name": "f"}], "tools": []}, "functions"),
    "a function call and a choice": (
        {"function_call": "auto", "tool_choice": "auto"},
        "function_call",
    ),
    "a call of another type": (said(calling(type="custom")), "messages[1].tool_calls[0]"),
    "calls of a user": (
        said({"role": "user", "content": "a", "tool_calls": calling()["tool_calls"]}),
        "messages[1].tool_calls",
    ),
    "a result without a call": (said({"role": "tool", "content": "a"}), "messages[1].tool_call_id"),
    "a result without content": (
        said({"role": "tool", "tool_call_id": "a"}),
        "messages[1].content",
    ),
    "a call's id of a user": (
        said({"role": "user", "content": "a", "tool_call_id": "a"}),
        "messages[1].tool_call_id",
    ),
}


@pytest.mark.parametrize(("asked", "param"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_named(qwen, asked, param):
    refused = qwen.post(CHAT, ASK | asked)
    error = refused.body["error"]
    assert (refused.status, error["type"], error["param"]) == (400, "invalid_request_error", param)


@pytest.fixture
def client(qwen):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{qwen.port}/v1", api_key="none") as client:
        yield client


def test_the_openai_client(qwen, client):
    asked = {"model": qwen.get("/v1/models").body["data"][0]["id"]} | ASK
    with qwen.saying(TEXT, 2):
        message = client.chat.completions.create(**asked).choices[0].message
        with client.chat.completions.stream(**asked) as stream:
            events = [*stream]
            final = stream.get_final_completion().choices[0]
    assert message.content == final.message.content == WANT["content"]
    assert message.reasoning_content == WANT["reasoning"]
    for calls in (message.tool_calls, final.message.tool_calls):
        assert [[c.function.name, c.function.arguments] for c in calls] == WANT["calls"]
    assert final.finish_reason == "tool_calls"
    deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert "".join(e.arguments_delta for e in deltas if e.index == 0) == ARGUMENTS
    thoughts = [e.chunk.choices[0].delta for e in events if e.type == "chunk" and e.chunk.choices]
    told = [getattr(delta, "reasoning_content", None) or "" for delta in thoughts]
    assert "".join(told) == WANT["reasoning"]


def test_the_openai_client_sends_a_conversation_back(qwen, client):
    asked = {"model": qwen.get("/v1/models").body["data"][0]["id"]} | ASK
    with qwen.saying(TEXT):
        message = client.chat.completions.create(**asked).choices[0].message
        results = [
            {"role": "tool", "tool_call_id": c.id, "content": "1"} for c in message.tool_calls
        ]
        more = [*ASK["messages"], message, *results]
        client.chat.completions.create(**asked | {"messages": more})
    prompt = qwen.tokenizer.decode(qwen.last.prompt)
    assert 'get_weather P}"é' in prompt and "<think>Paris.</think>" in prompt
    assert prompt.count("tool: 1") == 2


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_makes_the_calls_that_are_enforced(server, seed):
    body = chat_body(temperature=1.5, seed=seed, max_tokens=200, ignore_eos=False)
    schema = {
        "properties": {"city": {"enum": ["Paris", "Oslo"]}, "day": {"type": "boolean"}},
        "required": ["city", "day"],
        "additionalProperties": False,
    }
    named = {"name": "weather", "parameters": schema}
    body["tools"] = [{"type": "function", "function": named}]
    body["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    [whole] = server.post(CHAT, body).body["choices"]
    *chunks, _ = server.stream(CHAT, body)
    told = put_together([c for chunk in chunks for c in chunk["choices"]])
    assert as_reported(whole) == told and told[1] == "stop"
    [[name, arguments]] = told[0]["calls"]
    assert name == "weather" and told[0]["content"] == ""
    jsonschema.validate(json.loads(arguments), schema)


def test_a_models_card_reports_the_parsers(qwen, unknown):
    cards = [server.get("/v1/models").body["data"][0] for server in (qwen, unknown)]
    parsers = [(card["tool_parser"], card["reasoning_parser"]) for card in cards]
    assert parsers == [("hermes", "think"), ("generic", "none")]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "a"}}),
        (CHAT, ASK | {"tools": [], "structured_outputs": {"regex": "a"}}),
        (CHAT, ASK | {"tool_choice": "required"}),
    ],
)
def test_a_check_ends_when_its_client_leaves(qwen, monkeypatch, path, asked):
    told = []

    async def check(self, *_):
        told.append("begins")
        try:
            await asyncio.Event().wait()
        finally:
            told.append("ends")

    monkeypatch.setattr(Grammars, "check", check)
    with started(qwen, asked, path):
        eventually(lambda: told == ["begins"])
    eventually(lambda: told == ["begins", "ends"])


def test_the_grammar_of_calls_is_written_next_to_streams(qwen, monkeypatch):
    told, write = [], chat.call_grammar

    def noted(*args):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        told.append(write(*args))
        return told[-1]

    monkeypatch.setattr(chat, "call_grammar", noted)
    with qwen.saying(CALL):
        assert qwen.post(CHAT, ASK | {"tool_choice": "required"}).status == 200
    [grammar] = told
    assert "get_weather" in grammar
