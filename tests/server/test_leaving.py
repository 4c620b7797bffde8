"""Clients that disconnect, whose resources are freed, and clients that wait, which get comments."""

import contextlib
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.server.asking import (
    COMPLETIONS,
    answer_of,
    check_overloaded,
    head,
    is_running,
    is_waiting,
    saying,
    started,
    streaming,
)
from tests.server.server_process import eventually


def test_a_client_may_leave_before_its_body_is_complete(strict):
    with strict.connect() as client:
        client.sendall(head("Content-Length: 1000") + b'{"prompt": "a')
    strict.wait_until_idle()
    assert strict.post(COMPLETIONS, saying(2)).status == 200


def test_a_client_may_leave_while_it_waits_in_the_queue(strict):
    with streaming(strict, saying(500, ms=20)) as events:
        with started(strict, saying(500, ms=20)):
            eventually(lambda: is_waiting(strict))
        eventually(lambda: is_waiting(strict, 0), seconds=8)
        next(events)  # the other one goes on
    strict.wait_until_idle()


def test_a_client_may_leave_while_its_prompt_is_computed(strict):
    with started(strict, saying(100, ms=100, num_prompt=400)):
        eventually(lambda: strict.held_blocks() > 0)
    strict.wait_until_idle()


def test_a_client_may_leave_a_stream(strict):
    with streaming(strict, saying(500, ms=20)) as events:
        next(events)
    strict.wait_until_idle()


def test_a_client_may_leave_while_its_whole_answer_is_made(strict):
    with started(strict, saying(500, ms=20)):
        eventually(lambda: is_running(strict))
    strict.wait_until_idle()


def test_of_64_clients_half_may_leave_at_any_moment_and_nothing_is_left(server):
    rounds = []
    for number in range(3):
        swarm(server, random.Random(number))
        server.wait_until_idle()
        rounds.append([resident_bytes(pid) for pid in (server.process.pid, server.engine_pid)])
    api, engine = (after - before for before, after in zip(rounds[0], rounds[2], strict=True))
    assert api < 8 << 20
    assert engine < 128 << 20  # malloc's heap settles after some hundred steps, 100 MiB higher


def swarm(server, chance):
    """64 streams at once; every second one is left after some of its events."""
    patience = [chance.randrange(1, 40) if n % 2 else None for n in range(64)]

    def ask(num_events):
        with server.open_stream(COMPLETIONS, saying(60)) as events:
            seen = [event for event, _ in zip(events, range(num_events or 1000), strict=False)]
        return num_events is not None or seen[-1] == "[DONE]"

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(ask, patience))


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_more_requests_than_may_wait_are_refused_and_those_that_wait_are_answered(strict):
    with contextlib.ExitStack() as stack:
        with streaming(strict, saying(500, ms=20)):
            waiting = [stack.enter_context(started(strict, saying(3))) for _ in range(4)]
            eventually(lambda: is_waiting(strict, 4))
            check_overloaded(strict.post(COMPLETIONS, saying(3)))
        answers = [answer_of(connection) for connection in waiting]
    assert [a.status for a in answers] == [200] * 4
    assert {a.body["usage"]["completion_tokens"] for a in answers} == {3}


def test_more_prompt_tokens_than_may_wait_are_refused_and_a_short_prompt_is_not(strict):
    with contextlib.ExitStack() as stack:
        with streaming(strict, saying(500, ms=20)):
            long = stack.enter_context(started(strict, saying(3, num_prompt=500)))
            eventually(lambda: is_waiting(strict))
            check_overloaded(strict.post(COMPLETIONS, saying(3, num_prompt=101)))
            short = stack.enter_context(started(strict, saying(3, num_prompt=100)))
            eventually(lambda: is_waiting(strict, 2))
        assert answer_of(long).status == answer_of(short).status == 200
    strict.wait_until_idle()


def test_what_could_never_wait_is_no_reason_to_ask_again(strict):
    for prompts in ([[1]] * 5, [[1] * 250] * 3):
        response = strict.post(COMPLETIONS, saying(2, prompt=prompts))
        assert response.status == 400 and "queue limit" in response.body["error"]["message"]


def test_a_stream_that_waits_is_kept_alive_by_comments(strict):
    with streaming(strict, saying(500, ms=20)), started(strict, saying(2, stream=True)) as client:
        response = client.getresponse()
        lines = [response.readline() for _ in range(4)]
    assert response.status == 200 and lines == [b": waiting\n", b"\n"] * 2


def test_a_client_may_leave_with_a_second_request_already_sent(strict):
    body = json.dumps(saying(500, ms=20)).encode()
    request = head(f"Content-Length: {len(body)}") + body
    for apart in (False, True):
        with strict.connect() as client:
            client.sendall(request if apart else request + request)
            eventually(lambda: is_running(strict))
            client.sendall(request if apart else b"")
        strict.wait_until_idle()  # in half the time that the answer takes
