"""How sources are compared, on a tiny pair."""

import json

import pytest

from specserve_bench.figures import sources
from specserve_bench.figures.__main__ import main
from specserve_drafters.base import AUTO_SOURCES
from tests.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def contenders(tmp_path_factory):
    sizes = {"max_position_embeddings": 2048, "seed": 1}
    folder = tmp_path_factory.mktemp("pair")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "KV_BYTES", 1 << 26)
        yield sources.load(
            (
                tiny_checkpoint(folder / "target", **sizes),
                tiny_checkpoint(folder / "draft", num_hidden_layers=1, **sizes),
            )
        )


def test_sources_are_those_that_the_subject_names(contenders):
    asked = {name: {*c.runnable.llm.speculation().sources} for name, c in contenders.items()}
    assert asked["prediction"] == {"prediction"} and not asked["off"]
    assert (
        asked["all sources"] == {*AUTO_SOURCES} - {"eagle"} >= asked[sources.WARM] > asked["auto"]
    )
    assert [name for name, c in contenders.items() if c.is_warm] == [sources.WARM]


def test_a_comparison_is_of_the_bases_time_over_the_subjects(contenders):
    edit = sources.COMPARISONS[0]._replace(requests=1)
    row = sources.measured(edit, contenders, rounds=2)
    assert (edit.workload, edit.subject, edit.base) == ("edit", "prediction", "off")
    both = zip(row["base_tpot_ms"], row["tpot_ms"], strict=True)
    over = row["times_as_fast"]
    ratios = sorted(base / ms for base, ms in both)
    assert [over.low, over.high] == pytest.approx(ratios)
    assert row["is_same"] and row["tokens_a_step"] >= 1
    told = sources.table({"rows": [row]})
    assert "| edit | 0 | prediction | " in told and "at least 4 |" in told


def test_texts_that_differ_are_said_aloud(contenders):
    row = sources.measured(sources.COMPARISONS[2]._replace(requests=1), contenders, rounds=1)
    assert "DIFFER" not in sources.table({"rows": [row]})
    row["is_same"] = False
    assert "| questions (OUTPUTS DIFFER) |" in sources.table({"rows": [row]})


def test_every_comparison_is_kept(monkeypatch, contenders, tmp_path, capsys):
    few = [c._replace(requests=1) for c in sources.COMPARISONS[-2:]]
    monkeypatch.setattr(sources, "COMPARISONS", few)
    monkeypatch.setattr(sources, "load", lambda pair: contenders)
    out = tmp_path / "r.json"
    assert main(["sources", "--pair=demo", "--rounds=1", f"--out={out}"]) == 0
    kept = json.loads(out.read_text())
    assert [(row["workload"], row["temperature"]) for row in kept["rows"]] == [
        ("questions", 0.8),
        ("random", 2.0),
    ]
    assert "auto with suffix, warm" in capsys.readouterr().out
