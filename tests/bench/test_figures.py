"""`python -m specserve_bench.figures`: which parts are measured, and what is refused."""

import re
from pathlib import Path

import pytest

from specserve_bench import figures


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The names of files that are kept; nothing is measured."""
    names = []
    monkeypatch.chdir(tmp_path)
    figures.RESULTS.mkdir(parents=True)
    monkeypatch.setattr(figures, "keep", lambda name, found: names.append(name))
    monkeypatch.setattr(figures, "demo_figures", lambda: names.append("demo"))
    for parts in (figures.OF_PAIR, figures.OTHERS):
        for name in parts:
            monkeypatch.setitem(parts, name, lambda *args: {})
    monkeypatch.delenv("SPECSERVE_TEST_MODELS", raising=False)
    return names


def test_the_named_parts_are_measured(measured):
    assert figures.main(["host", "demo"]) == 0
    assert measured == ["host-cpu", "demo"]


def test_without_names_all_parts_are_measured(measured, tmp_path, monkeypatch):
    for name in figures.PAIR:
        (tmp_path / name).mkdir()
    monkeypatch.setenv("SPECSERVE_TEST_MODELS", str(tmp_path))
    assert figures.main([]) == 0
    assert measured == [*(f"{name}-cpu" for name in [*figures.PARTS][:-1]), "demo"]


def test_without_the_pair_its_parts_are_left_out(measured, capsys):
    assert figures.main([]) == 0
    assert measured == [*(f"{name}-cpu" for name in figures.OTHERS), "demo"]
    assert "server is left out: set SPECSERVE_TEST_MODELS to a folder" in capsys.readouterr().err


def test_parts_that_cannot_be_measured_are_refused(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPECSERVE_TEST_MODELS", str(tmp_path))
    (tmp_path / figures.PAIR[0]).mkdir()
    for part, words in {
        "stepz": "no part 'stepz'; there are engine, server, steps, ",
        "server": "server: set SPECSERVE_TEST_MODELS to a folder with the models code-target and",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            figures.main(["host", part])
        assert words in capsys.readouterr().err
    figures.RESULTS.rmdir()
    with pytest.raises(SystemExit, match="2"):
        figures.main(["host"])
    assert "no folder bench/results: run it at the top of" in capsys.readouterr().err
    assert measured == []


def test_long_parts_are_measured_alone_with_arguments_of_their_own(measured, monkeypatch, capsys):
    asked = []
    monkeypatch.setitem(figures.LONG, "speculation", lambda argv: asked.append(argv) or 0)
    assert figures.main(["speculation", "--rounds=9"]) == 0
    assert (asked, measured) == ([["--rounds=9"]], [])
    with pytest.raises(SystemExit, match="2"):
        figures.main(["host", "speculation"])
    assert "no part 'speculation'" in capsys.readouterr().err


def test_the_help_says_what_every_part_measures_and_what_it_replaces(capsys):
    assert {*figures.PARTS} == {*figures.OF_PAIR, *figures.OTHERS, "demo"}
    with pytest.raises(SystemExit, match="0"):
        figures.main(["--help"])
    told = capsys.readouterr().out
    for name, what in figures.PARTS.items():
        assert re.search(rf"^  {name} +{re.escape(what)}$", told, re.MULTILINE)
    assert "replace those in bench/results" in told


def test_the_manual_names_every_part():
    manual = (Path(__file__).parents[2] / "docs/bench.md").read_text()
    [section] = re.findall(r"^## Kept figures$(.*?)^## ", manual, re.MULTILINE | re.DOTALL)
    assert {*figures.PARTS, *figures.LONG, *figures.PAIR} <= set(
        re.findall(r"`([^`\n]+)`", section)
    )
