"""A model whose rows have other bits in other steps runs without guesses and prefix hits."""

import logging

import pytest

from specserve import LLM, SamplingParams
from specserve.errors import ConfigError
from tests.models.transformers_models import foreign_checkpoint

SETTINGS = {"model.threads": 1, "memory.kv_bytes": 1 << 26, "scheduler.max_batched_tokens": 140}
EXPERTS = {"model_type": "granitemoeshared", "num_local_experts": 4, "num_experts_per_tok": 2}
PROMPT = [9, 8, 7, 6] * 10  # n-grams would guess, and a second time most of it would be a hit
PARAMS = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    variant = foreign_checkpoint(root / "variant", **EXPERTS)
    return variant, foreign_checkpoint(root / "invariant", model_type="olmo")


def start(folder, draft=None, **settings):
    return LLM(folder, draft, set=SETTINGS | settings, progress=False)


def test_it_says_so_and_neither_draft_tokens_nor_takes_hits(folders, caplog):
    variant, invariant = folders
    with caplog.at_level(logging.WARNING), start(variant, invariant) as llm:
        assert (llm.loaded.drafter, llm.loaded.weights.draft) == ("none", None)
        assert "Speculation and prefix caching are off" in llm.loaded.phases["rows"]
        [said] = [m for m in caplog.messages if "not batch-invariant" in m]
        assert str(variant) in said
        first, second = (llm.generate([PROMPT], PARAMS)[0] for _ in range(2))
        assert first.token_ids == second.token_ids
        assert second.num_cached_tokens == 0
        assert llm.loaded.engine.tables.formats == {}


def test_nothing_can_make_draft_tokens_for_it_later(folders):
    variant, invariant = folders
    with start(variant) as llm:
        with pytest.raises(ConfigError, match="speculation is off"):
            llm.change_speculation(max_nodes=4)
        with pytest.raises(ConfigError, match="speculation is off"):
            llm.load_draft_model(invariant)
        llm.change_speculation(drafter="none")
        assert llm.generate([PROMPT], PARAMS)[0].token_ids


def test_a_model_that_passes_has_both(folders):
    _, invariant = folders
    with start(invariant, **{"drafter.name": "ngram"}) as llm:
        assert llm.loaded.drafter == "ngram"
        assert llm.loaded.phases["rows"].endswith("batch-invariant in steps of 1 to 140 rows")
        assert llm.loaded.phases["target forward"] == "transformers' modules, run eagerly"
        first, second = (llm.generate([PROMPT], PARAMS)[0] for _ in range(2))
        assert first.token_ids == second.token_ids
        assert second.num_cached_tokens > 0


def test_a_draft_models_rows_do_not_matter(folders):
    """What it says is checked."""
    variant, invariant = folders
    with start(invariant) as plain, start(invariant, variant, **{"drafter.name": "model"}) as llm:
        assert llm.loaded.drafter == "model"
        assert llm.loaded.weights.draft.key.implementation == "transformers"
        texts = [each.generate([PROMPT], PARAMS)[0].token_ids for each in (plain, llm)]
        assert texts[0] == texts[1]


def test_native_code_is_not_probed(folders, tmp_path):
    with start(foreign_checkpoint(tmp_path, model_type="llama")) as llm:
        assert "rows" not in llm.loaded.phases
        assert llm.loaded.weights.target.is_row_invariant is None
