"""How masks and the speed of structured output are measured."""

import json

import pytest

from specserve_bench.figures import structured
from specserve_bench.figures.__main__ import main
from specserve_bench.figures.structured import SCHEMAS, SIZE, large_tokenizer
from tests.checkpoints import tiny_checkpoint


@pytest.fixture
def pair(tmp_path):
    target = tiny_checkpoint(tmp_path / "target", seed=1, max_position_embeddings=1024)
    draft = tiny_checkpoint(
        tmp_path / "draft", seed=1, num_hidden_layers=1, max_position_embeddings=1024
    )
    return target, draft


def test_speeds_are_over_off_and_texts_the_same(pair):
    few = {name: SCHEMAS[name] for name in ("function/age", "function/no_arguments")}
    found = structured.speed_figures(pair, few, rounds=2)
    assert found["is_same"] and {len(each) for each in found["tpot_ms"].values()} == {2}
    assert all(over["median"] > 0 for over in found["over_off"].values())
    masks = {"mask_ms": 0.02, "mask_ms_p95": 0.05, "rows": 9, "compile_ms": 1, "compile_ms_most": 2}
    told = structured.table({"masks": masks, "schemas": 2} | found)
    assert "p95 0.050 ms, over 9 rows of 2" in told and "| auto | " in told
    assert "DIFFER" in structured.table({"masks": masks, "schemas": 2} | found | {"is_same": False})


@pytest.mark.slow
def test_masks_are_measured_of_every_row_up_to_the_end(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["structured", "--rounds", "0", "--every", "67", "--out", str(out)]) == 0
    kept = json.loads(out.read_text())
    assert kept["schemas"] == 3 and 3 <= kept["masks"]["rows"] <= 3 * structured.ROWS
    assert 0 < kept["masks"]["mask_ms"] <= kept["masks"]["mask_ms_p95"]
    assert "a mask of 151936 ids" in capsys.readouterr().out


def test_the_vocabulary_has_every_id_once_and_ends_texts_with_the_last():
    tokenizer = large_tokenizer()
    assert tokenizer.get_vocab_size() == SIZE == len({*tokenizer.get_vocab().values()})
    assert tokenizer.id_to_token(structured.END_ID) == "<|end|>"
    assert tokenizer.decode(tokenizer.encode("def f(x):").ids) == "def f(x):"
