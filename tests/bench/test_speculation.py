"""The cells of `figures speculation`: how they are measured in parts, kept, and held to bounds."""

from types import SimpleNamespace

import pytest

from specserve.errors import ConfigError
from specserve_bench.figures import speculation
from specserve_bench.figures.__main__ import main
from specserve_bench.figures.demo import SETTINGS
from specserve_bench.figures.speculation import HOT, Cell, Place
from specserve_bench.results import Round, Speculation


def a_cell(name="mixed", concurrency=1, temperature=None, pair="demo", is_same=True, **tpot_ms):
    tpot_ms = {key.replace("_", ":"): values for key, values in tpot_ms.items()}
    others = {"requests": 1, "acceptance_length": {}, "guesses": {}, "machine": {}}
    place = {"pair": pair, "workload": name, "concurrency": concurrency, "temperature": temperature}
    return Cell(**place, tpot_ms=tpot_ms, is_same=is_same, **others)


def test_the_best_setting_is_that_with_the_lowest_median_whatever_a_round_says():
    cell = a_cell(off=[9, 9, 9], ngram_8=[1, 5, 5], model_8=[4, 4, 4], auto=[2, 2, 2])
    assert cell.best == "model:8"
    assert cell.over("model:8").median == 0.5


@pytest.mark.parametrize(("high", "is_marked"), [(1.04, False), (1.06, True)])
def test_an_interval_that_does_not_end_below_the_bound_is_marked(high, is_marked):
    steady = [high] * 7
    row = speculation.row(a_cell(off=[10.0] * 7, model_8=[1.0] * 7, auto=steady))
    assert row[-2] == f"{high:.2f} ({high:.2f}-{high:.2f}) [{high:.2f}-{high:.2f}]" + (
        " !" if is_marked else ""
    )
    assert not row[-1].endswith("!")  # over off
    once = speculation.row(a_cell(off=[10.0], model_8=[1.0], auto=[0.5]))
    assert once[-2] == "0.50 (0.50-0.50) !", "one round has no interval"


def test_texts_that_differ_are_said_aloud():
    row = speculation.row(a_cell(off=[1.0], auto=[1.0], is_same=False))
    assert row[1] == "mixed (OUTPUTS DIFFER)"


def test_an_average_is_taken_over_workloads_within_rounds():
    guessed = {"model_8": [1.0, 1.0], "model_16": [1.0, 1.0]}
    cells = [
        a_cell("mixed", auto=[0.5, 4.0], **guessed),
        a_cell("random", auto=[2.0, 1.0], **guessed),  # its own temperature: in both averages
        a_cell("mixed", 1, HOT, auto=[8.0, 8.0], **guessed),
        a_cell("mixed", 4, auto=[99.0, 99.0], **guessed),
    ]
    found = {(a.temperature, a.subject): a.ratio for a in speculation.averages(cells)}
    assert found.keys() == {(t, f"model:{n}") for t in (0.0, HOT) for n in (8, 16)}
    cold, hot = found[0.0, "model:8"], found[HOT, "model:8"]
    assert (cold.low, cold.high) == pytest.approx((1.0, 2.0))
    assert (hot.low, hot.high) == pytest.approx((8**0.5, 4.0))
    assert not [*speculation.averages([cells[1], cells[3]])], "no workload of either temperature"


def test_a_cell_takes_the_place_of_the_one_measured_before(tmp_path):
    file = tmp_path / "cells.json"
    for cell in (a_cell(auto=[1.0]), a_cell("agent", auto=[2.0]), a_cell(auto=[3.0])):
        speculation.keep(cell, file)
    kept = {c.workload: c.tpot_ms["auto"] for c in speculation.read(file).cells}
    assert kept == {"mixed": [3.0], "agent": [2.0]}
    file.write_text("[]")
    with pytest.raises(ConfigError, match="no cells of `figures speculation`"):
        speculation.read(file)


def test_one_at_a_time_is_measured_at_two_temperatures():
    places = [*speculation.places("demo", ["mixed", "random"], [1, 4])]
    assert places == [
        Place("demo", "mixed", 1, None),
        Place("demo", "mixed", 1, HOT),
        Place("demo", "random", 1, None),
        Place("demo", "mixed", 4, None),
        Place("demo", "random", 4, None),
    ]
    assert [*speculation.subjects(places[1])] == ["model:8", "model:16", "auto"]


def test_a_mixture_is_measured_with_few_draft_tokens_as_well():
    more = {*speculation.settings("mixture")} - {*speculation.settings("demo")}
    assert more == {f"{name}:{n}" for name in ("ngram", "model") for n in (1, 2, 3)}
    assert {*speculation.subjects(Place("mixture", "agent", 4, None))} >= more


@pytest.fixture
def measured(monkeypatch):
    """The runs that are measured, as (subject, temperature, number of requests): of nothing."""
    ran = []

    class Runnable:
        def __init__(self, label):
            self.label = label

        def check(self, ask):
            pass

        def run(self, asked, load):
            ran.append((self.label, asked.asks[0].temperature, load.concurrency, len(asked.asks)))
            requests = [SimpleNamespace(tpot_ms=float(len(ran)))] * len(asked.asks)
            told = Speculation(steps=2, tokens=6, drafted=8, accepted=[])
            return Round(
                seconds=1, requests=requests, itl_ms=None, output_hash="x", speculation=told
            )

    def load(pair, every, is_warm):
        return [speculation.suite.Contender(name, None, Runnable(name)) for name in every]

    monkeypatch.setattr(speculation, "load", load)
    monkeypatch.setitem(speculation.PAIRS, "demo", lambda: None)
    return ran


def test_the_named_cells_are_measured_and_kept(measured, tmp_path, capsys):
    file = tmp_path / "cells.json"
    asked = ["--pairs=demo", "--concurrency=1", "--workloads=mixed", "--rounds=2", "--requests=3"]
    assert main(["speculation", *asked, f"--out={file}"]) == 0
    cold, hot = speculation.read(file).cells
    assert (cold.temperature, hot.temperature) == (None, HOT)
    assert list(cold.tpot_ms) == [*SETTINGS]
    assert list(hot.tpot_ms) == ["model:8", "model:16", "auto"]
    assert all(len(rounds) == 2 for rounds in (*cold.tpot_ms.values(), *hot.tpot_ms.values()))
    assert (cold.acceptance_length["auto"], cold.guesses["auto"]) == (3.0, 4.0)
    assert {(t, n) for _, t, _, n in measured if n > 1} == {(0.0, 3), (HOT, 3)}
    printed = capsys.readouterr().out
    assert printed.startswith("| pair | workload |") and "| demo | mixed | 1 | 0.8 |" in printed


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--pairs=small", "'small' is none of demo, 0.6b, mixture"),
        ("--rounds=0", "no whole number"),
    ],
)
def test_what_cannot_be_measured_is_refused(flag, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["speculation", flag])
    assert words in capsys.readouterr().err
