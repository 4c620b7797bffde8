"""The commands, code and tables of the documents are run or compared, so that they stay true."""

import json
import re
import shlex
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import specserve
from specserve import LLM, SamplingParams, cli
from specserve.config import KNOBS, description
from specserve.models.families import FAMILIES
from specserve.models.shapes import SHAPES
from specserve.server import body
from specserve.server.body import fields
from specserve.server.chat import ChatBody
from specserve.server.completions import CompletionBody
from specserve_bench import fairness, host, memory, perplexity, scale, steps, suite
from specserve_bench.peers import command as peers
from specserve_bench.peers import table as peers_table
from specserve_bench.report import markdown
from specserve_bench.results import Result, Subject, read
from specserve_bench.workloads import WORKLOADS
from tests.checkpoints import tiny_checkpoint
from tests.fake_llm import FakeLLM, FakeParams

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGES["README.md"], re.DOTALL)
SHELL = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
MANUAL = (ROOT / "docs/bench.md").read_text()
BENCH = re.findall(r"^(specserve bench .*?)(?:  +#.*)?$", "\n".join([*SHELL, MANUAL]), re.MULTILINE)
COMMANDS = [line for line in SHELL if line.startswith("specserve ") and line not in BENCH]


@pytest.mark.parametrize(
    "target", sorted(set(re.findall(r"`?make (\w+)", "".join(PAGES.values()))))
)
def test_every_make_target_that_is_named_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What README calls path/to/model and path/to/draft."""
    top = tmp_path_factory.mktemp("models")
    there = {f"path/to/{name}": str(tiny_checkpoint(top / name)) for name in ("model", "draft")}
    return there | {"path/to/rounded": str(top / "rounded")}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs(command, folders, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(vars(specserve), "LLM", FakeLLM)
    monkeypatch.setitem(vars(specserve), "SamplingParams", FakeParams)
    # Serving, listening and chatting have tests of their own.
    monkeypatch.setattr("specserve.exchange.spawn.spawn", lambda config: config)
    monkeypatch.setattr("specserve.server.listen.listen", lambda limits: nullcontext())
    monkeypatch.setattr("specserve.server.serve.serve", lambda *args: 0)
    remote = SimpleNamespace(card=SimpleNamespace(sources=["ngram"], scaled=[]))
    monkeypatch.setattr("specserve.remote.Remote", lambda *args: remote)
    monkeypatch.setattr("specserve.chat.Local", lambda *args: None)
    monkeypatch.setattr("specserve.chat.converse", lambda chat: None)
    for name, folder in folders.items():
        command = command.replace(name, folder)
    assert cli.main(shlex.split(command)[1:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(set(BENCH)))
def test_every_bench_command_is_understood(command, folders, tmp_path, monkeypatch, capsys):
    """Files and names in it are checked; tests/bench checks the measurements."""
    result = Result(kind="latency", machine={}, subjects={}, workloads={}, runs=[])
    subject = suite.Contender("", Subject(model="m"), None)
    monkeypatch.setattr(suite, "measure", lambda *args: result)
    monkeypatch.setattr(suite, "hosted", lambda *args: subject)
    monkeypatch.setattr(suite.Loader, "load", lambda self, label, config: subject)
    monkeypatch.setattr(scale, "scale_model", lambda *args, **others: None)
    monkeypatch.setattr(perplexity, "show", lambda *args: None)
    monkeypatch.setattr(peers, "peers", lambda args: 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(result))
    for name, folder in folders.items():
        command = command.replace(name, folder)
    assert cli.main(shlex.split(command)[1:]) == 0, capsys.readouterr().err


def test_the_table_is_that_of_the_kept_results():
    kept = [read(ROOT / f"bench/results/{name}.json") for name in ("demo-cpu", "demo-0.6b-cpu")]
    assert markdown(kept) in PAGES["README.md"]


def test_the_table_of_other_engines_is_that_of_the_kept_result():
    kept = json.loads((ROOT / "bench/results/peers-cpu.json").read_text())
    assert peers_table.table(kept) in PAGES["README.md"]


@pytest.mark.parametrize("bits", ["w4", "w8"])
def test_the_tables_of_quantized_weights_are_those_of_the_kept_results(bits):
    kept = json.loads((ROOT / f"bench/results/peers-{bits}-cpu.json").read_text())
    assert peers_table.table(kept) in (ROOT / "docs/quantized.md").read_text()


def test_the_table_of_the_memory_is_that_of_the_kept_result():
    kept = json.loads((ROOT / "bench/results/memory-cpu.json").read_text())
    assert memory.table(kept) in MANUAL


def test_the_table_of_fairness_is_that_of_the_kept_result():
    kept = json.loads((ROOT / "bench/results/fairness-cpu.json").read_text())
    del kept["machine"]
    assert fairness.table(kept) in MANUAL


def test_the_table_of_the_hosts_share_is_that_of_the_kept_result():
    kept = json.loads((ROOT / "bench/results/host-cpu.json").read_text())
    assert host.table(kept["rows"]) in MANUAL


def test_the_table_of_steps_against_their_bound_is_that_of_the_kept_result():
    kept = json.loads((ROOT / "bench/results/steps-cpu.json").read_text())
    assert steps.table(kept) in MANUAL


def test_the_manual_of_the_bench_names_every_workload_shape_and_command():
    named = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", MANUAL, flags=re.DOTALL))
    assert {*WORKLOADS, *SHAPES} <= set(named)
    commands = re.findall(r"specserve bench ([\w-]+)", MANUAL)
    assert set(commands) == {
        "latency",
        "drafters",
        "load",
        "compare",
        "show",
        "scale-model",
        "perplexity",
        "peers",
    }


def test_the_python_example_runs(folders, capsys):
    [code] = [text for kind, text in BLOCKS if kind == "python" and "from specserve" in text]
    for name, folder in folders.items():
        code = code.replace(name, folder)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_every_line_of_a_shell_block_is_covered_here():
    elsewhere = "curl "  # tests/server/test_readme.py
    assert [line for line in SHELL if not line.startswith(("make ", "specserve ", elsewhere))] == []


def test_the_table_of_models_has_every_family_and_no_other():
    text = (ROOT / "docs/models.md").read_text()
    assert set(re.findall(r"^\| `(\w+ForCausalLM)` \|", text, re.MULTILINE)) == {*FAMILIES}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_links_of_the_documents_lead_somewhere(page):
    for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#?)([^)]*)\)", page.read_text()):
        there = (page.parent / target) if target else page
        assert there.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
            assert anchor in anchors, (target, anchor)


def test_the_servers_manual_names_every_field():
    manual = (ROOT / "docs/server.md").read_text()
    own = {*fields(ChatBody), *fields(CompletionBody)} - {"read_past"}
    known = own | {*body.NO_OP, *body.REFUSED, *body.HARMLESS, *body.FRONTENDS}
    assert [name for name in sorted(known) if f"`{name}`" not in manual] == []


@pytest.mark.parametrize("key", KNOBS)
def test_every_knob_says_what_it_is(key):
    assert description(key)


def test_every_folder_that_is_named_exists():
    folders = re.findall(r"`([\w/]+)/`", "".join(PAGES.values()))
    assert folders
    assert not [f for f in folders if not (ROOT / f).is_dir()]


DRAFTERS = re.findall(r"```python\n(.*?)```", PAGES["CONTRIBUTING.md"], re.DOTALL)


def test_the_source_that_contributing_shows_guesses(tmp_path, monkeypatch, caplog):
    _, code = DRAFTERS
    (tmp_path / "repeat_drafter.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    [settings] = re.findall(r"```toml\n(.*?)```", PAGES["CONTRIBUTING.md"], re.DOTALL)
    (tmp_path / "sources.toml").write_text(
        settings.replace("your_package.module", "repeat_drafter")
    )
    given = {"model.threads": 1, "memory.kv_bytes": 1 << 24}
    folder = tiny_checkpoint(tmp_path / "model")
    file = tmp_path / "sources.toml"
    with LLM(folder, config=file, set=given, progress=False) as llm:
        llm.generate("the cat", SamplingParams(temperature=0, max_tokens=9))
        name = "repeat_drafter:Repeat"
        assert llm.engine.sources == ("ngram", name)
        assert llm.engine.guesses.sources[1].drafter.p == 0.5
        assert llm.engine.stats.sources[name].proposed > 0 == llm.engine.stats.drafter_errors
    assert caplog.messages == []


def test_the_drafter_that_contributing_shows_drafts(tmp_path, monkeypatch):
    code, _ = DRAFTERS
    (tmp_path / "echo_drafter.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"model.threads": 1, "memory.kv_bytes": 1 << 24, "drafter.options": {"length": 2}}
    folder = tiny_checkpoint(tmp_path / "model")
    with LLM(folder, drafter="echo_drafter:Echo", set=settings, progress=False) as llm:
        (output,) = llm.generate("the cat", SamplingParams(temperature=0, max_tokens=9))
        assert llm.engine.stats.drafter_errors == 0
    assert output.speculation.drafted > 0
