"""Weights that are no finite numbers are refused while they are read, by tensor and file."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.errors import ConfigError
from specserve.models.checkpoint import Checkpoint
from specserve.models.eagle_head import load_eagle_head
from specserve.models.loader import load_decoder
from specserve.models.mtp_head import load_mtp_head
from specserve.models.quantized.stored import is_finite
from specserve_kernels import reference
from tests.checkpoints import tiny_checkpoint
from tests.models.eagle_heads import load_target, write_head
from tests.models.gguf_files import write
from tests.models.mtp_layers import write_target
from tests.models.transformers_models import foreign_checkpoint, load_foreign

WEIGHTS = "model.safetensors"
BAD = [float("nan"), float("inf"), float("-inf")]
REASON = "has values that are not finite (NaN or infinity). Download the model again, or use"


def spoil(folder, name, value):
    tensors = load_file(folder / WEIGHTS)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def refused(path, name):
    return pytest.raises(ConfigError, match=f"^{re.escape(f'{path}: the tensor {name} {REASON}')}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [*BAD, 1.0])
def test_one_bad_number_among_many_is_found(dtype, value):
    values = torch.full((300, 1000), 200.0, dtype=dtype)  # whose sum is no float16
    values[299, 7] = value
    assert is_finite(values) == (value == 1.0)


def test_numbers_are_finite_whose_sum_is_not():
    assert is_finite(torch.full((8,), 3e38)) and is_finite(torch.full((8,), 3e38).bfloat16())


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.k_proj.bias"],
)
def test_a_bad_number_of_a_model_is_refused(tmp_path, name, value):
    spoil(tiny_checkpoint(tmp_path, "qwen2"), name, value)
    with refused(tmp_path / WEIGHTS, name):
        load_decoder(tmp_path, "auto", reference)


def test_a_number_that_the_models_type_does_not_hold_is_refused(tmp_path):
    spoil(tiny_checkpoint(tmp_path), "lm_head.weight", 3.4e38)
    load_decoder(tmp_path, "fp32", reference)
    with refused(tmp_path / WEIGHTS, "lm_head.weight"):
        load_decoder(tmp_path, "bf16", reference)


def test_the_error_names_the_shard(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    spoil(tiny_checkpoint(tmp_path), name, BAD[0])
    tensors = load_file(tmp_path / WEIGHTS)
    parts = {"a.safetensors": {name: tensors.pop(name)}, "b.safetensors": tensors}
    for file, held in parts.items():
        save_file(held, tmp_path / file)
    (tmp_path / WEIGHTS).unlink()
    index = {tensor: file for file, held in parts.items() for tensor in held}
    (tmp_path / f"{WEIGHTS}.index.json").write_text(f'{{"weight_map": {index}}}'.replace("'", '"'))
    with refused(tmp_path / "a.safetensors", name):
        load_decoder(tmp_path, "auto", reference)


@pytest.mark.parametrize(
    ("type", "theirs", "ours", "place"),
    [
        ("F32", "output_norm.weight", "model.norm.weight", slice(4)),
        ("Q8_0", "blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.Q8_0", slice(2)),
    ],
)
def test_a_bad_number_of_a_gguf_file_is_refused(tmp_path, type, theirs, ours, place):
    file, _ = write(tmp_path, "llama", type=type)
    tensor = Checkpoint(file).files[ours].parts[ours].entry
    data = bytearray(file.read_bytes())
    size = place.stop
    data[tensor.offset : tensor.offset + size] = b"\xff" * size  # NaN
    file.write_bytes(data)
    with refused(file, theirs):
        load_decoder(file, "fp32", reference)


@pytest.mark.parametrize("name", ["fc.weight", "layers.0.self_attn.q_proj.weight", "norm.weight"])
def test_a_bad_number_of_a_head_is_refused(tmp_path, name):
    target = load_target(tmp_path / "target", reference)
    write_head(tmp_path / "head")
    spoil(tmp_path / "head", name, BAD[1])
    with refused(tmp_path / "head" / WEIGHTS, name):
        load_eagle_head(tmp_path / "head", target)


def test_a_bad_number_of_a_layer_for_multi_token_prediction_is_refused(tmp_path):
    name = "model.layers.2.eh_proj.weight"
    write_target(tmp_path, edit=lambda tensors: tensors[name].view(-1)[-1:].fill_(BAD[0]))
    target = load_decoder(tmp_path / "target", "fp32", reference)
    with refused(tmp_path / "target" / WEIGHTS, name):
        load_mtp_head(tmp_path / "target", target)


def test_a_bad_number_of_a_model_that_transformers_computes_is_refused(tmp_path):
    folder = foreign_checkpoint(tmp_path, model_type="gpt2", num_key_value_heads=4)
    name = next(n for n in load_file(folder / WEIGHTS) if n.endswith("mlp.c_fc.weight"))
    spoil(folder, name, BAD[2])
    with refused(folder / WEIGHTS, name):
        load_foreign(folder)
