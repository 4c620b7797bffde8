"""`python -m specserve_bench.soak`: what it asks for, what it would find, and two minutes of it."""

import asyncio
import json
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

from specserve_bench import soak
from specserve_bench.soak import (
    COMPARED,
    AnswerError,
    Soak,
    growth,
    growth_of_young,
    read,
    request,
)
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
    assert growth([(s, 500 + s / 30) for s in range(500)]) == pytest.approx((2, 0))
    assert growth([(s, 900 - min(250, s)) for s in range(500)]) == pytest.approx((0, 0))
    assert growth([(s, 500 + s / 30) for s in range(359)]) is None


def test_engine_processes_that_are_larger_each_time_have_grown():
    engines = [[(100 * n + s, 300 + 5 * n + s) for s in range(60)] for n in range(5)]
    assert growth_of_young(engines) == pytest.approx((3, 0))
    assert growth_of_young([*engines[:4], engines[4][:40]]) is None


@pytest.mark.parametrize(("mib", "is_small"), [(0.0, True), (0.9, True), (1.6, False)])
def test_what_comes_and_goes_is_no_growth_and_hides_none(mib, is_small):
    chance = random.Random(0)
    noisy = [(s, 500 + mib * s / 60 + chance.gauss(0, 4)) for s in range(1800)]
    told = growth(noisy)
    assert told.slope == pytest.approx(mib, abs=0.1) and 0 < told.error < 0.1
    assert told.is_small is is_small


def test_an_error_in_a_stream_is_none_of_its_text():
    texts = {}
    read(b'{"choices": [{"index": 1, "text": "a", "finish_reason": null}]}', texts)
    read(b'{"choices": [{"index": 1, "text": "b", "finish_reason": "stop"}]}', texts)
    with pytest.raises(AnswerError, match="it broke"):
        read(b'{"error": {"message": "it broke"}}', texts)
    assert texts == {1: "ab <stop>"}


def test_what_is_refused_or_cannot_be_reached_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "request", lambda *_: soak.SoakRequest(COMPLETIONS, {"n": 0}, None))
    with ServerProcess(tiny_checkpoint(tmp_path)) as server:
        run = Soak(SimpleNamespace(host="127.0.0.1", port=server.port), 0)
        asyncio.run(run.ask())
    asyncio.run(run.ask())
    refused, unreachable = run.errors
    assert refused.startswith("request 0: AnswerError: n: ") and '"n": 0' in refused
    assert unreachable.startswith("request 1: Connection")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_json_comes_after_the_table_only_on_request(flags, monkeypatch, capsys):
    told = {"errors": [], "other texts": [], "checks": {"no request failed": True}}
    monkeypatch.setattr(soak, "soak", lambda minutes, seed: told)
    assert soak.main(flags) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert table[0] == "| soak | |"
    assert last == (json.dumps(told) if flags else "| no request failed | yes |")


@pytest.mark.slow
def test_two_minutes_lose_nothing():
    command = [sys.executable, "-m", "specserve_bench.soak", "--minutes=2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and all(told["checks"].values()), done.stdout
    assert told["kills"] >= 1 and told["clients that left"] > 0 and told["texts compared"] > 5
