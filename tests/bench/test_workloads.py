"""Workloads: made from the seed, of text that the demo pair was not trained on."""

import pytest

from specserve.errors import ConfigError
from specserve_bench.demo import held_out
from specserve_bench.demo.corpus import EVALUATION_FILES, PURPOSE
from specserve_bench.demo.held_out import questions, source_files
from specserve_bench.workloads import IDENTIFIER, NUM_TURNS, WORKLOADS, edited, workload

HELD_OUT = "\n\n".join(source_files().values())


def text_of(ask):
    if isinstance(ask.prompt, str):
        return ask.prompt
    return "".join(f"<{m['role']}>{m['content']}" for m in ask.prompt)


def test_the_committed_files_are_those_that_training_leaves_out():
    assert set(source_files()) == {name.replace("/", ".") for name in EVALUATION_FILES}


def test_the_committed_questions_are_phrased_as_training_never_does():
    beginnings = {p.split("{}")[0] for p in PURPOSE.training}
    for q in questions():
        asked = q.question.split(q.symbol)
        assert len(asked) >= 2 and asked[0] not in beginnings - {""}
        assert any(p.format(q.symbol) == q.question for p in PURPOSE.held_out)


@pytest.mark.slow
def test_without_the_committed_files_there_are_those_of_the_running_python(tmp_path, monkeypatch):
    names = list(source_files())
    monkeypatch.setattr(held_out, "COMMITTED", tmp_path)
    assert list(source_files()) == names and all(source_files().values())
    (q,) = [q for q in questions() if q.symbol == "shutil.copytree"]
    assert q.first_sentence.startswith("Recursively copy") and "shutil.copytree" in q.question
    assert len(workload("mixed", 4, seed=0).asks) == 4


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_its_name_its_size_and_its_seed(name):
    first, again = (workload(name, 12, seed=5) for _ in range(2))
    assert first == again
    assert len(first.asks) == 12
    assert [a.prompt for a in first.asks] != [a.prompt for a in workload(name, 12, seed=6).asks]
    assert len({ask.seed for ask in first.asks}) == 12
    told = first.described()
    assert (told["requests"], told["about"], told["seed"]) == (12, first.about, 5)
    assert told["hash"] != workload(name, 12, seed=6).described()["hash"]


def test_a_temperature_goes_for_every_request():
    asks = workload("random", 3, 0).asks
    assert {ask.temperature for ask in asks} == {2.0}
    assert {ask.temperature for ask in workload("random", 3, 0, temperature=0.5).asks} == {0.5}


def test_source_to_go_on_with_comes_from_the_held_out_files():
    for ask in workload("completion", 30, 1).asks:
        assert ask.prompt in HELD_OUT and ask.prompt.endswith("\n")


def test_an_agent_repeats_most_of_its_last_request():
    asks = workload("agent", 2 * NUM_TURNS, 0).asks
    overlaps = []
    for number, ask in enumerate(asks):
        if number % NUM_TURNS:
            before, now = text_of(asks[number - 1]), text_of(ask)
            assert now.startswith(before)
            overlaps.append(len(before) / len(now))
    assert min(overlaps) >= 0.70 and max(overlaps) <= 0.95


def test_a_prediction_is_the_text_with_another_name_for_every_20th_identifier_alone():
    text = "\n".join(f"def f{n}(x_{n}, 7): return _{n} + 'ü'" for n in range(30))
    before, after = IDENTIFIER.findall(text), IDENTIFIER.findall(edited(text))
    assert len(before) == len(after) == 150
    changed = [n for n, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b]
    assert changed == [20, 40, 60, 80, 100, 120, 140]
    assert IDENTIFIER.split(edited(text)) == IDENTIFIER.split(text)


def test_what_was_asked_once_before_has_other_seeds_than_any_workload():
    asked = workload("questions", 12, 0)
    before = asked.once_before
    assert [a[:3] for a in before.asks] == [a[:3] for a in asked.asks]
    assert len({a.seed for a in before.asks}) == 12
    assert max(a.seed for a in asked.asks) < 2**32 <= min(a.seed for a in before.asks)


def test_every_fourth_request_of_the_mixed_workload_is_long():
    lengths = [len(text_of(ask)) for ask in workload("mixed", 8, 0).asks]
    assert all((length > 2000) == (n % 4 == 3) for n, length in enumerate(lengths))


def test_an_unknown_workload_is_named_with_those_that_exist():
    with pytest.raises(ConfigError, match="chess: the workloads are questions, completion"):
        workload("chess", 1, 0)
