import json

import pytest

from specserve.errors import ConfigError
from specserve.text.defaults import GenerationDefaults, load_defaults, load_ends

CASES = {  # config.json, generation_config.json -> the defaults
    "nothing said": ({}, None, {}),
    "as written": (
        {},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "do_sample": True},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
    ),
    "a penalty of greedy text, too": (
        {},
        {"do_sample": False, "repetition_penalty": 1.05},
        {"temperature": 0.0, "repetition_penalty": 1.05},
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


ENDS = {  # eos_token_id of config.json, of generation_config.json -> by file
    "one": (2, None, {"config.json": [2]}),
    "several": (None, [7, 5], {"generation_config.json": [7, 5]}),
    "of both": (2, 7, {"generation_config.json": [7], "config.json": [2]}),
    "0 is one": (None, 0, {"generation_config.json": [0]}),
    "none": (None, None, {}),
}


@pytest.mark.parametrize(("config", "generation", "want"), ENDS.values(), ids=ENDS)
def test_both_files_name_end_tokens(tmp_path, config, generation, want):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_ends(tmp_path) == want


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ids", ["</s>", [-1], {"a": 1}, [1.5]])
def test_an_end_token_is_an_id(tmp_path, file, ids):
    (tmp_path / file).write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ConfigError, match=rf"{file}: eos_token_id: .*Correct the file"):
        load_ends(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", 1e-5),
        ("temperature", 2e4),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", "all"),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(tmp_path, key, value):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ConfigError, match=rf"generation_config\.json.*{key}"):
        load_defaults(tmp_path)


IGNORED = {  # key -> a value that would change the text in transformers, and one that would not
    "encoder_repetition_penalty": (1.1, 1.0),
    "no_repeat_ngram_size": (3, 0),
    "typical_p": (0.9, 1.0),
    "bad_words_ids": ([[5]], []),
    "suppress_tokens": ([5], None),
    "forced_bos_token_id": (0, None),
    "forced_eos_token_id": (2, None),
    "min_new_tokens": (4, 0),
    "min_length": (4, 0),
    "num_beams": (4, 1),
    "penalty_alpha": (0.6, 0.0),
}


@pytest.mark.parametrize(("key", "values"), IGNORED.items(), ids=IGNORED)
def test_a_key_that_is_not_applied_is_warned_of_unless_it_changes_nothing(
    tmp_path, caplog, key, values
):
    (tmp_path / "config.json").write_text("{}")
    for value in values:
        (tmp_path / "generation_config.json").write_text(json.dumps({key: value, "top_k": 5}))
        assert load_defaults(tmp_path) == GenerationDefaults(top_k=5)
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / 'generation_config.json'}: specserve ignores these")
    assert line.endswith(f": {key}")
