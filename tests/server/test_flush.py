"""When events of streams go out and how large they are; the text is the same in any case."""

import contextlib
import json
import time
from http.client import HTTPConnection
from itertools import pairwise

import pytest

from specserve.config import load_config
from specserve.errors import ConfigError
from specserve.server.completion import ChoiceDelta
from specserve.server.stream import ROOM, SIZE, merged, padded, tokens_of, with_room
from tests.checkpoints import tiny_tokenizer
from tests.server.asking import CHAT, COMPLETIONS, saying
from tests.server.calling import TEMPLATE
from tests.server.scripted import scripted, with_template
from tests.server.server_process import ServerProcess

RESPONSES = "/v1/responses"
TEXT = "the cat sat on the mat, and the other cat: café ☕ and 🐈"
MODES = "event", "token", "interval"
SECONDS = 0.1
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
    COMPLETIONS: {"prompt": "a"},
    RESPONSES: {"input": "a"},
}
PREDICTABLE = {
    "prompt": "a" * 50,
    "max_tokens": 400,
    "ignore_eos": True,
    "allowed_token_ids": tiny_tokenizer().encode("a"),
}
SLOW = """
import time
from specserve_drafters.ngram import NgramDrafter

class Slow(NgramDrafter):
    def propose(self, items):
        time.sleep(0.03)
        return super().propose(items)
"""


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def server(mode):
    """One whose steps have seven tokens each."""
    tokenizer = with_template(tiny_tokenizer().backend_tokenizer, TEMPLATE)
    more = {"server.stream_interval_ms": 20} if mode == "interval" else {}
    settings = {"server.served_model_name": "tiny", "server.stream_flush": mode} | more
    with scripted(tokenizer, **settings) as server, server.saying(TEXT, 7):
        yield server


def raw_events(server, path, body):
    """Each event's bytes and the time at which it came."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body | {"stream": True}))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        lines = []
        for line in response:
            lines.append(line)
            if line == b"\n":
                yield b"".join(lines), time.monotonic()
                lines = []


def text_of(path, events):
    if path == RESPONSES:
        return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    choices = [e["choices"][0] for e in events if e != "[DONE]" and e["choices"]]
    return "".join(c.get("text", c.get("delta", {}).get("content")) or "" for c in choices)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("options", [None, {"include_obfuscation": True}])
def test_the_text_is_the_same_in_every_mode(server, path, options):
    events = server.stream(path, BODIES[path] | {"stream_options": options})
    assert text_of(path, events) == TEXT


def test_token_ids_and_logprobs_are_reported_once_each(server, mode):
    body = BODIES[COMPLETIONS] | {"logprobs": 0, "return_token_ids": True}
    *events, _ = server.stream(COMPLETIONS, body)
    choices = [e["choices"][0] for e in events]
    told = [c for c in choices if c.get("token_ids")]
    whole = server.post(COMPLETIONS, body).body["choices"][0]
    assert [i for c in told for i in c["token_ids"]] == whole["token_ids"]
    offsets = [offset for c in told for offset in c["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]
    sizes = {len(c["token_ids"]) for c in told}
    assert sizes == {1} if mode == "token" else max(sizes) >= 7


def test_usage_runs_along_with_the_events(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = BODIES[CHAT] | {"stream_options": options, "return_token_ids": True}
    *events, last, _ = server.stream(CHAT, body)
    told = 0
    for event in events:
        told += len(event["choices"][0].get("token_ids", ()))
        assert event["usage"]["completion_tokens"] == told
    assert last["usage"]["completion_tokens"] == told


def test_calls_and_reasoning_are_reported_the_same(server):
    said = (
        '<think>\nso\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    script = server.engine.script
    with server.saying(said, 7):
        *events, _ = server.stream(CHAT, BODIES[CHAT] | {"tools": [tool]})
    server.engine.script = script
    deltas = [e["choices"][0]["delta"] for e in events]
    calls = [c["function"] for d in deltas for c in d.get("tool_calls", ())]
    assert "".join(c.get("arguments", "") for c in calls) == '{"a": 1}'
    assert "".join(d.get("reasoning", "") for d in deltas) == "so"


@pytest.mark.parametrize("path", BODIES)
def test_padded_events_have_a_multiple_of_256_bytes(server, mode, path):
    asked = {} if mode == "interval" else {"stream_options": {"include_obfuscation": True}}
    events = [event for event, _ in raw_events(server, path, BODIES[path] | asked)]
    padded = [event for event in events if event != b"data: [DONE]\n\n"]
    assert len(padded) > 1 and {len(event) % SIZE for event in padded} == {0}
    assert all(b'"obfuscation":"' in event for event in padded if not event.startswith(b":"))


def test_padding_can_be_left_out(server):
    body = BODIES[CHAT] | {"stream_options": {"include_obfuscation": False}}
    assert not any(b"obfuscation" in event for event, _ in raw_events(server, CHAT, body))


@pytest.fixture(scope="module")
def hidden(plain, tmp_path_factory):
    """Events at an interval; steps with guesses take 30 ms."""
    path = tmp_path_factory.mktemp("slow")
    (path / "slow.py").write_text(SLOW)
    settings = {"server.stream_flush": "interval", "server.stream_interval_ms": 1e3 * SECONDS}
    env = {"PYTHONPATH": str(path)}
    with ServerProcess(plain, "--drafter=slow:Slow", env=env, **settings) as server:
        yield server


def streams(server):
    """Of a stream with guesses and of one without: the acceptance length, and the events."""
    for has_guesses in (True, False):
        body = PREDICTABLE | {"temperature": 0, "speculation": {"enabled": has_guesses}}
        events = [*raw_events(server, COMPLETIONS, body)]
        last = json.loads(events[-2][0].removeprefix(b"data: "))
        drafted = last["metrics"]["speculative_decoding"]
        yield drafted["mean_acceptance_length"], events[:-2]


@pytest.mark.timed
def test_at_an_interval_sizes_report_nothing_of_acceptance(hidden):
    (accepted, guessed), (alone, plain) = streams(hidden)
    assert accepted > 2 * alone
    text = [
        sum(len(json.loads(e[6:])["choices"][0]["text"]) for e, _ in s) for s in (guessed, plain)
    ]
    assert text[0] == text[1] > 0
    assert {len(event) for event, _ in guessed} == {len(event) for event, _ in plain}
    assert len({len(event) for event, _ in guessed}) == 1


@pytest.mark.timed
def test_at_an_interval_gaps_report_nothing_of_acceptance(hidden):
    for _, events in streams(hidden):
        first = events[0][1]
        late = [(at - first) - n * SECONDS for n, (_, at) in enumerate(events)]
        assert max(map(abs, late)) < SECONDS / 3  # of the last as of the first: nothing adds up


@pytest.mark.timed
def test_events_come_at_the_interval_before_the_first_token_too(paced):
    settings = {"server.stream_flush": "interval", "server.stream_interval_ms": 100}
    long = saying(400, ms=20)
    with (
        paced(**{"scheduler.max_running": 1} | settings) as server,
        contextlib.ExitStack() as stack,
    ):
        stack.enter_context(server.open_stream(COMPLETIONS, long))
        waiting = raw_events(server, COMPLETIONS, saying(3))
        came = [next(waiting) for _ in range(8)]
        waiting.close()
    texts = [json.loads(event[6:])["choices"][0]["text"] for event, _ in came]
    assert texts == [""] * 8
    gaps = [b[1] - a[1] for a, b in pairwise(came)]
    assert all(abs(gap - 0.1) < 0.04 for gap in gaps)


def test_every_choice_that_has_not_ended_has_an_event_at_each_time(paced_threads):
    settings = {"server.stream_flush": "interval", "server.stream_interval_ms": 50}
    with paced_threads(**settings) as server:
        *events, _ = server.stream(COMPLETIONS, saying(20, ms=20, n=3))
    indexes = [e["choices"][0]["index"] for e in events if not e["choices"][0]["finish_reason"]]
    times = [indexes.count(choice) for choice in range(3)]
    assert max(times) - min(times) <= 1  # the last step may be told as a time comes
    assert indexes == [c for n in range(max(times)) for c in range(3) if n < times[c]]


def test_an_interval_without_the_mode_is_refused():
    with pytest.raises(
        ConfigError, match=r"server\.stream_flush = 'event'\. Set server\.stream_flush"
    ):
        load_config(None, {"server.stream_interval_ms": 20})


def test_a_step_is_parted_where_the_texts_of_its_tokens_end():
    step = ChoiceDelta(1, "abcde", 4, [7, 8, 9], True, ["details"], [2, 2, 4])
    assert [*tokens_of(step)] == [
        ChoiceDelta(1, "ab", 4, [7], False),
        ChoiceDelta(1, "", 5, [8], False),
        ChoiceDelta(1, "cde", 6, [9], True, ["details"]),
    ]
    assert merged([*tokens_of(step)])[1]._replace(ends=[2, 2, 4]) == step


@pytest.mark.parametrize("size", [0, 1, 200, 239, 240, 255, 256, 999])
def test_padding_is_exact_whatever_an_event_holds(size):
    event = b'data: {"a":"%b %%s \\\\"}\n\n' % (b"x" * size)
    told = padded(event)
    bare = len(event) + 17
    assert len(told) == max(512, bare + -bare % SIZE)
    assert json.loads(told[6:]) | {"obfuscation": 0} == json.loads(event[6:]) | {"obfuscation": 0}
    assert len(padded(b": waiting\n\n")) == 512


def test_what_has_no_room_in_an_event_waits_for_the_next_in_its_order():
    tokens = [ChoiceDelta(n % 2, "é" * 20, n, [n], False) for n in range(12)]
    come, waiting = [], tokens
    while waiting:
        taken, waiting = with_room(waiting)
        for choice in range(2):
            texts = [each.text for each in taken if each.choice == choice]
            assert len(texts) == 1 or len("".join(texts).encode()) <= ROOM
        come += taken
    for choice in range(2):
        assert [e.begin for e in come if e.choice == choice] == [*range(choice, 12, 2)]
    long = [ChoiceDelta(0, "x" * 3 * ROOM, 0, [1], True)]
    assert with_room(long) == (long, [])
