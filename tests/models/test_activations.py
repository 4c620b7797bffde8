"""Checkpoints that ask for activations of 8 bits: which maps round rows, and to which numbers."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from transformers import AutoModelForCausalLM

from specserve.models.loader import load_decoder
from specserve.models.quantized.config import read_activations
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
    told = read_activations(groups)
    assert tuple(told.rounds(name, WIDTH) for name in (DOWN, UP, HEAD)) == want


def unmet(activations, weights=(), **group):
    """What is said of a group with activations of 8 bits but for some fields."""
    scheme = ROUNDED["input_activations"] | activations
    group |= {"input_activations": scheme, "weights": ROWS["weights"] | dict(weights)}
    return ", ".join(read_activations([group | {"targets": ["Linear"]}]).unmet)


UNMET = {  # -> words of what is asked; none where it is computed so
    "as asked": (unmet({}), None),
    "static": (unmet({"dynamic": False}), "activations in integers of 8 bits (static, per token)"),
    "for a whole tensor": (unmet({"strategy": "tensor"}), "(dynamic, per tensor)"),
    "asymmetric": (unmet({"symmetric": False}), "integers of 8 bits with zero points (dynamic"),
    "in groups": (unmet({"strategy": "group", "group_size": 32}), "in groups (dynamic, per group)"),
    "4 bits": (unmet({"num_bits": 4}), "activations in integers of 4 bits (dynamic, per token)"),
    "floats": (unmet({"type": "float"}), "activations in floats of 8 bits (dynamic, per token)"),
    "W4A8": (unmet({}, {"num_bits": 4}), "with weights in integers of 4 bits"),
    "weights in groups": (unmet({}, {"group_size": 32}), "weights in integers of 8 bits in groups"),
    "weights with zeros": (unmet({}, {"symmetric": False}), "of 8 bits with zero points"),
    "outputs": (unmet({}, output_activations=BYTES), "output activations"),
    "patterns that disagree": (
        ", ".join(read_activations(ASKED["patterns that disagree, and are not matched"][0]).unmet),
        "by some patterns, which are not matched",
    ),
    "one by its name": (", ".join(read_activations(ASKED["all but one"][0]).unmet), None),
}


@pytest.mark.parametrize(("said", "want"), UNMET.values(), ids=UNMET)
def test_what_is_not_computed_as_asked_is_said(said, want):
    assert want in said if want else not said


WARNED = {  # fixture -> what the line says after the name of the file
    "compressed-w8a8": None,
    "compressed-w8a16": None,
    "compressed-w8a8-static": "asks for activations in integers of 8 bits with zero points "
    "(static, per tensor) with weights in integers of 8 bits with zero points, but all activations "
    "stay in the model's dtype",
    "compressed-mixed": "asks for activations in floats of 8 bits (dynamic, per token) with "
    "weights in floats of 8 bits, but 1 of 5 linear layers have 8-bit integer activations "
    "(dynamic, per token), others in the model's dtype",
    "fp8-block": "asks for activations in floats of 8 bits (dynamic), but all activations stay in "
    "the model's dtype",
}


@pytest.mark.parametrize(("name", "words"), WARNED.items(), ids=WARNED)
def test_other_activations_than_asked_are_one_warning(tmp_path, caplog, name, words):
    load_decoder(quantized(tmp_path, name), "fp32", reference)
    said = f"{tmp_path}/config.json {words}"
    assert [record.message for record in caplog.records] == [said] * (words is not None)


def test_ops_that_round_no_rows_are_a_warning(tmp_path, caplog, monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(reference, "rounds_rows", False)
    load_decoder(quantized(tmp_path, "compressed-w8a8"), "fp32", reference)
    assert "integers of 8 bits, but all activations stay in the model's dtype" in caplog.text


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
