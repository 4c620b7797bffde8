"""/v1/responses answers as a chat does, in OpenAI's newer form, to OpenAI's own client."""

import json

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from specserve.server.response_input import read_input
from tests.server.asking import CHAT, MESSAGES, chat_body
from tests.server.scripted import scripted, with_template
from tests.server.server_process import eventually
from tests.server.test_tools import QWEN, backend

RESPONSES = "/v1/responses"
PLAIN = {"temperature": 0, "max_output_tokens": 24}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "parameters": CITY | {"additionalProperties": False}}
TOOL = {"type": "function", "strict": True} | WEATHER
CALLING = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 200}
LOGPROBS = "message.output_text.logprobs"


@pytest.fixture(scope="module")
def client(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def body_of(**asked):
    return {"input": MESSAGES, "ignore_eos": True} | PLAIN | asked


def asked_of(**asked):
    """The same for the client."""
    own = {"ignore_eos": True, "seed": 7}
    return {"model": "tiny", "input": MESSAGES, "extra_body": own} | PLAIN | asked


def events_of(server, body):
    """Names and data of a stream's events."""
    raw = server.post(RESPONSES, body | {"stream": True}).body
    blocks = [block.splitlines() for block in raw.split("\n\n") if block and block[0] != ":"]
    return [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in blocks]


def text_of(response):
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def test_the_text_is_that_of_the_chat_with_the_same_messages_and_seed(server):
    for changes in (
        {"seed": 3},
        {"temperature": 0.9, "seed": 5},
        {"top_k": 7, "seed": 2, "stop": "e"},
    ):
        chat = server.post(CHAT, chat_body(**changes)).body
        response = server.post(RESPONSES, body_of(**changes)).body
        [choice] = chat["choices"]
        assert text_of(response) == choice["message"]["content"] != ""
        assert response["seed"] == choice["seed"]
        assert response["system_fingerprint"] == chat["system_fingerprint"]
        counts = [chat["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")]
        usage = response["usage"]
        assert [usage[f"{name}_tokens"] for name in ("input", "output", "total")] == counts


def test_a_client_gets_an_answer_and_streams_the_same_one(client):
    asked = asked_of(temperature=0.8)
    whole = client.responses.create(**asked)
    assert isinstance(whole, Response) and whole.output_text
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.store is False and whole.usage.output_tokens == 24 and whole.created_at > 1e9
    with client.responses.create(**asked, stream=True) as stream:
        events = list(stream)
    assert [e.sequence_number for e in events] == [*range(len(events))]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == (
        whole.output_text
    )
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.total_tokens == whole.usage.total_tokens


def test_the_clients_own_reader_of_streams_puts_the_answer_together(client):
    asked = asked_of() | {"extra_body": {"stop": ["e"]}, "max_output_tokens": 400}
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed" and final.status == "completed"
    assert final.output_text == client.responses.create(**asked).output_text


ORDER = [
    *("response.created", "response.in_progress"),
    *("response.output_item.added", "response.content_part.added", "response.output_text.delta"),
    *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
    "response.incomplete",
]


def test_the_events_build_up_the_answer_in_order(server):
    events = events_of(server, body_of())
    assert [*dict.fromkeys(name for name, _ in events)] == ORDER
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == [*range(len(events))]
    by_name = dict(events)
    [item] = by_name["response.incomplete"]["response"]["output"]
    assert by_name["response.output_item.done"]["item"] == item
    assert item["status"] == "incomplete" and item["role"] == "assistant"
    added = by_name["response.output_item.added"]["item"]
    assert (added["id"], added["status"], added["content"]) == (item["id"], "in_progress", [])
    assert item["content"] == [by_name["response.content_part.done"]["part"]]
    assert by_name["response.output_text.done"]["text"] == item["content"][0]["text"]
    places = {
        (d["item_id"], d["output_index"], d["content_index"]) for _, d in events if "item_id" in d
    }
    assert places == {(item["id"], 0, 0)}
    assert by_name["response.created"]["response"]["output"] == []
    assert by_name["response.created"]["response"]["status"] == "in_progress"


def test_an_answer_without_text_is_an_empty_message(server):
    first = text_of(server.post(RESPONSES, body_of(max_output_tokens=400)).body)[0]
    empty = body_of(stop=first)
    [item] = server.post(RESPONSES, empty).body["output"]
    assert item["content"][0]["text"] == "" and item["status"] == "completed"
    events = events_of(server, empty)
    assert events[-1][0] == "response.completed" and "response.content_part.done" in dict(events)


def test_a_text_alone_is_a_users_message_and_instructions_are_the_systems(server):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "the cat"}]
    for body in (
        {"input": "the cat", "instructions": "be"},
        {"input": messages},
        {"input": [{"role": "developer", "content": "be"}, *messages[1:]]},
        {"input": [{"type": "message", **m} for m in messages], "model": "tiny"},
        {"input": [{"role": m["role"], "content": [part(m["content"])]} for m in messages]},
    ):
        assert server.post(RESPONSES, PLAIN | body).body["usage"]["input_tokens"] == count(
            server, messages
        )


def test_instructions_and_system_messages_at_the_beginning_are_one(server):
    items = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    asked = {"input": items, "instructions": "be"} | PLAIN
    one = [{"role": "system", "content": "be\n\na"}, items[1]]
    assert server.post(RESPONSES, asked).body["usage"]["input_tokens"] == count(server, one)


def part(text):
    return {"type": "input_text", "text": text}


def count(server, messages):
    return server.post("/tokenize", {"messages": messages}).body["count"]


def test_an_answer_can_be_sent_back_as_input(client, server):
    first = client.responses.create(**asked_of())
    items = [*MESSAGES, *first.output]
    said = {"role": "assistant", "content": first.output_text}
    more = {"role": "user", "content": "and"}
    second = client.responses.create(**asked_of(input=[*items, more]))
    assert second.usage.input_tokens == count(server, [*MESSAGES, said, more])


def test_a_call_is_that_of_the_chat_with_the_same_tools(server):
    tool = {"type": "function", "function": WEATHER | {"strict": True}}
    same = {"seed": 4, "temperature": 0.7, "ignore_eos": False, "parallel_tool_calls": False}
    asked = {"tools": [tool], "tool_choice": "required", "max_tokens": 200} | same
    [choice] = server.post(CHAT, chat_body(**asked)).body["choices"]
    response = server.post(RESPONSES, body_of(**CALLING | same)).body
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    expected = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [{"name": c["name"], "arguments": c["arguments"]} for c in calls] == expected
    assert expected[0]["name"] == "weather"
    assert json.loads(expected[0]["arguments"])["city"] in ("Rome", "Paris")
    assert choice["finish_reason"] == "tool_calls"
    assert response["status"] == "completed" and response["tools"] == [TOOL]
    assert (response["tool_choice"], response["parallel_tool_calls"]) == ("required", False)


def test_a_client_streams_a_call_and_sends_its_result(client):
    asked = asked_of(**CALLING, parallel_tool_calls=False, extra_body={"seed": 7})
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        [call] = stream.get_final_response().output
    kinds = dict.fromkeys(event.type for event in events)
    assert [*kinds] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        *("response.output_item.done", "response.completed"),
    ]
    [added] = [e.item for e in events if e.type == "response.output_item.added"]
    assert (added.name, added.arguments, added.status) == ("weather", "", "in_progress")
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments and json.loads(call.arguments)["city"]
    assert (call.call_id, call.id, call.status) == (added.call_id, added.id, "completed")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    more = client.responses.create(**asked_of(input=[*MESSAGES, call, result]))
    assert more.output_text


@pytest.fixture(scope="module")
def thinking():
    """A server that finds reasoning and calls in texts, and says what tests tell it to."""
    with scripted(with_template(backend(), QWEN)) as server:
        yield server


SAID = """<think>hm</think>so<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call><tool_call>
{"name": "weather", "arguments": {}}
</tool_call>"""
FREE = {"input": "a", "tools": [TOOL | {"strict": False}]}


def test_reasoning_text_and_calls_are_items_one_after_the_other(thinking):
    with thinking.saying(SAID) as num_tokens:
        whole = thinking.post(RESPONSES, FREE).body
    thought, said, called, again = whole["output"]
    assert (thought["type"], thought["content"], thought["summary"]) == (
        "reasoning",
        [{"type": "reasoning_text", "text": "hm"}],
        [],
    )
    assert said["content"][0]["text"] == "so" and again["arguments"] == "{}"
    assert (called["name"], json.loads(called["arguments"])) == ("weather", {"city": "Rome"})
    assert called["call_id"] != again["call_id"] and whole["status"] == "completed"
    usage = whole["usage"]
    assert 2 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"] / 2
    assert usage["output_tokens"] == num_tokens


@pytest.mark.parametrize("size", [1, 3, 999])
def test_a_stream_has_the_same_items_however_it_is_cut(thinking, size):
    with thinking.saying(SAID, size):
        whole = thinking.post(RESPONSES, FREE).body
        events = events_of(thinking, FREE)
    indexes = [data["output_index"] for _, data in events if "output_index" in data]
    assert indexes == sorted(indexes) and {*indexes} == {0, 1, 2, 3}
    dones = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert [without_ids(item) for item in dones] == [without_ids(i) for i in whole["output"]]
    assert events[-1][1]["response"]["output"] == dones
    assert events[-1][1]["response"]["usage"] == whole["usage"]
    ids = {data["item_id"]: data["output_index"] for _, data in events if "item_id" in data}
    assert [*ids] == [item["id"] for item in dones] and [*ids.values()] == [0, 1, 2, 3]
    texts = dict.fromkeys(ids, "")
    for name, data in events:
        if name.endswith(".delta"):
            texts[data["item_id"]] += data["delta"]
    assert [*texts.values()] == ["hm", "so", dones[2]["arguments"], "{}"]


def without_ids(item):
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_a_call_that_is_cut_is_incomplete_and_so_is_the_response(thinking):
    with thinking.saying(SAID) as num_tokens:
        most = num_tokens // 2
        response = thinking.post(RESPONSES, FREE | {"max_output_tokens": most}).body
    *before, cut = response["output"]
    assert (cut["type"], cut["status"], response["status"]) == (
        "function_call",
        *["incomplete"] * 2,
    )
    assert '{"city": "Rome"}'.startswith(cut["arguments"])
    assert {item["status"] for item in before} == {"completed"}


def test_reasoning_that_is_not_wanted_is_no_item(thinking):
    with thinking.saying(SAID):
        output = thinking.post(RESPONSES, FREE | {"include_reasoning": False}).body["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]


@pytest.mark.parametrize("size", [1, 3, 999])
def test_logprobs_are_those_of_the_message_alone(thinking, size):
    asked = FREE | {"include": [LOGPROBS]}
    with thinking.saying(SAID, size):
        [part] = thinking.post(RESPONSES, asked).body["output"][1]["content"]
        events = dict(events_of(thinking, asked))
    told = "".join(each["token"] for each in part["logprobs"])
    assert "so" in told and "hm" not in told and "name" not in told
    assert events["response.output_text.done"]["logprobs"] == part["logprobs"]


def test_items_become_the_messages_of_a_chat():
    given = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": "c"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "", "caller": None},
        {"type": "function_call_output", "call_id": "1", "output": "d"},
        {"type": "function_call_output", "call_id": "2", "output": [part("e"), part("f")]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "g"}]},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
        {"role": "assistant", "content": "h"},
        {"role": "assistant", "content": "i"},
        {"role": "system", "content": "j"},
    ]
    calls = [{"id": str(i), "type": "function", "function": {"name": "f"}} for i in (1, 2, 3)]
    for call, arguments in zip(calls, ('{"x": 1}', "", "{}"), strict=True):
        call["function"]["arguments"] = arguments
    answer = {"role": "assistant"}
    assert read_input(given, None) == [
        {"role": "user", "content": "a"},
        answer | {"reasoning_content": "b", "content": "c", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "1", "content": "d"},
        {"role": "tool", "tool_call_id": "2", "content": "e\nf"},
        answer | {"reasoning_content": "g", "tool_calls": calls[2:]},
        answer | {"content": "h"},
        answer | {"content": "i"},
        {"role": "system", "content": "j"},
    ]


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_a_text_has_the_form_that_was_asked_for(server, client, kind):
    form = {"type": kind}
    if kind == "json_schema":
        form |= {"name": "place", "schema": WEATHER["parameters"], "strict": True}
    asked = asked_of(text={"format": form}, max_output_tokens=400)
    response = client.responses.create(**asked)
    assert response.text.format.type == kind
    if response.status == "completed":  # JSON of any form may go on for longer than the context
        assert isinstance(json.loads(response.output_text), dict)
    if kind == "json_schema":
        assert json.loads(response.output_text)["city"] in ("Rome", "Paris")
    structured = {"json_object": True} if kind == "json_object" else {"json": form["schema"]}
    same = server.post(RESPONSES, body_of(structured_outputs=structured, max_output_tokens=400))
    assert text_of(same.body) == response.output_text


def test_logprobs_are_reported_where_they_are_included(server):
    told = {"include": [LOGPROBS], "top_logprobs": 2}
    chat = server.post(CHAT, chat_body(logprobs=True, top_logprobs=2)).body
    expected = chat["choices"][0]["logprobs"]["content"]
    response = server.post(RESPONSES, body_of(**told)).body
    assert response["output"][0]["content"][0]["logprobs"] == expected and len(expected) == 24
    events = events_of(server, body_of(**told))
    by_name = dict(events)
    assert by_name["response.output_text.done"]["logprobs"] == expected
    deltas = [d["logprobs"] for name, d in events if name == "response.output_text.delta"]
    told = [one for each in deltas for one in each]
    assert told == expected[: len(told)] and len(told) > 20
    assert server.post(RESPONSES, body_of()).body["output"][0]["content"][0]["logprobs"] == []


def test_what_was_asked_for_is_repeated(server):
    given = {"metadata": {"a": "b"}, "user": "u", "instructions": "be", "top_p": 0.5}
    given |= {"safety_identifier": "s", "prompt_cache_key": "k", "max_output_tokens": 3}
    response = server.post(RESPONSES, body_of(**given, text={"verbosity": "low"})).body
    assert {name: response[name] for name in given} == given
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (response["store"], response["temperature"], response["tools"]) == (False, 0, [])


ACCEPTED = {  # what clients send
    "store": False,
    "background": False,
    "include": ["reasoning.encrypted_content"],
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "service_tier": "auto",
    "text": {"format": {"type": "text"}, "verbosity": "high"},
    "tool_choice": "auto",
    "truncation": "disabled",
    "previous_response_id": None,
    "stream_options": None,
}


def test_what_clients_send_by_default_is_accepted(server):
    assert server.post(RESPONSES, body_of(**ACCEPTED)).status == 200


REFUSED = {
    "nothing to answer": ({"input": None}, "input", "Send a text"),
    "no items": ({"input": []}, "input", "Send a text"),
    "to be stored": ({"store": True}, "store", "not supported"),
    "what was stored": ({"previous_response_id": "resp_1"}, "previous_response_id", "not store"),
    "a conversation": ({"conversation": "c"}, "conversation", "not store"),
    "in the background": ({"background": True}, "background", "not supported"),
    "a stored prompt": ({"prompt": {"id": "p"}}, "prompt", "not store"),
    "an unknown field": ({"temprature": 1}, "temprature", "Did you mean temperature"),
    "a chat's field": ({"max_tokens": 3}, "max_tokens", "send max_output_tokens"),
    "choices": ({"n": 2}, "n", "one choice"),
    "to be cut": ({"truncation": "auto"}, "truncation", "disabled"),
    "usage of a stream": (
        {"stream": True, "stream_options": {"include_usage": True}},
        "stream_options.include_usage",
        "Omit it",
    ),
    "an item of no type": ({"input": [{"type": "x"}]}, "input[0].type", "message, function_call"),
    "a file": ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type", "message,"),
    "a message of nobody": ({"input": [{"content": "a"}]}, "input[0].role", "missing"),
    "an unknown role": ({"input": [{"role": "x", "content": "a"}]}, "input[0].role", "role"),
    "no content": ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
        "input[0].content[0].type",
        "Send text",
    ),
    "a field of a message": (
        {"input": [{"role": "user", "content": "a", "rle": "b"}]},
        "input[0].rle",
        "Did you mean role",
    ),
    "a call of nothing": (
        {"input": [{"type": "function_call", "call_id": "a", "name": "f"}]},
        "input[0].arguments",
        "missing",
    ),
    "hidden reasoning": (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        "input[0].encrypted_content",
        "unknown field",
    ),
    "likeliest tokens alone": ({"top_logprobs": 2}, "top_logprobs", "include"),
    "an unknown format": ({"text": {"format": {"type": "x"}}}, "text.format.type", "x"),
    "a long text": ({"input": "the cat " * 600}, "input", "tokens"),
    "a tool that searches": ({"tools": [{"type": "web_search"}]}, "tools[0].type", "Send function"),
    "a tool as in chats": (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools[0].function",
        "unknown field",
    ),
    "a function of no name": ({"tools": [{"type": "function"}]}, "tools[0]", "name"),
    "arguments of no object": (
        {"tools": [TOOL | {"parameters": {"type": "array"}}]},
        "tools[0].parameters.type",
        "object",
    ),
    "another's tool": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice.name",
        "unknown tool",
    ),
    "a choice of several": (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice",
        "none, auto, required or",
    ),
    "a schema that is not there": (
        {"text": {"format": {"type": "json_schema", "name": "a"}}},
        "text.format",
        "for the type json_schema",
    ),
    "a schema of a text": (
        {"text": {"format": {"type": "text", "schema": {}}}},
        "text.format",
        "for the type json_schema",
    ),
    "a schema that cannot be": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}},
        "text.format",
        "x",
    ),
    "two forms": (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        "text.format",
        "both set the format",
    ),
    "a form and calls": (
        {"text": {"format": {"type": "json_object"}}, "tools": [TOOL], "tool_choice": "required"},
        "tools",
        "text.format and tools",
    ),
    "a field of a format": ({"text": {"format": {"tpe": "text"}}}, "text", "tpe"),
    "metadata of numbers": ({"metadata": {"a": 1}}, "metadata", "Expected"),
}


@pytest.mark.parametrize(("changes", "param", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_names_the_field(server, changes, param, words, stream):
    answer = server.post(RESPONSES, body_of(**{"stream": stream} | changes))
    assert answer.status == 400, answer.body
    error = answer.body["error"]
    assert error["param"].startswith(param) and words in error["message"], error


def test_a_refusal_is_an_exception_of_the_client(client):
    with pytest.raises(openai.BadRequestError, match="previous_response_id is refused"):
        client.responses.create(**asked_of(previous_response_id="resp_1"))
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**asked_of(model="other"))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_a_stream_that_is_left_ends_the_request(server, client):
    asked = asked_of(max_output_tokens=400)
    with client.responses.create(**asked, stream=True) as stream:
        while next(stream).type != "response.output_text.delta":
            pass
    server.wait_until_idle()


def test_an_answer_that_nobody_awaits_ends(strict):
    body = {"input": "a", "max_output_tokens": 100, "ignore_eos": True, "seed": 50}
    with strict.open_stream(RESPONSES, body) as events:
        assert next(events)["type"] == "response.created"
    eventually(lambda: strict.metric("vllm:num_requests_running") == 0)


def test_an_answer_that_fails_ends_with_both_of_its_errors(paced):
    with paced(**{"server.served_model_name": "tiny"}) as server:
        asked = {"model": "tiny", "input": "a", "extra_body": {"ignore_eos": True, "seed": 50}}
        seen = []
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.responses.create(**asked, stream=True)
            with pytest.raises(openai.APIError, match="engine process has ended"):
                for event in stream:
                    if event.type == "response.in_progress":
                        server.kill_engines()
                    seen.append(event)
    assert seen[-1].type == "response.failed" and seen[-1].response.status == "failed"
    assert seen[-1].response.error.code == "server_error"
    assert "engine process has ended" in seen[-1].response.error.message


def test_the_body_of_a_coding_agent_is_accepted(server):
    """Codex sends this. Only `client_metadata` is unknown to OpenAI's API."""
    parts = [{"type": "input_text", "text": "the cat"}]
    messages = [
        {"type": "message", "id": f"msg_{role}", "role": role, "content": parts}
        for role in ("developer", "user", "user")
    ]
    tool = {"type": "function", "name": "run", "strict": False, "parameters": {"type": "object"}}
    asked = {
        "input": messages,
        "tools": [tool],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a",
        "client_metadata": {"session_id": "a"},
        "max_output_tokens": 4,
    }
    answer = server.post(RESPONSES, asked)
    assert answer.status == 200, answer.body
    assert answer.headers["Warning"] == '299 specserve "ignored: client_metadata"'
