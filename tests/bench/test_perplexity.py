"""What `specserve bench perplexity` refuses, and what it takes by default."""

import math

import pytest

from specserve import LLM
from specserve.cli import command as cli
from specserve.errors import ConfigError
from specserve_bench import perplexity
from tests.checkpoints import tiny_checkpoint


def test_each_rounding_is_a_line_with_its_ratio_to_the_first(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("one two three four")
    assert perplexity.main(["--text", str(text)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["stored", "w8", "w8a8", "w4"]
    assert ["standard error" in line for line in lines] == [False, True, True, True]


def test_a_difference_has_the_standard_error_of_the_mean_of_windows():
    before = [perplexity.Loss(10, 10), perplexity.Loss(30, 10)]
    after = [perplexity.Loss(10.1, 10), perplexity.Loss(30.3, 10)]  # 0.01 and 0.03 per token
    # 0.02 per token; each window departs from this by 0.1
    assert perplexity.difference(before, after) == "+2.02%, standard error 0.71%"


def test_a_quantized_model_is_measured_with_both_activations(tmp_path):
    source, target = tiny_checkpoint(tmp_path / "source"), tmp_path / "target"
    assert cli.main(["quantize", str(source), str(target), "--to", "w4"]) == 0
    assert list(perplexity.default_names(str(source))) == ["stored", "w8", "w8a8", "w4"]
    assert list(perplexity.default_names(str(target))) == ["stored:float", "stored:int8"]


def test_two_kinds_of_text_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--human-eval and --text exclude each other"):
        perplexity.main(["--human-eval", "--text", str(tmp_path / "text")])


def test_unknown_roundings_are_refused_before_anything_is_measured(capsys):
    with pytest.raises(SystemExit):
        perplexity.main(["--quantize", "w4,w2"])
    assert "'w2' is not one of stored, w8, w8a8, w4" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["quantize=w4", "activations=int8"])
def test_a_rounding_of_the_settings_would_make_stored_a_lie(setting):
    key, _, _ = setting.partition("=")
    with pytest.raises(ConfigError, match=rf"--set model\.{key}: use --quantize"):
        perplexity.main(["--set", f"model.{setting}"])


def test_activations_are_part_of_a_rounding(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("one two three four")
    assert perplexity.main(["--text", str(text), "--quantize", "w4:float,w4:int8"]) == 0
    plain, rounded = capsys.readouterr().out.splitlines()
    assert "activations in 8 bits" in rounded and "activations" not in plain


def test_text_without_two_tokens_has_no_perplexity():
    with LLM(progress=False) as llm:
        with pytest.raises(ConfigError, match="no file has two tokens"):
            perplexity.perplexity(llm, ["", "a"])
        assert math.isfinite(perplexity.perplexity(llm, ["", "one two three"]))
