"""Mistakes that are found before weights are loaded."""

import pytest

from specserve.config import load_config
from specserve.engine import build
from specserve.errors import ConfigError

FOREIGN = "specserve_drafters.ngram:NgramDrafter"  # by this name, no drafter that is built in
MISTAKES = [
    ({"drafter.name": "specserve_drafters.ngram:Missing"}, "no drafter"),
    ({"drafter.name": FOREIGN, "drafter.options": {"max_gram": 3}}, "max_gram"),
]


@pytest.mark.parametrize(("settings", "complaint"), MISTAKES)
def test_a_drafter_that_cannot_be_made_is_refused_first(settings, complaint, monkeypatch):
    monkeypatch.setattr(build, "load_weights", pytest.fail)
    with pytest.raises(ConfigError, match=complaint):
        build.build(load_config(None, settings))
