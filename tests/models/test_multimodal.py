"""The text model of a multimodal checkpoint, under each of the names that its tensors have."""

import json
import logging
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.errors import ConfigError
from specserve.models.loader import load_decoder, weight_bytes
from specserve.models.source import open_source
from specserve_kernels import cpu
from tests.checkpoints import MULTIMODAL, tiny_checkpoint
from tests.models.formats import change_config
from tests.models.forward import logits, prompt

IDS = prompt(320, 37)


def rename(folder, pattern, name):
    file = folder / "model.safetensors"
    tensors = {re.sub(pattern, name, key): value for key, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return tensors


def written(folder):
    return json.loads((folder / "config.json").read_text())


PREFIXES = {  # names of the tensors of layers, norm and embeddings; of the head
    "as in transformers 4": ("language_model.model.", "language_model.lm_head."),
    "as in transformers 5": ("model.language_model.", "lm_head."),
    "as in a text model": ("model.", "lm_head."),
}


@pytest.mark.parametrize("prefixes", PREFIXES.values(), ids=PREFIXES)
def test_names_of_tensors_make_no_difference(tmp_path, prefixes):
    folder = tiny_checkpoint(tmp_path, "qwen3_vl")
    want = logits(load_decoder(folder, "fp32", cpu), IDS)
    layers, head = prefixes
    rename(folder, r"^model\.language_model\.", layers)
    tensors = rename(folder, r"^lm_head\.", head)
    assert {f"{layers}norm.weight", f"{head}weight"} <= tensors.keys()
    assert torch.equal(logits(load_decoder(folder, "fp32", cpu), IDS), want)


def test_the_log_names_what_is_not_loaded_and_only_once(tmp_path, caplog):
    folder = tiny_checkpoint(tmp_path, "gemma3_vision")
    with caplog.at_level(logging.WARNING, "specserve"):
        decoder = load_decoder(folder, "fp32", cpu)
    words = "only the text model is loaded, without multi_modal_projector, vision_tower"
    assert [record.getMessage() for record in caplog.records] == [f"{folder}: {words}"]
    text = [t for name, t in load_file(folder / "model.safetensors").items() if "language" in name]
    num_bytes = 4 * sum(t.numel() for t in text)
    assert weight_bytes(folder, "fp32", cpu) == decoder.forms.num_bytes == num_bytes


def test_fields_of_the_text_model_next_to_those_of_vision(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen2_5_vl")
    want = open_source(folder).config()
    fields = written(folder)
    text = fields.pop("text_config")
    (folder / "config.json").write_text(json.dumps(text | fields))
    assert open_source(folder).config() == want


def test_maps_and_norms_that_shared_layers_do_not_use_are_not_read(tmp_path):
    folder = tiny_checkpoint(tmp_path, "gemma4_vision")
    want, file = logits(load_decoder(folder, "fp32", cpu), IDS), folder / "model.safetensors"
    tensors = load_file(file)
    for i in (4, 5):
        for name in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.language_model.layers.{i}.self_attn.{name}.weight"] = torch.ones(3, 3)
    save_file(tensors, file, {"format": "pt"})
    assert torch.equal(logits(load_decoder(folder, "fp32", cpu), IDS), want)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_a_head_of_its_own_wins_over_a_config_that_ties(tmp_path, family):
    folder = tiny_checkpoint(tmp_path, family)
    want = logits(load_decoder(folder, "fp32", cpu), IDS)
    change_config(folder, tie_word_embeddings=True)
    assert torch.equal(logits(load_decoder(folder, "fp32", cpu), IDS), want)


def test_end_tokens_may_be_those_of_the_text_model(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen3_vl", eos_token_id=[3, 4])
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert "eos_token_id" not in written(folder)
    assert open_source(folder).ends() == {"config.json": [3, 4]}
    change_config(folder, eos_token_id=5)
    assert open_source(folder).ends() == {"config.json": [5]}


REFUSED = {  # what is wrong -> family, changes of config.json, the complaint
    "another text model": (
        "mistral3",
        {"text_config": {"model_type": "gpt2"}},
        "text_config.model_type = 'gpt2' is not supported, only mistral, ministral3",
    ),
    "a text model that is none": ("mistral3", {"text_config": [1]}, r"text_config = \[1\] is not"),
    "fewer inputs of layers than tokens": (
        "gemma4_vision",
        {"text_config": {"vocab_size_per_layer_input": 319, "vocab_size": 320}},
        "vocab_size_per_layer_input = 319 must be at least vocab_size = 320",
    ),
    "shared layers without KV to read": (
        "gemma4_vision",
        {"text_config": {"num_hidden_layers": 6, "num_kv_shared_layers": 5}},
        "num_kv_shared_layers = 5 leaves no layer",
    ),
    "heads by layer": (
        "gemma4_vision",
        {"text_config": {"per_layer_config": {"0": {"head_dim": 32}}}},
        "per_layer_config has layers 0, but only layers with full_attention may have other heads",
    ),
    "KV heads that do not divide": (
        "gemma4_vision",
        {"text_config": {"attention_k_eq_v": True, "num_global_key_value_heads": 3}},
        "3 KV heads of size 512 in layers with full_attention do not fit",
    ),
    "groups of experts": (
        "glm4v_moe",
        {"text_config": {"n_group": 2, "head_dim": 128}},
        "n_group = 2 is not",
    ),
    "a size that is none": (
        "qwen3_vl",
        {"text_config": {"hidden_size": 0}},
        "hidden_size = 0 must be a whole number",
    ),
}


@pytest.mark.parametrize(("family", "changes", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path, family, changes, complaint):
    folder = tiny_checkpoint(tmp_path, family)
    change_config(folder, **changes)
    with pytest.raises(ConfigError, match=complaint):
        open_source(folder).shape("auto")


def test_transformers_modules_run_no_multimodal_checkpoint(tmp_path):
    folder = tiny_checkpoint(tmp_path, "gemma3_vision")
    with pytest.raises(ConfigError, match="in transformers, only text models run"):
        open_source(folder).shape("transformers")


def test_an_unknown_part_is_not_skipped_in_silence(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen3_vl")
    rename(folder, r"^model\.visual\.", "model.smell.")
    with pytest.raises(ConfigError, match=r"tensor model\.smell\..* is not part of the model"):
        load_decoder(folder, "fp32", cpu)
