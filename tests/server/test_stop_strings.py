"""Stop strings that contain special tokens, which texts leave out, on every route."""

import json

import pytest

from tests.checkpoints import EOS, PAD, tiny_tokenizer
from tests.server.asking import CHAT, COMPLETIONS
from tests.server.scripted import scripted, with_template

RESPONSES = "/v1/responses"
SHOWN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ASKED = {
    CHAT: {"messages": [{"role": "user", "content": "the cat"}]},
    COMPLETIONS: {"prompt": "the cat"},
    RESPONSES: {"input": "the cat"},
}
CASES = {  # text, stop -> shown, with the stop string, the stop reason
    "a token": (f"sat on{PAD} the mat", PAD, "sat on", PAD),
    "text and a token": (f"sat on.{PAD} the mat", f".{PAD}", "sat on", f".{PAD}"),
    "a token and text": (f"sat{PAD} on{PAD} the mat", f"{PAD} the", "sat on", f"{PAD} the"),
    "another token": (f"sat on{PAD} the mat", f"{EOS}.", "sat on the mat", None),
    "text and the end": ("sat on the mat.", f".{EOS}", "sat on the mat", f".{EOS}"),
}


@pytest.fixture(scope="module")
def server():
    with scripted(with_template(tiny_tokenizer().backend_tokenizer, SHOWN)) as server:
        yield server


def said(body):
    """Text, finish reason and stop reason of an answer, whatever the route."""
    if "output" in body:
        parts = [part["text"] for item in body["output"] for part in item["content"]]
        return "".join(parts), "stop" if body["status"] == "completed" else "", None
    [choice] = body["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, choice["finish_reason"], choice["stop_reason"]


def streamed(server, route, body):
    if route == RESPONSES:
        raw = server.post(route, body | {"stream": True}).body
        lines = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
        return said(json.loads(lines[-1])["response"])
    *chunks, _ = server.stream(route, body)
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(p.get("text") or p.get("delta", {}).get("content") or "" for p in pieces)
    return text, pieces[-1]["finish_reason"], pieces[-1]["stop_reason"]


@pytest.mark.parametrize("route", ASKED)
@pytest.mark.parametrize(("text", "stop", "shown", "reason"), CASES.values(), ids=CASES)
def test_a_text_ends_at_a_stop_string_with_special_tokens(server, route, text, stop, shown, reason):
    asked = ASKED[route] | {"stop": ["never", stop]}
    want = (shown, "stop", None if route == RESPONSES else reason)
    with server.saying(text, 2):
        assert said(server.post(route, asked).body) == want
        assert streamed(server, route, asked) == want
        kept = asked | {"include_stop_str_in_output": True}
        assert said(server.post(route, kept).body)[0] == shown + (reason or "")
