"""Ollama's routes return the texts of OpenAI's routes, in Ollama's form."""

import json
from http.client import HTTPConnection

import numpy as np
import pytest

from specserve.server.ollama_body import read_history
from tests.server.asking import CHAT, COMPLETIONS, MESSAGES
from tests.server.calling import replying
from tests.server.in_process import server_threads

OCHAT, GENERATE, EMBED = "/api/chat", "/api/generate", "/api/embed"
OPTIONS = {"temperature": 0.8, "seed": 3, "num_predict": 24, "top_k": 40, "repeat_penalty": 1.1}
SAME = {"temperature": 0.8, "seed": 3, "max_tokens": 24, "top_k": 40, "repetition_penalty": 1.1}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]

RAW = {"prompt": "the cat", "raw": True}


def lines(server, path, body):
    """The lines of a stream."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("POST", path, json.dumps(body))
    response = connection.getresponse()
    assert response.status == 200 and response.headers["Content-Type"] == "application/x-ndjson"
    raw = response.read().decode()
    connection.close()
    assert raw.endswith("\n")
    return [json.loads(line) for line in raw.removesuffix("\n").split("\n")]


def whole(server, path, body):
    answer = server.post(path, body | {"stream": False})
    assert answer.status == 200, answer.body
    return answer


def check_end(line):
    assert line["done"] is True and line["load_duration"] == 0
    parts = line["prompt_eval_duration"] + line["eval_duration"]
    assert 0 < parts <= line["total_duration"] < 60e9  # nanoseconds


def test_a_chat_has_the_text_of_openais_route(server):
    asked = {"model": "tiny", "messages": MESSAGES, "options": OPTIONS}
    want = server.post(CHAT, {"messages": MESSAGES} | SAME).body
    *parts, last = lines(server, OCHAT, asked)
    choice = want["choices"][0]
    assert "".join(part["message"]["content"] for part in parts) == choice["message"]["content"]
    assert all(part["done"] is False and part["model"] == "tiny" for part in parts)
    assert last["message"] == {"role": "assistant", "content": ""}
    counts = want["usage"]["prompt_tokens"], want["usage"]["completion_tokens"]
    assert (last["prompt_eval_count"], last["eval_count"]) == counts
    assert last["done_reason"] == choice["finish_reason"]
    check_end(last)
    once = whole(server, OCHAT, asked).body
    assert once["message"] == {"role": "assistant", "content": choice["message"]["content"]}
    check_end(once)


def test_a_prompt_is_a_message_of_the_user(server):
    asked = {"model": "tiny:latest", "prompt": "the cat", "system": "Say", "options": OPTIONS}
    messages = [{"role": "system", "content": "Say"}, {"role": "user", "content": "the cat"}]
    want = server.post(CHAT, {"messages": messages} | SAME).body["choices"][0]["message"]
    *parts, last = lines(server, GENERATE, asked)
    assert "".join(part["response"] for part in parts) == want["content"]
    check_end(last)
    assert whole(server, GENERATE, asked).body["response"] == want["content"]


def test_a_raw_prompt_is_continued(server):
    asked = {"model": "tiny", "prompt": "the cat", "raw": True, "options": OPTIONS}
    want = server.post(COMPLETIONS, {"prompt": "the cat"} | SAME).body["choices"][0]["text"]
    assert whole(server, GENERATE, asked).body["response"] == want


@pytest.mark.parametrize("path, empty", [(OCHAT, {"messages": []}), (GENERATE, {"prompt": ""})])
def test_a_request_without_a_prompt_reports_that_the_model_is_loaded(server, path, empty):
    answer = whole(server, path, {"model": "tiny", "keep_alive": "5m"} | empty)
    assert (answer.body["done"], answer.body["done_reason"]) == (True, "load")
    assert 'ignored: keep_alive"' in answer.headers["Warning"]


@pytest.mark.parametrize("form", ["json", SCHEMA])
def test_a_format_holds(server, form):
    asked = {"messages": MESSAGES, "format": form, "options": {"seed": 1, "num_predict": 200}}
    found = whole(server, OCHAT, asked).body
    value = json.loads(found["message"]["content"])
    assert isinstance(value, dict) and (form == "json" or value in ({"a": 1}, {"a": 2}))


def test_a_call_is_one_line_with_an_object():
    with replying() as server:
        message = {"role": "user", "content": "weather Rome"}
        asked = {"messages": [message], "tools": TOOLS}
        *parts, last = lines(server, OCHAT, asked)
        assert last["done"] and "tool_calls" not in last["message"]
        calls = [call for part in parts for call in part["message"].get("tool_calls", [])]
        [call] = calls
        assert call["function"] == {
            "name": "weather",
            "arguments": {"city": "Rome", "days": 2},
            "index": 0,
        }
        thoughts = "".join(part["message"].get("thinking", "") for part in parts)
        assert "I have to look." in thoughts
        once = whole(server, OCHAT, asked).body["message"]
        assert [c["function"] for c in once["tool_calls"]] == [call["function"]]
        # The result follows the call, without an id, as Ollama's clients send it.
        own = {"function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}
        more = [
            message,
            {"role": "assistant", "content": "", "tool_calls": [own]},
            {"role": "tool", "tool_name": "weather", "content": "22 degrees"},
        ]
        answer = whole(server, OCHAT, {"messages": more, "tools": TOOLS}).body["message"]
        assert "It is 22 degrees." in answer["content"]


def test_options_of_memory_are_ignored_with_a_warning(server):
    asked = {"messages": MESSAGES, "options": OPTIONS | {"num_ctx": 4096, "num_gpu": 1}}
    answer = whole(server, OCHAT, asked)
    assert "options.num_ctx, options.num_gpu" in answer.headers["Warning"]
    plain = whole(server, OCHAT, {"messages": MESSAGES, "options": OPTIONS})
    assert answer.body["message"] == plain.body["message"] and "Warning" not in plain.headers


@pytest.mark.parametrize("think", [True, False])
def test_thinking_that_the_template_lacks_is_ignored_with_a_warning(server, think):
    asked = {"messages": MESSAGES, "think": think, "options": {"num_predict": 2}}
    assert 'ignored: think"' in whole(server, OCHAT, asked).headers["Warning"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (OCHAT, {"messages": MESSAGES, "think": "high"}),
        (GENERATE, RAW | {"think": "high"}),
        (GENERATE, RAW | {"think": True}),
    ],
)
def test_an_effort_or_a_switch_that_no_template_reads_is_named_as_the_client_sent_it(
    server, path, asked
):
    answer = whole(server, path, asked | {"options": {"num_predict": 2}})
    assert answer.headers["Warning"].endswith('"ignored: think"')


REFUSED = {
    "an option": (OCHAT, {"options": {"num_predikt": 1}}, "options.num_predikt"),
    "a sampler": (OCHAT, {"options": {"mirostat": 1}}, "options.mirostat"),
    "a value": (OCHAT, {"options": {"temperature": -1}}, "options.temperature:"),
    "no tokens": (GENERATE, RAW | {"options": {"num_predict": 0}}, "options.num_predict: 0"),
    "a string": (OCHAT, {"options": {"num_predict": "8"}}, "options.num_predict: Expected"),
    "a penalty": (OCHAT, {"options": {"repeat_penalty": 0}}, "options.repeat_penalty: Expected"),
    "a stop string": (GENERATE, RAW | {"options": {"stop": [""]}}, "options.stop[0]: Expected"),
    "a field of OpenAI": (OCHAT, {"seed": 3}, "unknown field 'seed'"),
    "a schema": (OCHAT, {"format": {"type": "nonsense"}}, "format: Invalid type"),
    "thinking": (
        OCHAT,
        {"messages": [{"role": "assistant", "thinking": 5}]},
        "messages[0].thinking: Expected",
    ),
    "a field": (OCHAT, {"message": []}, "message"),
    "a format": (OCHAT, {"format": "xml"}, "format"),
    "top_logprobs": (OCHAT, {"top_logprobs": 2}, "top_logprobs"),
    "many top_logprobs": (OCHAT, {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    "a role": (OCHAT, {"messages": [{"role": "cat", "content": ""}]}, "messages[0].role"),
    "an image": (OCHAT, {"messages": [{"role": "user", "images": ["AA"]}]}, "images"),
    "a template": (GENERATE, {"prompt": "a", "template": "x"}, "template"),
    "a context": (GENERATE, {"prompt": "a", "context": [1]}, "context"),
    "no texts": (EMBED, {}, "input"),
}


@pytest.mark.parametrize("path, asked, word", REFUSED.values(), ids=REFUSED)
def test_refusals_have_ollamas_form(server, path, asked, word):
    answer = server.post(path, ({"messages": MESSAGES} if path == OCHAT else {}) | asked)
    assert answer.status == 400 and [*answer.body] == ["error"]
    assert word in answer.body["error"] and "response_format" not in answer.body["error"]


@pytest.mark.parametrize("path", [OCHAT, GENERATE, "/api/show"])
def test_an_unknown_model_is_not_found(server, path):
    answer = server.post(path, {"model": "llama3"})
    assert answer.status == 404 and "llama3" in answer.body["error"]


@pytest.mark.parametrize("path", ["/api/pull", "/api/blobs/sha256:0", "/api/copy"])
def test_routes_that_change_models_are_not_offered(server, path):
    answer = server.post(path, {"model": "llama3"})
    assert answer.status == 404 and [*answer.body] == ["error"]
    assert f"{path}: not offered" in answer.body["error"] and "/api/tags" in answer.body["error"]


def test_a_missing_route_has_ollamas_form(server):
    answer = server.post("/api/chats", {})
    assert answer.status == 404 and "The nearest route is /api/chat;" in answer.body["error"]


@pytest.mark.parametrize("path, given", [(OCHAT, {"messages": MESSAGES}), (GENERATE, RAW)])
def test_logprobs_are_those_of_openais_route(server, path, given):
    asked = given | {"options": OPTIONS, "logprobs": True, "top_logprobs": 2}
    found = whole(server, path, asked).body["logprobs"]
    if path == OCHAT:
        same = SAME | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
        [choice] = server.post(CHAT, same).body["choices"]
        assert found == choice["logprobs"]["content"]
    else:
        [choice] = server.post(COMPLETIONS, SAME | {"prompt": "the cat", "logprobs": 2}).body[
            "choices"
        ]
        assert [each["logprob"] for each in found] == choice["logprobs"]["token_logprobs"]
    assert all(len(each["top_logprobs"]) == 2 for each in found)
    parts = lines(server, path, asked)
    assert [each for part in parts for each in part.get("logprobs", [])] == found
    assert len([part for part in parts if "logprobs" in part]) > 1
    assert "logprobs" not in whole(server, path, given | {"options": OPTIONS}).body


def test_an_error_is_the_last_line_of_a_stream(paced_threads):
    with paced_threads(**{"server.timeout_ms": 1000}) as server:
        options = {"seed": 50, "num_predict": 400}
        *parts, last = lines(server, OCHAT, {"messages": MESSAGES, "options": options})
        assert [*last] == ["error"] and "1000 ms" in last["error"] and parts


def test_streams_can_be_padded(folder):
    with server_threads(folder, **{"server.stream_flush": "interval"}) as server:
        *parts, last = lines(server, OCHAT, {"messages": MESSAGES, "options": OPTIONS})
        assert all("obfuscation" in part for part in [*parts, last])


def test_the_model_is_listed_and_shown(server):
    [entry] = server.get("/api/tags").body["models"]
    assert entry["name"] == entry["model"] == "tiny" and len(entry["digest"]) == 64
    assert entry["details"]["family"] == "qwen3" and entry["details"]["quantization_level"] == "F32"
    [running] = server.get("/api/ps").body["models"]
    assert running["context_length"] == 512 and running["size_vram"] == 0 < running["size"]
    for name in ({"model": "tiny"}, {"name": "tiny:latest"}):
        card = server.post("/api/show", name).body
        assert card["model_info"]["general.architecture"] == "qwen3"
        assert card["model_info"]["qwen3.context_length"] == 512
        assert card["capabilities"] == ["completion", "tools"] and "messages" in card["template"]
    assert server.get("/api/version").body["version"].count(".") == 2


def test_embeddings_are_those_of_openais_route(folder):
    with server_threads(folder, **{"model.task": "embed"}) as server:
        want = server.post("/v1/embeddings", {"input": ["a cat", "mats"]}).body
        found = server.post(EMBED, {"input": ["a cat", "mats"], "keep_alive": 0})
        np.testing.assert_array_equal(
            found.body["embeddings"], [each["embedding"] for each in want["data"]]
        )
        assert found.body["prompt_eval_count"] == want["usage"]["prompt_tokens"]
        assert found.body["total_duration"] > 0 and "keep_alive" in found.headers["Warning"]
        [cut] = server.post(EMBED, {"input": "cat " * 2000, "dimensions": 8}).body["embeddings"]
        assert len(cut) == 8
        answer = server.post(EMBED, {"input": "cat " * 2000, "truncate": False})
        assert answer.status == 400 and "maximum context length" in answer.body["error"]
        old = server.post("/api/embeddings", {"prompt": "a cat", "options": {"num_ctx": 8}})
        assert old.body["embedding"] == found.body["embeddings"][0]
        assert "options.num_ctx" in old.headers["Warning"]
        assert server.post("/api/embeddings", {}).body["error"].startswith("prompt: missing")
        assert "embedding" in server.post("/api/show", {"model": folder.name}).body["capabilities"]


def test_results_belong_to_the_calls_of_their_tools():
    """Ollama's results name a tool, and come in any order."""
    calls = [{"function": {"name": name, "arguments": {}}} for name in "aba"]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in "baa"]
    _, *found = read_history([{"role": "assistant", "tool_calls": calls}, *results])
    assert [each["tool_call_id"] for each in found] == ["call_0_1", "call_0_0", "call_0_2"]
    first, second = {"role": "tool", "tool_call_id": "call_0_0"}, {"role": "tool"}
    _, *found = read_history([{"role": "assistant", "tool_calls": calls}, first, second])
    assert [each["tool_call_id"] for each in found] == ["call_0_0", "call_0_1"]
