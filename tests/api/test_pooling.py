"""`LLM.embed` and `LLM.score` return what transformers computes."""

import math

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from specserve import LLM, RequestError, SamplingParams
from specserve.errors import ConfigError
from tests.checkpoints import tiny_checkpoint
from tests.server.server_process import SETTINGS
from tests.server.test_embeddings import (
    CLOSE,
    PROMPTS,
    TEXTS,
    hidden,
    outputs,
    ranker_of,
    unit,
    with_log_odds,
    with_pooling,
)

ASKED = SamplingParams(temperature=1.0, max_tokens=8)


def loaded(folder, **more):
    return LLM(folder, set=SETTINGS, progress=False, **more)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("embedder"), seed=3)
    with loaded(with_pooling(folder, "pooling_mode_lasttoken"), seed=1) as llm:
        yield folder, llm


def test_embeddings_are_those_of_transformers_in_order(embedder):
    folder, llm = embedder
    ids = AutoTokenizer.from_pretrained(folder)(TEXTS[0])["input_ids"]
    found = llm.embed([*TEXTS, {"prompt_token_ids": ids}])
    for text, each in zip([*TEXTS, TEXTS[0]], found, strict=True):
        want = unit(hidden(folder, text)[-1])
        np.testing.assert_allclose(each.outputs.embedding, want, **CLOSE)
        assert each.outputs.hidden_size == 64 and each.finished
    assert found[0].prompt_token_ids == ids
    [one] = llm.embed(ids)
    assert one.outputs == found[0].outputs


def test_dimensions_prompts_and_long_texts(embedder):
    folder, llm = embedder
    [found] = llm.embed(TEXTS[0], dimensions=8, prompt_name="query")
    want = unit(hidden(folder, PROMPTS["query"] + TEXTS[0])[-1][:8])
    np.testing.assert_allclose(found.outputs.embedding, want, **CLOSE)
    with pytest.raises(RequestError, match="context"):
        llm.embed("cat " * 2000)
    assert len(llm.embed("cat " * 2000, truncate=True)[0].prompt_token_ids) == 511
    with pytest.raises(RequestError, match="Send 1 to 64"):
        llm.embed("a", dimensions=-1)
    for wrong in ({"dimensions": 65}, {"dimensions": 0}, {"prompt_name": "other"}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            llm.embed("a", **wrong)


def test_embeddings_change_no_text(embedder):
    """They take no seed from the LLM, and leave no request."""
    folder, llm = embedder
    with loaded(folder, seed=1) as other:
        want = [output.text for output in other.generate(TEXTS[:2], ASKED)]
    first = llm.generate(TEXTS[0], ASKED)[0].text
    llm.embed(TEXTS)
    assert [first, llm.generate(TEXTS[1], ASKED)[0].text] == want and not llm.live


def test_a_classifier_scores_pairs(tmp_path):
    folder = tiny_checkpoint(
        tmp_path / "m", seed=5, kind=AutoModelForSequenceClassification, num_labels=1
    )
    ranker_of(folder)
    with loaded(folder) as llm:
        found = [each.outputs.score for each in llm.score("a cat", TEXTS)]
        assert found == [each.outputs.score for each in llm.score(["a cat"] * 4, TEXTS)]
        want = [1 / (1 + math.exp(-outputs(folder, "a cat", text))) for text in TEXTS]
        assert found == pytest.approx(want, abs=1e-5)
        with pytest.raises(RequestError, match="data_1: 2 texts for 1 of data_2"):
            llm.score(["a", "b"], ["c"])
        with pytest.raises(RequestError, match="instruction"):
            llm.score("a", "b", instruction="c")
        with pytest.raises(RequestError, match=r"Use LLM\.score"):
            llm.embed("a")


def test_two_tokens_score_a_pair(tmp_path):
    folder = with_log_odds(tiny_checkpoint(tmp_path / "m", seed=5), squashes=False)
    with loaded(folder) as llm:
        [found] = llm.score("a cat", TEXTS[3])
        prompt = AutoTokenizer.from_pretrained(folder)("querya catdocument" + TEXTS[3])
        assert found.prompt_token_ids == prompt["input_ids"]
        assert math.isfinite(found.outputs.score)


def test_vllms_task_sets_the_pooling(tmp_path):
    folder = tiny_checkpoint(tmp_path / "m")
    with loaded(folder) as llm, pytest.raises(RequestError, match="no embeddings"):
        llm.embed("a")
    with loaded(folder, task="embed", runner="pooling") as llm:
        assert len(llm.embed("a")[0].outputs.embedding) == 64
    with pytest.raises(ConfigError, match="task"):
        loaded(folder, task="reward")
