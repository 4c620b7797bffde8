"""Requests over HTTP, to a server that sends scripted events."""

import json
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specserve.cli.command import main
from specserve_bench import results
from specserve_bench.hosted import Hosted
from specserve_bench.results import Load
from specserve_bench.workloads import UNLEARNT, Ask, Workload, edited, workload

GAP = 0.05


def said(text=None, reason=None, **rest):
    choices = [] if text is None else [{"delta": {"content": text}, "finish_reason": reason}]
    return {"choices": choices, **rest}


USAGE = {"usage": {"prompt_tokens": 5, "completion_tokens": 9}}
TOLD = {
    "num_spec_steps": 4,
    "num_draft_tokens": 12,
    "acceptance_histogram": [2, 1, 1],
    "mean_acceptance_length": 1.75,
}


def told(**changed):
    return said(metrics={"speculative_decoding": TOLD | changed})


# Nine tokens in three events of text, the first of which comes with an empty one before it.
PLAIN = [said(""), said("a"), said("bc"), said("d", "stop"), said(**USAGE)]


class Scripted(BaseHTTPRequestHandler):
    """Serves `server.events`, `server.gap` seconds apart, and `server.series` as its metrics."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        if self.path == "/v1/models":
            self.whole(json.dumps({"data": [{"id": "m"} | self.server.card]}).encode())
        elif self.path == "/metrics" and self.server.series:
            self.whole(self.server.series.pop(0).encode())
        else:
            self.send_error(404)

    def whole(self, body, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, body))
            self.server.keys.append(self.headers.get("Authorization"))
            self.server.live += 1
            self.server.most = max(self.server.most, self.server.live)
        if self.server.refuses:
            self.whole(json.dumps({"error": {"message": "too many"}}).encode(), 429)
        else:
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            for event in self.server.events:
                time.sleep(self.server.gap)
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if self.server.is_done:
                self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True
        with self.server.lock:
            self.server.live -= 1


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        server.events, server.series, server.asked, server.keys = PLAIN, [], [], []
        server.lock, server.live, server.most = threading.Lock(), 0, 0
        server.is_done, server.refuses, server.card, server.gap = True, False, {}, 0.0
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def paced(server):
    """Events come GAP seconds apart."""
    server.gap = GAP
    return server


def asked(count, prompt=({"role": "user", "content": "?"},)):
    return Workload("test", "a test", 0, [Ask(prompt, 9, 0.5, seed) for seed in range(count)])


def test_a_last_token_without_text_counts_until_it_came(paced):
    paced.events = [said("a"), said("b"), said("", "stop"), said(**USAGE)]
    [answer] = run(paced).requests
    assert answer.num_events == 2
    assert answer.last_at - answer.first_at == pytest.approx(2 * GAP, abs=0.04)


def test_an_answer_without_any_text_ends_when_it_begins(paced):
    usage = {"prompt_tokens": 5, "completion_tokens": 1}
    paced.events = [said(""), said("", "stop"), said(usage=usage)]
    [answer] = run(paced).requests
    assert answer.error is None and answer.tpot_ms is None
    assert answer.ttft_ms == answer.end_to_end_ms == pytest.approx(2e3 * GAP, abs=60)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_are_text_that_is_waited_for(paced, field):
    thought = {"choices": [{"delta": {field: "hm"}}]}
    paced.events = [thought, said("a", "stop"), said(**USAGE)]
    [answer] = run(paced).requests
    assert answer.num_events == 2 and answer.ttft_ms < 2e3 * GAP


def run(server, load=None, count=1, **others):
    return Hosted(server.url).run(asked(count, **others), load or Load(concurrency=1))


def test_tokens_are_counted_by_usage_and_events_by_their_text(paced):
    [answer] = run(paced).requests
    assert (answer.prompt_tokens, answer.completion_tokens, answer.num_events) == (5, 9, 3)
    spread = answer.last_at - answer.first_at
    assert answer.tpot_ms == pytest.approx(1e3 * spread / 8)
    assert spread == pytest.approx(2 * GAP, abs=0.04)
    assert answer.ttft_ms == pytest.approx(2e3 * GAP, abs=60)
    assert answer.error is None


def test_a_conversation_and_a_text_go_where_they_belong(server):
    run(server)
    server.events = [{"choices": [{"text": "x", "finish_reason": "length"}]}, said(**USAGE)]
    text = run(server, prompt="def f")
    assert text.requests[0].num_events == 1
    (chat, first), (completions, second) = server.asked
    assert (chat, completions) == ("/v1/chat/completions", "/v1/completions")
    assert first["messages"] == [{"role": "user", "content": "?"}] and "prompt" not in first
    assert second["prompt"] == "def f" and "messages" not in second
    asked_for = {key: second[key] for key in ("model", "max_tokens", "temperature", "seed")}
    assert asked_for == {"model": "m", "max_tokens": 9, "temperature": 0.5, "seed": 0}
    assert second["stream"] is True and second["stream_options"] == {"include_usage": True}


LONG = " ".join(f"name{n}" for n in range(25))


def test_an_edit_is_recorded_before_it_is_measured_and_sent_as_the_prediction(server, tmp_path):
    server.card = {"drafter": "auto"}
    server.events = [{"choices": [{"text": LONG, "finish_reason": "stop"}]}, said(**USAGE)]
    args = ["--url", server.url, "--workloads=edit", "--requests=2", "--rounds=1"]
    assert main(["bench", "latency", *args, f"--out={tmp_path / 'r.json'}"]) == 0
    bodies = [body for path, body in server.asked if path == "/v1/completions"]
    recorded, warm_up, measured = bodies[:2], bodies[2:3], bodies[3:]
    assert all(b["speculation"]["enabled"] is b["speculation"]["learn"] is False for b in recorded)
    assert not any("prediction" in body for body in recorded)
    assert [b["prompt"] for b in measured] == [b["prompt"] for b in recorded]
    assert [b["seed"] for b in measured] == [b["seed"] for b in recorded]
    sent = {"type": "content", "content": edited(LONG)}
    assert all(body["prediction"] == sent for body in [*warm_up, *measured])
    assert not any("speculation" in body for body in measured)
    [run] = results.read(tmp_path / "r.json").runs
    assert [len(round.requests) for round in run.rounds] == [2]


def test_a_text_that_cannot_be_recorded_ends_the_measurement(server, capsys):
    server.refuses = True
    assert main(["bench", "latency", "--url", server.url, "--workloads=edit"]) == 1
    assert "its text could not be recorded: too many" in capsys.readouterr().err


@pytest.mark.parametrize(("card", "has_field"), [({}, False), ({"drafter": "auto"}, True)])
def test_only_specserve_is_reported_which_draft_tokens_a_request_may_have(server, card, has_field):
    server.card = card
    Hosted(server.url).run(asked(1).guessed(UNLEARNT), Load(concurrency=1))
    [(_, body)] = server.asked
    assert ("speculation" in body) is has_field


def test_a_warm_server_is_asked_once_before_with_other_seeds_and_does_not_learn_the_rest(
    server, tmp_path
):
    server.card = {"drafter": "auto"}
    args = ["--url", server.url, "--workloads=questions", "--requests=2", "--rounds=2", "--warm"]
    assert main(["bench", "latency", *args, f"--out={tmp_path / 'r.json'}"]) == 0
    seeds = [ask.seed for ask in workload("questions", 2, 0).asks]
    others = [seed + 2**32 for seed in seeds]
    bodies = [body for _, body in server.asked][1:]  # one warms up
    assert [body["seed"] for body in bodies] == [*others, *seeds] * 2
    assert [body.get("speculation", {}).get("learn") for body in bodies] == [None] * 2 + [
        False
    ] * 2 + [None] * 2 + [False] * 2
    [run] = results.read(tmp_path / "r.json").runs
    assert [len(round.requests) for round in run.rounds] == [2, 2]


def test_a_concurrency_is_kept_and_not_exceeded(paced):
    round = run(paced, Load(concurrency=2), count=5)
    assert paced.most == 2
    # A request is due when there is room for it, so that none has waited.
    assert all(a.ttft_ms < 4e3 * GAP for a in round.requests)


def test_at_a_rate_requests_do_not_wait_for_each_other(paced):
    round = run(paced, Load(rate=100.0), count=5)
    assert paced.most >= 4
    assert [a.arrived_at for a in round.requests] == sorted(a.arrived_at for a in round.requests)
    assert round.requests[0].arrived_at == 0.0


def test_statistics_of_specserve_are_taken_from_its_last_chunk(server):
    server.events = [*PLAIN[:-1], said(**USAGE, metrics={"speculative_decoding": TOLD})]
    speculation = run(server, count=2).speculation
    assert (speculation.steps, speculation.tokens, speculation.drafted) == (8, 14, 24)
    assert speculation.accepted == [4, 2, 2]


SERIES = """
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}
# TYPE specserve_step_seconds histogram
specserve_step_seconds_bucket{{le="+Inf"}} 3
specserve_step_seconds_sum {seconds}
"""


def test_series_of_vllm_report_the_rest_as_the_growth_during_the_round(server):
    before = {"drafts": 10, "drafted": 40, "accepted": 20, "first": 15, "second": 5, "seconds": 2.5}
    after = {"drafts": 20, "drafted": 80, "accepted": 31, "first": 22, "second": 9, "seconds": 4}
    server.series = [SERIES.format(**before), SERIES.format(**after)]
    round = run(server)
    s = round.speculation
    assert (s.steps, s.tokens, s.drafted, s.accepted) == (10, 21, 40, [3, 3, 4])
    assert (round.step_seconds, round.draft_seconds) == (1.5, None)


def test_a_server_is_measured_from_the_command_line(paced, tmp_path, capsys):
    key = tmp_path / "key"
    key.write_text("secret\n")
    args = ["--url", paced.url, "--model=m", "--api-key-file", key, "--out", tmp_path / "r.json"]
    args += ["--workloads=questions", "--requests=2", "--rounds=1", "--temperature=0.25"]
    args += ["--seed=7", "--goal-ttft-ms=1e5", "--goal-tpot-ms=0.5"]
    assert main(list(map(str, ["bench", "latency", *args]))) == 0
    result = results.read(tmp_path / "r.json")
    assert result.goals == results.Goals(ttft_ms=1e5, tpot_ms=0.5)
    [subject] = result.subjects.values()
    assert (subject.url, subject.model) == (paced.url, "m")
    [[round]] = [run.rounds for run in result.runs]
    assert results.goodput(round, result.goals) == 0.0 < results.goodput(round, results.Goals())
    wanted = workload("questions", 2, 7).asks
    heard = [(b["messages"][0]["content"], b["seed"], b["temperature"]) for _, b in paced.asked]
    assert heard[-2:] == [(a.prompt[0]["content"], a.seed, 0.25) for a in wanted]
    assert set(paced.keys) == {"Bearer secret"}
    assert "goodput: TTFT at most 100000 ms, TPOT at most 0.5 ms" in capsys.readouterr().out


def test_what_a_server_refuses_is_shown_and_no_success(server, capsys):
    server.refuses = True
    args = ["--url", server.url, "--workloads=questions", "--requests=2", "--rounds=2"]
    assert main(["bench", "latency", *args]) == 1
    assert f"4 errors: {server.url}: " in capsys.readouterr().out


def test_a_server_of_a_scaled_demo_is_shown_as_one(server, capsys):
    scaled = [{"source": "small", "like": "qwen3-0.6b"}]
    server.card = {"scaled": scaled, "drafter": "ngram", "max_nodes": 8}
    args = ["--url", server.url, "--workloads=questions", "--requests=1", "--rounds=1"]
    assert main(["bench", "latency", *args]) == 0
    words = "m (scaled demo: small at the cost of qwen3-0.6b) drafter ngram, at most 8 nodes"
    assert f"{server.url}: {words}" in capsys.readouterr().out


def test_statistics_that_make_no_sense_are_no_statistics(server):
    server.events = [*PLAIN[:-1], told(num_spec_steps=0), said(**USAGE)]
    figures = results.figures(run(server), results.Goals())
    assert figures["acceptance_by_depth"] == [] and figures["acceptance_length"] is None
    nan = "# TYPE vllm:spec_decode_num_drafts counter\nvllm:spec_decode_num_drafts_total NaN\n"
    server.events, server.series = PLAIN, [nan, nan]
    assert run(server).speculation is None


def test_an_interrupt_ends_it_however_silent_the_server_is(paced):
    hosted, before = Hosted(paced.url), threading.enumerate()
    paced.events, paced.is_done = [said("a")] * 30, False
    main_thread = threading.main_thread().ident
    timer = threading.Timer(0.2, signal.pthread_kill, [main_thread, signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        hosted.run(asked(3), Load(concurrency=2))
    timer.join()
    assert paced.live == 2, "the answers have ended before the interrupt"
    assert [t for t in threading.enumerate() if t not in before and not t.daemon] == []
    paced.events = []


def test_a_server_without_statistics_is_measured_all_the_same(server):
    round = run(server)
    assert (round.speculation, round.step_seconds) == (None, None)
    assert round.output_hash


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"refuses": True}, "too many"),
        ({"is_done": False}, "broke off"),
        ({"events": [said("a"), {"error": {"message": "out of memory"}}]}, "out of memory"),
        ({"events": [{"choices": 3}]}, "choices"),
        ({"events": PLAIN[:-1]}, "include_usage"),
        ({"events": [said("a"), said(**USAGE)]}, "told no finish_reason"),
        ({"events": [*PLAIN[:-1], said(usage={"completion_tokens": 0})]}, "no token"),
        ({"events": [*PLAIN[:-1], said(usage={"completion_tokens": -7})]}, "completion_tokens"),
        ({"events": [*PLAIN, told(mean_acceptance_length=1e308)]}, "mean_acceptance_length"),
        ({"events": [*PLAIN, told(num_spec_steps=-3)]}, "num_spec_steps"),
    ],
)
def test_a_failure_is_kept_with_its_request(server, changes, complaint):
    vars(server).update(changes)
    round = run(server, count=2)
    assert all(complaint in answer.error for answer in round.requests)
    figures = results.figures(round, results.Goals())
    assert figures["errors"] == 2
    assert [figures[name] for name in ("ttft_ms", "itl_ms", "end_to_end_ms")] == [None] * 3
    assert (figures["tokens_per_s"], figures["goodput"]) == (0.0, 0.0)
