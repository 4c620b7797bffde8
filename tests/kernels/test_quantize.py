"""Rounding weights to codes: what is chosen, and that C++ chooses as the reference does."""

import math

import pytest
import torch

from specserve_kernels import cpu, reference
from tests.kernels.builds import BUILDS
from tests.kernels.levels import EVERY_LEVEL
from tests.kernels.random_steps import random_tensor

GROUP = 64


def relative_error(weight, codes):
    return ((codes.widen(torch.float32) - weight).norm() / weight.norm()).item()


@BUILDS
def test_a_group_that_codes_can_hold_is_held_exactly(ops):
    values = torch.arange(-8, 8).repeat(4)
    weight = torch.stack([values * 0.5, values * -0.25, values * 0.0]).float()
    codes = ops.quantize(weight, 4)
    assert torch.equal(codes.widen(torch.float32), weight)
    assert codes.scale[:, 0].tolist() == [0.5, -0.25, 1.0] and codes.zero is None


@BUILDS
def test_of_8_bits_a_row_has_one_scale_whatever_its_width(ops):
    weight = torch.tensor([[1.0, -0.5, 0.0], [-4.0, 3.0, 2.0]])
    codes = ops.quantize(weight, 8)
    assert codes.group == 3 and codes.scale.tolist() == [[-1 / 128], [1 / 32]]
    assert codes.q.tolist() == [[0, 192, 128], [0, 224, 192]]


@BUILDS
@pytest.mark.parametrize(("bits", "most"), [(4, 0.092), (8, 0.008)])
def test_the_error_is_that_of_a_search(ops, bits, most):
    """Of normal numbers; the best of one scale, extreme / 8, would be off by 0.095."""
    weight = random_tensor(64, 1024)
    codes = ops.quantize(weight, bits)
    assert relative_error(weight, codes) < most
    assert torch.equal(codes.scale.bfloat16().float(), codes.scale)
    assert codes.q.max() == 2**bits - 1 and codes.q.min() == 0


@BUILDS
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_with_a_number_that_is_not_finite_has_a_scale_that_is_none(ops, bits, bad):
    weight = torch.ones(2, 2 * GROUP)
    weight[1, 3] = bad
    scale = ops.quantize(weight, bits).scale
    assert scale.isnan().sum() == 1 and scale[1, 0].isnan()


@EVERY_LEVEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "N", "K"), [(4, 131, 192), (8, 131, 192), (8, 3, 77)])
def test_all_builds_choose_the_same_codes(bits, N, K, dtype):
    weight = random_tensor(N, K, dtype=dtype)
    weight[0] *= 1e-20
    weight[1] *= 1e30
    weight[2] = 0.0
    weight[2, 5] = 2.0**-110
    want, got = (ops.quantize(weight, bits) for ops in (reference, cpu))
    assert torch.equal(got.q, want.q) and torch.equal(got.scale, want.scale)
    assert got.group == want.group and got.zero is want.zero is None
