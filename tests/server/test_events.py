"""Events that are put together from bytes, against those that are encoded as a whole."""

import re

import pytest

from specserve.server import formatter
from specserve.server.formatter import CompletionFormatter
from specserve.server.stream import event
from tests.checkpoints import tiny_tokenizer
from tests.server.asking import CHAT, COMPLETIONS
from tests.server.calling import TEMPLATE
from tests.server.in_process import server_threads
from tests.server.scripted import scripted, with_template

TEXT = 'the "cat"\\ sat\n\x00\x7f é한🙂\u2028\u2029\u0085 </script> %b end'
PROMPT = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [{"role": "user", "content": "a"}]}}
OPTIONS = {"include_usage": {"include_usage": True}, "none": None}


@pytest.fixture(scope="module")
def server():
    tokenizer = with_template(tiny_tokenizer().backend_tokenizer, TEMPLATE)
    names = {"server.served_model_name": 'a "name"', "server.reasoning_parser": "none"}
    with scripted(tokenizer, **names, **{"server.tool_parser": "none"}) as server:
        yield server


def raw_stream(server, path, **asked):
    """The bytes of a stream's events, without what differs from one request to the next."""
    events = server.post(path, PROMPT[path] | asked | {"stream": True, "seed": 1}).body
    events = re.sub(r'"id":"[^"]*"|"created":\d+', "", events)
    return re.sub(r'"(metrics|timings)":\{.*\}', "", events)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_event_put_together_is_the_one_that_is_encoded(server, monkeypatch, path, n, options):
    asked, made = {"n": n, "stream_options": options}, []
    find = CompletionFormatter.find_around
    monkeypatch.setattr(
        CompletionFormatter, "find_around", lambda *args: made.append(args) or find(*args)
    )
    with server.saying(TEXT, 1):
        fast = raw_stream(server, path, **asked)
        assert len(made) == n  # once for each choice
        monkeypatch.setattr(
            CompletionFormatter, "events_of", lambda self, delta: [*map(event, self.chunks(delta))]
        )
        assert raw_stream(server, path, **asked) == fast
    assert len(made) == n and fast.count("data: ") > 20


def test_a_step_that_cannot_be_written_ends_its_stream_with_an_error(folder_server, monkeypatch):
    def fail(text):
        raise RuntimeError("no text")

    monkeypatch.setattr(formatter, "json_text", fail)
    asked = {"prompt": [5] * 8, "max_tokens": 200, "ignore_eos": True}
    *_, error, done = folder_server.stream(COMPLETIONS, asked)
    assert done == "[DONE]" and error["error"]["type"] == "server_error"


@pytest.fixture
def folder_server(folder):
    with server_threads(folder) as server:
        yield server
