"""Fields of older APIs have the effect of the fields that replaced them, and are reported."""

import json

import pytest

from specserve.server.chat import THINKS, ChatBody, fit_thinking, read_chat
from tests.server.asking import CHAT, COMPLETIONS, chat_body, completion_body, whole
from tests.server.calling import replying
from tests.server.in_process import server_threads
from tests.server.test_ignored_fields import fitted

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
GUIDED = {
    "guided_json": ("json", SCHEMA),
    "guided_json_object": ("json_object", True),
    "guided_regex": ("regex", "[ab]{5}"),
    "guided_choice": ("choice", ["yes", "no"]),
    "guided_grammar": ("grammar", 'start: "a" | "bc"'),
}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
USER = {"messages": [{"role": "user", "content": "a"}]}
PREDICT = {"options": {"num_predict": 2}, "stream": False}
ROUTES = {
    CHAT: chat_body(max_tokens=2),
    COMPLETIONS: completion_body(max_tokens=2),
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": USER | {"max_tokens": 2},
    "/v1/messages/count_tokens": USER,
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/api/chat": USER | PREDICT,
    "/api/generate": {"prompt": "a", "raw": True} | PREDICT,
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
}
FREE = {"max_tokens": 60, "ignore_eos": False, "seed": 1, "temperature": 1}


@pytest.mark.parametrize("old", GUIDED)
@pytest.mark.parametrize("path, body", [(CHAT, chat_body()), (COMPLETIONS, completion_body())])
def test_guided_fields_set_the_format(server, path, body, old):
    name, value = GUIDED[old]
    want = whole(server, path, body | FREE | {"structured_outputs": {name: value}})
    assert whole(server, path, body | FREE | {old: value}) == want
    answer = server.post(path, body | FREE | {old: value})
    assert answer.headers["Warning"] == f'299 specserve "deprecated: {old}"'


@pytest.mark.parametrize("name", ["cache_prompt", "num_ctx", "keep_alive"])
def test_fields_without_an_effect_on_the_text_are_ignored(server, name):
    body = chat_body(seed=1)
    answer = server.post(CHAT, body | {name: 1})
    assert answer.headers["Warning"] == f'299 specserve "ignored: {name}"'
    assert whole(server, CHAT, body | {name: 1}) == whole(server, CHAT, body)


@pytest.fixture(scope="module")
def scripted():
    with replying() as server:
        yield server


def asked(*messages, **fields):
    given = [{"role": "user", "content": "weather Rome"}, *messages]
    return {"messages": given, "functions": [FUNCTION]} | fields


def test_functions_are_tools_with_one_call(scripted):
    answer = scripted.post(CHAT, asked())
    [choice] = answer.body["choices"]
    call = choice["message"].pop("function_call")
    assert call["name"] == "weather" and json.loads(call["arguments"]) == {
        "city": "Rome",
        "days": 2,
    }
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    assert answer.headers["Warning"] == '299 specserve "deprecated: functions"'


def test_functions_are_streamed(scripted):
    *chunks, done = scripted.stream(CHAT, asked())
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    calls = [c["delta"]["function_call"] for c in choices if "function_call" in c["delta"]]
    assert calls[0]["name"] == "weather" and done == "[DONE]"
    arguments = "".join(call.get("arguments", "") for call in calls)
    assert json.loads(arguments) == {"city": "Rome", "days": 2}
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["function_call"]
    assert not any("tool_calls" in choice["delta"] for choice in choices)


def test_the_result_of_a_function_is_that_of_a_tool(scripted):
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    more = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "22 degrees"},
    ]
    answer = scripted.post(CHAT, asked(*more))
    assert "It is 22 degrees." in answer.body["choices"][0]["message"]["content"]
    assert (
        answer.headers["Warning"]
        == '299 specserve "deprecated: functions, messages[1], messages[2]"'
    )


@pytest.mark.parametrize(
    "choice, want",
    [
        ("none", ("auto", False)),
        ("auto", ("auto", False)),
        ({"name": "weather"}, ("weather", True)),
    ],
)
def test_a_function_call_is_a_choice_of_tools(choice, want):
    body, tools = read_chat(json.dumps(asked(function_call=choice)).encode())
    assert (tools.choice, tools.is_named) == want
    assert tools.is_parallel == (choice == "none")
    assert bool(tools.tools) == (choice != "none")
    assert body.replaced == ("functions", "function_call")


def test_thinking_reaches_a_template_that_reads_it():
    body, _ = read_chat(
        b'{"messages": [{"role": "user", "content": "a"}], "enable_thinking": false}'
    )
    assert body.chat_template_kwargs == {THINKS: False}
    reads, other = "{% if enable_thinking %}{% endif %}{{ messages }}", "{{ messages }}"
    assert fitted(fit_thinking, reads, body, THINKS) == body
    changed = fitted(fit_thinking, other, body, THINKS)
    assert (changed.chat_template_kwargs, changed.read_past) == ({}, (THINKS,))
    assert fitted(fit_thinking, other, ChatBody(), THINKS) == ChatBody()
    renamed = fitted(fit_thinking, "{{ thinking }}{{ messages }}", body, THINKS)
    assert (renamed.chat_template_kwargs, renamed.read_past) == ({"thinking": False}, ())


def test_thinking_that_no_template_reads_is_ignored(server):
    for fields in ({THINKS: False}, {"chat_template_kwargs": {THINKS: True}}):
        answer = server.post(CHAT, chat_body() | fields)
        assert answer.status == 200 and THINKS in answer.headers["Warning"]


def test_clients_can_name_the_model_as_they_like(folder):
    names = {"server.served_model_name": "tiny", "server.model_aliases": ["gpt-4o"]}
    with server_threads(folder, **names) as server:
        assert [m["id"] for m in server.get("/v1/models").body["data"]] == ["tiny", "gpt-4o"]
        assert server.post(CHAT, chat_body(model="gpt-4o")).body["model"] == "tiny"
        assert server.get("/v1/models/gpt-4o").status == 200
        assert server.post(CHAT, chat_body(model="gpt-5")).status == 404
    any_name = {"server.any_model_name": True, "model.task": "embed"}
    with server_threads(folder, **any_name) as server:
        for path, body in ROUTES.items():
            answer = server.post(path, {"model": "gpt-5"} | body)
            assert (answer.status, "ignored: model" in answer.headers["Warning"]) == (200, True)
            known = server.post(path, {"model": folder.name} | body)
            assert known.status == 200 and "Warning" not in known.headers
        assert server.post(CHAT, chat_body(model="gpt-5")).body["model"] == folder.name
