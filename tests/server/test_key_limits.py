"""Limits of each API key: requests beyond them are refused and cost nothing."""

import contextlib
import json
from http.client import HTTPConnection

import msgspec
import pytest

from specserve.config import load_config
from specserve.errors import ConfigError, Overloaded, RequestError
from specserve.exchange.fair_queue import owner
from specserve.server.body import BodyReader
from specserve.server.limits import Account
from specserve.server.refusal import RateLimited
from tests.server.asking import (
    CHAT,
    COMPLETIONS,
    chat_body,
    completion_body,
    is_waiting,
    saying,
    started,
)
from tests.server.server_process import eventually, payloads

FIRST, SECOND = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("first\nsecond\nmetrics\n")
    return str(path)


@pytest.fixture(scope="module")
def start(paced_threads, keys):
    @contextlib.contextmanager
    def started(**limits):
        named = {f"server.{name}": value for name, value in limits.items()}
        with paced_threads(**{"server.api_key_file": keys} | named) as server:
            server.headers = {"Authorization": "Bearer metrics"}
            yield server

    return started


@pytest.fixture(scope="module")
def two(start):
    """Two requests of a key at once."""
    with start(max_requests_per_key=2) as server:
        yield server


@pytest.fixture(scope="module")
def sixty(start):
    """As many tokens of a key a minute."""
    with start(max_tokens_per_minute_per_key=60) as server:
        yield server


@contextlib.contextmanager
def stream_of(server, key, body):
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", COMPLETIONS, json.dumps(body | {"stream": True}), key)
        response = connection.getresponse()
        assert response.status == 200
        events = payloads(response)
        next(events)
        yield response, events


def check_limited(answer, kind, limit):
    error = answer.body["error"]
    assert answer.status == 429 and error["code"] == "rate_limit_exceeded"
    assert error["type"] == kind and limit in error["message"] and error["param"] is None


def test_a_key_is_not_shown_what_another_key_has_in_the_prefix_cache(two):
    body = completion_body(prompt="one two three. " * 20, max_tokens=2)
    answers = [two.post(COMPLETIONS, body, headers=key) for key in (FIRST, SECOND, SECOND, FIRST)]
    told = [a.body["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert told[:2] == [0, 0] and min(told[2:]) > 0
    assert len({a.body["choices"][0]["text"] for a in answers}) == 1


def test_a_key_has_room_in_the_queue_that_another_key_has_filled(paced_threads, keys):
    limits = {"server.max_queued_requests": 16, "scheduler.max_running": 1}
    with paced_threads(**{"server.api_key_file": keys} | limits) as server:
        server.headers = FIRST
        with server.open_stream(COMPLETIONS, completion_body(max_tokens=400, n=16, seed=30)):
            eventually(lambda: is_waiting(server, 15))
            few, many = (completion_body(max_tokens=1, n=n) for n in (2, 3))
            asked = [(few, FIRST), (many, SECOND)]
            refused = [server.post(COMPLETIONS, body, headers=key).status for body, key in asked]
            server.headers = SECOND
            with started(server, few):
                eventually(lambda: is_waiting(server, 17))
    assert refused == [503, 503]  # an eighth of the queue is a key's share


def test_a_keys_bodies_have_room_next_to_those_of_another_key():
    config = load_config(None, {"server.max_incoming_bytes": 1 << 20}).server
    reader = BodyReader(msgspec.structs.replace(config, max_body_bytes=1 << 20), lambda _: None)
    owner.set(1)
    bodies = [bytearray() for _ in range(8)]
    for body in bodies[:7]:
        reader.extend(body, bytes(200_000))
        if reader.num_incoming > 850_000:
            break
    with pytest.raises(Overloaded, match="too many large bodies"):
        reader.extend(bodies[7], bytes(400_000))
    owner.set(2)
    reader.extend(bytearray(), bytes(150_000))
    with pytest.raises(Overloaded, match="too many large bodies"):
        reader.extend(bytearray(), bytes(400_000))


def test_a_key_has_so_many_requests_at_once_and_another_key_as_many(two):
    long = saying(400, ms=20, n=3)
    with stream_of(two, FIRST, long), stream_of(two, FIRST, long):
        for path, body in {COMPLETIONS: saying(1), CHAT: chat_body(max_tokens=1)}.items():
            refused = two.post(path, body, headers=FIRST)
            check_limited(refused, "requests", "server.max_requests_per_key")
            assert refused.headers["Retry-After"] == "1"
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert two.post(COMPLETIONS, saying(1), headers=SECOND).status == 200
        assert two.get("/v1/models", headers=FIRST).status == 200
        assert two.metric("vllm:admission_rejections_total", reason="key_requests") == 2


@pytest.mark.parametrize("ending", ["it left", "it failed", "it was answered"])
def test_a_request_gives_its_place_back_when(two, ending):
    def is_free():
        answer = two.post(COMPLETIONS, saying(1), headers=FIRST)
        return answer.headers["x-ratelimit-remaining-requests"] == "1"

    eventually(is_free)  # the streams of a test before this one may not have ended
    for _ in range(3):
        if ending == "it left":
            with stream_of(two, FIRST, saying(400, ms=20)):
                pass
            eventually(is_free)
        elif ending == "it failed":
            assert two.post(COMPLETIONS, {"prompt": []}, headers=FIRST).status == 400
            assert two.post(COMPLETIONS, b"{", headers=FIRST).status == 400
        else:
            assert two.post(COMPLETIONS, saying(1), headers=FIRST).status == 200

    eventually(is_free)


def test_answers_report_the_limits_that_there_are_and_no_others(two):
    headers = two.post(COMPLETIONS, saying(1), headers=SECOND).headers
    told = {name: value for name, value in headers.items() if name.startswith("x-ratelimit-")}
    names = "limit-requests", "remaining-requests", "reset-requests"
    assert told == {f"x-ratelimit-{n}": v for n, v in zip(names, ("2", "1", "1s"), strict=True)}
    assert "x-ratelimit-limit-requests" not in two.get("/v1/models").headers


def test_prompts_and_answers_take_tokens_and_who_has_too_few_waits(sixty):
    first = sixty.post(COMPLETIONS, saying(30, num_prompt=10, n=2), headers=FIRST)
    assert first.status == 200
    assert first.headers["x-ratelimit-limit-tokens"] == "60"
    refused = sixty.post(COMPLETIONS, saying(1, num_prompt=20), headers=FIRST)
    check_limited(refused, "tokens", "server.max_tokens_per_minute_per_key")
    assert 28 <= int(refused.headers["Retry-After"]) <= 30  # -10 tokens, one a second
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert sixty.post(COMPLETIONS, saying(1), headers=SECOND).status == 200
    assert sixty.metric("vllm:admission_rejections_total", reason="key_tokens") == 1
    assert sixty.metric("vllm:prompt_tokens_total") == 11


def test_a_prompt_of_more_than_a_minutes_tokens_is_refused_for_good(sixty):
    answer = sixty.post(COMPLETIONS, saying(1, num_prompt=61), headers=FIRST)
    assert answer.status == 400 and answer.body["error"]["param"] == "prompt"


@pytest.mark.parametrize("limit", ["max_requests_per_key", "max_tokens_per_minute_per_key"])
def test_without_keys_there_are_no_limits_of_keys(limit):
    with pytest.raises(
        ConfigError, match=rf"^--set: server\.{limit} = 3 needs server\.api_key_file"
    ):
        load_config(None, {f"server.{limit}": 3})


def account(max_requests=None, max_tokens=None):
    times, reasons = [0.0], []
    made = Account(max_requests, max_tokens, reasons.append, lambda: times[0])
    made.times, made.reasons = times, reasons
    return made


def test_tokens_come_back_evenly_and_a_minutes_are_kept():
    bucket = account(max_tokens=120)  # two a second
    bucket.admit(120, "prompt")
    bucket.take(10)
    with pytest.raises(RateLimited) as refusal:
        bucket.admit(30, "prompt")
    assert refusal.value.retry_after == 20 and bucket.reasons == ["key_tokens"]
    bucket.times[0] = 19.9
    with pytest.raises(RateLimited):
        bucket.admit(30, "prompt")
    bucket.times[0] = 20.0
    bucket.admit(30, "prompt")
    bucket.times[0] = 1000.0
    bucket.take(1)
    assert bucket.headers["x-ratelimit-remaining-tokens"] == "119"
    assert bucket.headers["x-ratelimit-reset-tokens"] == "1s"
    with pytest.raises(RequestError):
        bucket.admit(121, "prompt")


def test_what_is_refused_costs_nothing():
    bucket = account(max_tokens=60)
    bucket.admit(50, "prompt")
    for _ in range(5):
        with pytest.raises(RateLimited):
            bucket.admit(11, "prompt")
    bucket.admit(10, "prompt")
