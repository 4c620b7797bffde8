"""Sessions of an agent: what each turn sends, and what is reported of them."""

import json
from argparse import ArgumentParser

import msgspec
import pytest

from specserve.cli.command import main
from specserve.errors import ConfigError
from specserve_bench import agent
from specserve_bench.hosted import Heard, Hosted
from specserve_bench.results import Subject
from specserve_bench.suite import Contender


class Answering(Hosted):
    """Answers each turn with its own words, `seconds` after it was asked."""

    def __init__(self, name, calls, seconds=0.1, fails_at=None):
        self.name, self.calls, self.seconds, self.fails_at = name, calls, seconds, fails_at
        self.prompts = []

    def series(self):
        return {}

    def ask(self, number, ask, due_at, started_at):
        self.calls.append((number, self.name))
        self.prompts.append(ask.prompt)
        heard = Heard(number, float(number))
        if number == self.fails_at:
            heard.error = "too long"
            return heard
        begin = number + (10 * self.seconds if number == 0 else self.seconds)
        delta = {"content": f"{self.name} {number}"}
        usage = {"prompt_tokens": 1000 + number, "completion_tokens": 3}
        events = [
            {"choices": [{"delta": delta}]},
            {"choices": [{"delta": {"content": "."}, "finish_reason": "stop"}], "usage": usage},
        ]
        heard.data = [
            (begin + 0.02 * n, json.dumps(event).encode()) for n, event in enumerate(events)
        ]
        heard.data.append((begin + 0.02, b"[DONE]"))
        return heard


def arguments(*argv):
    parser = ArgumentParser()
    agent.add_arguments(parser)
    args = parser.parse_args(["http://one", *argv])
    args.command = "specserve bench agent"
    return args


def measured(*servers, turns=4):
    contenders = [Contender(s.name, Subject(model="m"), s) for s in servers]
    return agent.measure(contenders, arguments("--contexts=200", f"--turns={turns}"))


def test_a_turn_repeats_all_before_it_with_the_servers_own_answers():
    one, two = Answering("one", []), Answering("two", [])
    measured(one, two)
    for server in (one, two):
        last = server.prompts[-1]
        assert [len(prompt) for prompt in server.prompts] == [1, 3, 5, 7]
        assert all(prompt == last[: len(prompt)] for prompt in server.prompts)
        assert [m["content"] for m in last[1::2]] == [f"{server.name} {n}." for n in range(3)]
    assert one.prompts[-1][::2] == two.prompts[-1][::2], "both are asked the same"
    assert len(one.prompts[0][0]["content"]) >= 4 * 200


def test_another_server_begins_each_turn():
    calls = []
    measured(Answering("one", calls), Answering("two", calls), turns=2)
    assert calls == [(0, "one"), (0, "two"), (1, "two"), (1, "one")]


def test_a_failed_request_ends_the_session_of_its_server_alone():
    calls = []
    result = measured(Answering("one", calls, fails_at=1), Answering("two", calls))
    each = {run.subject: run.rounds[0].requests for run in result.runs}
    assert [request.error for request in each["one"]] == [None, "too long"]
    assert [request.error for request in each["two"]] == [None] * 4


def test_first_and_later_turns_are_reported_apart_and_compared_with_the_first_server():
    table = agent.table(measured(Answering("one", []), Answering("two", [], seconds=0.05)))
    row = {line.split(" | ")[1]: line for line in table.splitlines()[2:]}
    assert "| 1,000 to 1,003 | 1,000.0 | 100.0 (100.0) | 1.00 | 10.0 | 1.00 |" in row["one"]
    assert "| 500.0 | 50.0 (50.0) | 0.50 | 10.0 | 1.00 |" in row["two"]


@pytest.mark.parametrize("fails_at", [None, 2])
def test_the_command_prints_a_table_and_fails_with_a_request(monkeypatch, capsys, fails_at):
    server = Answering("one", [], fails_at=fails_at)
    contender = Contender("one", Subject(model="m"), server)
    monkeypatch.setattr(agent.suite, "hosted", lambda *_: contender)
    code = agent.main(arguments("--contexts=200", "--turns=3"))
    told = capsys.readouterr()
    assert "| 200 tokens | one |" in told.out
    assert (code, "error: too long" in told.err) == (int(fails_at is not None),) * 2


def test_a_written_result_is_shown_as_the_same_table(tmp_path, capsys):
    result, file = measured(Answering("one", [])), tmp_path / "r.json"
    file.write_bytes(msgspec.json.encode(result))
    for flags in ([], ["--markdown"]):
        assert main(["bench", "show", str(file), *flags]) == 0
        assert capsys.readouterr().out.strip() == agent.table(result)


def test_servers_have_names_and_a_url_is_its_own_name(monkeypatch, capsys):
    asked = []

    def hosted(name, url, *_):
        asked.append((name, url))
        return Contender(name, Subject(url=url, model=f"a/{name}.gguf", drafter="auto"), one)

    one = Answering("one", [])
    monkeypatch.setattr(agent.suite, "hosted", hosted)
    assert agent.main(arguments("peer=http://two?a=b", "--contexts=200", "--turns=1")) == 0
    assert asked == [("http://one", "http://one"), ("peer", "http://two?a=b")]
    assert "| 200 tokens | peer |" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="two servers have the same name"):
        agent.main(arguments("x=http://two", "x=http://three"))


def test_a_caption_names_models_file_and_drafters():
    result = measured(Answering("one", []))
    about = {"one": Subject(model="a/b.gguf", drafter="auto"), "two": Subject(model="a/b.gguf")}
    words = agent.caption({"r.json": msgspec.structs.replace(result, subjects=about)})
    words = " ".join(words.split())
    assert words.startswith("- b was measured") and "(`r.json`). Drafters: one: auto." in words
