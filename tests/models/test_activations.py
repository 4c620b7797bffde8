"""Checkpoints that ask for activations of 8 bits: which maps round rows, and to which numbers."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from transformers import AutoModelForCausalLM

from specserve.models.loader import load_decoder
from specserve.models.quantized import config
from specserve_kernels import cpu, reference
from tests.kernels.random_steps import random_tensor
from tests.kernels.test_rounded import rounding
from tests.models.formats import quantized, weights_only
from tests.models.forward import logits, prompt

BYTES = {"num_bits": 8, "type": "int"}
ROWS = {"weights": BYTES | {"strategy": "channel"}}
WIDTH = 64
ROUNDED = ROWS | {"input_activations": BYTES | {"strategy": "token", "dynamic": True}}
DOWN, UP, HEAD = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj", "lm_head"

ASKED = {  # groups -> which of DOWN, UP and HEAD
    "all linear maps": ([ROUNDED | {"targets": ["Linear"]}], (True, True, True)),
    "by a pattern": ([ROUNDED | {"targets": ["re:.*"]}], (True, True, True)),
    "none": ([ROWS | {"targets": ["Linear"]}], (False, False, False)),
    "one by its name": ([ROUNDED | {"targets": [DOWN]}], (True, False, False)),
    "all but one": (
        [ROUNDED | {"targets": ["Linear"]}, ROWS | {"targets": [HEAD]}],
        (True, True, False),
    ),
    "patterns that disagree, and are not matched": (
        [ROUNDED | {"targets": ["Linear", UP]}, ROWS | {"targets": ["re:.*down_proj"]}],
        (False, True, False),
    ),
    "beside a group of 4 bits": (
        [ROUNDED | {"targets": ["Linear"]}, {"weights": {"num_bits": 4}, "targets": ["re:.*up"]}],
        (True, True, True),
    ),
    "beside groups of columns": (
        [
            ROUNDED | {"targets": ["Linear"]},
            {"weights": BYTES | {"group_size": 32}, "targets": ["re:.*up"]},
        ],
        (True, True, True),
    ),
    "beside whole rows, written in full": (
        [
            ROUNDED | {"targets": ["re:.*mlp.*"]},
            {"weights": BYTES | {"group_size": WIDTH}, "targets": ["re:.*attn.*"]},
        ],
        (False, False, False),
    ),
    "beside whole rows, written as -1": (
        [
            ROUNDED | {"targets": ["re:.*mlp.*"]},
            {"weights": BYTES | {"group_size": -1}, "targets": ["re:.*attn.*"]},
        ],
        (False, False, False),
    ),
    "whole rows, written as -1": (
        [ROUNDED | {"weights": BYTES | {"group_size": -1}, "targets": ["Linear"]}],
        (True, True, True),
    ),
    "floats": (
        [ROWS | {"input_activations": BYTES | {"type": "float"}, "targets": ["Linear"]}],
        (False, False, False),
    ),
    "static and asymmetric": (
        [ROWS | {"input_activations": BYTES | {"symmetric": False}, "targets": ["Linear"]}],
        (True, True, True),
    ),
    "no targets": ([ROUNDED], (False, False, False)),
}


@pytest.mark.parametrize(("groups", "want"), ASKED.values(), ids=ASKED)
def test_the_group_of_a_map_says_whether_rows_are_rounded(groups, want):
    fields = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    fields["config_groups"] = {f"group_{i}": group for i, group in enumerate(groups)}
    told = config.parse({"quantization_config": fields})
    assert tuple(told.rounds_rows(name, WIDTH) for name in (DOWN, UP, HEAD)) == want


FORMS = {  # whether rows are rounded, of the map qkv, out, gate and up, down
    "compressed-w8a8": [True, True, True, True],
    "compressed-w8a8-static": [False] * 4,  # weights have zero points
    "compressed-w8a16": [False] * 4,
    "compressed-mixed": [False, False, False, True],
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_rounded_for_bytes_with_one_scale_a_row(tmp_path, name):
    (layer,) = load_decoder(quantized(tmp_path, name), "fp32", reference).weights.layers
    maps = layer.qkv, layer.out, layer.gate_up, layer.down
    assert [getattr(weight, "rounds_rows", False) for weight in maps] == FORMS[name]


def test_activations_are_what_compressed_tensors_makes_of_them_with_these_scales():
    x, codes = random_tensor(9, 96), rounding(40, 96)
    scale = x.abs().amax(1, keepdim=True) / 127
    args = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True)
    rows = fake_quantize(x, scale, torch.zeros_like(scale), args)
    want = rows.double() @ codes.widen(torch.float32).double().T
    for ops in (reference, cpu):
        got = ops.linear(x, ops.prepack(codes))
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_logits_are_nearly_those_of_compressed_tensors_own_forward(tmp_path, ops):
    """Its scales of rows are a little smaller: the largest number over 127.5."""
    name, ids = "compressed-w8a8", prompt(320, 37)
    folder = quantized(tmp_path / "model", name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    got = logits(load_decoder(folder, "fp32", ops), ids)
    assert (got - want).norm() < 0.03 * want.norm()
    exact = quantized(tmp_path / "exact", name, told=weights_only(name))
    assert not torch.allclose(got, logits(load_decoder(exact, "fp32", ops), ids), rtol=1e-3)
