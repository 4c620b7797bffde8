"""A dead engine is a pause: answers go on in another one, with the same text."""

import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.checkpoints import tiny_checkpoint
from tests.server.asking import (
    CHAT,
    COMPLETIONS,
    chat_body,
    completion_body,
    saying,
    streamed,
    whole,
)
from tests.server.server_process import ServerProcess, eventually

LONG = {"max_tokens": 300}
DRAWN = {"temperature": 1.0, "seed": 5}
ASKED = {
    "greedy": (COMPLETIONS, completion_body(**LONG, seed=1)),
    "drawn": (COMPLETIONS, completion_body(**LONG | DRAWN)),
    "a chat": (CHAT, chat_body(**LONG | DRAWN)),
    "two choices": (COMPLETIONS, completion_body(**LONG | DRAWN, n=2)),
    "penalties": (COMPLETIONS, completion_body(**LONG | DRAWN, frequency_penalty=0.5, min_p=0.01)),
    "a form": (
        COMPLETIONS,
        completion_body(**LONG | DRAWN, structured_outputs={"regex": "[a-z ,]{200,260}"}),
    ),
    "stop": (COMPLETIONS, completion_body(**LONG | DRAWN, stop=["qqqq", "the the the"])),
    "a prediction": (COMPLETIONS, completion_body(**LONG | DRAWN, prediction="the cat sat " * 50)),
    "few": (COMPLETIONS, completion_body(max_tokens=3, seed=9)),
}


STARVING = '''
"""A source without draft tokens. A step runs out of memory once a file exists."""
import os
from pathlib import Path

from specserve.engine.runner import Runner
from specserve_drafters.base import Options

SIGN, launch = Path(os.environ["STARVING"]), Runner.launch


def launch_or_starve(runner, step):
    if SIGN.exists():
        SIGN.unlink()
        raise MemoryError
    return launch(runner, step)


class Source:
    needs_executor = False
    Options = Options

    def __init__(self, options):
        Runner.launch = launch_or_starve

    def candidates(self, items):
        return [[] for _ in items]
'''


class Mortal(ServerProcess):
    """With every source, and ways to end its engine."""

    def __init__(self, folder, at, **settings):
        (at / "starving.py").write_text(STARVING)
        self.sign = at / "sign"
        env = {"PYTHONPATH": str(at), "STARVING": str(self.sign)}
        sources = ["ngram", "model", "grammar", "prediction", "suffix", "recycle"]
        sources.append("starving:Source")
        settings |= {"drafter.options.sources": sources, "server.served_model_name": "tiny"}
        super().__init__(folder, f"--draft-model={folder}", env=env, **settings)

    def end_engine(self, how):
        if how is MemoryError:
            self.sign.touch()
        else:
            os.kill(self.engine_pid, how)


ENDS = [signal.SIGKILL, signal.SIGSEGV, MemoryError]


@pytest.fixture(scope="module")
def mortal(folder, tmp_path_factory):
    with Mortal(folder, tmp_path_factory.mktemp("mortal")) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(mortal):
    return {name: streamed(mortal, *asked) for name, asked in ASKED.items()}


def restarts(server):
    return server.metric("specserve_engine_restarts_total")


@pytest.mark.parametrize("how", ENDS)
def test_every_stream_has_the_text_that_it_would_have_had(mortal, undisturbed, how):
    chance = random.Random(str(how))
    before = restarts(mortal)
    with ThreadPoolExecutor(16) as threads:
        names = [*ASKED] * 2
        answers = [threads.submit(streamed, mortal, *ASKED[name]) for name in names]
        time.sleep(chance.uniform(0.02, 0.3))
        mortal.end_engine(how)
        for name, answer in zip(names, answers, strict=True):
            assert answer.result() == undisturbed[name], name
    eventually(lambda: restarts(mortal) == before + 1)
    mortal.wait_until_idle()
    assert whole(mortal, *ASKED["drawn"])[0] == undisturbed["drawn"][0]


def test_a_recurrent_state_is_computed_again_in_another_engine(tmp_path):
    names = ["greedy", "two choices"]
    with ServerProcess(tiny_checkpoint(tmp_path, "falcon_h1")) as server:
        undisturbed = [streamed(server, *ASKED[name]) for name in names]
        with ThreadPoolExecutor(2) as threads:
            answers = [threads.submit(streamed, server, *ASKED[name]) for name in names]
            eventually(lambda: server.metric("vllm:num_requests_running") > 0)
            time.sleep(0.1)
            os.kill(server.engine_pid, signal.SIGKILL)
            assert [answer.result() for answer in answers] == undisturbed
        eventually(lambda: restarts(server) == 1)


def test_beams_are_searched_again_in_another_engine(mortal):
    asked = COMPLETIONS, completion_body(max_tokens=250, use_beam_search=True, n=3, seed=1)
    want, before = whole(mortal, *asked), restarts(mortal)
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(whole, mortal, *asked)
        eventually(lambda: mortal.metric("vllm:num_requests_running") > 0)
        mortal.end_engine(signal.SIGKILL)
        assert answer.result() == want
    eventually(lambda: restarts(mortal) == before + 1)


@pytest.mark.timed
def test_an_engine_that_hangs_is_replaced(paced):
    with paced(**{"server.hang_seconds": 1.0}) as server:
        alone = whole(server, COMPLETIONS, saying(40, ms=20))
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(streamed, server, COMPLETIONS, saying(40, ms=20))
            eventually(lambda: server.metric("vllm:num_requests_running") == 1)
            os.kill(server.engine_pid, signal.SIGSTOP)
            assert answer.result() == alone
        assert restarts(server) == 1


def test_an_engine_that_stands_still_for_a_while_goes_on_by_itself(paced):
    with paced() as server:
        alone = whole(server, COMPLETIONS, saying(40, ms=20))
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(streamed, server, COMPLETIONS, saying(40, ms=20))
            eventually(lambda: server.metric("vllm:num_requests_running") == 1)
            engine = server.engine_pid
            os.kill(engine, signal.SIGSTOP)
            time.sleep(1)
            os.kill(engine, signal.SIGCONT)
            assert answer.result() == alone
        assert (server.engine_pid, restarts(server)) == (engine, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("hang_seconds", "deaths"), [(120.0, 0), (5.0, 1)])
def test_every_stream_outlives_an_engine_that_stands_still_for_half_a_minute(
    folder, tmp_path, hang_seconds, deaths
):
    with Mortal(folder, tmp_path, **{"server.hang_seconds": hang_seconds}) as server:
        undisturbed = {name: streamed(server, *asked) for name, asked in ASKED.items()}
        with ThreadPoolExecutor(16) as threads:
            names = [*ASKED] * 2
            answers = [threads.submit(streamed, server, *ASKED[name]) for name in names]
            time.sleep(0.1)
            engine = server.engine_pid
            os.kill(engine, signal.SIGSTOP)
            time.sleep(30)
            if not deaths:
                os.kill(engine, signal.SIGCONT)
            for name, answer in zip(names, answers, strict=True):
                assert answer.result() == undisturbed[name], name
        assert restarts(server) == deaths
        server.wait_until_idle()


def test_one_that_dies_while_nobody_asks_is_replaced_and_what_is_asked_meanwhile_is_answered(paced):
    with paced() as server:
        os.kill(server.engine_pid, signal.SIGKILL)
        eventually(lambda: restarts(server) == 1)
        os.kill(server.engine_pid, signal.SIGKILL)  # now the next one starts after half a second
        with ThreadPoolExecutor() as threads:
            time.sleep(0.1)  # it is noticed
            asked = [
                threads.submit(server.get, "/v1/speculation"),
                threads.submit(server.post, "/v1/cache/reset", {}),
                threads.submit(server.get, "/health/ready"),
                threads.submit(server.post, COMPLETIONS, saying(3)),
            ]
            assert restarts(server) == 1
            assert [each.result().status for each in asked] == [200] * 4
        assert restarts(server) == 2
        assert server.get("/v1/speculation").status == 200


@pytest.mark.slow
def test_engines_that_die_while_they_load_are_no_requests_fault(paced):
    with paced() as server:
        alone = whole(server, COMPLETIONS, saying(100, ms=20))
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(streamed, server, COMPLETIONS, saying(100, ms=20))
            eventually(lambda: server.metric("vllm:num_requests_running") == 1)
            server.kill_engines(4)
            assert answer.result() == alone
        assert restarts(server) == 1


KILLER = '''
import os
from specserve_drafters import Draft
from specserve_drafters.base import Options


class Killer:
    """Guesses nothing, and ends its process at the ninth token of a request with the seed 666."""

    needs_executor = False
    Options = Options

    def __init__(self, options):
        pass

    def propose(self, items):
        if any(i.seed == 666 and len(i.token_ids) >= 9 for i in items):
            os.abort()
        return [Draft() for _ in items]
'''


def test_a_request_that_ends_engines_is_ended_alone(folder, tmp_path):
    (tmp_path / "killer.py").write_text(KILLER)
    env = {"PYTHONPATH": str(tmp_path)}
    with ServerProcess(folder, "--drafter=killer:Killer", env=env) as server:
        others = [completion_body(max_tokens=200, temperature=1, seed=s) for s in range(4)]
        alone = [whole(server, COMPLETIONS, body) for body in others]
        with ThreadPoolExecutor(8) as threads:
            answers = [threads.submit(streamed, server, COMPLETIONS, body) for body in others]
            *events, error, done = server.stream(COMPLETIONS, completion_body(seed=666))
            assert "each time" in error["error"]["message"] and done == "[DONE]"
            assert 0 < len(events) < 9
            assert [answer.result() for answer in answers] == alone
        assert restarts(server) == 3
        assert whole(server, COMPLETIONS, others[0]) == alone[0]
        server.wait_until_idle()
        server.signal()
        assert server.exit_code() == 0
        log = server.process.communicate()[1]
        assert "prompt tokens" in log and "'seed': 666" in log and "the cat sat" not in log
        assert re.search(r"each time.*'seed': 666.* \[req-\w{32}\]\n", log)


@pytest.mark.slow
@pytest.mark.parametrize("round", range(7))
def test_streams_with_every_source_outlive_deaths_at_any_moment(folder, tmp_path, round):
    chance = random.Random(round)
    with Mortal(folder, tmp_path) as server:
        undisturbed = {name: streamed(server, *asked) for name, asked in ASKED.items()}
        for number in range(1, 4):
            with ThreadPoolExecutor(16) as threads:
                names = [*ASKED] * 2
                chance.shuffle(names)
                answers = [threads.submit(streamed, server, *ASKED[name]) for name in names]
                time.sleep(chance.uniform(0, 0.6))
                server.end_engine(chance.choice(ENDS))
                for name, answer in zip(names, answers, strict=True):
                    assert answer.result() == undisturbed[name], name
            # A step for the memory error, in case all streams had ended before.
            assert streamed(server, *ASKED[names[0]]) == undisturbed[names[0]]
            eventually(lambda n=number: restarts(server) == n)
            server.wait_until_idle()
