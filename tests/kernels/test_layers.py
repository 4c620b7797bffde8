"""Linear maps with what follows them, and norms; which build is loaded."""

import math

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


def gated(ops, values, up, gate="silu"):
    """f(values) * up, [n], through a map of a single number."""
    packed = ops.prepack(torch.cat((values, up))[:, None], is_gated=True)
    return ops.linear_gated(torch.ones(1, 1), packed, None, gate)[0]


@BUILDS
@pytest.mark.parametrize(("gate", "up", "want"), SILUS.values(), ids=SILUS)
def test_a_gate_of_silu(ops, gate, up, want):
    got = gated(ops, torch.full((17,), gate), torch.full((17,), up))  # a vector and a tail
    torch.testing.assert_close(got, torch.full((17,), want))


@BUILDS
def test_a_gate_of_gelu_is_torchs_approximation_with_tanh(ops):
    gate = torch.linspace(-12, 12, 501)
    want = torch.nn.functional.gelu(gate.double(), approximate="tanh")
    got = gated(ops, gate, torch.ones_like(gate), "gelu_tanh").double()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


LAYER_NORMS = {  # x, weight, eps -> (x - mean) / deviation * weight
    "the mean is taken off": ([1.0, 3], [1.0, 1], 0.0, [-1, 1]),
    "the weight is a factor": ([1.0, 3], [2.0, -3], 0.0, [-2, -3]),
    "eps is inside the root": ([-3.0, 3], [1.0, 1], 16.0, [-0.6, 0.6]),
    "equal numbers become zeros": ([5.0, 5, 5], [1.0, 1, 1], 1e-6, [0, 0, 0]),
}


@BUILDS
@pytest.mark.parametrize(("x", "weight", "eps", "want"), LAYER_NORMS.values(), ids=LAYER_NORMS)
def test_layer_norm(ops, x, weight, eps, want):
    got = ops.layer_norm(torch.tensor([x]), torch.tensor(weight), eps)
    torch.testing.assert_close(got, torch.tensor([want]).float())


@BUILDS
def test_a_layer_norm_may_have_a_bias(ops):
    x, weight, bias = torch.tensor([[1.0, 3]]), torch.tensor([2.0, -3]), torch.tensor([10.0, 20])
    got = ops.layer_norm(x, weight, 0.0, bias)
    torch.testing.assert_close(got, torch.tensor([[8.0, 17]]))


ACTIVATIONS = {  # curve and alphas -> torch's function
    "silu": (("silu",), torch.nn.functional.silu),
    "gelu_tanh": (("gelu_tanh",), lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    "relu2": (("relu2",), lambda x: x.relu().square()),
    "xielu": (
        ("xielu", (0.8, 0.3)),
        lambda x: torch.where(
            x > 0, 0.8 * x.square() + 0.5 * x, (torch.expm1(x) - x) * 0.3 + 0.5 * x
        ),
    ),
}


@BUILDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("args", "function"), ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_an_activation_bends_in_place(ops, args, function, dtype):
    x = torch.cat([torch.linspace(-30, 30, 70).view(2, 35), torch.zeros(1, 35)]).to(dtype)
    want = function(x.double())
    got = ops.activate(x, *args)
    assert got.data_ptr() == x.data_ptr()
    error = 2e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(got.double(), want, rtol=error, atol=error)


@BUILDS
@pytest.mark.parametrize("args", [args for args, _ in ACTIVATIONS.values()], ids=ACTIVATIONS)
def test_an_activation_keeps_what_is_no_number(ops, args):
    assert ops.activate(torch.full((1, 3), float("nan")), *args).isnan().all()


@BUILDS
def test_a_norm_is_added_to_the_residual_stream_in_place(ops):
    residual = torch.tensor([[10.0, 20]])
    out = ops.rms_norm_add(torch.tensor([[3.0, 4]]), torch.ones(2), 100 - 12.5, residual)
    assert out.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(residual, torch.tensor([[10.3, 20.4]]))


@BUILDS
def test_groups_of_columns_have_norms_of_their_own(ops):
    residual = torch.tensor([[10.0, 20, 10, 20], [1, 2, 3, 4]])
    x = torch.tensor([[3.0, 4, -4, 3], [0, 0, 3, 4]])
    ops.rms_norm_add(x, torch.tensor([1.0, 2]), 100 - 12.5, residual)
    torch.testing.assert_close(residual, torch.tensor([[10.3, 20.8, 9.6, 20.6], [1, 2, 3.3, 4.8]]))


@BUILDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("curve", ["silu", "gelu_tanh"])
def test_columns_of_another_tensor_are_gated_in_place(ops, curve, dtype):
    x, other = torch.linspace(-9, 9, 70).view(2, 35).to(dtype), torch.randn(2, 50).to(dtype)
    want = ACTIVATIONS[curve][1](x.double()) * other[:, 7:42].double()
    got = ops.gate_columns(x, curve, other, 7)
    assert got.data_ptr() == x.data_ptr()
    error = 2e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(got.double(), want, rtol=error, atol=error)


@BUILDS
def test_a_norm_of_columns_leaves_the_others_as_they_are(ops):
    x = torch.tensor([[7.0, 3, 4, 8], [7, 0, 0, 8]])
    out = ops.rms_norm_columns(x, 1, torch.tensor([1.0, 2]), 100 - 12.5)
    assert out.data_ptr() == x.data_ptr()
    torch.testing.assert_close(x, torch.tensor([[7.0, 0.3, 0.8, 8], [7, 0, 0, 8]]))


@BUILDS
def test_curves_bend_in_place(ops):
    x = torch.tensor([[-100.0, -1, 0, 1, 100, math.nan]])
    assert ops.soft_cap(x, 2.0) is x
    half = 2 * math.tanh(0.5)
    want = torch.tensor([[-2.0, -half, 0, half, 2, math.nan]])
    torch.testing.assert_close(x, want, equal_nan=True)
    assert ops.scale(x, -3.0) is x
    torch.testing.assert_close(x, -3 * want, equal_nan=True)


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
def test_logits_are_not_rounded(ops, dtype):
    x, w = random_tensor(5, 320, dtype=dtype), random_tensor(331, 320, dtype=dtype, seed=1)
    got = ops.lm_head(x, ops.prepack(w))
    assert got.dtype == torch.float32
    assert (row_errors(got, linear(x.double(), w.double())) < 1e-5).all()


@BUILDS
@DTYPES
def test_a_gated_map_multiplies_halves_of_odd_width(ops, dtype):
    x, w = (random_tensor(n, 150, dtype=dtype, seed=n) for n in (3, 2 * 331))
    bias = random_tensor(2 * 331, dtype=dtype)
    gate, up = linear(x.double(), w.double(), bias.double()).chunk(2, dim=1)
    got = ops.linear_gated(x, ops.prepack(w, is_gated=True), bias)
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
    assert ops.linear_gated(x, ops.prepack(weight, is_gated=True)).shape == (0, 16)


@EVERY_LEVEL_AND_ARM
@DTYPES
@pytest.mark.parametrize("width", [1, 16, 150, 331, 853, 4097])
def test_the_build_normalizes_as_the_reference(width, dtype):
    x, y = (3 * random_tensor(9, width, dtype=dtype, seed=s) for s in (0, 1))
    both, weight = torch.cat((x, y), dim=1), random_tensor(width, seed=2)
    outs = []
    for ops in (cpu, reference):
        outs.append(
            [
                ops.rms_norm(x, weight, 1e-6),
                ops.layer_norm(x, weight, 1e-3),
                ops.rms_norm_add(x, weight, 1e-6, y.clone()),
                ops.rms_norm_columns(both.clone(), width, weight, 1e-6),
                ops.scale(x.clone(), 1.7),
                ops.soft_cap(x.clone(), 2.0),
            ]
        )
    for got, want in zip(*outs, strict=True):
        assert got.dtype == dtype
        off = (got.double() - want.double()).norm(dim=1)
        assert (off <= TOLERANCE[dtype] * want.double().norm(dim=1) + 1e-9).all()


def test_exp_holds_its_two_ulp():
    """Seen through silu: exp has no entrance of its own."""
    gate = torch.linspace(-80, 80, 100_000)
    got = gated(cpu, gate, torch.ones_like(gate)).double()
    want = gate.double().sigmoid() * gate
    torch.testing.assert_close(got, want, rtol=4 * 2.0**-23, atol=1e-36)


def test_a_device_that_nobody_has_kernels_for_is_refused():
    assert load(torch.device("cpu")) is cpu
    with pytest.raises(DeviceError, match=r"Device 'xpu' has no kernels\. Use 'cpu' or 'cuda'"):
        load("xpu")
