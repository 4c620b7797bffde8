"""Linear maps on every level: exact to a bound, and a row's bits depend on it alone."""

import pytest
import torch

from specserve_kernels import cpu
from tests.kernels.maps import random_maps
from tests.kernels.random_steps import random_tensor

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Odd ones; more words than a part of K has on any level; more rows than a thread packs at once.
SHAPES = [(1, 1), (50, 7), (331, 150), (32, 32), (33, 2101)]


@DTYPES
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_the_error_is_within_the_bound_of_its_roundings(gemm, N, K, dtype):
    R = 300 if K > 2000 else 45
    x, maps = random_tensor(R, K, dtype=dtype), random_maps(gemm, N, K, dtype, R)
    maps.check(maps.outputs(gemm, x, list(range(R))), x)


EVERY = (*range(1, 131), 513)
EDGES = (1, 2, 3, 5, 6, 7, 13, 14, 15, 16, 17, 31, 32, 33, 64, 130)  # of blocks of rows


@pytest.mark.pairs
@DTYPES
@pytest.mark.parametrize(
    ("N", "K", "sizes"),
    [(50, 7, EVERY), (331, 150, EDGES), (33, 2101, (*EDGES, 300))],
    ids=["every number of rows", "several panels", "several parts of K"],
)
def test_a_rows_bits_depend_on_no_other_row_and_no_thread(gemm, N, K, sizes, dtype):
    R = max(sizes)
    random_maps(gemm, N, K, dtype, R).check_rows(gemm, random_tensor(R, K, dtype=dtype), sizes)


@DTYPES
@pytest.mark.parametrize(("N", "K"), [(50, 7), (331, 150), (17, 65)])
def test_a_row_that_is_not_finite_spoils_no_other(gemm, N, K, dtype):
    """Nor does what lies before and behind the rows."""
    around = random_tensor(36, K, dtype=dtype)
    maps = random_maps(gemm, N, K, dtype, 34)
    want = maps.outputs(gemm, around[1:35].clone(), list(range(34)))
    spoiled = [0, 1, 8, 9, 20, 35]
    around[spoiled] = torch.tensor([float("nan"), float("inf")] * 3).to(dtype)[:, None]
    fine = [i - 1 for i in range(1, 35) if i not in spoiled]
    for rows in (range(34), range(4), range(1)):
        got = maps.outputs(gemm, around[1 : 1 + len(rows)], list(rows))
        kept = [r for r in fine if r in rows]
        for name, out in got.items():
            assert torch.equal(out[kept], want[name][kept]), name
            assert not out[0].isfinite().any(), name


@DTYPES
@pytest.mark.parametrize(("N", "K"), [(1, 3), (50, 7), (33, 64)])
def test_nothing_is_written_around_the_rows(gemm, N, K, dtype):
    maps = random_maps(gemm, N, K, dtype, 1)
    for R in (1, 3, 17):
        around = random_tensor(R + 2, N, dtype=dtype)
        before = around.clone()
        x = random_tensor(R, K, dtype=dtype)
        gemm.linear_add(x, maps.packed, maps.bias, around[1:-1])
        assert torch.equal(around[[0, -1]], before[[0, -1]])
        assert not torch.equal(around[1:-1], before[1:-1])


@DTYPES
@pytest.mark.parametrize(("N", "K"), [(50, 7), (96, 64), (16, 33)])
def test_panels_hold_every_weight_once_and_zeros(gemm, N, K, dtype):
    """[panels][words][32] words of 4 bytes; a gated panel has 16 columns of each half."""
    per_word = 4 // dtype.itemsize
    maps = random_maps(gemm, N, K, dtype, 1)
    for weight, packed, width in ((maps.weight, maps.packed, 32), (maps.gate_up, maps.gated, 16)):
        words = -(-K // (16 * per_word)) * 16
        panels = packed.words.view(dtype).view(-1, words, 32, per_word)
        columns = panels.permute(0, 2, 1, 3).reshape(len(panels), 32, words * per_word)
        halves = columns.view(len(panels), 32 // width, width, -1).transpose(0, 1)
        got = halves.reshape(32 // width, len(panels) * width, -1)
        assert torch.equal(got[:, :N, :K].reshape(-1, K), weight)
        assert not got[:, N:].any() and not got[:, :, K:].any()


def test_a_tied_head_is_a_copy_of_the_embedding(gemm):
    weight = random_tensor(50, 7)
    packed = gemm.prepack(weight)
    x, before = random_tensor(2, 7), gemm.linear(random_tensor(2, 7), packed)
    weight.zero_()
    assert torch.equal(gemm.linear(x, packed), before)


def test_weights_of_the_wrong_kind_are_refused():
    x, weight = random_tensor(2, 8), random_tensor(4, 8)
    plain, gated = cpu.prepack(weight), cpu.prepack(weight, is_gated=True)
    with pytest.raises(AssertionError, match="packed for another op"):
        cpu.linear_gated(x, plain)
    with pytest.raises(AssertionError, match="packed for another op"):
        cpu.linear(x, gated)
    with pytest.raises(AssertionError, match="different dtypes"):
        cpu.linear(x.bfloat16(), plain)
    with pytest.raises(AssertionError, match="width differs"):
        cpu.linear(x[:, :4].contiguous(), plain)
