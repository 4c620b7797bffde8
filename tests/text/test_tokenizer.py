import json

import pytest

from specserve.errors import ConfigError
from specserve.text.tokenizer import check_same_vocabulary, load_tokenizer
from tests.checkpoints import tiny_checkpoint


def test_text_survives_the_tokenizer_and_a_token_without_text_is_empty(tmp_path):
    tokenizer = load_tokenizer(tiny_checkpoint(tmp_path))
    ids = tokenizer.encode("def read(path):")
    assert tokenizer.decode(ids) == "def read(path):"
    assert tokenizer.decode([319]) == ""
    assert tokenizer.id_to_token(319) is None


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
    assert load_tokenizer(tmp_path).encode("a")
    assert not (tmp_path / "ran").exists()


def test_two_models_with_the_same_tokens_may_work_together(tmp_path):
    tokenizer = load_tokenizer(tiny_checkpoint(tmp_path))
    check_same_vocabulary(tokenizer, load_tokenizer(tmp_path))


def test_a_draft_whose_tokens_mean_something_else_is_refused(tmp_path):
    tokenizer, other = (load_tokenizer(tiny_checkpoint(tmp_path)) for _ in range(2))
    other.backend.add_tokens(["<|think|>"])
    with pytest.raises(ConfigError, match=r"differs .* '<\|think\|>' \(\d+ there, None in"):
        check_same_vocabulary(tokenizer, other)
