"""The commands, code and tables of the documents are run or compared, so that they stay true."""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import specserve
from specserve import LLM, SamplingParams
from specserve.cli import command as cli
from specserve.config import DEMO, KNOBS, description
from specserve.exchange.sampling_params import SpeculationParams
from specserve.models import parse_config
from specserve.models.families import FAMILIES
from specserve.models.multimodal_families import MULTIMODAL
from specserve.server import body
from specserve.server.body import fields
from specserve.server.chat import ChatBody
from specserve.server.completions import CompletionBody
from specserve_bench import (
    agent,
    doctor,
    documents,
    machine,
    perplexity,
    reference,
    scale,
    suite,
)
from specserve_bench.bound import StepSize, cost, kv_token_bytes
from specserve_bench.demo import commands as demo
from specserve_bench.demo.head_card import read_head_card
from specserve_bench.demo.scaled_model import SHAPES
from specserve_bench.demo.training_config import HeadConfig
from specserve_bench.figures import __main__ as figures
from specserve_bench.peers import command as peers
from specserve_bench.peers import table as peers_table
from specserve_bench.report import markdown
from specserve_bench.results import Result, Subject, read
from specserve_bench.workloads import WORKLOADS
from specserve_drafters.base import AUTO_SOURCES, BUILT_IN, drafter_options
from tests.adapters import write_adapter
from tests.checkpoints import tiny_checkpoint
from tests.fake_llm import FakeLLM, FakeParams
from tests.models import gguf_files

ROOT = Path(__file__).parents[1]
PAGES = {
    str(p.relative_to(ROOT)): p.read_text() for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
}
FOLDERS = "docs", "examples", "specserve"
LINKED = [*PAGES, *(str(p.relative_to(ROOT)) for f in FOLDERS for p in (ROOT / f).rglob("*.md"))]
BLOCKS = [
    (name, kind, text)
    for name, page in PAGES.items()
    for kind, text in re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
]
LINES = [
    re.sub(r"  +#.*", "", line)
    for _, kind, text in BLOCKS
    if kind == "sh"
    for line in text.replace("\\\n", "").splitlines()
]
MANUAL = PAGES["docs/bench.md"]
BENCH = sorted({line for line in LINES if line.startswith("specserve bench ")})
FIGURES = sorted({line for line in LINES if line.startswith("python -m specserve_bench.figures")})
DOCTOR = sorted({line for line in LINES if line.startswith("specserve doctor ")})
HEADS = sorted({line for line in LINES if line.startswith("specserve demo ")})
KNOWN = {*BENCH, *DOCTOR, *HEADS}
COMMANDS = sorted({line for line in LINES if line.startswith("specserve ")} - KNOWN)
KEPT_TABLES = (
    *("families", "implementations", "maps", "mixtures", "sampling", "versions"),
    *("adapters", "fairness", "host", "kv", "memory", "real", "replicas", "restart", "sources"),
    *("steps", "swap", "speculation", "open-loop", "heads", "merged", "targets", "tiers"),
    *("key-isolation", "load-gaps", "lm-eval", "server", "structured"),
)
ELSEWHERE = {  # beginnings of lines -> the tests that run them, or why none does
    "curl ": "tests/server/test_readme.py",
    "guidellm ": "tests/server/test_recipes.py",
    "lm_eval ": "tests/server/test_recipes.py",
    "vllm-router ": "tests/server/test_recipes.py, tests/server/test_replicas.py",
    "examples/vllm-router/start.sh ": "tests/server/test_replicas.py",
    "cd examples && serve run ": "tests/server/test_replicas.py, by a file with the same options",
    "docker ": "tests/deploy/test_images.py, without a daemon",
    "cp deploy/systemd/": "tests/deploy/test_systemd.py checks the unit",
    "systemctl ": "needs a booted systemd",
    "helm ": "tests/deploy/test_chart.py",
    "python -m specserve_bench.soak ": "tests/bench/test_soak.py",
    "python -m specserve_bench.gguf_shapes ": "tests/bench/test_gguf_shapes.py",
    "source .venv/bin/activate": "tests/test_clean_machine.py",
    "python3 -m venv .venv": "as `make setup`, which tests/test_clean_machine.py runs",
    "pip install -c constraints.txt ": "the same, and the Dockerfiles",
    "export PIP_EXTRA_INDEX_URL=": "the address of an index that this project does not know",
    "pip install 'specserve[gpu]'": "gigabytes; the extra's name is checked here",
    "python3.11 -m venv ": "installs other engines for as long as they take to compile",
    "export CMAKE_ARGS=": "the same",
    "vllm/bin/pip uninstall": "the same",
}


@pytest.mark.parametrize(
    "target",
    sorted(set(re.findall(r"(?:`|^)make ([\w-]+)", "".join(PAGES.values()), re.MULTILINE))),
)
def test_every_make_target_that_is_named_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What README calls path/to/model and path/to/draft."""
    top = tmp_path_factory.mktemp("models")
    there = gguf_of(top / "gguf")  # first, as its name begins with that of another one
    there |= {f"path/to/{name}": tiny_checkpoint(top / name) for name in ("model", "draft")}
    there |= {
        name: there["path/to/model"] for name in ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-8B")
    }
    there["Qwen/Qwen3-0.6B"] = there["path/to/draft"]
    for name in ("sql-adapter", "legal-adapter"):
        there[f"path/to/{name}"] = write_adapter(top / name, top / "model")
    there["path/to/rounded"] = top / "rounded"
    there["path/to/secret"] = top / "secret"
    there["path/to/secret"].write_text("0123456789abcdef" * 4)
    there["path/to/secret"].chmod(0o600)
    return {name: str(folder) for name, folder in there.items()}


def gguf_of(folder):
    """A GGUF file, by its path, and by names of the hub and of Ollama."""
    names = "path/to/model.gguf", "org/repo-GGUF:Q8_0", "ollama:llama3.2:1b"
    return dict.fromkeys(names, gguf_files.write(folder).file)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs(command, folders, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(vars(specserve), "LLM", FakeLLM)
    monkeypatch.setitem(vars(specserve), "SamplingParams", FakeParams)
    # Serving, listening and chatting have tests of their own.
    monkeypatch.setattr("specserve.exchange.spawn.ForkServer.start", lambda self: self)
    monkeypatch.setattr("specserve.server.listen.listen", lambda limits: nullcontext())
    monkeypatch.setattr("specserve.server.serve.serve", lambda *args: 0)
    monkeypatch.setattr("specserve.cli.rank.run_rank", lambda *args: None)
    remote = SimpleNamespace(card=SimpleNamespace(sources=["ngram"], scaled=[]))
    monkeypatch.setattr("specserve.cli.remote.Remote", lambda *args: remote)
    monkeypatch.setattr("specserve.cli.chat.LocalModel", lambda *args: None)
    monkeypatch.setattr("specserve.cli.chat.converse", lambda chat: None)
    for name, folder in folders.items():
        command = command.replace(name, folder)
    assert cli.main(shlex.split(command)[1:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(set(BENCH)))
def test_every_bench_command_is_understood(command, folders, tmp_path, monkeypatch, capsys):
    """Files and names in it are checked; tests/bench checks the measurements."""
    result = Result(kind="latency", machine={}, subjects={}, workloads={}, runs=[])
    subject = suite.Contender("", Subject(model="m"), None)
    monkeypatch.setattr(suite, "measure", lambda *args: result)
    monkeypatch.setattr(machine, "commit", lambda: "0123456789ab")
    monkeypatch.setattr(suite, "hosted", lambda *args: subject)
    monkeypatch.setattr(suite.Loader, "load", lambda self, label, config: subject)
    monkeypatch.setattr(scale, "scale_model", lambda *args, **others: None)
    monkeypatch.setattr(perplexity, "show", lambda *args: None)
    monkeypatch.setattr(peers, "peers", lambda args: 0)
    monkeypatch.setattr(agent, "measure", lambda *args: result)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(result))
    for name, folder in folders.items():
        command = command.replace(name, folder)
    assert cli.main(shlex.split(command)[1:]) == 0, capsys.readouterr().err


def test_the_table_is_that_of_the_kept_results():
    kept = [read(ROOT / f"bench/results/{name}.json") for name in ("demo-cpu", "demo-0.6b-cpu")]
    assert markdown(kept) in MANUAL


def test_the_table_of_other_engines_is_that_of_the_kept_result():
    kept = json.loads((ROOT / "bench/results/peers-cpu.json").read_text())
    assert peers_table.table(kept) in PAGES["docs/comparison.md"]
    assert peers_table.sweep_summary(kept) in PAGES["docs/comparison.md"]
    assert peers_table.caption(kept) in PAGES["docs/comparison.md"]
    assert peers_table.caption(kept) in PAGES["README.md"]
    # Each row of the README names the setting that produced it, and losses stand with wins.
    rows = documents.summary().splitlines()
    assert "\n".join(rows) in PAGES["README.md"]
    told = "".join(rows)
    for what in ("n-gram lookup", "draft model", "auto", "open loop", "p99 TTFT"):
        assert what in told


def test_every_block_of_a_page_is_that_of_the_kept_results(monkeypatch):
    """`python -m specserve_bench.documents` writes them again."""
    monkeypatch.chdir(ROOT)
    assert [name for name, page in PAGES.items() if documents.written(page) != page] == []


def test_every_result_that_a_page_shows_has_a_caption():
    """It has the commit: no result is of an uncommitted tree."""
    for name, page in PAGES.items():
        blocks = re.findall(r"<!-- result: ([\w -]+) -->", page)
        tables = {block.split(" ")[0] for block in blocks}
        captions = {block.split(" ")[0] for block in blocks if block.endswith(" caption")}
        assert tables == captions, name
        assert not re.search("[Mm]easured on an uncommitted tree after", page), name


@pytest.mark.parametrize("bits", ["w4", "w8"])
def test_the_tables_of_quantized_weights_are_those_of_the_kept_results(bits):
    kept = json.loads((ROOT / f"bench/results/peers-{bits}-cpu.json").read_text())
    for part in (peers_table.table(kept), peers_table.caption(kept)):
        assert part in PAGES["docs/quantized.md"]


def test_readme_shows_the_command_that_tests_next_to_the_one_that_serves():
    [(_, _, commands), *_] = [block for block in BLOCKS if block[0] == "README.md"]
    assert [line.split("  ")[0] for line in commands.splitlines()][:2] == [
        "make serve",
        "make test",
    ]


QWEN3 = SHAPES["qwen3-0.6b"]
HUB = {  # hub ids of README -> what their config.json has
    "Qwen/Qwen3-0.6B": QWEN3,
    "Qwen/Qwen3-8B": QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "tie_word_embeddings": False},
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN3
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896}
    | {"intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"num_key_value_heads": 2, "head_dim": 64},
}


def test_readme_states_the_memory_of_its_models():
    lines = re.findall(
        r"^specserve serve (\S+/.*?)  +# ([\d.]+ GiB)", PAGES["README.md"], re.MULTILINE
    )
    assert len(lines) == 3
    for words, stated in lines:
        args = cli.parser({}).parse_args(["serve", *shlex.split(words)])
        models = [(args.model, args.quantize), (args.draft_model, args.draft_quantize)]
        models = [(parse_config.parse(HUB[name]), how) for name, how in models if name]
        assert stated == f"{sum(weight_bytes(*each) for each in models) / 2**30:.1f} GiB"
        kv = sum(kv_token_bytes(shape) for shape, _ in models) / 1024
        assert f"{kv:.0f} KiB" in PAGES["README.md"]


SIZES = {  # models of docs/models.md -> what their config.json has
    "Qwen3 0.6B": QWEN3,
    "Qwen3 4B": QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    | {"num_attention_heads": 32},
    "Qwen3 8B": HUB["Qwen/Qwen3-8B"],
}


def test_the_page_on_models_states_their_memory():
    rows = dict(
        re.findall(r"^\| (Qwen3 [\d.]+B) \| (.*) \|$", PAGES["docs/models.md"], re.MULTILINE)
    )
    assert rows.keys() == SIZES.keys()
    for name, config in SIZES.items():
        shape = parse_config.parse(config)
        each = [f"{weight_bytes(shape, how) / 2**30:.1f} GiB" for how in (None, "w8", "w4")]
        assert rows[name].split(" | ") == [*each, f"{kv_token_bytes(shape) // 1024} KiB"], name


def weight_bytes(shape, quantize):
    """The bytes that a step reads, and the embedding, also if the head is tied to it."""
    step = cost(shape, StepSize("", (0,), 1), quantize)
    return step.num_bytes + 2 * shape.vocab_size * shape.hidden_size


MESSAGES = [
    (name, line)
    for name, kind, text in BLOCKS
    if kind == "text" and name in ("docs/troubleshooting.md", "docs/install.md")
    for line in text.splitlines()
]


@pytest.fixture(scope="module")
def texts_of_the_code():
    files = [path for f in ("specserve", "kernels") for path in (ROOT / f).rglob("*.py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return "\n".join(map(text_of, nodes))


def text_of(node):
    """A string of the code, without the values that it is formatted with."""
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else ""


@pytest.mark.parametrize("name, message", MESSAGES)
def test_messages_that_the_documents_quote_are_those_of_the_code(name, message, texts_of_the_code):
    assert [part for part in message.split("...") if part.strip() not in texts_of_the_code] == []


@pytest.mark.parametrize("name", KEPT_TABLES)
def test_the_table_of_a_figure_is_that_of_the_kept_result(name):
    page = PAGES["docs/replicas.md"] if name == "replicas" else MANUAL
    assert documents.BLOCKS[name]() in page
    assert documents.BLOCKS[f"{name} caption"]() in page


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
        "agent",
    }


def test_the_first_python_example_runs(folders, capsys):
    code = next(text for name, kind, text in BLOCKS if name == "docs/python.md")
    for name, folder in folders.items():
        code = code.replace(name, folder)
    exec(compile(code, "docs/python.md", "exec"), {})
    assert capsys.readouterr().out


def test_every_line_of_a_shell_block_is_run_somewhere():
    known = ("make ", "specserve ", *FIGURES, *ELSEWHERE)
    assert [line for line in LINES if not line.startswith(known)] == []


@pytest.mark.parametrize("command", FIGURES)
def test_every_command_for_figures_is_understood(command, capsys):
    """They take minutes to hours; their parts and options are checked."""
    part, *words = shlex.split(command)[3:]
    assert part in {*figures.FIGURES, *figures.LONG}
    if part in figures.LONG:
        with pytest.raises(SystemExit, match="0"):
            figures.main([part, "--help"])
        told = capsys.readouterr().out
        assert [w for w in words if w.startswith("--") and w not in told] == []


@pytest.mark.parametrize("command", DOCTOR)
def test_every_line_with_doctor_is_understood(command, folders):
    assert doctor.parser().parse_args(shlex.split(command)[2:]).model == "path/to/model"


@pytest.mark.parametrize("command", HEADS)
def test_every_line_with_demo_is_understood(command):
    """tests/demo checks what they do."""
    assert demo.parser().parse_args(shlex.split(command)[2:]).out


def test_the_page_on_heads_has_every_field_a_valid_config_and_the_cards_figures():
    page = PAGES["docs/heads.md"]
    [text] = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert msgspec.json.decode(text, type=HeadConfig).draft_steps == 5
    table = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))))
    defaults = HeadConfig()
    for names, told in re.findall(r"^\| (`.*?) \| .* \| (.*?) \|$", page, re.MULTILINE):
        values = [None if x[:4] == "none" else float(x) for x in told.split(", ")]
        assert [getattr(defaults, name) for name in re.findall(r"`(\w+)`", names)] == values
    figures = read_head_card(DEMO / "specserve-demo-head").figures
    assert all(f"{100 * figures[kind].right[0]:.0f} %" in page for kind in ("files", "questions"))
    of_the_demo = {"own_tokens", "max_files", "max_symbols", "ask_every"}
    assert table == set(HeadConfig.__struct_fields__) - of_the_demo


def test_the_page_on_drafters_has_every_option_with_its_default():
    page = PAGES["docs/drafters.md"]
    rows = re.findall(r"^\| (`[\w`, ]+`) \| `(\w+)` \| `(.*?)` \|", page, re.MULTILINE)
    found = {name: {} for names, *_ in rows for name in re.findall(r"`(\w+)`", names)}
    for names, option, default in rows:
        for name in re.findall(r"`(\w+)`", names):
            found[name][option] = json.loads(default)
    assert found == {
        name: json.loads(msgspec.json.encode(drafter_options(name, {}))) for name in BUILT_IN
    }


def test_the_page_on_drafters_names_every_source_flag_and_field():
    page = PAGES["docs/drafters.md"]
    limits = SpeculationParams.__struct_fields__
    flags = "--drafter", "--draft-model", "--draft-head", "--draft-quantize"
    first_cells = set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE))
    assert {*AUTO_SOURCES, *limits, *flags} <= first_cells


def test_extras_that_are_installed_by_name_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(re.findall(r"pip install [^\n`]*'[\w.]+\[(\w+)\]'", "".join(PAGES.values())))
    assert named and named <= set(project["optional-dependencies"])
    table = re.findall(r"^\| `(\w+)` \| [^|]* \|$", PAGES["docs/install.md"], re.MULTILINE)
    assert set(table) == set(project["optional-dependencies"])


PYTHON = [(name, text) for name, kind, text in BLOCKS if kind == "python"]
PYTHON = [(name, text) for name, text in PYTHON if "from specserve import" in text]


@pytest.mark.slow
@pytest.mark.parametrize("name, code", PYTHON, ids=lambda text: text[:20])
def test_every_python_example_runs_as_a_script(name, code, folders, tmp_path):
    for its, folder in folders.items():
        code = code.replace(its, folder)
    (tmp_path / "example.py").write_text(code)
    command = [sys.executable, "example.py"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr


@pytest.mark.slow
def test_the_site_is_built_without_a_broken_link(tmp_path):
    """mkdocs is strict: a link, an anchor or a page that is in no menu fails it (not with -q)."""
    command = [sys.executable, "-m", "mkdocs", "build", "-d", tmp_path / "site"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    pages = [p for p in tmp_path.rglob("*.html") if p.name != "404.html"]
    assert {p.name for p in pages} >= {"tour.html", "http.html", "settings.html"}
    loads = r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:[^\" >]+)"
    outside = {m for p in pages for m in re.findall(loads, p.read_text())}
    assert outside == set(), "nothing is loaded from elsewhere"


def test_the_table_of_models_has_every_family_and_no_other():
    text = (ROOT / "docs/models.md").read_text()
    rows = re.findall(r"^\| `(\w+For\w+)` \| (.*) \|$", text, re.MULTILINE)
    assert rows == [(name, kind.models) for name, kind in (FAMILIES | MULTIMODAL).items()]


def prose_of(page):
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors_of(page):
    """The anchors that GitHub and mkdocs give to headings."""
    titles = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", sorted({*LINKED}))
def test_links_of_the_documents_lead_somewhere(name):
    page = ROOT / name
    links = re.findall(r"\]\((?!https?:)([^)#]*)(#?)([^)]*)\)", prose_of(page))
    for target, _, anchor in links:
        there = (page.parent / target) if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors_of(there), (target, anchor)


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_reference_in_the_repository_is_that_of_the_code(name):
    kept = (ROOT / "docs/reference" / name).read_text()
    assert kept == reference.PAGES[name](), f"{name} is old: run `make reference`"


def test_the_reference_is_written_to_a_folder(tmp_path):
    assert reference.main([str(tmp_path / "new")]) == 0
    assert {p.name for p in tmp_path.glob("new/*")} == {*reference.PAGES}


def test_the_servers_manual_names_every_field():
    manual = "".join(PAGES[f"docs/{name}.md"] for name in ("server", "limits", "operations"))
    own = {*fields(ChatBody), *fields(CompletionBody)} - {"read_past", "replaced"}
    known = own | {*body.NO_OP, *body.REFUSED, *body.HARMLESS, *body.FRONTENDS}
    assert [name for name in sorted(known) if f"`{name}`" not in manual] == []


@pytest.mark.parametrize("key", KNOBS)
def test_every_knob_says_what_it_is(key):
    assert description(key)


def test_every_python_file_that_a_guide_names_exists():
    """As a path, or as the last part of one."""
    folders = "specserve", "drafters", "kernels", "bench", "tests", "deploy"
    files = [f"/{path.relative_to(ROOT)}" for f in folders for path in (ROOT / f).rglob("*.py")]
    for guide in ("docs/design.md", "CONTRIBUTING.md"):
        named = re.findall(r"`([\w/.-]+\.py)`", PAGES[guide])
        missing = [name for name in named if not any(f.endswith(f"/{name}") for f in files)]
        assert len(named) > 20 and missing == []


def test_every_folder_that_is_named_exists():
    folders = re.findall(r"`([\w/]+)/`", PAGES["README.md"] + PAGES["CONTRIBUTING.md"])
    assert folders
    assert not [f for f in folders if not (ROOT / f).is_dir()]


DRAFTERS = re.findall(r"```python\n(.*?)```", PAGES["CONTRIBUTING.md"], re.DOTALL)


def test_the_source_that_contributing_shows_draft_tokens(tmp_path, monkeypatch, caplog):
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
    caplog.set_level("WARNING", "specserve")
    with LLM(folder, config=file, set=given, progress=False) as llm:
        llm.generate("the cat", SamplingParams(temperature=0, max_tokens=9))
        name = "repeat_drafter:Repeat"
        assert llm.engine.sources == ("ngram", name)
        assert llm.engine.speculator.sources[1].drafter.p == 0.5
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
