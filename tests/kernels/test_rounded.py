"""Linear maps of 8-bit codes whose rows become such codes, too: every level has the same bits."""

import itertools

import pytest
import torch

from specserve_kernels import Codes, cpu, reference
from specserve_kernels.codes import MAX_ROUNDED
from tests.kernels.maps import check_bits, maps_of, random_codes
from tests.kernels.random_steps import random_tensor
from tests.kernels.test_codes import BUILDS, DTYPES, STEP, Coded, made

EXACT = ("linear", "linear with a bias", "linear_add")  # exp has other bits in torch

# Odd ones; more words than a part of K has on any level; more rows than a thread packs at once.
SHAPES = [(1, 1), (50, 7), (331, 150), (32, 64), (33, 4201)]
EVERY = (*range(1, 131), 513)
EDGES = (1, 2, 3, 5, 6, 7, 13, 14, 15, 16, 17, 31, 32, 33, 64, 130)  # of blocks of rows


def rounding(N, K, seed=0):
    return random_codes(N, K, 8, K, False, seed)._replace(rounds_rows=True)


def rounding_maps(ops, N, K, dtype, num_rows):
    return maps_of(ops, rounding(N, K, N), rounding(2 * N, K, 2 * N), dtype, num_rows)


TABLE = {  # row, codes -> the sum of products, in units of the row's largest over 127
    "the middle is zero": ([3.0, -1.0], [128, 128], 0),
    "the largest is 127": ([2.0, 0.0], [129, 200], 127),
    "and so is the smallest": ([0.5, -2.0], [128, 129], -127),
    "others are rounded": ([127.0, 3.4], [128, 138], 30),
    "to the nearest": ([127.0, 3.6], [128, 138], 40),
    "to even in a tie": ([127.0, 2.5, 3.5], [128, 129, 128 + 16], 2 + 64),
    "codes from -128 to 127": ([1.0, -1.0], [0, 255], -127 * 255),
}


@BUILDS
@pytest.mark.parametrize(("row", "codes", "want"), TABLE.values(), ids=TABLE)
def test_a_sum_is_that_of_the_codes_of_rows_and_weight(ops, row, codes, want):
    q, x = torch.tensor([codes], dtype=torch.uint8), torch.tensor([row])
    packed = ops.prepack(Codes(8, len(row), q, torch.tensor([[0.5]]), rounds_rows=True))
    scale = (x.abs().max() / torch.tensor(127.0)) * 0.5
    assert torch.equal(ops.linear(x, packed)[0, 0], float(want) * scale)


@BUILDS
@pytest.mark.parametrize("size", [0.0, 2.0**-101])
def test_rows_that_are_nearly_zero_are_zero(ops, size):
    packed = ops.prepack(rounding(40, 30))
    bias = random_tensor(40)
    assert torch.equal(ops.linear(torch.full((2, 30), size), packed, bias), bias.expand(2, 40))


@DTYPES
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_every_level_has_the_bits_of_the_reference(gemm, N, K, dtype):
    R = 300 if K > 4000 else 45
    x = random_tensor(R, K, dtype=dtype)
    got, want = (
        rounding_maps(ops, N, K, dtype, R).outputs(ops, x, list(range(R)))
        for ops in (gemm, reference)
    )
    for name in EXACT:
        assert torch.equal(got[name], want[name]), name
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    name = "linear_gated"
    torch.testing.assert_close(got[name], want[name], rtol=tolerance, atol=tolerance)


def test_the_largest_sums_are_exact(gemm):
    K = MAX_ROUNDED
    q = torch.tensor([0, 255]).byte()[:, None].repeat(1, K)
    x = torch.ones(3, K) * torch.tensor([1.0, -1.0, 0.5])[:, None]
    codes = Codes(8, K, q, torch.tensor([[127.0], [1.0]]), rounds_rows=True)
    sums = torch.tensor([-128.0 * 127, 127.0]) * K * torch.tensor([1.0, -1.0, 0.5])[:, None]
    got = gemm.linear(x, gemm.prepack(codes))
    assert torch.equal(got, reference.linear(x, codes))
    torch.testing.assert_close(got, sums)


@pytest.mark.pairs
@DTYPES
@pytest.mark.parametrize(
    ("N", "K", "sizes"),
    [(50, 7, EVERY), (331, 150, EDGES), (33, 4201, (*EDGES, 300))],
    ids=["every number of rows", "several panels", "several parts of K"],
)
def test_a_rows_bits_depend_on_no_other_row_and_no_thread(gemm, N, K, sizes, dtype):
    R = max(sizes)
    maps = rounding_maps(gemm, N, K, dtype, R)
    maps.check_rows(gemm, random_tensor(R, K, dtype=dtype), sizes)


@DTYPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_spoils_no_other(gemm, bad, dtype):
    x = random_tensor(34, 150, dtype=dtype)
    maps = rounding_maps(gemm, 50, 150, dtype, 34)
    want = maps.outputs(gemm, x, list(range(34)))
    spoiled = [0, 7, 8, 19, 33]
    x[spoiled, 77] = bad
    for rows in (range(34), range(4), range(1)):
        fine = [r for r in rows if r not in spoiled]
        for name, out in maps.outputs(gemm, x[: len(rows)], list(rows)).items():
            assert torch.equal(out[fine], want[name][fine]), name
            assert out[0].isnan().all(), name


def test_a_code_takes_a_byte_and_a_row_a_float():
    assert cpu.prepack(rounding(64, 4096)).words.nbytes == 64 * (4096 + 4)


@DTYPES
def test_a_recorded_forward_has_the_bits_of_its_ops(dtype):
    weights = cpu.prepack(rounding(64, 64)), cpu.prepack(rounding(128, 64), True)
    model = Coded(cpu, (random_tensor(50, 64, dtype=dtype), *weights), dtype)
    program, eager = (make(model, STEP.kv, 40, 4) for make in (cpu.program, made))
    for n in (1, 5, 40):
        ids, read = torch.arange(n), torch.tensor([0])
        want, got = eager.run(STEP.rows(), ids, read), program.run(STEP.rows(), ids, read)
        assert torch.equal(got.residual, want.residual) and torch.equal(got.logits, want.logits)


@pytest.mark.slow
@pytest.mark.usefixtures("arm_level")
def test_rounded_rows_on_arm_too():
    for dtype, (N, K) in itertools.product((torch.float32, torch.bfloat16), ((40, 96), (33, 2101))):
        x = random_tensor(9, K, dtype=dtype)
        packed, codes = (rounding_maps(ops, N, K, dtype, 9) for ops in (cpu, reference))
        check_bits(packed, codes, x, (1, 2, 3, 6, 9), EXACT)


@pytest.mark.slow
@pytest.mark.usefixtures("arm_level")
def test_extreme_codes_of_whole_rows_on_arm_too():
    q = torch.tensor([[0, 255], [255, 0]], dtype=torch.uint8).repeat(1, 40)
    codes = Codes(8, 80, q, torch.ones(2, 1), None, rounds_rows=True)
    x = torch.tensor([[-127.0, 127.0], [127.0, -127.0], [127.0, 127.0]]).repeat(1, 40)
    want = x @ (q.float() - 128).T
    for rows in ([0], [0, 1], [0, 1, 2]):
        assert torch.equal(cpu.linear(x[rows], cpu.prepack(codes)), want[rows])
