"""Requests whose deadline passes: they end at once, wherever they are, and leave nothing behind."""

import re
import time

import pytest

from tests.checkpoints import tiny_checkpoint
from tests.server.asking import CHAT, COMPLETIONS, saying, streaming
from tests.server.in_process import server_threads
from tests.server.server_process import eventually
from tests.text.grammars.hostile import ENDLESS, EVERY

RESPONSES = "/v1/responses"
FOREVER = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
ENDLESS_GRAMMAR = {"structured_outputs": EVERY[min(ENDLESS)]}
LIMITS = {
    "scheduler.max_running": 2,
    "scheduler.prefill_chunk": 1,
    "server.timeout_ms": 5000,
    "server.template_seconds": 30,
    "server.access_log": "true",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "stderr"


@pytest.fixture(scope="module")
def server(paced, log):
    with log.open("w") as stderr, paced(stderr=stderr, **LIMITS) as server:
        yield server


def check_ended(answer):
    assert answer.status == 408 and answer.body["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"


def ended(server):
    return server.metric("vllm:request_success_total", finished_reason="timeout")


def refused(server):
    return server.metric("vllm:admission_rejections_total", reason="timeout")


WAYS = {
    "its text comes": saying(400, ms=50, timeout_ms=300),
    "several choices come": saying(400, ms=50, n=3, timeout_ms=300),
}


@pytest.mark.parametrize("body", WAYS.values(), ids=WAYS)
def test_a_request_ends_while(server, body):
    check_ended(server.post(COMPLETIONS, body))
    server.wait_until_idle()
    assert ended(server) >= 1


def test_it_ends_while_its_prompt_is_computed_next_to_a_stream(server):
    with streaming(server, saying(400, ms=20)) as events:
        check_ended(server.post(COMPLETIONS, saying(3, num_prompt=400, timeout_ms=300)))
        next(events)
    server.wait_until_idle()


def test_it_ends_while_it_waits_and_the_one_before_it_goes_on(server):
    long = saying(400, ms=20)
    with streaming(server, long), streaming(server, long) as events:
        check_ended(server.post(COMPLETIONS, saying(3, timeout_ms=300)))
        next(events)
    server.wait_until_idle()


def test_a_stream_reports_the_error_and_has_its_usual_end(server):
    *events, error, done = server.stream(COMPLETIONS, saying(400, ms=20, timeout_ms=1000))
    assert done == "[DONE]" and error["error"]["code"] == "deadline_exceeded"
    assert events and all("choices" in event for event in events)
    server.wait_until_idle()


def test_a_response_that_streams_fails_with_that_code(server):
    body = {"input": "a", "max_output_tokens": 400, "ignore_eos": True, "seed": 20}
    *_, failed, error = server.stream(RESPONSES, body | {"timeout_ms": 500})
    assert (failed["type"], error["type"]) == ("response.failed", "error")
    assert error["code"] == "deadline_exceeded"


@pytest.mark.timed
def test_it_ends_when_it_said(server):
    begin = time.monotonic()
    check_ended(server.post(COMPLETIONS, saying(400, ms=50, timeout_ms=500)))
    assert 0.5 <= time.monotonic() - begin < 0.9


def test_it_ends_while_its_grammar_is_compiled(server):
    body = saying(3, timeout_ms=50) | ENDLESS_GRAMMAR
    check_ended(server.post(COMPLETIONS, body | {"ignore_eos": False}))
    assert refused(server) == 1
    assert server.post(COMPLETIONS, saying(2)).status == 200


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_ends_while_its_prompt_is_rendered(tmp_path, stream):
    folder = tiny_checkpoint(tmp_path)
    (folder / "chat_template.jinja").write_text(FOREVER)
    with server_threads(folder, **{"server.template_seconds": 30}) as server:
        messages = [{"role": "user", "content": "a"}]
        check_ended(server.post(CHAT, {"messages": messages, "timeout_ms": 200, "stream": stream}))
        assert refused(server) == 1


def test_the_servers_own_deadline_holds_for_requests_that_give_none(paced_threads):
    with paced_threads(**{"server.timeout_ms": 1000}) as server:
        check_ended(server.post(COMPLETIONS, saying(400, ms=20)))
        assert server.post(COMPLETIONS, saying(2)).status == 200


@pytest.mark.parametrize("asked", [5001, 0, -1, "a"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_more_than_the_servers_or_nonsense_is_refused(server, path, asked):
    field = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}[path]
    value = [{"role": "user", "content": "a"}] if path == CHAT else "a"
    answer = server.post(path, {field: value, "timeout_ms": asked})
    assert answer.status == 400 and answer.body["error"]["param"] == "timeout_ms"


def test_the_log_says_timeout(server, log):
    begin = log.stat().st_size
    check_ended(server.post(COMPLETIONS, saying(400, ms=20, timeout_ms=200)))
    line = re.compile(rf"POST {COMPLETIONS} 408 .*, timeout \[\S+\]$", re.MULTILINE)
    eventually(lambda: line.search(log.read_bytes()[begin:].decode()))
