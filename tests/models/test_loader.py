import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.errors import ConfigError
from specserve.models.loader import load_decoder
from specserve_kernels import reference
from tests.checkpoints import tiny_checkpoint
from tests.models.forward import logits, prompt


def load(folder, dtype="auto", **kwargs):
    return load_decoder(folder, dtype, reference, **kwargs)


@pytest.mark.parametrize(
    ("stored", "dtype", "has_bf16", "want"),
    [
        (torch.float32, "auto", True, torch.float32),
        (torch.bfloat16, "auto", True, torch.bfloat16),
        (torch.float16, "auto", True, torch.bfloat16),
        (torch.bfloat16, "auto", False, torch.float32),
        (torch.float32, "bf16", True, torch.bfloat16),
        (torch.bfloat16, "fp32", True, torch.float32),
    ],
)
def test_dtype(tmp_path, monkeypatch, stored, dtype, has_bf16, want):
    monkeypatch.setattr(reference, "has_bf16", lambda: has_bf16)
    decoder = load(tiny_checkpoint(tmp_path, dtype=stored), dtype)
    assert decoder.dtype == want
    assert logits(decoder, prompt(320, 3), chunks=()).isfinite().all()


def test_an_unknown_dtype_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'int4' is unknown\. Use auto, bf16 or fp32"):
        load(tiny_checkpoint(tmp_path), "int4")


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load(tmp_path / "nowhere")


def test_the_rotary_table_reaches_beyond_the_longest_request_by_a_tree(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    assert len(load(folder).rotary.cos) == 512 + 64
    assert len(load(folder, max_len=100).rotary.sin) == 100 + 64


def test_tables_for_millions_of_positions_are_not_made_unasked(tmp_path):
    folder = tiny_checkpoint(tmp_path, max_position_embeddings=2**31 - 1)
    with pytest.raises(ConfigError, match=r"2147483647 tokens .*\. Set scheduler\.max_model_len"):
        load(folder)
    assert len(load(folder, max_len=100).rotary.sin) == 100 + 64


def test_a_head_of_its_own_wins_over_the_word_tied(tmp_path):
    """As in transformers, which ties only what the checkpoint does not tell apart."""
    folder = tiny_checkpoint(tmp_path)
    ids = prompt(320, 5)
    want = logits(load(folder), ids, chunks=())
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))
    assert torch.equal(logits(load(folder), ids, chunks=()), want)


def test_the_model_outlives_its_files(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    decoder, ids = load(folder), prompt(320, 5)
    want = logits(decoder, ids, chunks=())
    path = folder / "model.safetensors"
    zeros = {name: torch.zeros_like(t) for name, t in load_file(path).items()}
    save_file(zeros, folder / "zeros")
    path.write_bytes((folder / "zeros").read_bytes())  # in place: what is mapped would change
    assert torch.equal(logits(decoder, ids, chunks=()), want)


def test_code_of_the_checkpoint_does_not_run(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    evil = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(fields | {"auto_map": evil}))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_token_beyond_the_vocabulary_is_our_mistake(tmp_path):
    with pytest.raises(IndexError):
        logits(load(tiny_checkpoint(tmp_path)), torch.tensor([320]), chunks=())
