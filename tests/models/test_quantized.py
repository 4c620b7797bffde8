"""Quantized checkpoints compute with the values that their numbers mean."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.errors import ConfigError
from specserve.models.loader import load_decoder
from specserve_kernels import cpu, reference
from tests.models.forward import logits, prompt
from tests.models.quantized import CASES, WEIGHTS, awq, fp8, gptq, write


def load(folder, ops=reference, dtype="fp32"):
    return load_decoder(folder, dtype, ops)


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_are_those_of_the_values_that_are_meant(tmp_path, case, ops):
    quantized, plain = write(tmp_path, case)
    ids = prompt(320, 37)
    got, want = logits(load(quantized, ops), ids), logits(load(plain, ops), ids)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_maps_that_are_not_quantized_stay_as_they_are(tmp_path):
    quantized, plain = write(tmp_path, gptq(4, 32), lambda name: "mlp" in name)
    ids = prompt(320, 29)
    torch.testing.assert_close(logits(load(quantized), ids), logits(load(plain), ids))


def test_the_head_may_be_quantized(tmp_path):
    is_quantized = lambda name: "_proj" in name or "lm_head" in name  # noqa: E731
    quantized, plain = write(tmp_path, gptq(4, 32), is_quantized)
    ids = prompt(320, 29)
    torch.testing.assert_close(logits(load(quantized), ids), logits(load(plain), ids))


MAP = "model.layers.1.mlp.up_proj"


def cut(name):
    return lambda t: t.update({f"{MAP}.{name}": t[f"{MAP}.{name}"][:-1].contiguous()})


def drop(name):
    return lambda t: t.pop(f"{MAP}.{name}")


BROKEN = {  # case, what happened to the tensors -> the complaint
    "no scales": (gptq(4, 32), drop("scales"), f"{MAP}.scales is missing"),
    "scales of another group": (gptq(4, 32), cut("scales"), r"scales has the shape \[1, 128\]"),
    "fewer integers": (awq(32), cut("qweight"), r"qweight has the shape \[63, 16\]"),
    "one scale too few": (fp8((32, 16)), cut("weight_scale_inv"), "weight_scale_inv has the shape"),
    "columns in another order": (
        gptq(4, 32),
        lambda t: t.update({f"{MAP}.g_idx": t[f"{MAP}.g_idx"].flip(0)}),
        f"{MAP}: its columns were reordered",
    ),
    "a tensor of another format": (
        awq(32),
        lambda t: t.update({f"{MAP}.weight_packed": torch.zeros(2)}),
        "weight_packed has no place",
    ),
}


@pytest.mark.parametrize(("case", "edit", "complaint"), BROKEN.values(), ids=BROKEN)
def test_broken_maps_are_refused(tmp_path, case, edit, complaint):
    quantized, _ = write(tmp_path, case)
    tensors = load_file(quantized / WEIGHTS)
    edit(tensors)
    save_file(tensors, quantized / WEIGHTS)
    with pytest.raises(ConfigError, match=complaint):
        load(quantized)


REFUSED = {  # quantization_config -> the complaint
    "no method": ({"bits": 4}, "quant_method = None.*compressed-tensors, gptq, awq, fp8 are"),
    "another method": ({"quant_method": "bitsandbytes"}, "'bitsandbytes'.*take another"),
    "no object": ("gptq", "quantization_config = 'gptq' is no object"),
    "3 bits": ({"quant_method": "gptq", "bits": 3}, "bits = 3 is not supported: 4, 8"),
    "bits in words": ({"quant_method": "gptq", "bits": "4"}, "bits = '4'"),
    "a group of 0": ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size = 0"),
    "a group that does not divide": (
        {"quant_method": "gptq", "bits": 4, "group_size": 48},
        "group_size: 64 is no multiple of 48",
    ),
    "settings by module": ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": 1}}, "dynamic"),
    "another layout": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = 'gemv'"),
    "another float": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
    "half a block": ({"quant_method": "fp8", "weight_block_size": [128]}, r"\[128\] is no pair"),
    "sparse": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "sparsity_config": {"format": "sparse-24"},
        },
        "sparse-24",
    ),
    "another compression": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        "format = 'nvfp4-pack-quantized'",
    ),
}


@pytest.mark.parametrize(("told", "complaint"), REFUSED.values(), ids=REFUSED)
def test_quantizations_that_are_not_supported_are_refused(tmp_path, told, complaint):
    quantized, _ = write(tmp_path, gptq(4, 32))
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = told
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=complaint):
        load(quantized)
