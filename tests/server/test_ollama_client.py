"""Ollama's Python client gets what plain requests get."""

import json

import numpy as np
import pytest

from tests.server.asking import CHAT, COMPLETIONS, MESSAGES
from tests.server.environments import python_with
from tests.server.in_process import server_threads
from tests.server.test_python_clients import run

pytestmark = pytest.mark.slow
OPTIONS = {"temperature": 0.8, "seed": 3, "num_predict": 24}
SAME = {"temperature": 0.8, "seed": 3, "max_tokens": 24}


def test_ollamas_client_gets_texts_calls_and_embeddings(server, calling, folder, tmp_path):
    with server_threads(folder, **{"model.task": "embed"}) as embedder:
        asked = {"messages": MESSAGES, "prompt": "the other cat", "options": OPTIONS}
        asked |= {"calls": calling[1], "embedder": embedder.url}
        given = server.url, json.dumps(asked)
        told = json.loads(run(tmp_path, python_with("ollama"), "with_ollama.py", *given))
        vectors = embedder.post("/v1/embeddings", {"input": ["a cat", "mats"]}).body["data"]
    chat = server.post(CHAT, {"messages": MESSAGES} | SAME).body
    text = chat["choices"][0]["message"]["content"]
    assert told["chat"] == {"text": text, "count": chat["usage"]["completion_tokens"]}
    assert told["chat, streamed"] == text
    prompt = {"prompt": "the other cat"} | SAME
    text = server.post(COMPLETIONS, prompt).body["choices"][0]["text"]
    assert told["prompt"] == told["prompt, streamed"] == text
    assert json.loads(told["form"]) in ({"a": 1}, {"a": 2})
    assert (told["models"], told["running"], told["shown"]) == (["tiny"], [512], "qwen3")
    assert told["loaded"] == "load" and "other" in told["error"]
    assert told["call"] == {"name": "weather", "arguments": {"city": "Rome", "days": 2}}
    assert "It is 22 degrees." in told["answer"]
    np.testing.assert_array_equal(told["embeddings"], [each["embedding"] for each in vectors])
