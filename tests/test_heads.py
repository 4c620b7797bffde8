"""A target with layers for multi-token prediction guesses by itself, with the same text."""

import pytest
from safetensors.torch import load_file, save_file

from specserve import LLM, SamplingParams
from specserve.errors import ConfigError
from tests.engine.engines import let_all_guess
from tests.models.eagle_heads import write_head
from tests.models.mtp_layers import STYLES, WEIGHTS, write_target

SETTINGS = {"model.threads": 1, "memory.kv_bytes": 1 << 25, "scheduler.max_running": 8}
PROMPTS = ["the cat sat on the mat", "def read(path):", "a b c a b c a b"]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=4, n=4),
]


TARGETS = {style: {"style": style} for style in STYLES} | {
    "hybrid": {
        "style": "qwen",
        "family": "qwen3_5",
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
    }
}


@pytest.fixture(scope="module", params=TARGETS)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_target(folder, **TARGETS[request.param])
    return folder / "target"


def load(folder, **settings):
    return LLM(folder, set=SETTINGS | settings, progress=False)


def texts(llm):
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def undisturbed(folder):
    with load(folder, **{"drafter.name": "none"}) as llm:
        assert llm.engine.head is None
        return texts(llm)


@pytest.fixture
def eager(monkeypatch):
    let_all_guess(monkeypatch)


@pytest.mark.parametrize("settings", [{}, {"drafter.name": "eagle"}], ids=["auto", "eagle"])
def test_a_target_with_mtp_layers_draft_tokens_by_them(folder, undisturbed, eager, settings):
    with load(folder, **settings) as llm:
        assert "eagle" in llm.engine.sources
        assert texts(llm) == undisturbed
        stats = llm.engine.stats
        assert stats.drafter_errors == 0 and stats.sources["eagle"].verified > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"drafter.options.sources": ["ngram", "grammar"]},
        {"drafter.name": "ngram"},
        {"speculation.max_nodes": 0},
    ],
    ids=str,
)
def test_mtp_layers_that_nobody_asks_for_are_not_loaded(folder, undisturbed, settings):
    with load(folder, **settings) as llm:
        assert llm.engine.head is None and "eagle" not in llm.engine.sources
        assert texts(llm) == undisturbed


def test_a_target_whose_mtp_layers_cannot_be_read_serves_without_them(tmp_path, caplog):
    """But not where nobody else may guess."""
    write_target(tmp_path)
    target = tmp_path / "target"
    tensors = load_file(target / WEIGHTS)
    del tensors["model.layers.2.eh_proj.weight"]
    save_file(tensors, target / WEIGHTS, {"format": "pt"})
    with load(target) as llm:
        assert "eagle" not in llm.engine.sources and llm.engine.head is None
        with pytest.raises(ConfigError, match="no draft head was loaded at start-up"):
            llm.change_speculation(drafter="eagle")
    [words] = warnings(caplog)
    assert "multi-token prediction layers are not used" in words and "eh_proj" in words
    with pytest.raises(ConfigError, match="eh_proj"):
        load(target, **{"drafter.name": "eagle"})


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("settings", [{}, {"drafter.options.sources": ["ngram"]}], ids=str)
def test_a_target_that_has_lost_its_mtp_layers_says_so_where_they_were_to_guess(
    tmp_path, caplog, settings
):
    write_target(tmp_path, edit=lambda tensors: tensors.clear())
    with load(tmp_path / "target", **settings) as llm:
        assert llm.engine.head is None
    told = [] if settings else ["describes MTP layers, but their tensors are missing"]
    assert len(warnings(caplog)) == len(told)
    assert all(a in b for a, b in zip(told, warnings(caplog), strict=True))


def test_a_drafter_that_lacks_mtp_layers_which_were_lost_is_refused_with_the_reason(tmp_path):
    write_target(tmp_path, edit=lambda tensors: tensors.clear())
    with pytest.raises(ConfigError, match=r"--draft-head\)\. .*/target: .* tensors are missing"):
        load(tmp_path / "target", **{"drafter.name": "eagle"})


def test_a_target_that_transformers_computes_serves_without_its_mtp_layers(tmp_path, caplog):
    """But not where nobody else may guess."""
    write_target(tmp_path)
    settings = {"model.implementation": "transformers"}
    with load(tmp_path / "target", **settings) as llm:
        assert llm.engine.head is None and texts(llm)
    assert any("runs with transformers, but a head" in words for words in warnings(caplog))
    with pytest.raises(ConfigError, match="runs with transformers, but a head"):
        load(tmp_path / "target", **settings, **{"drafter.name": "eagle"})


@pytest.mark.parametrize(
    "settings",
    [
        {"model.quantize": "w8"},
        {"memory.kv_dtype": "int8"},
        {"lora.max_loras": 1},
        {"memory.prefix_cache": False, "scheduler.max_batched_tokens": 9},
    ],
    ids=str,
)
def test_a_head_goes_with_other_settings(tmp_path, eager, settings):
    write_target(tmp_path)
    write_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1])
    with load(tmp_path / "target", **settings | {"drafter.name": "none"}) as llm:
        want = texts(llm)
    for own in {}, {"drafter.head": str(tmp_path / "head")}:
        with load(tmp_path / "target", **settings | own) as llm:
            assert "eagle" in llm.engine.sources and texts(llm) == want
            assert llm.engine.stats.sources["eagle"].verified > 0
