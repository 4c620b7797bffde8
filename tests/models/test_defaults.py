import json

import pytest

from specserve.errors import ConfigError
from specserve.models.defaults import GenerationDefaults, load_defaults

CASES = {  # config.json, generation_config.json -> the defaults
    "nothing said": ({}, None, {}),
    "eos of the config": ({"eos_token_id": 2}, None, {"eos_token_ids": (2,)}),
    "eos of generation first": (
        {"eos_token_id": 2},
        {"eos_token_id": [7, 5]},
        {"eos_token_ids": (7, 5)},
    ),
    "eos 0 is one": ({"eos_token_id": 2}, {"eos_token_id": 0}, {"eos_token_ids": (0,)}),
    "null is unset": ({"eos_token_id": 2}, {"eos_token_id": None}, {"eos_token_ids": (2,)}),
    "as written": (
        {},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "do_sample": True},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
    ),
    "nothing that transformers would fill in": ({}, {"do_sample": True}, {}),
    "greedy by its own word": ({}, {"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
    "an integer is a number": ({}, {"temperature": 1, "top_p": 1}, {}),
}


@pytest.mark.parametrize(("config", "generation", "want"), CASES.values(), ids=CASES)
def test_defaults_are_what_the_files_say(tmp_path, config, generation, want):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_defaults(tmp_path) == GenerationDefaults(**want)


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1), ("top_p", 0), ("top_k", "all"), ("eos_token_id", ["</s>"])],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(tmp_path, key, value):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ConfigError, match=rf"generation_config\.json.*{key}"):
        load_defaults(tmp_path)
