"""What is recorded with results, and that results come from committed code."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.cli.command import main
from specserve.errors import ConfigError
from specserve_bench import arguments, machine
from specserve_bench.figures import __main__ as figures
from specserve_bench.gpu import checks, demo, stage, stages

ROOT = Path(__file__).parents[2]
DIRTY = "0123456789ab-dirty"
REMEDY = "Commit or stash the changes, or add --allow-dirty."


def commits(value):
    """All commits in a file's JSON."""
    if isinstance(value, dict):
        for key, part in value.items():
            if key == "commit" and isinstance(part, str):
                yield part
            yield from commits(part)
    elif isinstance(value, list):
        for part in value:
            yield from commits(part)


def head_of(file):
    """A file's JSON, of lines the first one."""
    text = file.read_text()
    return json.loads(text.partition("\n")[0] if file.suffix == ".jsonl" else text)


def test_no_result_comes_from_an_uncommitted_tree():
    files = [*(ROOT / "bench/results").glob("*.json*")]
    found = {f.name: set(commits(head_of(f))) for f in files}
    assert len(found) > 30
    assert not [name for name, each in found.items() if any(c.endswith("-dirty") for c in each)]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git tree with a copy of the module; the function that gives its commit."""
    (tmp_path / "bench/results").mkdir(parents=True)
    (tmp_path / "bench/results/x.json").write_text("{}")
    shutil.copy(machine.__file__, tmp_path / "bench/machine.py")
    monkeypatch.syspath_prepend(tmp_path / "bench")
    monkeypatch.delitem(sys.modules, "machine", raising=False)
    import machine as copy

    def git(*words):
        own = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *own, *words], check=True, capture_output=True)

    def commit():
        copy.commit.cache_clear()
        return copy.commit()

    yield tmp_path, git, commit
    sys.modules.pop("machine", None)


def test_a_commit_is_dirty_if_code_differs_from_it_and_not_if_results_do(repository):
    folder, git, commit = repository
    assert commit() == machine.NO_GIT
    git("init", "-q")
    assert commit() == machine.NO_GIT, "the module is not of this repository"
    git("add", ".")
    git("commit", "-qm", "x")
    clean = commit()
    assert len(clean) == 12
    (folder / "bench/results/x.json").write_text("{1}")
    (folder / "run.json").write_text("{}")
    assert commit() == clean
    with (folder / "bench/machine.py").open("a") as file:
        file.write("\n")
    assert commit() == f"{clean}-dirty"


def test_a_machine_without_git_has_no_commit(monkeypatch, repository):
    def missing(*args, **others):
        raise FileNotFoundError

    *_, commit = repository
    monkeypatch.setattr(subprocess, "run", missing)
    assert commit() == machine.NO_GIT


def test_results_of_an_installed_wheel_are_written(monkeypatch):
    monkeypatch.setattr(machine, "commit", lambda: machine.NO_GIT)
    assert machine.refusal("--out run.json", allow_dirty=False) is None


def test_an_uncommitted_tree_is_refused_unless_it_is_allowed(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "commit", lambda: DIRTY)
    file = tmp_path / "run.json"
    arguments.check_result("--out", file, allow_dirty=True)
    with pytest.raises(ConfigError, match=r"uncommitted changes.*add --allow-dirty"):
        arguments.check_result("--out", file, allow_dirty=False)


@pytest.mark.parametrize("words", ["latency", "load", "drafters", "compare a.toml b.toml", "peers"])
def test_every_command_of_the_suite_refuses_out_first(words, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "commit", lambda: DIRTY)
    assert main(["bench", *words.split(), "--out", str(tmp_path / "run.json")]) != 0
    assert REMEDY in capsys.readouterr().err


@pytest.mark.parametrize("words", [["host"], [], *([name] for name in figures.LONG)])
def test_every_figure_refuses_an_uncommitted_tree(words, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "commit", lambda: DIRTY)
    monkeypatch.chdir(tmp_path)
    figures.RESULTS.mkdir(parents=True)
    more = {"versions": ["--before", ".", "--models", "x"], "open-loop": ["--vllm", "python"]}
    more |= {"lm-eval": ["--lm-eval", "python"]}
    with pytest.raises(SystemExit, match="2"):
        figures.main([*words, *more.get("".join(words), [])])
    assert REMEDY in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "run",
    [
        lambda out: stages.main(["--out", out]),
        lambda out: stage.options(["--out", out]),
        lambda out: demo.main(["--out", out]),
        lambda out: checks.main(["tests", "--out", out]),
    ],
)
def test_every_gpu_stage_refuses_an_uncommitted_tree(run, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "commit", lambda: DIRTY)
    with pytest.raises(SystemExit, match="add --allow-dirty"):
        run(str(tmp_path / "out"))


def test_a_rehearsal_writes_no_results_and_is_not_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "commit", lambda: DIRTY)
    assert stage.options(["--out", str(tmp_path / "out"), "--rehearse"]).rehearse


def test_a_caption_says_if_the_tree_was_uncommitted():
    known = {"date": "2026-01-02", "cores": 2, "cpu": "AMD EPYC", "commit": "abc"}
    assert (
        machine.measured(known)
        == "measured at commit abc, on 2026-01-02, on 2 cores of an AMD EPYC"
    )
    dirty = machine.measured(known | {"commit": "abc-dirty", "gpu": "NVIDIA H100"})
    start = "measured on an uncommitted tree after commit abc, on 2026-01-02, on NVIDIA H100, "
    assert dirty == f"{start}2 cores of an AMD EPYC"
    wheel = machine.measured(known | {"commit": machine.NO_GIT})
    assert wheel.startswith("measured with an installed package (no git tree), on ")
    p = argparse.ArgumentParser()
    machine.add_allow_dirty(p)
    assert p.parse_args(["--allow-dirty"]).allow_dirty


CPUS = {  # /proc/cpuinfo -> the name
    "of a model": (
        "model name\t: AMD EPYC 9354 32-Core Processor\ncpu family\t: 25",
        "AMD EPYC 9354 32-Core Processor",
    ),
    "hidden": (
        "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n",
        "AMD EPYC (family 26, model 2)",
    ),
}


@pytest.mark.parametrize(("text", "name"), CPUS.values(), ids=CPUS)
def test_a_hidden_cpu_model_is_named_by_its_family(text, name, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "CPU_FILE", tmp_path / "cpuinfo")
    assert machine.cpu_name() == name
