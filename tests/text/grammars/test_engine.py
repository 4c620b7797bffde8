"""Texts of a model that obey the 200 schemas at T = 1, the same ones whoever guesses."""

import json

import jsonschema
import pytest

from specserve import LLM, RequestError, SamplingParams, StructuredOutputsParams
from specserve_bench.figures.structured import SCHEMAS
from tests.checkpoints import tiny_checkpoint

MOST = 4000  # tokens of a text
LONG = {"max_position_embeddings": 8192}
SOURCES = {
    "ngram": {"drafter.name": "ngram"},
    "model": {"drafter.name": "model"},
    "grammar": {"drafter.name": "auto", "drafter.options": {"sources": ["grammar"]}},
    "auto": {"drafter.name": "auto"},
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """LLMs on one random pair, the draft model of which is often right."""
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_checkpoint(folder / "target", seed=1, **LONG)
    draft = tiny_checkpoint(folder / "draft", seed=1, num_hidden_layers=1, **LONG)

    def load(**settings):
        sources = settings.get("drafter.options", {"sources": ["model"]})["sources"]
        needs_draft = settings["drafter.name"] in ("model", "auto") and "model" in sources
        settings = {"memory.kv_bytes": 1 << 26, "scheduler.max_running": 40} | settings
        return LLM(target, draft if needs_draft else None, set=settings, progress=False)

    return load


def texts(llm, names):
    asked = [
        SamplingParams(
            structured_outputs=StructuredOutputsParams(json=SCHEMAS[name]),
            temperature=1,
            seed=seed,
            max_tokens=MOST,
        )
        for seed, name in enumerate(names)
    ]
    outputs = llm.generate([f"{name}: " for name in names], asked, use_tqdm=False)
    assert {output.finish_reason for output in outputs} == {"stop"}
    return [output.text for output in outputs], outputs


@pytest.fixture(scope="module")
def plain(load):
    """The texts of some schemas without guesses; each is found once."""
    known = {}

    def plain(names):
        if names[-1] not in known:
            with load(**{"drafter.name": "none"}) as llm:
                known[names[-1]] = texts(llm, names)[0]
        return known[names[-1]]

    return plain


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "names", [[*SCHEMAS][::10], pytest.param([*SCHEMAS], marks=pytest.mark.slow)], ids=["20", "200"]
)
def test_texts_obey_their_schemas_whoever_draft_tokens(load, plain, names, source):
    want = plain(names)
    for name, text in zip(names, want, strict=True):
        jsonschema.validate(json.loads(text), SCHEMAS[name])
    with load(**SOURCES[source]) as llm:
        got, outputs = texts(llm, names)
        assert got == want
        assert sum(output.speculation.accepted for output in outputs) > 0


def test_what_cannot_be_compiled_is_a_request_error_before_anything_runs(load):
    with load(**{"drafter.name": "none"}) as llm:
        bad = {"structured_outputs": {"json": {"uniqueItems": True}}}
        for _ in range(2):  # the second time it is known
            with pytest.raises(RequestError, match="not supported: uniqueItems") as e:
                llm.generate(["a", "b"], [SamplingParams(), SamplingParams(**bad)])
            assert e.value.param == "structured_outputs" and not llm.live
