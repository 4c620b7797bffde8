"""Several residual streams in a row, and sparse gates: by hand, and the builds by the reference."""

import pytest
import torch

from specserve_kernels import cpu, reference
from tests.kernels.builds import BUILDS
from tests.kernels.random_steps import random_tensor, row_errors

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@BUILDS
def test_streams_get_the_size_of_the_first_one(ops):
    first = torch.tensor([[3.0, 4.0]])
    got = ops.spread_streams(torch.tensor([[6.0, 8, 1e-4, 0]]), first)
    small = 1e-4 * 12.5**0.5 / 1e-5**0.5  # the divisor has a minimum
    torch.testing.assert_close(got, torch.tensor([[3.0, 4, 3, 4, small, 0]]))


@BUILDS
def test_a_stream_of_the_size_of_the_first_is_added(ops):
    total = torch.tensor([[10.0, 20]])
    got = ops.add_matched(torch.tensor([[4.0, 3.0]]), torch.tensor([[6.0, 8.0]]), total)
    assert got.data_ptr() == total.data_ptr()
    torch.testing.assert_close(got, torch.tensor([[18.0, 26]]))


@BUILDS
def test_streams_are_mixed(ops):
    streams = torch.tensor([[1.0, 2, 10, 20]])  # two streams of two columns
    got = ops.mix_streams(streams, torch.tensor([[1.0, 2, 3, 4]]))
    assert got.tolist() == [[1 + 1 + 20, 2 + 2 + 40, 10 + 3 + 40, 20 + 6 + 80]]
    assert streams.tolist() == [[1, 2, 10, 20]]


@BUILDS
def test_streams_are_corrected_by_the_difference_to_the_first(ops):
    streams = torch.tensor([[1.0, 2, 10, 20]])
    got = ops.correct_streams(streams, torch.tensor([[2.0, 0]]), torch.tensor([[0.0, 2]]))
    assert got.data_ptr() == streams.data_ptr()
    assert got.tolist() == [[2, 0, 10 + 3, 20 - 6]]


@BUILDS
def test_columns_are_weighed(ops):
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    assert ops.weigh_columns(x, 1, torch.tensor([10.0, 100])).tolist() == [[20, 300], [60, 700]]


@BUILDS
@pytest.mark.parametrize(
    ("curve", "f"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_only_gates_above_the_cutoff_are_active(ops, curve, f):
    gate, up = torch.tensor([-3.0, -1, 1, 3]), torch.tensor([5.0, 6, 7, 8])
    got = ops.sparse_gated(torch.cat([gate, up])[None], curve, 0.3)
    cutoff = 0.3 * 5**0.5  # their mean is 0
    want = torch.tensor([0, 0, f(1 - torch.tensor(cutoff)) * 7, f(3 - torch.tensor(cutoff)) * 8])
    torch.testing.assert_close(got, want[None])


def all_ops(ops, R, K, N, dtype):
    """The results of all ops on random rows."""
    x = {w: random_tensor(R, w, dtype=dtype, seed=w) for w in (K, 2 * K, N * K, (N - 1) * K)}
    few = {w: random_tensor(R, w, dtype=dtype, seed=9 + w) for w in (N, N * N)}
    streams, total = x[N * K].clone(), x[K].flip(0).clone()
    return [
        ops.spread_streams(x[(N - 1) * K], x[K]),
        ops.add_matched(x[K].clone(), x[2 * K][:, :K].contiguous(), total),
        ops.mix_streams(streams, few[N * N]),
        ops.correct_streams(streams, x[K], few[N]),
        ops.weigh_columns(x[N * K], K, random_tensor(K, seed=3)),
        ops.sparse_gated(x[2 * K], "gelu_tanh", 1.0),
        ops.rms_norm_add(x[K], random_tensor(K, seed=4), 1e-6, x[N * K].clone(), K),
    ]


@BUILDS
@DTYPES
@pytest.mark.parametrize(("K", "N"), [(70, 4), (33, 2)])
def test_the_builds_compute_as_the_reference(ops, K, N, dtype):
    for got, want in zip(
        *(all_ops(each, 9, K, N, dtype) for each in (ops, reference)), strict=True
    ):
        assert got.dtype == dtype
        assert row_errors(got, want).max() < TOLERANCE[dtype]


@DTYPES
def test_a_rows_bits_depend_on_no_other_row(dtype):
    whole = all_ops(cpu, 9, 70, 3, dtype)
    x, few = random_tensor(9, 210, dtype=dtype, seed=210), random_tensor(9, 9, dtype=dtype, seed=18)
    one = cpu.mix_streams(x[4:5].clone(), few[4:5].clone())
    gates = random_tensor(9, 140, dtype=dtype, seed=140)
    assert torch.equal(one, whole[2][4:5])
    assert torch.equal(cpu.sparse_gated(gates[4:5].clone(), "gelu_tanh", 1.0), whole[5][4:5])


@BUILDS
def test_taken_columns_are_a_copy_even_of_one_row(ops):
    x = torch.tensor([[1.0, 2, 3]])
    taken = ops.take_columns(x, 0, 2)
    taken += 5
    assert x.tolist() == [[1, 2, 3]] and taken.tolist() == [[6, 7]]
