"""`python -m specserve_bench.figures`: which parts are measured, and what is refused."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specserve_bench.figures import __main__ as figures
from specserve_kernels.cpu.levels import usable_levels


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The names of parts that are measured: of nothing."""
    names = []

    def module(name):
        def measure(*args):
            names.append((name, *args))
            return {"ms": 1}

        def add_arguments(p):
            p.add_argument("--rounds", type=int)

        return SimpleNamespace(measure=measure, table=str, add_arguments=add_arguments)

    monkeypatch.chdir(tmp_path)
    figures.RESULTS.mkdir(parents=True)
    monkeypatch.setattr(figures, "module", module)
    return names


def kept():
    return {file.name for file in figures.RESULTS.iterdir()}


def test_the_named_parts_are_measured_and_kept(measured, capsys):
    assert figures.main(["host", "demo"]) == 0
    assert measured == [("host",), ("demo",)]
    assert kept() == {"host-cpu.json"}
    assert "{'ms': 1}\n{\"machine\": " in capsys.readouterr().out


def test_each_part_begins_with_the_threads_of_the_process(measured, monkeypatch):
    threads, before = [], torch.get_num_threads()
    part = figures.module("host")

    def measure():
        threads.append(torch.get_num_threads())
        torch.set_num_threads(1)  # as an engine that measured so few to be faster
        return {}

    monkeypatch.setattr(part, "measure", measure)
    monkeypatch.setattr(figures, "module", lambda name: part)
    torch.set_num_threads(2)
    try:
        assert figures.main(["host", "kv"]) == 0
    finally:
        torch.set_num_threads(before)
    assert threads == [2, 2]


def test_a_level_of_the_kernels_has_a_file_of_its_own(measured, monkeypatch, capsys):
    used, [level, *_] = [], [level.name for level in usable_levels()]
    monkeypatch.setattr(figures, "use_level", used.append)
    assert figures.main(["recurrent", "--level", level]) == 0
    assert used == [level] and kept() == {f"recurrent-{level}-cpu.json"}
    command = f"{figures.PROGRAM} recurrent --level {level}"
    assert f'"command": "{command}", "level": "{level}"' in capsys.readouterr().out
    for argv, words in (
        (["recurrent", "--level=x"], "this CPU cannot run level 'x'; it can run"),
        (["server", f"--level={level}"], "--level supports only steps, .* not server"),
    ):
        with pytest.raises(SystemExit, match="2"):
            figures.main(argv)
        assert re.search(words, capsys.readouterr().err)


def test_without_names_all_parts_are_measured(measured):
    assert figures.main([]) == 0
    assert measured == [(name,) for name in figures.FIGURES]


def test_parts_that_cannot_be_measured_are_refused(measured, capsys):
    with pytest.raises(SystemExit, match="2"):
        figures.main(["host", "stepz"])
    assert "no part 'stepz'; the parts are server, steps, " in capsys.readouterr().err
    figures.RESULTS.rmdir()
    with pytest.raises(SystemExit, match="2"):
        figures.main(["host"])
    assert "There is no folder bench/results. Run the command at the top" in capsys.readouterr().err
    assert measured == []


def test_long_parts_are_measured_alone_with_arguments_of_their_own(measured, capsys):
    assert figures.main(["speculation", "--rounds=9"]) == 0
    [(name, args)] = measured
    assert (name, args.rounds) == ("speculation", 9)
    assert kept() == {"speculation-cpu.json"}
    with pytest.raises(SystemExit, match="2"):
        figures.main(["host", "speculation"])
    assert "no part 'speculation'" in capsys.readouterr().err


def test_every_part_is_a_module_with_a_table():
    for name in (*figures.FIGURES, *figures.LONG):
        module = figures.module(name)
        assert module.measure and module.table
        assert hasattr(module, "add_arguments") == (name in figures.LONG)


def test_the_help_says_what_every_part_measures_and_what_it_replaces(capsys):
    with pytest.raises(SystemExit, match="0"):
        figures.main(["--help"])
    told = capsys.readouterr().out
    for name, what in figures.FIGURES.items():
        assert re.search(rf"^  {name} +{re.escape(what)}$", told, re.MULTILINE)
    assert "replace those in bench/results" in told


def test_the_manual_names_every_part():
    manual = (Path(__file__).parents[2] / "docs/bench.md").read_text()
    [section] = re.findall(r"^## Kept results$(.*?)^## ", manual, re.MULTILINE | re.DOTALL)
    assert {*figures.FIGURES, *figures.LONG} <= set(re.findall(r"`([^`\n]+)`", section))
