"""Libraries that talk to servers of the OpenAI API get the text and logprobs of a plain request."""

import json
import math
import subprocess

import pytest

from tests.server.environments import PINNED, python_with

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "the cat sat on the mat"}]
PROMPT = "the other cat"
ASKED = {"temperature": 0.8, "seed": 3, "max_tokens": 40}
ALL = "chat", "chat, streamed", "completion", "completion, streamed"
WAYS = {
    "litellm": ALL,
    "langchain": ("chat", "chat, streamed", "batch"),
    "llama_index": ALL,
    "pydantic_ai": ("chat", "chat, streamed"),
}
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def direct(server):
    """What plain requests are answered: a chat and a completion, with logprobs."""
    chat = server.post(
        CHAT, ASKED | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    ).body
    completion = server.post(COMPLETIONS, ASKED | {"prompt": PROMPT, "logprobs": 2}).body
    [said], [written] = chat["choices"], completion["choices"]
    content = said["logprobs"]["content"]
    return {
        "chat": {
            "text": said["message"]["content"],
            "logprobs": [each["logprob"] for each in content],
            "likeliest": [[one["logprob"] for one in each["top_logprobs"]] for each in content],
            "usage": chat["usage"]["total_tokens"],
        },
        "completion": {
            "text": written["text"],
            "logprobs": written["logprobs"]["token_logprobs"],
            "likeliest": [[*each.values()] for each in written["logprobs"]["top_logprobs"]],
        },
    }


@pytest.fixture(scope="module", params=WAYS)
def heard(request, server, tmp_path_factory):
    """A client, and what it says of the server."""
    name = request.param
    asked = json.dumps(ASKED | {"messages": MESSAGES, "prompt": PROMPT})
    command = [python_with(name), "-I", str(PINNED / f"with_{name}.py"), server.url, asked]
    home = tmp_path_factory.mktemp(name)  # some clients keep settings and caches
    env = {"HOME": str(home), "PATH": ""} | OFFLINE
    said = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    return name, json.loads(said.stdout)


def test_a_client_reads_what_a_plain_request_is_answered(heard, direct):
    name, told = heard
    for way in WAYS[name]:
        if way == "batch":
            assert told[way] == [direct["chat"]["text"]] * 3
        else:
            want = direct[way.removesuffix(", streamed")]
            assert told[way] == {key: want[key] for key in told[way]}, (name, way)
            assert "text" in told[way]
    assert {"logprobs", "likeliest"} & told["chat"].keys()


def test_the_logprobs_are_those_of_all_tokens(direct):
    for each, least in zip(direct.values(), (40, 20), strict=True):
        assert least <= len(each["logprobs"]) == len(each["likeliest"]) <= 40
        assert all(math.isfinite(logprob) and logprob < 0 for logprob in each["logprobs"])


def test_what_a_client_sends_by_default_is_accepted(heard):
    name, told = heard
    assert told["defaults"], name
