"""Linear maps with what follows them, and norms; which build is loaded."""

import pytest
import torch
from torch.nn.functional import linear

from specserve_kernels import DeviceError, cpu, load, reference
from tests.kernels.builds import BUILDS
from tests.kernels.levels import EVERY_LEVEL_AND_ARM
from tests.kernels.maps import random_codes
from tests.kernels.random_steps import random_tensor, row_errors

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}  # of a row, relative to its norm

NORMS = {  # x, weight, eps -> x / rms(x) * weight
    "mean, not sum": ([3.0, 4, 5, 12], [1.0, 1, 1, 1], 0.0, [x / 48.5**0.5 for x in (3, 4, 5, 12)]),
    "eps is inside the root": ([3.0, 4], [1.0, 1], 100 - 12.5, [0.3, 0.4]),
    "the weight is a factor": ([1.0, -1], [2.0, -3], 0.0, [2, 3]),
    "eps keeps zeros zero": ([0.0, 0], [1.0, 1], 1e-6, [0, 0]),
}


@BUILDS
@pytest.mark.parametrize(("x", "weight", "eps", "want"), NORMS.values(), ids=NORMS)
def test_rms_norm(ops, x, weight, eps, want):
    got = ops.rms_norm(torch.tensor([x]), torch.tensor(weight), eps)
    torch.testing.assert_close(got, torch.tensor([want]).float())


SILUS = {  # gate, up -> silu(gate) * up
    "zero is shut": (0.0, 5.0, 0.0),
    "one is open to a sigmoid": (1.0, 2.0, 2 / (1 + 2.718281828459045**-1)),
    "a large gate is linear": (100.0, 2.0, 200.0),
    "a very negative one is shut": (-1000.0, 2.0, 0.0),
}


def silu_mul(ops, gate, up):
    """silu(gate) * up, [n], through a map of a single number."""
    packed = ops.prepack(torch.cat((gate, up))[:, None], is_gated=True)
    return ops.linear_silu_mul(torch.ones(1, 1), packed)[0]


@BUILDS
@pytest.mark.parametrize(("gate", "up", "want"), SILUS.values(), ids=SILUS)
def test_linear_silu_mul(ops, gate, up, want):
    got = silu_mul(ops, torch.full((17,), gate), torch.full((17,), up))  # a vector and a tail
    torch.testing.assert_close(got, torch.full((17,), want))


@BUILDS
@DTYPES
@pytest.mark.parametrize(("N", "K"), [(960, 320), (17, 4096), (331, 150), (1, 64)])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_linear_is_torchs(ops, N, K, has_bias, dtype):
    x, w = random_tensor(5, K, dtype=dtype), random_tensor(N, K, dtype=dtype, seed=1)
    bias = 9 * random_tensor(N, dtype=dtype, seed=2) if has_bias else None
    want = linear(x.double(), w.double(), bias if bias is None else bias.double())
    for rows in (1, 2, 5):
        got = ops.linear(x[:rows], ops.prepack(w), bias)
        assert got.dtype == dtype
        assert (row_errors(got, want[:rows]) < TOLERANCE[dtype]).all()


@BUILDS
@DTYPES
def test_a_gated_map_multiplies_halves_of_odd_width(ops, dtype):
    x, w = (random_tensor(n, 150, dtype=dtype, seed=n) for n in (3, 2 * 331))
    bias = random_tensor(2 * 331, dtype=dtype)
    gate, up = linear(x.double(), w.double(), bias.double()).chunk(2, dim=1)
    got = ops.linear_silu_mul(x, ops.prepack(w, is_gated=True), bias)
    assert got.dtype == dtype
    assert (row_errors(got, gate * gate.sigmoid() * up) < 2 * TOLERANCE[dtype]).all()


@BUILDS
@pytest.mark.parametrize("bias", [None, torch.tensor([4.0, 0]).bfloat16()], ids=["plain", "bias"])
def test_linear_add_writes_into_the_residual(ops, bias):
    x, w = torch.tensor([[1.0, 2], [3, 4]]).bfloat16(), torch.tensor([[1.0, 1], [0, 2]]).bfloat16()
    residual = torch.tensor([[10.0, 20], [30, 40]]).bfloat16()
    out = ops.linear_add(x, ops.prepack(w), bias, residual)
    more = 0 if bias is None else 4
    assert out is residual and out.tolist() == [[13 + more, 24], [37 + more, 48]]


@pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
def test_linear_add_rounds_once(ops):
    """Rounded by itself, 1 + 2^-8 is 1: 8 bits of bfloat16 hold no more."""
    x, w = torch.tensor([[1.0, 2.0**-8]]).bfloat16(), torch.ones(1, 2).bfloat16()
    residual = torch.full((1, 1), 2.0**-8).bfloat16()
    assert ops.linear_add(x, ops.prepack(w), None, residual).item() == 1 + 2.0**-7


@BUILDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embedding_and_row_selection_copy_whole_rows(ops, dtype):
    table = random_tensor(9, 5).to(dtype)
    rows = torch.tensor([8, 0, 3, 3])
    for taken in (ops.embed(table, rows, dtype), ops.take_rows(table, rows)):
        assert taken.dtype == dtype and torch.equal(taken, torch.stack([table[r] for r in rows]))
    ops.embed(table, rows, dtype).fill_(7)
    assert not (table == 7).any(), "the residual stream begins with a tensor of its own"


@BUILDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embeddings_of_codes_are_their_values(ops, dtype):
    table, rows = random_codes(9, 32, 8, 8, has_offset=True), torch.tensor([8, 0, 3, 3])
    assert torch.equal(ops.embed(table, rows, dtype), table.widen(dtype)[rows])
    assert ops.embed(table, rows[:0], dtype).shape == (0, 32)


@BUILDS
def test_blocks_are_copied_whole_and_in_order(ops):
    blocks = torch.arange(5, dtype=torch.uint8)[:, None].repeat(1, 16)
    ops.copy_blocks(blocks, torch.tensor([4, 0, 1]), torch.tensor([0, 1, 4]))
    assert blocks[:, 0].tolist() == [4, 4, 2, 3, 4] and (blocks == blocks[:, :1]).all()


@BUILDS
def test_no_rows_are_no_error(ops):
    x, weight = torch.empty(0, 64), random_tensor(32, 64)
    assert ops.linear(x, ops.prepack(weight)).shape == (0, 32)
    assert ops.linear_add(x, ops.prepack(weight), None, torch.empty(0, 32)).shape == (0, 32)
    assert ops.linear_silu_mul(x, ops.prepack(weight, is_gated=True)).shape == (0, 16)


@EVERY_LEVEL_AND_ARM
@DTYPES
@pytest.mark.parametrize("width", [1, 16, 150, 331, 853, 4097])
def test_the_build_normalizes_as_the_reference(width, dtype):
    x, weight = 3 * random_tensor(9, width, dtype=dtype), random_tensor(width, dtype=dtype, seed=2)
    got, want = (ops.rms_norm(x, weight, 1e-6) for ops in (cpu, reference))
    assert got.dtype == dtype
    assert (row_errors(got, want) < TOLERANCE[dtype]).all()


def test_exp_holds_its_two_ulp():
    """Seen through silu: exp has no entrance of its own."""
    gate = torch.linspace(-80, 80, 100_000)
    got = silu_mul(cpu, gate, torch.ones_like(gate)).double()
    want = gate.double().sigmoid() * gate
    torch.testing.assert_close(got, want, rtol=4 * 2.0**-23, atol=1e-36)


def test_a_device_that_nobody_has_kernels_for_is_refused():
    assert load(torch.device("cpu")) is cpu
    with pytest.raises(DeviceError, match="no kernels for 'xpu': take 'cpu' or 'cuda'"):
        load("xpu")
