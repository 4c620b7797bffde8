"""Linear maps of 4- and 8-bit codes: what they mean, and that every level computes it."""

import pytest
import torch

from specserve_kernels import Codes, cpu, reference
from tests.kernels.random_steps import random_tensor, row_errors

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
BUILDS = pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])


def random_codes(N, K, bits, group, has_zero, seed=0):
    draw = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 1 << bits, (N, K), generator=draw, dtype=torch.uint8)
    shape = N, K // group
    scale = torch.rand(shape, generator=draw) / (1 << bits)
    zero = torch.randint(0, 1 << bits, shape, generator=draw, dtype=torch.uint8)
    return Codes(bits, group, q, scale, zero if has_zero else None)


TABLE = {  # bits, q, scale, zero -> values, in groups of 2
    "the middle is zero": (4, [8, 9, 0, 15], [1.0, 2.0], None, [0, 1, -16, 14]),
    "and of 8 bits": (8, [128, 129, 0, 255], [1.0, 0.5], None, [0, 1, -64, 63.5]),
    "a zero per group": (4, [0, 15, 0, 15], [1.0, 2.0], [0, 15], [0, 15, -30, 0]),
    "a zero of 8 bits": (8, [0, 255, 0, 255], [1.0, 2.0], [255, 0], [-255, 0, 0, 510]),
}


@BUILDS
@DTYPES
@pytest.mark.parametrize(("bits", "q", "scale", "zero", "want"), TABLE.values(), ids=TABLE)
def test_a_value_is_a_code_less_its_zero_times_its_scale(ops, bits, q, scale, zero, want, dtype):
    zeros = None if zero is None else torch.tensor([zero], dtype=torch.uint8)
    codes = Codes(bits, 2, torch.tensor([q], dtype=torch.uint8), torch.tensor([scale]), zeros)
    got = ops.linear(torch.eye(4, dtype=dtype), ops.prepack(codes))
    assert got[:, 0].tolist() == want and got.dtype == dtype


@DTYPES
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zero", [True, False])
def test_the_epilogues_are_those_of_other_maps(bits, has_zero, dtype):
    K, N = 96, 50
    weight, gated = (random_codes(n, K, bits, 32, has_zero, seed=n) for n in (N, 2 * N))
    bias, both = (random_tensor(n, dtype=dtype, seed=n) for n in (N, 2 * N))
    x, residual = (random_tensor(5, n, dtype=dtype, seed=n) for n in (K, N))
    outputs = []
    for ops in (reference, cpu):
        packed, gate_up = ops.prepack(weight), ops.prepack(gated, is_gated=True)
        outputs.append(
            [
                ops.linear(x, packed, bias),
                ops.linear_add(x, packed, bias, residual.clone()),
                ops.linear_silu_mul(x, gate_up, both),
            ]
        )
    for want, got in zip(*outputs, strict=True):
        assert got.dtype == dtype and (row_errors(got, want) < 6e-3).all()
