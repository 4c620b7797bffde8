"""`specserve tune`: what texts show about drafters, and a start that begins with it."""

import json
import os

import pytest

from specserve import LLM, SamplingParams
from specserve.cli import command as cli
from specserve.cli.tune import TuningPrompt, read_prompts
from specserve.config import load_config
from specserve.engine import build
from specserve.errors import ConfigError
from specserve_drafters.base import DEFAULT_SCOPE
from specserve_drafters.candidates import ROOT
from specserve_drafters.trie import KNOWN_WEIGHT, NUM_BINS, BinCounts, shipped_prior
from tests.checkpoints import tiny_checkpoint, tiny_tokenizer
from tests.drafters.oracle_trie import Calibration
from tests.engine.engines import ask_always

TEXT = "the cat sat on the mat and " * 6
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def begun(llm):
    """The calibration with which greedy requests begin."""
    acceptance = llm.engine.speculator.acceptance
    return (acceptance.find(DEFAULT_SCOPE) or acceptance.begin(-1, DEFAULT_SCOPE)).calibration(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tuned"), seed=5)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The file of all models, in a folder of the test's own."""
    file = tmp_path / "acceptance-0.json"
    monkeypatch.setattr(build, "kept_file", lambda what, *key: file)
    return file


def test_prompts_are_whole_texts_or_lines_without_the_response(tmp_path):
    (tmp_path / "a.txt").write_text("a text\nof two lines")
    lines = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "p\u2028q", "id": 3},
    ]
    told = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "b.jsonl").write_text(f"\ufeff{told}")
    (tmp_path / "empty.txt").write_text(" \n")
    found = read_prompts([tmp_path / name for name in ("a.txt", "b.jsonl", "empty.txt")])
    assert found == [
        TuningPrompt(prompt="a text\nof two lines"),
        TuningPrompt(messages=[{"role": "user", "content": "a"}]),
        TuningPrompt(prompt="p\u2028q"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.jsonl", "no json", "a.jsonl, line 1: "),
        ("a.jsonl", '\n{"prompt": 1}', "line 2: Expected `str`, got `int`"),
        ("a.jsonl", "{}", "line 1: set either messages or prompt"),
        ("a.jsonl", '{"prompt": "a", "messages": [{"role": "user"}]}', "set either messages or"),
        ("a.jsonl", '{"messages": [{"role": "assistant"}]}', "set either messages or prompt"),
        ("a.txt", "", "the files have no prompts"),
        ("A.JSONL", "no json", "A.JSONL, line 1: "),
    ],
)
def test_a_file_without_usable_prompts_is_refused(tmp_path, name, text, complaint):
    (file := tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as e:
        read_prompts([file])
    assert complaint in str(e.value)
    with pytest.raises(ConfigError, match=r"missing\.txt cannot be read"):
        read_prompts([tmp_path / "missing.txt"])


def test_a_later_start_begins_with_what_texts_have_shown(folder, kept, tmp_path, capsys):
    lines = [json.dumps({"prompt": TEXT[i:]}) for i in range(20)]
    (file := tmp_path / "texts.jsonl").write_text("\n".join(lines))
    given = ["--set", "memory.kv_bytes=16777216", "--max-tokens", "60"]
    assert cli.main(["tune", str(folder), str(file), *given]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("20 prompts, ") and said[1].startswith("ngram: ")
    assert said[-1] == f"kept for later starts in {kept}; delete this file to forget it"
    [(source, bins)] = json.loads(kept.read_text())["acceptance"].items()
    assert source == "ngram" and sum(tries for _, tries, *_ in bins) > 20

    def run():
        with LLM(folder, set={"memory.kv_bytes": 1 << 24}, progress=False) as llm:
            begun(llm).trie(-1).add(ROOT, 5, 0.5, "ngram")
            assert llm.loaded.phases["acceptance"] == f"learned by specserve tune: {kept}"
            return begun(llm).counts()

    counts = run()
    want = {kind: min(1.0, KNOWN_WEIGHT / tries) * tries for kind, tries, *_ in bins}
    assert {each.kind: each.tries for each in counts["ngram"]} == pytest.approx(want)


@pytest.mark.parametrize(
    "bins",
    [
        *([[9999, 1, 1, 1]], [[0, 0, 0, 0]], [[0, -1, 0, 0]], "x", None),  # ignored
        *([[0, 1, 0, 0]], [[i, 1e-3, 1e9, 1e9] for i in range(NUM_BINS)]),  # odd, and used
    ],
    ids=str,
)
def test_a_forged_file_changes_no_text_and_ends_nothing(folder, kept, bins):
    params = [GREEDY, SamplingParams(seed=3, max_tokens=12)]
    params.append(SamplingParams(seed=3, max_tokens=12, structured_outputs={"regex": "(ab)+c"}))

    def run():
        with LLM(folder, set={"memory.kv_bytes": 1 << 24}, progress=False) as llm:
            ask_always(llm.engine)
            outputs = llm.generate([TEXT] * len(params), params)
            assert not llm.engine.stats.drafter_errors
            return [output.token_ids for output in outputs]

    want = run()
    names = "ngram", "grammar", "children by model"
    kept.write_text(json.dumps({"acceptance": {name: bins for name in names}}))
    assert run() == want


def test_drafting_that_is_turned_on_again_begins_with_it(folder, kept):
    kept.write_text('{"acceptance": {"ngram": [[0, 8, 2, 4]]}}')
    given = {"memory.kv_bytes": 1 << 24, "drafter.name": "none"}
    with LLM(folder, set=given, progress=False) as llm:
        llm.change_speculation(drafter="auto")
        prior = begun(llm).prior
        assert prior == {**shipped_prior(), "ngram": [BinCounts(0, 8, 2, 4)]}


def test_a_start_without_a_tuned_file_begins_with_the_shipped_acceptance(folder, kept):
    with LLM(folder, set={"memory.kv_bytes": 1 << 24}, progress=False) as llm:
        assert begun(llm).prior == shipped_prior()
        assert "acceptance" not in llm.loaded.phases


def test_models_of_one_shape_have_files_of_their_own(folder, tmp_path):
    others = tiny_checkpoint(tmp_path / "others", seed=6)
    configs = [load_config(None, {"model.path": str(path)}) for path in (folder, others)]
    target = LoadedShape()
    assert len({build.acceptance_file(config, target) for config in configs}) == 2


class LoadedShape:
    dtype, forms = "bf16", None


def test_a_file_that_cannot_be_replaced_is_an_error(folder, kept, tmp_path, monkeypatch, capsys):
    kept.write_text('{"acceptance": {"ngram": []}}')
    monkeypatch.setattr(os, "replace", refused)
    (file := tmp_path / "text.txt").write_text(TEXT)
    flags = ["--set", "memory.kv_bytes=16777216", "--max-tokens", "20"]
    assert cli.main(["tune", str(folder), str(file), *flags]) == 1
    assert f"{kept} cannot be written. Check the disk" in capsys.readouterr().err


def refused(*paths):
    raise OSError("no space left")


def test_only_auto_learns(folder, tmp_path, capsys):
    (file := tmp_path / "text.txt").write_text(TEXT)
    assert cli.main(["tune", str(folder), str(file), "--drafter", "ngram"]) == 1
    assert "drafter.name = 'ngram': only auto learns from texts" in capsys.readouterr().err


def test_a_prior_shifts_scores_and_fades_with_new_draft_tokens():
    kind = Calibration().calibrators(0)["a"].weigh(0.9, 1)[1]
    assert kind < NUM_BINS
    poor = Calibration({"a": [BinCounts(kind, 1000, 100, 900)]})
    calibrator = poor.calibrators(0)["a"]
    first = calibrator.weigh(0.9, 1)[3]
    assert first < 0.25 < Calibration().calibrators(0)["a"].weigh(0.9, 1)[3]
    for _ in range(400):
        calibrator.learn(calibrator.weigh(0.9, 1), True)
    calibrator.use()
    assert calibrator.weigh(0.9, 1)[3] > 0.9
