"""`prediction`: a text that is expected is guessed, changes no text, and is counted."""

import re

import pytest

from specserve import LLM, SamplingParams
from tests.engine.clock import Clock
from tests.server.asking import CHAT, COMPLETIONS, chat_body, completion_body, said, streamed
from tests.server.in_process import server_threads

LONG = {"max_tokens": 60, "ignore_eos": True, "temperature": 1.0, "seed": 3}
CODE = "import os\n\n\ndef read_lines(path):\n"


@pytest.fixture(scope="module")
def demo():
    """Texts of the tiny models are no text: their tokens are others once they are read again."""
    with server_threads(None, **{"memory.kv_bytes": 1 << 28}) as server:
        yield server


def asked(path, **more):
    messages = [{"role": "user", "content": "What does shutil.copytree do?"}]
    return LONG | more | ({"messages": messages} if path == CHAT else {"prompt": CODE})


def answer(server, path, body):
    response = server.post(path, body)
    assert response.status == 200, response.body
    return response.body


def of_openai(text):
    return {"type": "content", "content": text}


def in_parts(text):
    return {"type": "content", "content": [{"type": "text", "text": t} for t in (text, "")]}


@pytest.mark.parametrize("form", [str, of_openai, in_parts])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_text_is_the_same_and_usage_reports_how_much_of_the_prediction_came(demo, path, form):
    body = asked(path)
    alone = answer(demo, path, body)
    assert "completion_tokens_details" not in alone["usage"]
    text = said(alone["choices"][0])
    for expected in (text, "nothing like it at all"):
        told = answer(demo, path, body | {"prediction": form(expected)})
        assert said(told["choices"][0]) == text
        counts = told["usage"]["completion_tokens_details"]
        size = num_tokens(demo, expected)
        assert sum(counts.values()) == size
        assert (counts["accepted_prediction_tokens"] > size / 2) == (expected == text)
        assert told["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]


def num_tokens(server, text):
    return server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).body["count"]


def test_the_counts_are_those_of_the_text_whoever_draft_tokens(presets):
    body = completion_body(**LONG, n=2)
    text = said(answer(presets["off"], COMPLETIONS, body)["choices"][0])
    body |= {"prediction": text[:40] + "?" + text[41:]}
    whole = [answer(server, COMPLETIONS, body) for server in presets.values()]
    assert len({str(each["usage"]["completion_tokens_details"]) for each in whole}) == 1
    for server, each in zip(presets.values(), whole, strict=True):
        choices, usage = streamed(server, COMPLETIONS, body)
        assert [text for text, *_ in choices] == [said(c) for c in each["choices"]]
        assert usage["completion_tokens_details"] == each["usage"]["completion_tokens_details"]


WRONG = {
    "a number": 3,
    "another type": {"type": "image", "content": "x"},
    "no content": {"type": "content"},
    "an unknown field": {"type": "content", "content": "x", "more": 1},
    "a part that is no text": {"type": "content", "content": [{"type": "image_url"}]},
    "more than the context": of_openai("the cat sat " * 200),
    "far too much": of_openai("the cat sat " * 9000),
}


@pytest.mark.parametrize("prediction", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_no_prediction_is_refused_by_name(server, path, prediction):
    body = (chat_body if path == CHAT else completion_body)()
    refused = server.post(path, body | {"prediction": prediction})
    error = refused.body["error"]
    assert refused.status == 400 and error["param"].startswith("prediction")
    assert re.search("send|Omit it|Shorten it", error["message"]), error


def test_an_edit_takes_few_steps_and_where_it_is_wrong_none_more_than_without(monkeypatch):
    Clock(monkeypatch)  # how many are verified must not depend on this machine
    settings = {"memory.kv_bytes": 1 << 28, "model.threads": 1}
    params = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
    with LLM(set=settings, progress=False) as llm:
        (plain,) = llm.generate(CODE, SamplingParams(**params))
        only = {"sources": ("prediction",)}
        for expected, most in ((plain.text, 60), ("no such thing", 200)):
            wish = SamplingParams(**params, prediction=expected, speculation=only)
            (output,) = llm.generate(CODE, wish)
            assert output.token_ids == plain.token_ids and output.speculation.steps <= most
            usage = output.usage
            counts = usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
            assert sum(counts) == len(llm.tokenizer.encode(expected, add_special_tokens=False))
