"""The cells of `figures speculation`: how they are measured in parts, kept, and held to bounds."""

import random
from contextlib import contextmanager

import msgspec
import pytest

from specserve.errors import ConfigError
from specserve_bench import real_prompts
from specserve_bench.figures import busy, speculation
from specserve_bench.figures.__main__ import main
from specserve_bench.figures.speculation import MEASURES, Cell, Place
from specserve_bench.results import MeasuredRequest, Round, Speculation
from specserve_bench.workloads import Ask


def a_cell(is_warm=True, prompts="chat", is_same=True, machine=None, **ms):
    rounds = {name.replace("_", ":"): values for name, values in ms.items()}
    place = {"model": "SmolLM2", "prompts": prompts, "concurrency": 1, "temperature": 0.0}
    others = {"requests": 1, "draft_tokens": 0.0, "tokens_per_step": 1.0}
    return Cell(
        **place,
        **others,
        is_warm=is_warm,
        is_same=is_same,
        rounds=dict.fromkeys(MEASURES, rounds),
        machine=machine or {},
    )


def test_the_best_setting_is_chosen_in_every_second_round_and_compared_in_the_others():
    cell = a_cell(off=[9, 9, 9, 9], ngram_2=[1, 8, 1, 8], ngram_8=[4, 4, 4, 4], auto=[2, 2, 2, 2])
    assert cell.best == "ngram:2", "what is best in the others does not count"
    assert cell.over_best.median == 0.25
    assert cell.over("ngram:8").median == 0.5


@pytest.mark.parametrize(("is_warm", "bound"), [(True, 1.05), (False, 1.03)])
@pytest.mark.parametrize("is_below", [True, False])
def test_an_interval_that_does_not_end_below_the_bound_is_marked(is_warm, bound, is_below):
    high = bound - 0.01 if is_below else bound + 0.01
    row = speculation.row(a_cell(is_warm, off=[10.0] * 6, ngram_2=[9.0] * 6, auto=[10 * high] * 6))
    assert row[8].endswith(" !") != is_below
    once = speculation.row(a_cell(off=[10.0], auto=[5.0]))
    assert once[8].endswith(" !"), "one round has no interval"


def test_the_table_counts_losses_and_marks_rows_of_uncommitted_trees():
    known = {"date": "2026-01-02", "cores": 2, "cpu": "AMD EPYC"}
    lost = a_cell(
        off=[1.0], ngram_2=[1.5], auto=[2.0], machine=known | {"commit": "01234567-dirty"}
    )
    won = a_cell(off=[2.0], ngram_2=[1.5], auto=[1.0], machine=known | {"commit": "12345678"})
    kept = speculation.Cells([won, lost])
    said = speculation.losses(kept)
    assert "slower than no drafting in 1 of 2 cells (worst 2.00)" in said
    assert "best fixed setting in 1 (median 1.33, worst 2.00)" in said
    assert [speculation.row(cell)[-1] for cell in kept.cells] == ["1234567", "0123456†"]
    assert speculation.caption(kept) == (
        "Measured on 2026-01-02 on 2 cores of an AMD EPYC. Each row names its commit. † marks 1 "
        "rows measured on an uncommitted tree."
    )
    assert speculation.losses(speculation.Cells()) == "No cell is measured."


def test_texts_that_differ_are_said_aloud():
    assert speculation.row(a_cell(off=[1.0], auto=[1.0], is_same=False))[1].endswith(
        "(OUTPUTS DIFFER)"
    )


def test_a_cell_takes_the_place_of_the_one_measured_before(tmp_path):
    file = tmp_path / "cells.json"
    for cell in (a_cell(auto=[1.0]), a_cell(prompts="edit", auto=[2.0]), a_cell(auto=[3.0])):
        speculation.keep(cell, file)
    kept = {c.prompts: c.rounds["tpot_ms"]["auto"] for c in speculation.read(file).cells}
    assert kept == {"chat": [3.0], "edit": [2.0]}
    file.write_text("[]")
    with pytest.raises(ConfigError, match="no cells of `figures speculation`"):
        speculation.read(file)


def test_each_round_has_prompts_of_its_own(monkeypatch):
    known = [Ask(f"prompt {n}", 8, 0.0, n) for n in range(20)]
    monkeypatch.setattr(speculation, "prompts", lambda name: known)
    rounds = [*speculation.asks_of(Place("SmolLM2", "chat", 4, 0.8, True), 8, 3)]
    first, second, third = ({a.prompt for a in asks} for asks in rounds)
    assert not first & second and len(third - first - second) == 4, "then they come again"
    assert len({a.seed for asks in rounds for a in asks}) == 24
    assert {a.temperature for asks in rounds for a in asks} == {0.8}


def test_there_are_prompts_of_each_kind(monkeypatch):
    problem = {"prompt": "def f():\n", "canonical_solution": "    return 1\n"}
    monkeypatch.setattr(real_prompts, "problems", lambda: [problem] * 164)
    sizes = {name: len(real_prompts.prompts(name)) for name in real_prompts.PROMPTS}
    assert sizes == {
        **{"HumanEval": 164, "chat": 60, "edit": 164, "documents": 60},
        **{"agent": 48, "JSON": 200, "4k tokens": 12, "7k tokens": 12},
        **{"16k tokens": 12, "32k tokens": 12},
    }
    long = [ask.prompt[0]["content"] for ask in real_prompts.prompts("7k tokens")]
    assert len({text[:20_000] for text in long}) == 2 and len({*long}) == 12
    assert all(ask.prediction for ask in real_prompts.prompts("edit"))
    assert all(ask.schema for ask in real_prompts.prompts("JSON"))
    assert len({a.prompt[0]["content"] for a in real_prompts.prompts("chat")}) == 60


class Server:
    """A server that takes as long as its subject's name says."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def close(self):
        self.log.append((self.name, "closed", 0, 0))


@pytest.fixture
def ran(monkeypatch):
    """The runs that are measured, as (subject, temperature, requests at a time, requests)."""
    log, ms = [], {"off": 2.0, "ngram:2": 4.0, "auto": 1.0}

    class Local:
        def __init__(self, server, is_lasting):
            assert is_lasting
            self.server = server

        def run(self, asked, load):
            log.append(
                (self.server.name, asked.asks[0].temperature, load.concurrency, len(asked.asks))
            )
            seconds = ms[self.server.name]
            each = MeasuredRequest(
                number=0, arrived_at=0, first_at=1, last_at=1 + seconds, completion_tokens=3
            )
            told = Speculation(steps=2, tokens=6, drafted=8, accepted=[])
            return Round(seconds=1, requests=[each], itl_ms=None, output_hash="x", speculation=told)

    class Loader(speculation.Loader):
        def __init__(self, subjects, sources):
            self.configs, self.warm = dict.fromkeys([*subjects.fixed, "auto"]), {}
            self.is_chat = subjects.is_chat

        def started(self, name):
            return Server(name, log)

    monkeypatch.setattr(speculation, "Local", Local)
    monkeypatch.setattr(speculation, "Loader", Loader)
    asks = [Ask(f"prompt {n}", 8, 0.0, n) for n in range(20)]
    monkeypatch.setattr(speculation, "prompts", lambda name: asks)
    subjects = speculation.Subjects({}, ["off", "ngram:2"])
    monkeypatch.setitem(speculation.MODELS, "demo", lambda: subjects)
    return log


def test_warm_servers_answer_200_requests_first_and_go_on(ran, tmp_path, capsys):
    file = tmp_path / "cells.json"
    asked = ["--models=demo", "--concurrency=4", "--prompts=chat,edit", "--temperatures=0.8"]
    assert main(["speculation", *asked, "--rounds=2", f"--out={file}"]) == 0
    first, second = speculation.read(file).cells
    assert (first.prompts, second.prompts, first.is_warm) == ("chat", "edit", True)
    assert first.rounds["end_to_end_ms"] == {
        "off": [3000.0] * 2,
        "ngram:2": [5000.0] * 2,
        "auto": [2000.0] * 2,
    }
    assert first.rounds["ttft_ms"]["auto"] == [1000.0] * 2
    assert (first.tokens_per_step, first.draft_tokens) == (3.0, 4.0)
    assert [n for name, _, _, n in ran if name == "auto"] == [200, 12, 12, 12, 12]
    assert {name for name, *_ in ran[:6:2]} == {"off", "ngram:2", "auto"}
    assert "| demo | chat | warm | 4 | 0.8 |" in capsys.readouterr().out


def test_cold_servers_are_new_in_each_round(ran, tmp_path):
    asked = ["--models=demo", "--concurrency=1", "--prompts=chat", "--temperatures=0", "--cold"]
    assert main(["speculation", *asked, "--rounds=2", f"--out={tmp_path / 'cells.json'}"]) == 0
    assert ran.count(("auto", 0.0, 1, 20)) == ran.count(("auto", "closed", 0, 0)) == 2


def test_busy_measures_before_during_and_after_other_load(ran, tmp_path, monkeypatch):
    load = []

    @contextmanager
    def processes():
        load.append(len(ran))
        yield
        load.append(len(ran))

    monkeypatch.setattr(busy, "busy_processes", processes)
    monkeypatch.setattr(busy, "Loader", speculation.Loader)
    monkeypatch.setattr(busy, "prompts", speculation.prompts)
    file = tmp_path / "busy.json"
    asked = ["--model=demo", "--seconds=0.01", "--rounds=3", f"--out={file}"]
    assert main(["busy", *asked]) == 0
    found = msgspec.json.decode(file.read_bytes())["tpot_ms"]
    assert [*found] == ["before", "during", "after"]
    assert found["before"] == found["after"] == {"off": [1000.0] * 3, "auto": [500.0] * 3}
    warm, rounds = 2, 3 * len(busy.SUBJECTS)
    assert load[0] == warm + rounds and load[1] >= load[0] + rounds
    assert len(ran) == load[1] + len(busy.SUBJECTS) + rounds, "a request of each follows the load"
    ask = speculation.prompts("chat")[0]
    first, second = (busy.drawn(ask, random.Random(seed)) for seed in (1, 2))
    assert first.seed != second.seed and first.temperature == second.temperature == 0.8


def test_only_the_named_fixed_settings_are_run_besides_off(ran, tmp_path):
    asked = ["--models=demo", "--concurrency=1", "--prompts=chat", "--temperatures=0"]
    file = f"--out={tmp_path / 'cells.json'}"
    for flag, names in ((["--fixed=ngram:4"], {"off", "auto"}), ([], {"off", "ngram:2", "auto"})):
        ran.clear()
        assert main(["speculation", *asked, *flag, "--rounds=1", file]) == 0
        assert {name for name, *_ in ran} == names


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["speculation", "--models=small"])
    assert "'small' is not one of SmolLM2, Gemma, demo, 0.6b" in capsys.readouterr().err


def test_a_number_at_a_time_that_is_not_usual_has_twice_as_many_requests(ran, tmp_path):
    asked = ["--models=demo", "--concurrency=3", "--prompts=chat", "--temperatures=0"]
    assert main(["speculation", *asked, "--rounds=1", f"--out={tmp_path / 'cells.json'}"]) == 0
    assert ("auto", 0.0, 3, 6) in ran
