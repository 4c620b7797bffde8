"""Weights of maps that are multiplied as one: what their parts mean stays as it was."""

import pytest
import torch

from specserve.models.weight import form_of, fuse, num_bytes, with_activations
from specserve.models.weight_forms import MapForm
from specserve_kernels import Codes
from tests.kernels.test_codes import random_codes
from tests.kernels.test_rounded import rounding

K = 96
PLAIN = torch.arange(2 * K).view(2, K).bfloat16()
PARTS = {  # -> bits, group, whether there are zeros and offsets, of codes that hold all parts
    "alike": (
        [random_codes(3, K, 4, 32, False), random_codes(2, K, 4, 32, False)],
        (4, 32, False, False),
    ),
    "of other groups": (
        [random_codes(3, K, 4, 32, True), random_codes(2, K, 4, 48, True)],
        (4, 16, True, False),
    ),
    "of other bits": (
        [random_codes(3, K, 8, 32, False), random_codes(2, K, 4, K, False)],
        (8, 32, False, False),
    ),
    "one with zeros": (
        [random_codes(3, K, 4, 32, False), random_codes(2, K, 8, 32, True)],
        (8, 32, True, False),
    ),
    "one with offsets": (
        [random_codes(3, K, 4, 32, has_offset=True), random_codes(2, K, 8, 16)],
        (8, 16, True, True),
    ),
}


@pytest.mark.parametrize(("parts", "form"), PARTS.values(), ids=PARTS)
def test_codes_of_any_forms_become_codes_of_the_same_values(parts, form):
    fused = fuse(parts, torch.float32)
    assert (*fused[:2], fused.zero is not None, fused.offset is not None) == form
    want = torch.cat([part.widen(torch.float32) for part in parts])
    assert torch.equal(fused.widen(torch.float32), want)


def test_next_to_a_weight_that_is_no_codes_all_are_widened():
    codes = random_codes(3, K, 4, 32, True)
    fused = fuse([PLAIN, codes], torch.bfloat16)
    assert torch.equal(fused, torch.cat([PLAIN, codes.widen(torch.bfloat16)]))


def test_groups_so_small_that_codes_would_save_nothing_are_widened():
    parts = [random_codes(3, K, 4, 32, True), random_codes(2, K, 4, 4, True)]
    fused = fuse(parts, torch.bfloat16)
    assert torch.equal(fused, torch.cat([part.widen(torch.bfloat16) for part in parts]))


@pytest.mark.parametrize(
    ("others", "rounds"),
    [
        (rounding(2, K), True),
        (random_codes(2, K, 8, K, False), False),
        (random_codes(2, K, 4, 32, True), False),
    ],
)
def test_rows_are_rounded_if_all_parts_ask_for_it(others, rounds):
    assert fuse([rounding(3, K), others], torch.float32).rounds_rows == rounds


def test_what_is_fused_is_in_memory_of_its_own():
    """A file that was mapped may go, or be written to."""
    codes = random_codes(3, K, 8, 32, has_offset=True)
    fused = fuse([codes], torch.float32)
    for tensor in (codes.q, codes.scale, codes.zero):
        tensor.zero_()
    assert all(tensor.any() for tensor in (fused.q, fused.scale, fused.zero))


@pytest.mark.parametrize(
    ("weight", "form", "size"),
    [
        (PLAIN, MapForm(16, None, 1), 4 * K),
        (PLAIN.float(), MapForm(32, None, 1), 8 * K),
        (random_codes(3, K, 4, 32, False), MapForm(4, 32, 1), 3 * K // 2 + 9 * 4),
        (random_codes(3, K, 8, K, True), MapForm(8, None, 1), 3 * K + 3 * 4 + 3),
        (
            random_codes(3, K, 4, 32, has_offset=True),
            MapForm(4, 32, 1, has_offsets=True),
            3 * K // 2 + 9 * 8,
        ),
        (rounding(3, K), MapForm(8, None, 1, activation_bits=8), 3 * K + 3 * 4),
    ],
)
def test_the_form_and_the_bytes(weight, form, size):
    assert (form_of(weight), num_bytes(weight)) == (form, size)


def test_the_values_that_fuse_keeps_are_those_of_the_definition():
    q = torch.tensor([[0, 15] * 4], dtype=torch.uint8)
    codes = Codes(4, 8, q, torch.tensor([[0.5]]))
    fused = fuse([codes, codes._replace(bits=8)], torch.float32)
    assert fused.widen(torch.float32).tolist() == [[-4.0, 3.5] * 4, [-64.0, -56.5] * 4]


@pytest.mark.parametrize(("K", "group", "size"), [(1024, 1024, 256), (896, 896, 224), (96, 32, 32)])
def test_wide_groups_are_divided_to_round_rows(K, group, size):
    codes = random_codes(3, K, 8, group, has_offset=True)
    got = with_activations(codes, "model.layers.0.mlp.down_proj", "int8")
    assert (got.group, got.rounds_rows) == (size, True)
    assert torch.equal(got.widen(torch.float32), codes.widen(torch.float32))
    assert with_activations(got, "model.layers.0.mlp.down_proj", "float").rounds_rows is False


@pytest.mark.parametrize(
    ("weight", "module"),
    [
        (random_codes(3, 331, 4, 331), "model.layers.0.mlp.down_proj"),  # a prime number
        (random_codes(3, 64, 4, 32), "model.layers.0.mlp.gate"),  # a router
        (PLAIN, "lm_head"),
    ],
)
def test_other_weights_keep_the_models_dtype(weight, module):
    assert with_activations(weight, module, "int8") is weight
