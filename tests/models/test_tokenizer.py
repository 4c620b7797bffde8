import json

import msgspec
import pytest

from specserve.errors import ConfigError
from specserve.models.families import load_config
from specserve.models.tokenizer import check_same_vocabulary, load_tokenizer
from tests.checkpoints import tiny_checkpoint


def test_text_survives_the_tokenizer_and_a_token_without_text_is_empty(tmp_path):
    tokenizer = load_tokenizer(tiny_checkpoint(tmp_path))
    ids = tokenizer("def read(path):")["input_ids"]
    assert tokenizer.decode(ids) == "def read(path):"
    assert tokenizer.decode([319]) == ""


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    (tiny_checkpoint(tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_is_refused(tmp_path):
    (tiny_checkpoint(tmp_path) / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_tokenizers_own_code_does_not_run(tmp_path):
    path = tiny_checkpoint(tmp_path) / "tokenizer_config.json"
    fields = json.loads(path.read_text()) | {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
    }
    path.write_text(json.dumps(fields))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    assert load_tokenizer(tmp_path)("a")["input_ids"]
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def model(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    return load_config(folder), load_tokenizer(folder)


def test_a_draft_with_the_same_tokens_is_welcome(model):
    config, tokenizer = model
    other = msgspec.structs.replace(config, num_layers=1, architecture="LlamaForCausalLM")
    check_same_vocabulary(config, other, tokenizer, tokenizer)


def test_a_draft_of_another_size_is_refused(model):
    config, tokenizer = model
    draft = msgspec.structs.replace(config, vocab_size=300)
    with pytest.raises(ConfigError, match=r"vocab_size is 300.*320; take a draft model"):
        check_same_vocabulary(config, draft, tokenizer, tokenizer)


def test_a_draft_whose_tokens_mean_something_else_is_refused(model, tmp_path):
    config, tokenizer = model
    other = load_tokenizer(tmp_path)
    other.add_tokens(["<|think|>"])
    with pytest.raises(ConfigError, match=r"differs .* '<\|think\|>' \(\d+ there, None in"):
        check_same_vocabulary(config, config, tokenizer, other)
