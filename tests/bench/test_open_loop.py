"""How specserve and vLLM are held against each other at a rate."""

import sys
from argparse import ArgumentParser

import pytest

from specserve.errors import ConfigError
from specserve_bench.figures import open_loop
from specserve_bench.figures.__main__ import main
from specserve_bench.results import Goals, Load, MeasuredRequest, Result, Round, Run, Subject
from specserve_bench.suite import Contender
from specserve_bench.workloads import workload

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

port = next(arg for arg in sys.argv if arg.startswith("--port="))
HTTPServer(("127.0.0.1", int(port[7:])), Healthy).serve_forever()
"""


def fake_python(tmp_path, script):
    (tmp_path / "server.py").write_text(script)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/server.py "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_a_server_that_is_ready_is_ended_with_its_block(tmp_path):
    python, guesses = fake_python(tmp_path, SERVER), '{"method": "ngram"}'
    with open_loop.VLLMServer(python, tmp_path, guesses) as vllm:
        assert vllm.process.poll() is None
        assert "--speculative-config" in " ".join(vllm.process.args)
    assert vllm.process.poll() is not None


def test_a_server_that_ends_says_why(tmp_path):
    python = fake_python(tmp_path, "print('no such model')")
    with (
        pytest.raises(ConfigError, match="did not become ready: no such model"),
        open_loop.VLLMServer(python, tmp_path, None),
    ):
        pass


def a_round(ttft, tpot=0.01, seconds=1.0):
    answer = MeasuredRequest(
        number=0, arrived_at=0.0, first_at=ttft, last_at=ttft + tpot, completion_tokens=2
    )
    return Round(seconds=seconds, requests=[answer], itl_ms=None, output_hash="")


def test_figures_are_ours_over_theirs_in_the_same_round():
    load, subject = Load(rate=0.5), Subject(model="m")
    rounds = {
        "vllm": [a_round(0.4), a_round(0.8)],
        "specserve": [a_round(0.2, seconds=0.5), a_round(0.2, tpot=0.02, seconds=0.5)],
    }
    runs = [
        Run(subject=name, workload="mixed", load=load, rounds=each) for name, each in rounds.items()
    ]
    subjects, about = dict.fromkeys(rounds, subject), {"mixed": {"about": ""}}
    result = Result(kind="load", machine={}, subjects=subjects, workloads=about, runs=runs)
    ttft, tpot, *others, goodput = open_loop.compared(runs[1], runs[0], Goals())
    assert ttft.startswith("0.38 (0.25-0.50)")
    assert tpot.startswith("1.50 (1.00-2.00)")
    assert [words.split()[0] for words in others] == [
        "0.38",
        "0.39",
    ]  # (0.21 / 0.41 + 0.22 / 0.81) / 2
    assert goodput.startswith("2.00 (2.00-2.00)")
    assert "| mixed | 0.5/s, Poisson | 0.38 " in open_loop.table(result)


def test_rates_are_shares_of_what_the_slower_one_answers(monkeypatch):
    class Runnable:
        def __init__(self, seconds):
            self.seconds, self.loads = seconds, []

        def check(self, ask):
            pass

        def run(self, asked, load):
            self.loads.append(load.rate)
            return a_round(0.1, seconds=self.seconds)

    both = {"vllm": Runnable(0.5), "specserve": Runnable(0.25)}
    contenders = [Contender(name, Subject(model="m"), r) for name, r in both.items()]
    parser = ArgumentParser()
    open_loop.add_arguments(parser)
    args = parser.parse_args(["--vllm=python", "--rounds=2", "--shares=0.5,0.8"])
    result = open_loop.measured(contenders, [workload("questions", 1, 0)], args)
    assert {run.load.rate for run in result.runs} == {1.0, 1.6}
    assert result.machine["capacity"] == {"vllm": 2.0, "specserve": 4.0}
    assert both["vllm"].loads == [None] * 2 + [1.0, 1.6] * 3


def test_a_python_without_vllm_is_refused(capsys):
    with pytest.raises(ConfigError, match="--vllm nothing: not an executable file"):
        main(["open-loop", "--vllm=nothing"])
