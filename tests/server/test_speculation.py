"""What a request may ask of speculation, and what answers, /metrics and /v1/speculation tell."""

import json
import re
from pathlib import Path

import pytest

from specserve.api.input_processor import load_text_files
from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve.exchange.messages import SourceStats, Stats
from specserve.server.metrics import Metrics
from specserve_drafters import Draft
from tests.engine.clock import Clock
from tests.server import asking
from tests.server.asking import (
    CHAT,
    COMPLETIONS,
    said,
    saying,
    streamed,
    streaming,
    whole,
)
from tests.server.in_process import server_threads
from tests.server.server_process import ServerProcess

MANUAL = (Path(__file__).parents[2] / "docs/server.md").read_text()
DETAILED = {"return_speculation_details": True}
CODE = "def read_lines(path):\n    with open(path) as file:\n        return"
LONG = 60  # tokens
SOURCES = ("ngram", "model")  # those that guess without a grammar
ALL = (*SOURCES, "grammar", "prediction")
REFUSED = {
    "a source that is not there": ({"sources": ["ngram", "suffix"]}, "(known: ngram, model"),
    "a source that is no list": ({"sources": "ngram"}, "Expected an array or null"),
    "fewer guesses than none": ({"max_nodes": -1}, ">= 0"),
    "a limit in words": ({"max_depth": "deep"}, "Expected an integer or null"),
    "a misspelt limit": ({"max_node": 1}, "Did you mean max_nodes?"),
    "a yes": (True, "Expected an object or null"),
}


@pytest.fixture(scope="module")
def server():
    """A server of the demo pair, whose texts repeat themselves, with all sources of guesses."""
    settings = {"drafter.model": str(DEMO_DRAFT), "speculation.max_nodes": 16}
    settings |= {"scheduler.tpot_ms": 50, "server.min_tpot_ms": 20}
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch, target=lambda rows: 0.01 + 0.0001 * rows)
        with server_threads(DEMO_TARGET, **settings) as server:
            yield server


@pytest.fixture(scope="module")
def decode():
    return load_text_files(DEMO_TARGET).tokenizer.decode


def completion_body(**asked):
    return asking.completion_body(prompt=CODE) | {"max_tokens": LONG} | asked


def chat_body(**asked):
    messages = [{"role": "user", "content": CODE}]
    return asking.chat_body(messages=messages, max_tokens=LONG, **asked)


BODIES = {CHAT: chat_body, COMPLETIONS: completion_body}
each_route = pytest.mark.parametrize("path", BODIES)


@pytest.mark.parametrize(("asked", "words"), REFUSED.values(), ids=REFUSED)
@each_route
def test_a_wrong_wish_is_refused_by_name(server, path, asked, words):
    body = BODIES[path](speculation=asked)
    error = server.post(path, body).body["error"]
    assert words in error["message"] and error["param"].partition(".")[0] == "speculation"


@pytest.mark.parametrize("asked", [{"tpot_ms": 0}, {"ttft_ms": -1}, {"itl_ms": 5}, 5], ids=str)
@each_route
def test_a_wrong_target_is_refused_by_name(server, path, asked):
    answer = server.post(path, BODIES[path](slo=asked))
    assert answer.status == 400 and answer.body["error"]["param"].startswith("slo")


@each_route
def test_no_client_has_a_tighter_target_than_the_operator_lets_it(server, path):
    error = server.post(path, BODIES[path](slo={"tpot_ms": 19.9})).body["error"]
    assert error["param"] == "slo.tpot_ms"
    assert (
        "the minimum at this server is 20" in error["message"]
        and "server.min_tpot_ms" in error["message"]
    )
    for slo in ({"tpot_ms": 20}, {"ttft_ms": 0.001}, {}):
        assert server.post(path, BODIES[path](slo=slo)).status == 200


def test_null_in_a_wish_or_target_is_the_same_as_leaving_it_out(server):
    wish = {"enabled": None, "sources": None, "max_nodes": 5, "max_depth": None}
    answer = server.post(CHAT, chat_body(speculation=wish, slo={"ttft_ms": 9, "tpot_ms": None}))
    told = answer.body["metrics"]["speculative_decoding"]
    assert told["num_spec_tokens"] == 5 and told["num_draft_tokens"] > 0


def test_an_unknown_field_in_a_target_is_reported_the_nearest_name(server):
    error = server.post(CHAT, chat_body(slo={"tpot_m": 50})).body["error"]
    assert (error["param"], error["code"]) == ("slo.tpot_m", "unknown_parameter")
    assert "Did you mean tpot_ms?" in error["message"]


ASKED = {
    "off": {"speculation": {"enabled": False}},
    "no source": {"speculation": {"sources": []}},
    "one source": {"speculation": {"sources": ["ngram"]}},
    "few": {"speculation": {"max_nodes": 3, "max_depth": 1}},
    "more than the server allows": {"speculation": {"max_nodes": 10**6}},
    "targets": {"slo": {"ttft_ms": 1, "tpot_ms": 20}},
    "details": DETAILED,
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_the_text_is_the_same_whatever_is_asked(server, asked):
    for path, body in ((CHAT, chat_body(n=2)), (COMPLETIONS, completion_body(n=2))):
        plain = body | {"temperature": 1, "seed": 5}
        want = whole(server, path, plain)
        assert whole(server, path, plain | asked) == want
        assert streamed(server, path, plain | asked) == want


LIMITS = {
    "nothing": (None, 16, 16),
    "off": ({"enabled": False, "max_nodes": 5}, 0, 0),
    "no source": ({"sources": []}, 0, 0),
    "no depth": ({"max_depth": 0}, 0, 0),
    "fewer": ({"max_nodes": 5}, 5, 5),
    "more": ({"max_nodes": 99}, 16, 16),
    "shallow": ({"max_depth": 3}, 16, 3),
    "deeper than there are guesses": ({"max_nodes": 5, "max_depth": 9}, 5, 5),
}


@pytest.mark.parametrize(("asked", "limit", "depth"), LIMITS.values(), ids=LIMITS)
def test_an_answer_reports_the_limits_that_held(server, asked, limit, depth):
    answer = server.post(CHAT, chat_body(speculation=asked)).body
    told = answer["metrics"]["speculative_decoding"]
    assert (told["num_spec_tokens"], told["max_depth"]) == (limit, depth)


def test_an_answer_counts_draft_tokens_by_source_over_all_choices(server):
    one = counted(server, completion_body())
    told = counted(server, completion_body(prompt=[CODE] * 3))
    assert told["sources"].keys() == set(SOURCES) and one["num_accepted_draft_tokens"] > 0
    for of_all, key in (
        ("num_draft_tokens", "verified"),
        ("num_accepted_draft_tokens", "accepted"),
    ):
        each = [counts[key] for counts in told["sources"].values()]
        assert max(each) <= told[of_all] <= sum(each)  # one of both sources counts for each
    assert all(c["proposed"] >= c["verified"] for c in told["sources"].values())
    ngram = [answer["sources"]["ngram"]["accepted"] for answer in (one, told)]
    assert ngram[1] > ngram[0] > 0


def counted(server, body):
    return server.post(COMPLETIONS, body).body["metrics"]["speculative_decoding"]


WISHES = {
    "off": ({"enabled": False}, set(), 0, 0),
    "no source": ({"sources": []}, set(), 0, 0),
    "one source": ({"sources": ["ngram"]}, {"ngram"}, 16, 16),
    "short": ({"max_depth": 2}, set(SOURCES), 16, 2),
    "few": ({"max_nodes": 3}, set(SOURCES), 3, 3),
}


@pytest.mark.parametrize(("asked", "names", "most", "deepest"), WISHES.values(), ids=WISHES)
def test_draft_tokens_keep_to_what_was_asked(server, asked, names, most, deepest):
    body = completion_body(speculation=asked, **DETAILED)
    answer = server.post(COMPLETIONS, body).body
    told = answer["metrics"]["speculative_decoding"]
    assert told["sources"].keys() <= names and (told["num_draft_tokens"] > 0) == (most > 0)
    for step in answer["choices"][0]["speculation"]["steps"]:
        tree = step["tree"]
        draft = Draft(tree["tokens"], tree["parents"])
        assert len(draft) <= most and max(draft.depths()) <= deepest


def check(steps, text, decode):
    """Each token has the text that is said to be its own, and the sources of its node."""
    begin = 0
    for step in steps:
        check_tree(step)
        for token, end in zip(step["tokens"], step["ends"], strict=True):
            assert decode([token]).startswith(text[begin:end])
            begin = end
    assert begin == len(text)


def check_tree(step):
    tree, above, path = step["tree"], 0, []
    for node in step["tree"]["accepted"]:
        assert tree["parents"][node - 1] == above < node
        above = node
        path.append((tree["tokens"][node - 1], tree["sources"][node - 1]))
    given = [*zip(step["tokens"], step["sources"], strict=True)]
    assert path[: len(given)] == given[: len(path)]
    assert given[len(path) :] == [(token, 0) for token in step["tokens"][len(path) :]]


def test_the_manuals_example_is_one_step():
    examples = re.findall(r"^```json\n(.*?)^```", MANUAL, re.MULTILINE | re.DOTALL)
    [example] = [each for each in examples if '"speculation"' in each]
    [step] = json.loads(f"{{{example}}}")["speculation"]["steps"]
    check_tree(step)


@each_route
def test_every_chunk_reports_where_its_tokens_came_from(server, path, decode):
    body = BODIES[path](n=2, **DETAILED)
    *chunks, _ = server.stream(path, body)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(2):
        told = [c for c in choices if c["index"] == index and "speculation" in c]
        assert all(c["speculation"]["sources"] == list(ALL) for c in told)
        each = [c["speculation"]["steps"] for c in told]
        assert [len(steps) for steps in each] == [1] * len(told)
        check([step for steps in each for step in steps], "".join(map(said, told)), decode)
        assert any(step["tree"]["accepted"] for [step] in each)


def test_a_step_without_text_is_reported_with_the_chunk_that_it_gets(server):
    body = completion_body(stop=["\0"], **DETAILED)
    [(text, _, _)], _ = whole(server, COMPLETIONS, body)
    *chunks, _ = server.stream(COMPLETIONS, body | {"stop": [text + "\0"]})  # all of it is held
    told = [c for chunk in chunks for c in chunk["choices"] if "speculation" in c]
    steps = [step for c in told for step in c["speculation"]["steps"]]
    assert [said(c) for c in told] == [""] * (len(told) - 1) + [text]
    assert sum(len(step["tokens"]) for step in steps) == LONG
    assert [step["ends"][-1] for step in steps] == [0] * (len(steps) - 1) + [len(text)]


def test_a_whole_answer_reports_every_step(server, decode):
    answer = server.post(COMPLETIONS, completion_body(n=2, **DETAILED)).body
    for choice in answer["choices"]:
        assert choice["speculation"]["sources"] == list(ALL)
        check(choice["speculation"]["steps"], choice["text"], decode)


def test_tokens_after_a_stop_string_are_not_reported(server, decode):
    [(text, _, _)], _ = whole(server, COMPLETIONS, completion_body())
    body = completion_body(stop=text[9:11], **DETAILED)
    answer = server.post(COMPLETIONS, body).body
    [choice] = answer["choices"]
    check(choice["speculation"]["steps"], choice["text"], decode)
    count = sum(len(step["tokens"]) for step in choice["speculation"]["steps"])
    assert count == answer["usage"]["completion_tokens"] < LONG


def test_who_did_not_ask_is_reported_nothing_of_steps(server):
    assert "speculation" not in server.post(COMPLETIONS, completion_body()).body["choices"][0]
    *chunks, _ = server.stream(COMPLETIONS, completion_body())
    assert not any("speculation" in choice for chunk in chunks for choice in chunk["choices"])


def test_the_state_is_reported_while_requests_run_and_while_none_does(server):
    server.post(COMPLETIONS, completion_body())
    state = server.get("/v1/speculation").body
    assert (state["max_nodes"], state["sources"]) == (16, list(ALL))
    assert state["max_step_nodes"] > 0 and state["object"] == "speculation"
    assert state["slo"] == {"ttft_ms": None, "tpot_ms": 50, "min_tpot_ms": 20}
    known = [step for step in state["costs"]["target"]["steps"] if step["is_known"]]
    assert known and all(step["seconds"] > 0 for step in known)
    assert state["costs"]["draft"]["slowdown"] >= 1
    kinds = [kind for source in SOURCES for kind in state["calibration"][source]]
    assert all(kind["tries"] > 0 <= kind["right"] <= 1 <= kind["depth"] for kind in kinds)
    plan = state["plan"]
    assert plan["rows"] == plan["roots"] + plan["prompt_rows"] + plan["guesses"]
    assert plan["tokens"] >= plan["roots"] == 1 and plan["seconds"] > 0
    with streaming(server, saying(400)):
        assert server.get("/v1/speculation").body.keys() == state.keys()


def test_steps_without_draft_tokens_are_reported_as_measured(server):
    server.post(COMPLETIONS, completion_body(speculation={"enabled": False}))
    plain = server.get("/v1/speculation").body["plain_steps"]
    assert all(step["seconds"] == pytest.approx(0.0101) for step in plain)  # the clock's one row
    assert sum(step["steps"] for step in plain) > 10
    assert [step["context"] for step in plain] == sorted(step["context"] for step in plain)


@pytest.mark.usefixtures("server")  # whose clock is that of all engines
def test_a_key_is_warned_about_its_own_requests_alone(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("first\nsecond\n")
    first, second = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))
    monkeypatch.setattr(ServerProcess, "headers", first)  # of whoever waits until it is ready
    with server_threads(DEMO_TARGET, **{"server.api_key_file": str(tmp_path / "keys")}) as server:
        assert server.post(COMPLETIONS, completion_body(), headers=second).status == 200
        told = [server.get("/v1/speculation", headers=key).body for key in (first, second)]
    assert told[0]["calibration"] == {} and "ngram" in told[1]["calibration"]
    assert told[0]["plan"] is None and told[1]["plan"] is not None
    assert told[0].keys() == told[1].keys() and "tenant" not in told[0]


def test_the_card_names_the_sources(server):
    [card] = server.get("/v1/models").body["data"]
    assert card["sources"] == list(ALL)


def test_series_by_source_count_what_answers_report(server):
    server.wait_until_idle()  # the stream of a test before this one may have a step left
    names = [f"specserve_source_{key}_tokens_total" for key in ("proposed", "verified")]
    before = [server.metric(name, source="ngram") for name in names]
    told = counted(server, completion_body())["sources"]["ngram"]
    moved = [server.metric(n, source="ngram") - m for n, m in zip(names, before, strict=True)]
    assert moved == [told["proposed"], told["verified"]]
    assert server.metric("specserve_source_seconds_total", source="model") > 0


STATS = {
    "ngram": SourceStats(9, 7, 4, [3, 1], 0.5, 0.25),
    "model": SourceStats(4, 4, 2, [2], 1.5, -0.5, errors=3),
}


def test_series_by_source_are_the_sums_of_the_last_report():
    metrics = Metrics("tiny", 4)
    assert metrics.text()  # of an engine that has told nothing yet
    metrics.on_stats(Stats(sources=STATS))
    later = SourceStats(10, 8, 6, [3, 2, 1], 0.75, 0.5)
    metrics.on_stats(Stats(sources=STATS | {"ngram": later}))
    names = ("proposed_tokens_total", "verified_tokens_total", "seconds_total", "saved_seconds")
    for source, sums in (("ngram", [10, 8, 0.75, 0.5]), ("model", [4, 4, 1.5, -0.5])):
        assert [value(metrics, f"source_{name}", source) for name in names] == sums
    name = "source_accepted_tokens_total"
    accepted = [value(metrics, name, "ngram", position=str(d)) for d in range(3)]
    assert accepted == [3, 2, 1]
    errors = [value(metrics, "drafter_errors_total", source) for source in STATS]
    assert errors == [0, 3]


def test_series_by_source_are_there_from_the_start():
    metrics = Metrics("tiny", 4)
    metrics.on_stats(Stats(sources={"ngram": SourceStats()}))
    names = ("proposed_tokens_total", "verified_tokens_total", "seconds_total", "saved_seconds")
    assert [value(metrics, f"source_{name}", "ngram") for name in names] == [0] * 4
    depths = [str(depth) for depth in range(5)]
    name = "source_accepted_tokens_total"
    accepted = [value(metrics, name, "ngram", position=depth) for depth in depths]
    assert accepted == [0, 0, 0, 0, None]


def value(metrics, name, source, **labels):
    labels |= {"model_name": "tiny", "engine": "0", "source": source}
    return metrics.registry.get_sample_value(f"specserve_{name}", labels)
