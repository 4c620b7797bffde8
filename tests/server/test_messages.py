"""/v1/messages answers as a chat does, in Anthropic's form, to Anthropic's own client."""

import json
import socket
import time

import anthropic
import pytest
from anthropic import Anthropic
from hypothesis import given
from hypothesis import strategies as st

from tests.server.asking import CHAT, chat_body
from tests.server.in_process import server_threads
from tests.server.scripted import scripted, with_template
from tests.server.test_tools import ARGUMENTS, QWEN, TEXT, backend

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
PLAIN = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
USER = {"role": "user", "content": "the cat sat on the mat"}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "input_schema": CITY | {"additionalProperties": False}}
TOOL = {"name": "get_weather", "description": "the weather", "input_schema": {"type": "object"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=%s;\n"
HIDDEN = "specserve"  # the signature of reasoning


@pytest.fixture(scope="module")
def client(server):
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def qwen():
    with scripted(with_template(backend(), QWEN)) as server:
        yield server


def body_of(**asked):
    return {"messages": [USER]} | PLAIN | asked


def text_of(message):
    return "".join(block["text"] for block in message["content"])


def events_of(server, body):
    """Names and data of a stream's events."""
    raw = server.post(MESSAGES, body | {"stream": True}).body
    blocks = [block.splitlines() for block in raw.split("\n\n") if block]
    return [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in blocks]


def put_together(events):
    """The message of a stream: its start with the blocks and the end that followed."""
    names = [name for name, _ in events]
    assert all(name == data["type"] for name, data in events)
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    message, texts = events[0][1]["message"], []
    for name, data in events[1:-2]:
        match name:
            case "content_block_start":
                assert data["index"] == len(message["content"]) == len(texts)
                message["content"].append(dict(data["content_block"]))
                texts.append("")
            case "content_block_delta":
                add(message["content"][-1], texts, data["delta"])
            case "content_block_stop":
                assert data["index"] == len(texts) - 1
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(texts[-1])
    last = events[-2][1]
    return message | last["delta"] | {"usage": last["usage"]}


def add(block, texts, delta):
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            texts[-1] += delta["partial_json"]


def compared(message):
    kept = ("content", "stop_reason", "stop_sequence", "usage")
    return {name: message[name] for name in kept} | {"usage": message["usage"]["output_tokens"]}


def test_the_text_is_that_of_the_chat_with_the_same_messages_and_seed(server):
    talk = [{"role": "system", "content": "be"}, USER, {"role": "assistant", "content": "a cat"}]
    talk.append({"role": "user", "content": "and"})
    for changes in ({"seed": 3}, {"temperature": 0.9, "seed": 5}, {"top_k": 7, "seed": 2}):
        [choice] = server.post(CHAT, chat_body(messages=talk, **changes)).body["choices"]
        own = body_of(system="be", messages=talk[1:], **changes)
        message = server.post(MESSAGES, own).body
        assert text_of(message) == choice["message"]["content"] != ""
        assert message["seed"] == choice["seed"]
        assert put_together(events_of(server, own))["content"] == message["content"]


def test_a_client_gets_a_message_and_streams_the_same_one(client):
    extra = {"seed": 7, "temperature": 0.8, "ignore_eos": True}
    asked = {"model": "tiny", "max_tokens": 24, "messages": [USER], "extra_body": extra}
    whole = client.messages.create(**asked, system=[{"type": "text", "text": "be"}])
    assert (whole.role, whole.stop_reason, whole.type) == ("assistant", "max_tokens", "message")
    with client.messages.stream(**asked, system="be") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert [b.text for b in final.content] == [b.text for b in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 24)


def test_a_stop_sequence_ends_the_text_and_is_named(server):
    text = text_of(server.post(MESSAGES, body_of(max_tokens=100)).body)
    message = server.post(MESSAGES, body_of(stop_sequences=["zz", text[7]])).body
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", text[7])
    assert text_of(message) == text[: text.index(text[7])]
    empty = server.post(MESSAGES, body_of(stop_sequences=[text[0]])).body
    assert empty["content"] == []
    assert put_together(events_of(server, body_of(stop_sequences=[text[0]])))["content"] == []


def test_reasoning_text_and_calls_are_blocks_streamed_or_whole(qwen):
    body = {"messages": [USER], "tools": [TOOL, TOOL | {"name": "now"}]}
    with qwen.saying(TEXT):
        whole = qwen.post(MESSAGES, body).body
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, call, other = whole["content"]
    assert (thought["thinking"], thought["signature"]) == ("Paris.", HIDDEN)
    assert text["text"] == "Let me see." and call["input"] == json.loads(ARGUMENTS)
    assert (other["name"], other["input"], whole["stop_reason"]) == ("now", {}, "tool_use")
    for size in (1, 2, 5):
        with qwen.saying(TEXT, size):
            streamed = put_together(events_of(qwen, body))
        for block, own in zip(streamed["content"], whole["content"], strict=True):
            assert block | {"id": 0} == own | {"id": 0}
        assert streamed["stop_reason"] == "tool_use"
    hidden = {"thinking": {"type": "adaptive", "display": "omitted"}}
    with qwen.saying(TEXT):
        assert qwen.post(MESSAGES, body | hidden).body["content"][0]["type"] == "text"


def test_calls_reasoning_and_results_go_back_to_the_template(qwen):
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": "other"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Oslo"}},
    ]
    result = [{"type": "text", "text": "ra"}, {"type": "text", "text": "in"}]
    back = [
        {"type": "tool_result", "tool_use_id": "call_1", "content": result, "is_error": True},
        {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "now"},
    ]
    messages = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": back}]
    body = {"messages": messages, "tools": [TOOL]}
    with qwen.saying("Rain."):
        answer = qwen.post(MESSAGES, body)
    assert "messages.content.cache_control" in answer.headers["Warning"]
    prompt = qwen.tokenizer.decode(qwen.last.prompt)
    assert "assistant: Let me see.<think>Hm.</think>get_weather Oslo call_1\n" in prompt
    assert "tool: Error: ra\nin(call_1 )\nuser: and?\n\nnow\n" in prompt
    assert json.dumps(TOOL["description"]) in prompt
    assert qwen.post(COUNT, body).body == {"input_tokens": len(qwen.last.prompt)}


CHOICES = {
    "any": ({"type": "any", "disable_parallel_tool_use": True}, True),
    "one": ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, True),
    "none": ({"type": "none"}, False),
}


@pytest.mark.parametrize(("choice", "calls"), CHOICES.values(), ids=CHOICES)
def test_a_choice_of_a_tool_is_enforced(server, choice, calls):
    asked = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 200, "ignore_eos": False}
    message = server.post(MESSAGES, body_of(**asked, temperature=1, seed=4)).body
    uses = [block for block in message["content"] if block["type"] == "tool_use"]
    assert bool(uses) == calls
    if calls:
        assert message["stop_reason"] == "tool_use"
        assert all(use["input"]["city"] in ("Rome", "Paris") for use in uses)
        assert len(uses) == 1


def test_the_last_message_of_an_assistant_is_continued(server):
    text = text_of(server.post(MESSAGES, body_of()).body)
    begun = [USER, {"role": "assistant", "content": text[:5]}]
    message = server.post(MESSAGES, body_of(messages=begun)).body
    chat = chat_body(messages=begun, continue_final_message=True)
    [choice] = server.post(CHAT, chat).body["choices"]
    assert text_of(message) == choice["message"]["content"]


def test_the_form_of_the_text_is_enforced(server):
    form = {"format": {"type": "json_schema", "schema": WEATHER["input_schema"]}}
    asked = body_of(output_config=form, max_tokens=100, ignore_eos=False)
    message = server.post(MESSAGES, asked).body
    assert json.loads(text_of(message))["city"] in ("Rome", "Paris")


def test_what_a_client_adds_to_each_turn_does_not_break_the_prefix_cache(server):
    """A billing header is new in each turn, and precedes all other text."""
    told, rules = "cached " * 20, {"type": "text", "text": "Be brief. " * 20}
    turns = [[USER], [USER, {"role": "assistant", "content": "a"}, USER | {"content": told}]]
    usages = []
    for turn, talk in enumerate(turns):
        system = [{"type": "text", "text": BILLING % f"{turn:05x}"}, rules]
        usage = server.post(MESSAGES, body_of(system=system, messages=talk)).body["usage"]
        usages.append(usage)
    first, second = usages
    num_first = first["input_tokens"] + first["cache_read_input_tokens"]
    assert second["cache_read_input_tokens"] > num_first - 32  # two blocks of 16 tokens
    both = server.post(MESSAGES, body_of(system=rules["text"], messages=turns[1])).body["usage"]
    num_second = second["input_tokens"] + second["cache_read_input_tokens"]
    assert both["input_tokens"] + both["cache_read_input_tokens"] == num_second


def test_fields_of_coding_agents_are_ignored_and_reported(server):
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    more = {"context_management": edits, "metadata": {"user_id": "u"}, "speed": "fast"}
    beta = {"anthropic-beta": "a,b", "anthropic-version": "2023-06-01"}
    answer = server.post(f"{MESSAGES}?beta=true", body_of(**more), headers=beta)
    assert answer.status == 200
    assert answer.headers["Warning"] == '299 specserve "ignored: context_management, speed"'
    thread = server.post(MESSAGES, body_of(thread={"type": "create"}))
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert thread.status == 400 and thread.body["error"]["details"] == details


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}
WRONG = {  # body, what the message says
    "an image": ({"messages": [USER | {"content": [IMAGE]}]}, "reads text only"),
    "an image in a result": ({"messages": [USER | {"content": [RESULT]}]}, "content[0].type"),
    "no message": ({"messages": []}, "messages: empty"),
    "no block": ({"messages": [USER | {"content": []}]}, "messages[0].content: empty"),
    "a role": ({"messages": [USER | {"role": "tool"}]}, "messages[0].role"),
    "a field": ({"messages": [USER | {"name": "me"}]}, "'messages[0].name'"),
    "a block's field": (
        {"messages": [USER | {"content": [{"type": "text", "text": "a", "txt": 1}]}]},
        "'messages[0].content[0].txt'. Did you mean text?",
    ),
    "a block without its id": (
        {"messages": [USER | {"content": [{"type": "tool_result"}]}]},
        "tool_use_id: missing",
    ),
    "OpenAI's name": ({"messages": [USER], "stop": ["a"]}, "send stop_sequences"),
    "a server's tool": (
        {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "a tool of Anthropic's servers",
    ),
    "a tool's schema": (
        {"messages": [USER], "tools": [{"name": "a", "input_schema": {"type": "array"}}]},
        "tools[0].input_schema.type: not object",
    ),
    "a choice without a name": (
        {"messages": [USER], "tools": [WEATHER], "tool_choice": {"type": "tool"}},
        "tool_choice",
    ),
    "a budget alone": (
        {"messages": [USER], "thinking": {"type": "disabled", "budget_tokens": 9}},
        "thinking",
    ),
    "calls without results": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                },
            ]
        },
        "Send a tool_result for each",
    ),
}


@pytest.mark.parametrize(("body", "why"), WRONG.values(), ids=WRONG)
def test_a_wrong_body_is_refused_in_anthropics_form(server, body, why):
    for path in (MESSAGES, COUNT):
        answer = server.post(path, body)
        assert answer.status == 400 and answer.body.keys() == {"type", "error"}
        assert answer.body["type"] == "error"
        assert answer.body["error"]["type"] == "invalid_request_error"
        assert why in answer.body["error"]["message"]


def test_the_client_raises_its_own_errors(server, client):
    asked = {"model": "tiny", "max_tokens": 2, "messages": [USER]}
    with pytest.raises(anthropic.BadRequestError, match="reads text only"):
        client.messages.create(**asked | {"messages": [USER | {"content": [IMAGE]}]})
    with pytest.raises(anthropic.NotFoundError, match="is not served") as raised:
        client.messages.create(**asked | {"model": "claude"})
    assert raised.value.body["error"]["type"] == "not_found_error"
    wrong = server.get(MESSAGES)
    assert (wrong.status, wrong.body["error"]["type"]) == (405, "invalid_request_error")


def test_a_key_is_accepted_in_either_header(folder, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    with server_threads(folder, **{"server.api_key_file": str(keys)}) as server:
        accepted = {
            "x-api-key": {"x-api-key": "second"},
            "Bearer": {"Authorization": "Bearer first"},
            "both": {"x-api-key": "first", "Authorization": "Bearer other"},
        }
        for headers in accepted.values():
            told = server.post(MESSAGES, body_of(), headers=headers | {"anthropic-version": "1"})
            assert told.status == 200
        for headers in ({}, {"x-api-key": "third"}, {"Authorization": "first"}):
            refused = server.post(MESSAGES, body_of(), headers=headers)
            assert refused.status == 401
            assert refused.body["error"]["type"] == "authentication_error"


def test_a_stream_that_waits_gets_pings(paced_threads):
    settings = {"server.comment_seconds": 0.05, "server.served_model_name": "tiny"}
    with paced_threads(**settings) as server:
        events = events_of(server, body_of(max_tokens=3, seed=300))
        names = [name for name, _ in events]
        assert names.count("ping") > 3
        message = put_together([event for event in events if event[0] != "ping"])
        assert message["stop_reason"] == "max_tokens"
        late = events_of(server, body_of(max_tokens=300, seed=300, timeout_ms=700))
        assert late[-1][0] == "error" and late[-1][1]["error"]["type"] == "timeout_error"


def test_a_slow_reader_gets_the_same_message_in_fewer_events(qwen):
    """Text that comes while it does not read is joined."""
    text = "A long text. " * 20_000
    body = {"messages": [USER], "tools": [TOOL]}
    raw = json.dumps(body | {"stream": True}).encode()
    head = f"POST {MESSAGES} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(raw)}"
    with qwen.saying(text, 2), socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(30)
        slow.connect(("127.0.0.1", qwen.port))
        slow.sendall(f"{head}\r\n\r\n".encode() + raw)
        time.sleep(0.5)
        got = b"".join(iter(lambda: slow.recv(4096), b""))
        whole = qwen.post(MESSAGES, body).body
    lines = [line[6:] for line in got.splitlines() if line.startswith(b"data: ")]
    events = [json.loads(line) for line in lines]
    message = put_together([(event["type"], event) for event in events])
    assert compared(message) == compared(whole) and message["content"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
FIELDS = """messages system tools tool_choice thinking stop_sequences output_config metadata
max_tokens temperature top_k top_p stream role content type text id name input input_schema"""
NAMES = st.sampled_from(FIELDS.split())
blocks = st.dictionaries(NAMES, values, max_size=4) | st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])},
    optional={"text": values, "id": values, "input": values, "tool_use_id": values},
)
talks = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]) | values},
        optional={"content": st.lists(blocks, max_size=3) | values},
    ),
    max_size=3,
)


@given(body=st.dictionaries(NAMES, values, max_size=4), talk=talks | st.just([USER]))
def test_any_body_is_answered_or_refused_in_anthropics_form(server, body, talk):
    given = {"messages": talk} | body | {"max_tokens": 1}
    for path in (MESSAGES, COUNT):
        answer = server.post(path, json.dumps(given).encode())
        if answer.status != 200:
            assert 400 <= answer.status < 500, answer.body
            assert answer.body["type"] == "error" and answer.body["error"]["message"]
