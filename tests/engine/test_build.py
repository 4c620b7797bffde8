"""Mistakes that are found before weights are loaded."""

import pytest

from specserve.config import load_config
from specserve.engine import build
from specserve.engine.tuning import model_key
from specserve.errors import ConfigError
from tests.checkpoints import tiny_checkpoint

FOREIGN = "specserve_drafters.ngram:NgramDrafter"  # by this name, no drafter that is built in
MISTAKES = [
    ({"drafter.name": "specserve_drafters.ngram:Missing"}, "Unknown drafter"),
    ({"drafter.name": FOREIGN, "drafter.options": {"max_gram": 3}}, "max_gram"),
]


@pytest.mark.parametrize(("settings", "complaint"), MISTAKES)
def test_a_drafter_that_cannot_be_made_is_refused_first(settings, complaint, monkeypatch):
    monkeypatch.setattr(build, "load_weights", pytest.fail)
    with pytest.raises(ConfigError, match=complaint):
        build.build(load_config(None, settings))


def test_a_pool_too_small_for_a_recurrent_request_counts_the_state(tmp_path):
    settings = {"model.path": str(tiny_checkpoint(tmp_path, "lfm2")), "memory.kv_bytes": 20_000}
    with pytest.raises(ConfigError, match="tokens, its tree and its recurrent state need"):
        build.build(load_config(None, settings))


def test_each_model_is_rounded_as_its_own_section_says():
    settings = {
        "memory.kv_bytes": 1 << 26,
        "model.threads": 1,
        "model.quantize": "w8",
        "model.quantize_head": "none",
        "model.quantize_embedding": "w8",
        "drafter.quantize": "w4",
    }
    config = load_config(None, settings)
    loaded = build.build(config)
    models = {"target": loaded.weights.target.decoder, "draft model": loaded.weights.draft.decoder}
    bits = {n: {(f.bits, f.group) for f in m.weights.forms.maps} for n, m in models.items()}
    assert bits == {"target": {(8, None), (16, None)}, "draft model": {(4, 64), (16, None)}}
    for name, model in models.items():
        assert model.weights.forms.embedding_bits == 8
        assert model.weights.forms.words in loaded.phases[name]
    plain = build.build(
        load_config(None, settings | {"model.quantize": None}), known=loaded.weights
    )
    assert plain.weights.draft is loaded.weights.draft
    assert plain.weights.target is not loaded.weights.target
    assert model_key(plain.engine.target) != model_key(loaded.engine.target)
    assert plain.engine.tables.formats["target"] != loaded.engine.tables.formats["target"]


def test_kv_is_another_models_where_the_embedding_or_activations_are_rounded():
    """As it is where the rest of the weights is."""
    model = build.build(load_config(None, {"memory.kv_bytes": 1 << 26, "model.threads": 1}))
    target = model.weights.target.decoder
    more: list[dict[str, str]] = [{}, {"quantize_embedding": "w8"}, {"activations": "int8"}]
    rounded = [{f"model.{key}": x for key, x in ({"quantize": "w4"} | m).items()} for m in more]
    names = [build.kv_names(load_config(None, settings), target, None) for settings in rounded]
    for model in ("target", "draft"):
        assert len({name[model] for name in names}) == len(more)
