"""`specserve bench` as a user calls it, on a tiny model: JSON, tables, plots, mistakes."""

import json
import shutil
from itertools import pairwise

import msgspec
import pytest

from specserve.cli.command import main
from specserve.config import load_config
from specserve.models.folder import SCALED, Scaled
from specserve_bench import machine, results, suite
from specserve_bench.plots import PLOTS, draw
from specserve_bench.report import markdown, report
from specserve_bench.results import Load
from specserve_bench.workloads import UNDRAFTED, UNLEARNT, workload
from specserve_drafters.suffix import END, LENGTHS
from tests.checkpoints import tiny_checkpoint

SMALL = ["--requests=2", "--rounds=2", "--set=model.threads=1", "--set=memory.kv_bytes=67108864"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"max_position_embeddings": 2048}
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "target", seed=1, **sizes)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    sizes = {"max_position_embeddings": 2048, "num_hidden_layers": 1}
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "draft", seed=2, **sizes)


@pytest.fixture(scope="module")
def latency(folder, draft, tmp_path_factory):
    """Result file, and what was printed, of a latency run with plots."""
    out = tmp_path_factory.mktemp("out")
    args = ["--model", folder, "--draft-model", draft, "--out", out / "r.json"]
    args += ["--plots", out / "plots", "--drafters=off,ngram:4,model:4,scripted:0.9/0.5"]
    with pytest.MonkeyPatch.context() as patch, open(out / "printed", "w+") as printed:
        patch.setattr("sys.stdout", printed)
        assert main(list(map(str, ["bench", "latency", *args, *SMALL, "--json"]))) == 0
    return out / "r.json", (out / "printed").read_text()


def test_every_subject_is_measured_on_every_workload_and_says_the_same(latency):
    result = results.read(latency[0])
    assert list(result.subjects) == ["off", "ngram:4", "model:4", "scripted:0.9/0.5"]
    assert list(result.workloads) == ["questions", "completion"]
    assert len(result.runs) == 8
    assert all(len(run.rounds) == 2 for run in result.runs)
    for name in result.workloads:
        hashes = {r.output_hash for run in result.runs if run.workload == name for r in run.rounds}
        assert len(hashes) == 1
    about = result.subjects["model:4"]
    assert (about.model, about.draft_model) == ("target", "draft")
    assert (about.drafter, about.max_nodes) == ("model", 4)


def test_the_file_says_where_how_and_of_what(latency, folder):
    text = latency[0].read_text()
    known = json.loads(text)
    assert known["machine"].keys() >= {"cpu", "cores", "torch", "specserve", "commit", "date"}
    assert known["machine"]["command"].startswith(f"specserve bench latency --model {folder}")
    assert str(folder) not in json.dumps(known["subjects"])
    assert "never saw" in known["workloads"]["questions"]["about"]
    assert known["subjects"]["ngram:4"]["config"]["speculation.max_nodes"] == 4


def test_an_installed_wheel_records_that_there_is_no_git_tree(monkeypatch):
    monkeypatch.setattr(suite, "commit", lambda: machine.NO_GIT)
    assert suite.machine("test")["commit"] == "no git tree"


def test_tables_and_plots_come_from_the_file_alone(latency, tmp_path, capsys, monkeypatch):
    def no_model(*args, **others):
        raise AssertionError("a kept result is shown without a model")

    monkeypatch.setattr(suite, "LLM", no_model)
    file, printed = latency
    again = ["bench", "show", str(file), "--plots", str(tmp_path / "again")]
    for flags, lines in [(["--json"], printed.splitlines()), ([], printed.splitlines()[:-1])]:
        assert main([*again, *flags]) == 0
        assert capsys.readouterr().out.splitlines() == lines
    plots = {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()}
    assert plots.keys() == {"latency-cdf.png", "acceptance-by-depth.png", "tpot-ratios.png"}
    first = {p.name: p.read_bytes() for p in (file.parent / "plots").iterdir()}
    assert plots == first


def test_with_json_the_last_line_has_the_figures(latency):
    line = json.loads(latency[1].splitlines()[-1])
    assert [row["subject"] for row in line["rows"][:2]] == ["off", "ngram:4"]
    row = line["rows"][0]
    assert row["ratios"]["tpot_ms"]["median"] == 1.0 and row["is_same"] is True
    assert row["ttft_ms"]["p99"] >= row["ttft_ms"]["p50"] > 0


def test_an_output_that_differs_is_said_aloud(latency):
    result = results.read(latency[0])
    result.runs[1].rounds[1].output_hash = "0123456789abcdef"
    text = report(result)
    assert "OUTPUTS DIFFER from those of off: ngram:4" in text and "DIFFERENT" in text
    assert "DIFFER" not in latency[1]


@pytest.mark.parametrize("label", ["off", "model:4"])
def test_a_scaled_model_is_never_shown_without_saying_so(latency, label):
    result = results.read(latency[0])
    scaled = [Scaled("small", "qwen3-0.6b")]
    result.subjects[label] = msgspec.structs.replace(result.subjects[label], scaled=scaled)
    text = report(result, has_json=True)
    assert "(scaled demo: small padded to qwen3-0.6b)" in text
    assert json.loads(text.splitlines()[-1])["scaled_demo"] == "scaled to qwen3-0.6b"
    assert "scaled to qwen3-0.6b: questions" in markdown([result])
    assert all("scaled to qwen3-0.6b" in title for title in titles(result))


def titles(result):
    figures = [plot([result]) for plot in PLOTS.values()]
    return [ax.get_title() for figure in figures if figure is not None for ax in figure.axes]


def test_kept_results_make_the_readmes_table(latency, capsys):
    file = str(latency[0])
    assert main(["bench", "show", file, file, "--markdown"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| drafter" + " | target: questions | target: completion" * 2 + " |"
    assert [row.split(" | ")[0] for row in rows] == [
        "| off",
        "| ngram:4",
        "| model:4",
        "| scripted:0.9/0.5",
    ]


def test_what_a_server_calls_things_is_no_markup(latency):
    result = results.read(latency[0])
    odd = "m[/x] [bold]:smile:[/bold]"
    result.subjects["off"] = msgspec.structs.replace(result.subjects["off"], model=odd)
    result.runs[0].rounds[0].requests[0].error = "template [/INST] not allowed"
    text = report(result)
    assert odd in text and "1 errors: off: template [/INST] not allowed" in text
    assert ", 1 errors" not in markdown([result]), "a median over rounds"


BROKEN = {
    "no rounds": lambda r: r.runs[0].rounds.clear(),
    "a round that ends before it begins": lambda r: setattr(r.runs[0].rounds[0], "seconds", -1.0),
    "a workload that says nothing": lambda r: r.workloads["questions"].pop("about"),
    "a workload that is not there": lambda r: r.workloads.pop("questions"),
    "no load": lambda r: setattr(r.runs[0], "load", Load()),
    "no subjects": lambda r: r.subjects.clear(),
    "a subject without runs": lambda r: r.subjects.update(other=r.subjects["off"]),
    "an unknown subject": lambda r: setattr(r.runs[0], "subject", "other"),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_a_file_that_no_measurement_left_is_named(latency, tmp_path, damage, capsys):
    result = results.read(latency[0])
    damage(result)
    (tmp_path / "r.json").write_bytes(msgspec.json.encode(result))
    assert main(["bench", "show", str(tmp_path / "r.json"), "--markdown"]) == 1
    assert "r.json: no results of" in capsys.readouterr().err


def test_a_scaled_draft_is_one_as_well(folder, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(folder, draft)
    fields = json.loads((draft / "config.json").read_text())
    fields[SCALED] = {"source": "small", "like": "large"}
    (draft / "config.json").write_text(json.dumps(fields))
    settings = {"memory.kv_bytes": 1 << 26, "model.path": str(folder), "drafter.model": str(draft)}
    loader = suite.Loader(progress=False)
    config = load_config(None, settings)
    with_draft = loader.load("", config).about
    assert with_draft.scaled == [Scaled(**fields[SCALED])]
    off = loader.load("", load_config(None, settings | suite.drafting("off", config))).about
    assert off.scaled == []


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_measured(tmp_path, capsys):
    short = tiny_checkpoint(tmp_path / "short", seed=1, max_position_embeddings=512)
    out = tmp_path / "r.json"
    args = ["--model", short, "--out", out, "--workloads=questions,mixed", "--drafters=off"]
    assert main(list(map(str, ["bench", "latency", *args, *SMALL, "--requests=4"]))) == 1
    shown = capsys.readouterr()
    assert "measuring" not in shown.err and "tokens" in shown.err and not out.exists()


def test_what_cannot_be_kept_after_all_is_shown(folder, capsys):
    args = ["--model", folder, "--drafters=off", "--workloads=questions", "--out=/dev/full"]
    assert main(list(map(str, ["bench", "latency", *args, *SMALL]))) == 1
    shown = capsys.readouterr()
    assert "questions, 1 at a time" in shown.out
    assert "/dev/full: cannot be written" in shown.err


def test_the_same_drafter_twice_shows_the_noise(folder, tmp_path):
    args = ["--model", folder, "--drafters=off,off", "--out", tmp_path / "r.json"]
    args += ["--workloads=questions", "--requests=1", "--rounds=1"]
    assert main(list(map(str, ["bench", "latency", *args]))) == 0
    assert list(results.read(tmp_path / "r.json").subjects) == ["off", "off (2)"]


@pytest.fixture(scope="module")
def loaded(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    args = ["--model", folder, "--out", out / "r.json", "--concurrency=1,2"]
    args += ["--workloads=questions", "--goal-ttft-ms=1e9", "--goal-tpot-ms=1e9"]
    assert main(list(map(str, ["bench", "load", *args, *SMALL]))) == 0
    return out / "r.json"


def test_load_runs_every_concurrency_and_counts_goodput(loaded, tmp_path):
    result = results.read(loaded)
    assert [str(run.load) for run in result.runs[::2]] == ["1 at a time", "2 at a time"]
    for run in result.runs:
        for r in run.rounds:
            assert results.goodput(r, result.goals) == pytest.approx(2 / r.seconds)
    assert "tpot-over-concurrency.png" in {file.name for file in draw([result], tmp_path)}


def test_load_at_a_rate_is_open_loop(folder, tmp_path):
    args = ["--model", folder, "--rate=50", "--burstiness=2", "--out", tmp_path / "r.json"]
    args += ["--workloads=questions", "--drafters=off"]
    assert main(list(map(str, ["bench", "load", *args, *SMALL]))) == 0
    [run] = results.read(tmp_path / "r.json").runs
    assert run.load == Load(rate=50.0, burstiness=2.0)
    arrivals = [[a.arrived_at for a in r.requests] for r in run.rounds]
    assert arrivals[0] == arrivals[1] and arrivals[0][1] > 0


def test_compare_takes_configs_in_turn(folder, tmp_path):
    files = []
    for name in ("none", "ngram"):
        files.append(tmp_path / f"{name}.toml")
        model = f'path = "{folder}"\nthreads = 1'
        files[-1].write_text(f'[model]\n{model}\n[drafter]\nname = "{name}"\n')
    args = [*files, "--out", tmp_path / "r.json", "--requests=1", "--rounds=1"]
    assert main(list(map(str, ["bench", "compare", *args, "--workloads=completion"]))) == 0
    result = results.read(tmp_path / "r.json")
    assert [s.drafter for s in result.subjects.values()] == ["none", "ngram"]


def test_every_config_is_read_before_a_model_is_loaded(tmp_path, monkeypatch, capsys):
    (tmp_path / "off.toml").write_text('[drafter]\nname = "none"\n')
    monkeypatch.setattr(suite.Loader, "load", lambda *args: pytest.fail("a model was loaded"))
    assert main(["bench", "compare", str(tmp_path / "off.toml"), "gone.toml"]) == 1
    assert "gone.toml" in capsys.readouterr().err


def test_the_same_config_twice_shows_the_noise(folder, tmp_path):
    file = tmp_path / "off.toml"
    file.write_text(f'[model]\npath = "{folder}"\nthreads = 1\n[drafter]\nname = "none"\n')
    args = [file, file, "--out", tmp_path / "r.json", "--requests=1", "--rounds=1"]
    assert main(list(map(str, ["bench", "compare", *args, "--workloads=questions"]))) == 0
    assert list(results.read(tmp_path / "r.json").subjects) == [str(file), f"{file} (2)"]


def test_every_drafter_at_every_size_is_tried_with_room_for_its_draft_tokens(
    folder, draft, tmp_path
):
    args = ["--model", folder, "--draft-model", draft, "--out", tmp_path / "r.json"]
    args += ["--nodes=2,40", "--requests=1", "--rounds=1", "--set=memory.kv_bytes=67108864"]
    assert main(list(map(str, ["bench", "drafters", *args]))) == 0
    subjects = results.read(tmp_path / "r.json").subjects
    assert list(subjects) == ["off", "ngram:2", "ngram:40", "model:2", "model:40", "auto"]
    wide = subjects["model:40"]
    assert (wide.max_nodes, wide.config["speculation.max_step_nodes"]) == (40, 40)
    assert wide.threads.keys() == {"target threads", "draft threads"}
    assert len({s.threads["target threads"].partition(": ")[2] for s in subjects.values()}) == 1


def test_only_warm_subjects_begin_a_round_with_what_was_learnt_before(folder, tmp_path):
    args = ["--model", folder, "--drafters=off,auto", "--workloads=questions", "--warm"]
    assert main(list(map(str, ["bench", "latency", *args, *SMALL, "--out", tmp_path / "r"]))) == 0
    assert [s.is_warm for s in results.read(tmp_path / "r").subjects.values()] == [False, True]


def test_models_are_loaded_once(folder, draft):
    loader = suite.Loader(progress=False)
    small = {"memory.kv_bytes": 1 << 26, "model.path": str(folder)}
    model = {"drafter.model": str(draft)}
    chosen = [{}, model, {"drafter.name": "none"}, model, {"scheduler.max_model_len": 512}]
    llms = [
        loader.load("", load_config(None, small | settings)).runnable.llm for settings in chosen
    ]
    targets = [llm.weights.target for llm in llms]
    assert targets[:4] == targets[:1] * 4 and targets[4] is not targets[0]
    assert llms[0].weights.draft is None and llms[1].weights.draft is llms[3].weights.draft
    assert len({id(llm.engine.target.decoder) for llm in llms}) == 2


def test_a_drafter_that_the_config_names_is_tried_with_its_options(folder, tmp_path):
    settings = [f"--set=drafter.options.{key}=2" for key in ("min_ngram", "max_ngram")]
    file = tmp_path / "mine.toml"
    file.write_text('[drafter]\nname = "specserve_drafters.ngram:NgramDrafter"\n')
    args = ["--model", folder, "--config", file, "--out", tmp_path / "r.json", "--requests=1"]
    args += ["--rounds=1", *settings]
    assert main(list(map(str, ["bench", "latency", *args]))) == 0
    subjects = results.read(tmp_path / "r.json").subjects
    own = "specserve_drafters.ngram:NgramDrafter"
    assert list(subjects) == ["off", "ngram", own]
    assert subjects[own].config["drafter.options"] == {"min_ngram": 2, "max_ngram": 2}
    assert "drafter.options" not in subjects["ngram"].config


def test_rounds_are_interleaved_after_a_first_request_that_is_thrown_away(monkeypatch):
    order, shown = [], []
    monkeypatch.setattr(
        suite.Progress, "update", lambda self, task, description: shown.append(description)
    )

    class Runnable:
        def __init__(self, label):
            self.label = label

        def check(self, ask):
            assert not order, "refuse before anything is measured"

        def run(self, workload, load):
            order.append((workload.name, self.label, len(workload.asks)))
            return results.Round(seconds=len(order), requests=[], itl_ms=None, output_hash="")

    subject = results.Subject(model="m")
    contenders = [suite.Contender(x, subject, Runnable(x)) for x in "ab"]
    chosen = [workload(name, 3, 0) for name in ("questions", "random")]
    trials = suite.Trials(chosen, [Load(concurrency=1)], rounds=2)
    result = suite.measure("latency", contenders, trials, results.Goals(), "test")
    turns = ("ab", 1), ("ba", 3), ("ab", 3)
    assert order == [
        (w, label, size)
        for labels, size in turns
        for w in ("questions", "random")
        for label in labels
    ]
    assert [r.seconds for r in result.runs[0].rounds] == [6, 9]
    assert shown[:2] == [
        "run 1 of 12 (warm-up): questions, 1 at a time, a",
        "run 2 of 12 (warm-up): questions, 1 at a time, b",
    ]
    assert shown[-1] == "run 12 of 12: random, 1 at a time, b"


def test_a_warm_subject_runs_the_same_once_before_each_round_that_is_measured():
    ran = []

    class Runnable:
        def check(self, ask):
            pass

        def run(self, workload, load):
            ran.append(workload)
            return results.Round(seconds=len(ran), requests=[], itl_ms=None, output_hash="")

    subject, asked = results.Subject(model="m"), workload("questions", 3, 0)
    contenders = [suite.Contender(x, subject, Runnable(), x == "warm") for x in ("cold", "warm")]
    trials = suite.Trials([asked], [Load(concurrency=1)], rounds=1)
    result = suite.measure("latency", contenders, trials, results.Goals(), "test")
    first, second, *rest = ran
    assert len(first.asks) == len(second.asks) == 1, "both warm up"
    assert rest == [asked.once_before, asked.with_speculation(UNLEARNT), asked]
    assert [[r.seconds for r in run.rounds] for run in result.runs] == [[5], [4]]


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_a_warm_source_has_learnt_the_round_before_and_nothing_that_is_measured(
    folder, temperature
):
    settings = {"model.path": str(folder), "model.threads": 1, "memory.kv_bytes": 1 << 26}
    settings |= {"drafter.options": {"sources": ["suffix"]}}
    loader = suite.Loader(progress=False, is_warm=True)
    contender = loader.load("suffix", load_config(None, settings))
    asked = workload("questions", 2, 0, temperature)
    trials = suite.Trials([asked], [Load(concurrency=1)], rounds=2)
    [run] = suite.measure("latency", [contender], trials, results.Goals(), "test").runs
    llm = contender.runnable.llm
    (suffix,) = llm.engine.speculator.sources
    learnt = learnt_by(suffix)
    before, measured = (outputs_of(contender.runnable, w) for w in (asked.once_before, asked))
    assert learnt == before * 2
    assert (before == measured) is (temperature == 0)
    assert len({round.output_hash for round in run.rounds}) == 1


def learnt_by(source):
    """The outputs that a suffix source has entered after the ends of their prompts."""
    [scope] = source.scopes.values()
    tokens = [token for part in reversed(scope.parts) for token in part.tokens]
    ends = [n for n, token in enumerate(tokens) if token == END]
    return [tokens[a + 1 + LENGTHS[-1] : b] for a, b in pairwise(ends) if b > a + 1]


def outputs_of(local, asked):
    checked = [local.check(ask) for ask in asked.with_speculation(UNDRAFTED).asks]
    outputs = local.llm.generate([ids for ids, _ in checked], [its.params for _, its in checked])
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["latency", "--workloads=chess"], "questions, completion"),
        (["latency", "--drafters=ngram:many"], "NAME:NODES"),
        (["latency", "--drafters=scripted:often"], "scripted:0.9/0.8/0.7"),
        (["latency", "--drafters=telepathy"], "Unknown drafter 'telepathy'"),
        (
            ["latency", "--url=http://127.0.0.1:1", "--drafters=off"],
            "a setting of the server",
        ),
        (["latency", "--url=http://127.0.0.1:1"], "specserve serve"),
        (["latency", "--api-key-file=k"], "--url"),
        (["latency", "--drafters=ngram:64"], "1 to 63"),
        (
            ["latency", "--drafters=off,ngram", "--draft-model=d"],
            "--drafters uses it",
        ),
        (["latency", "--set=drafter.name=ngram"], "--drafters"),
        (["latency", "--drafters=off", "--out=/dev/null/x/r.json"], "cannot be written"),
        (["load", "--burstiness=2"], "--rate"),
        (["drafters", "--nodes=4", "--drafters=off"], "NAME:NODES"),
        (["compare", "off.toml"], "nothing to compare with"),
        (["compare", "off.toml", "on.toml", "--api-key-file=k"], "one URL"),
        (["compare", "gone.toml", "gone.toml"], "gone.toml"),
        (["show", "gone.json"], "gone.json"),
        (["latency", "--drafters=off", "--out=gone/r.json"], "no folder gone: create it"),
        (["show", "gone.json", "--plots=/dev/null/x"], "cannot be written"),
        (["show", "gone.json", f"--plots={__file__}"], "is a file. Name a folder."),
        (["show", __file__], "name a file that --out of latency"),
        (["show", "gone.json", "--plots=gone/plots"], "no folder gone: create it"),
        (["scale-model", "m", "gone/m", "--like=qwen3-0.6b"], "no folder gone: create it"),
        (["show", "gone.json", "--plots=/proc"], "cannot be written"),
        (["latency", "--drafters=off", "--out=/proc", "--plots=/tmp"], "cannot be written"),
        (["drafters", "--url=http://127.0.0.1:1"], "Use the command latency"),
        (
            ["latency", "--drafters=off", "--set=drafter.options.max_ngram=2"],
            "which is not in --drafters",
        ),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    folder, tmp_path, monkeypatch, capsys, args, complaint
):
    monkeypatch.chdir(tmp_path)
    model = ["--model", str(folder)] if args[0] == "latency" and "--url" not in args[1] else []
    assert main(["bench", *args, *model]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert complaint in err
    assert not list(tmp_path.iterdir())


def test_a_command_that_failed_leaves_no_result(folder, tmp_path, capsys):
    out = tmp_path / "r.json"
    assert main(["bench", "latency", f"--model={folder}", "--drafters=telepathy", f"--out={out}"])
    assert "telepathy" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    "arg",
    [
        "--requests=0",
        "--rounds=-1",
        "--rate=0",
        "--rate=inf",
        "--concurrency=,",
        "--concurrency=1,1",
        "--rate=2,2.0",
        "--workloads=mixed,mixed",
        "--burstiness=nan",
        "--burstiness=1e-200",
        "--rate=1e-310",
        "--requests=100000000000000",
        "--seed=-1",
        "--temperature=nan",
        "--temperature=-1",
    ],
)
def test_a_number_that_cannot_be_is_refused(capsys, arg):
    with pytest.raises(SystemExit):
        main(["bench", "load", arg])
    assert arg.split("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["off", "ngram:4", "scripted:0.5"])
def test_subjects_without_a_draft_model_do_not_round_one(setting):
    pair = {"model.path": "m", "drafter.model": "d", "drafter.quantize": "w8"}
    chosen = suite.drafting(setting, load_config(None, pair))
    assert load_config(None, pair | chosen).drafter.quantize is None


@pytest.mark.parametrize("flag", ["--drafters=off", "--workloads=questions"])
def test_a_list_that_is_given_twice_is_refused(flag, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "latency", flag, flag])
    assert "is given twice; give one list, with commas" in capsys.readouterr().err
