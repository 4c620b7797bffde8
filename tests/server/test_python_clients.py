"""Libraries that talk to servers of the OpenAI API get the text and logprobs of a plain request."""

import json
import math
import subprocess
import sys

import pytest

from tests.server.calling import describing
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
WITH_TOOLS = "openai", "langchain", "litellm", "pydantic_ai"
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
    home = tmp_path_factory.mktemp(name)
    return name, json.loads(run(home, python_with(name), f"with_{name}.py", server.url, asked))


def run(home, python, script, *arguments):
    """What a script prints; some clients keep settings and caches at home."""
    command = [python, "-I", str(PINNED / script), *arguments]
    env = {"HOME": str(home), "PATH": ""} | OFFLINE
    said = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    return said.stdout


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


def test_langchains_agent_calls_tools_of_a_model_that_shows_none(tmp_path):
    with describing() as server:
        url = f"http://127.0.0.1:{server.port}"
        run(tmp_path, python_with("langchain"), "agent_with_langchain.py", url)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_client_calls_functions_and_reads_forms(name, calling, tmp_path):
    python = sys.executable if name == "openai" else python_with(name)
    run(tmp_path, python, f"tools_with_{name}.py", *calling)
