"""`python -m specserve_bench.soak`: what it asks for, what it would find, and two minutes of it."""

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from specserve_bench import soak
from specserve_bench.soak import COMPARED, Failed, Soak, read, request, slope
from tests.checkpoints import tiny_checkpoint
from tests.server.asking import CHAT, COMPLETIONS
from tests.server.server_process import ServerProcess


def test_a_seed_and_a_number_make_the_same_request():
    assert [request(1, n) for n in range(30)] == [request(1, n) for n in range(30)]
    assert request(1, 3) != request(2, 3) != request(2, 4)


def test_requests_have_every_parameter_and_some_clients_leave():
    asked = [request(0, number) for number in range(1000)]
    fields = {name for each in asked for name in each.body}
    assert {name for each in (*soak.PLAIN, *soak.SAMPLERS) for name in each} <= fields
    assert {name for each in (*soak.OF_TEXTS, *soak.OF_CHATS) for name in each} <= fields
    assert {each.path for each in asked} == {CHAT, COMPLETIONS}
    leaving = [number for number, each in enumerate(asked) if each.leaves_after is not None]
    assert 50 < len(leaving) < 150 and not any(number % COMPARED == 0 for number in leaving)


def test_growth_is_the_slope_after_a_warm_up():
    grown = [(second, 500 + second / 30) for second in range(200)]  # 2 MiB a minute
    assert slope(grown) == pytest.approx(2)
    assert slope([(second, 900 - min(50, second)) for second in range(200)]) == 0
    assert slope(grown[:70]) is None


def test_an_error_in_a_stream_is_none_of_its_text():
    texts = {}
    read(b'{"choices": [{"index": 1, "text": "a", "finish_reason": null}]}', texts)
    read(b'{"choices": [{"index": 1, "text": "b", "finish_reason": "stop"}]}', texts)
    with pytest.raises(Failed, match="it broke"):
        read(b'{"error": {"message": "it broke"}}', texts)
    assert texts == {1: "ab <stop>"}


def test_what_is_refused_or_cannot_be_reached_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "request", lambda *_: soak.Request(COMPLETIONS, {"n": 0}, None))
    with ServerProcess(tiny_checkpoint(tmp_path)) as server:
        run = Soak(SimpleNamespace(host="127.0.0.1", port=server.port), 0)
        asyncio.run(run.ask())
    asyncio.run(run.ask())
    refused, unreachable = run.errors
    assert refused.startswith("request 0: Failed: n: ") and '"n": 0' in refused
    assert unreachable.startswith("request 1: Connection")


@pytest.mark.slow
def test_two_minutes_lose_nothing():
    command = [sys.executable, "-m", "specserve_bench.soak", "--minutes=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and all(told["checks"].values()), done.stdout
    assert told["kills"] >= 1 and told["clients that left"] > 0 and told["texts compared"] > 5
