"""OLMo hybrid: its checkpoints as published, and fields of its config.json."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.errors import ConfigError
from specserve.models import parse_config
from specserve.models.loader import load_decoder
from specserve_kernels import reference
from tests.checkpoints import tiny_checkpoint
from tests.models.forward import logits, prompt

NAMED = {"architectures": ["OlmoHybridForCausalLM"]}


def change_convs(folder, sizes):
    """Divide each layer's convolution into parts of these sizes."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".q_conv1d." in name]:
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        parts = torch.cat([tensors.pop(own) for own in names]).split(sizes)
        if len(parts) == 1:
            names = [name.replace("q_conv1d", "conv1d")]
        tensors |= zip(names, map(torch.clone, parts), strict=True)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("sizes", [[32, 32, 96], [160]], ids=["as published", "one tensor"])
def test_convolutions_may_be_divided_in_any_way(tmp_path, sizes):
    folder, ids = tiny_checkpoint(tmp_path, "olmo_hybrid"), prompt(320, 37)
    want = logits(load_decoder(folder, "fp32", reference), ids)  # as transformers divides them
    change_convs(folder, sizes)
    assert torch.equal(logits(load_decoder(folder, "fp32", reference), ids), want)


def test_a_missing_part_of_a_convolution_is_an_error(tmp_path):
    folder = tiny_checkpoint(tmp_path, "olmo_hybrid")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.linear_attn.k_conv1d.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.0\.linear_attn\.conv1d\.weight is missing"):
        load_decoder(folder, "fp32", reference)


NULLS = [None, {"rope_type": None}, {"rope_theta": None, "rope_type": "default"}]


@pytest.mark.parametrize("told", NULLS, ids=str)
def test_null_in_rope_parameters_turns_rope_off(tmp_path, told):
    """Published config.json files have had all of these."""
    folder, ids = tiny_checkpoint(tmp_path, "olmo_hybrid"), prompt(320, 37)
    want = logits(load_decoder(folder, "fp32", reference), ids)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": told}))
    assert torch.equal(logits(load_decoder(folder, "fp32", reference), ids), want)


def test_sizes_of_heads_have_defaults_that_depend_on_other_fields():
    found = parse_config.parse(NAMED).recurrent
    assert (found.num_k_heads, found.num_v_heads) == (30, 30)
    assert (found.k_dim, found.v_dim, found.beta_factor) == (96, 192, 2.0)


def test_few_layers_end_with_attention():
    assert parse_config.parse(NAMED | {"num_hidden_layers": 3}).recurrent_layers == (1, 1, 0)


def test_the_convolution_needs_silu():
    with pytest.raises(ValueError, match=r"hidden_act = .*linear_attention"):
        parse_config.parse(NAMED | {"hidden_act": "gelu_pytorch_tanh"})
