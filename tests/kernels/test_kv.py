"""KV of 8 bits: what is written, how far it is off, and that it moves with its scales."""

import random

import pytest
import torch

from specserve_kernels import QKNorm, Rotary, cpu, reference
from specserve_kernels.reference.kv import LARGEST, quantize
from tests.kernels.builds import BUILDS
from tests.kernels.levels import EVERY_LEVEL_AND_ARM
from tests.kernels.random_steps import (
    RandomStep,
    Req,
    queries,
    random_tensor,
    random_tree,
    row_errors,
    tokens,
)

BOUND = {torch.int8: 0.015, torch.float8_e4m3fn: 0.08}  # of a row, relative to its norm
KV_DTYPES = pytest.mark.parametrize("kv_dtype", BOUND, ids=["int8", "fp8"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
INF, NAN = float("inf"), float("nan")

INT8 = {  # a head -> its codes and its scale
    "the largest gets the largest code": ([1.0, -2, 0.5, 0], [64, -127, 32, 0], 2 / 127),
    "a tie is rounded to even": ([127.0, 0.5, 1.5, -2.5], [127, 0, 2, -2], 1.0),
    "zeros": ([0.0, -0.0, 0, 0], [0, 0, 0, 0], 0.0),
    "too small to count": ([1e-38, 1e-40, 0, 0], [0, 0, 0, 0], 0.0),
    "large": ([3e38, -3e38, 1e38, 0], [127, -127, 42, 0], 3e38 / 127),
    "infinite": ([1.0, INF, 0, 0], [0, 0, 0, 0], NAN),
    "no number": ([1.0, 0, NAN, 0], [0, 0, 0, 0], NAN),
}
FP8 = {
    "the largest gets the largest code": ([1.0, -2, 0.5, 0], [224.0, -448, 112, 0], 2 / 448),
    "three bits of a mantissa": ([448.0, 17, 18, 19], [448.0, 16, 18, 20], 1.0),
    "what would be subnormal is zero": ([448.0, 2**-6, 0.0156, -0.0156], [448.0, 2**-6, 0, 0], 1.0),
    "infinite": ([1.0, INF, 0, 0], [0.0, 0, 0, 0], NAN),
    "no number": ([1.0, 0, NAN, 0], [0.0, 0, 0, 0], NAN),
}


CASES = [(torch.int8, *case) for case in INT8.values()]
CASES += [(torch.float8_e4m3fn, *case) for case in FP8.values()]


@BUILDS
@pytest.mark.filterwarnings("ignore:overflow|invalid value")  # of rotated values, which are dropped
@pytest.mark.parametrize(
    ("kv_dtype", "head", "codes", "scale"),
    CASES,
    ids=[*(f"int8: {name}" for name in INT8), *(f"fp8: {name}" for name in FP8)],
)
def test_codes_and_their_scale(ops, kv_dtype, head, codes, scale):
    """Of a value: keys are rotated first."""
    step = RandomStep([Req(0, 1)], 16, 1, 1, 4, num_layers=2, kv_dtype=kv_dtype)
    written(ops, step, torch.tensor([[0.0] * 8 + head]))
    layer, (slot,) = step.kv.layers[1], step.rows().slots.tolist()
    assert layer.v[slot // 16, slot % 16, 0].float().tolist() == codes
    got = layer.v_scale[slot // 16, slot % 16, 0]
    torch.testing.assert_close(got, torch.tensor(scale), equal_nan=True)


def written(ops, step, qkv):
    """The step's KV as `ops` write it, of values that stand in qkv; the rotated queries."""
    angle = torch.outer(torch.arange(400.0), random_tensor(step.head_dim // 2))
    rotary = Rotary(ops.place(angle.cos()), ops.place(angle.sin()))
    weights = (random_tensor(step.head_dim, seed=s) for s in (1, 2))
    norm = QKNorm(*map(ops.place, weights), 1e-6)
    plan = ops.plan(step.rows(), step.kv, step.num_heads)
    return ops.rope_write_kv(ops.place(qkv), rotary, norm, step.kv.layers[1], plan)


@pytest.mark.pairs
@BUILDS
@DTYPES
@KV_DTYPES
@pytest.mark.parametrize(("H", "Hk", "D"), [(4, 2, 16), (7, 1, 20), (9, 3, 80), (2, 1, 128)])
def test_codes_are_written_as_the_reference_writes_them_and_only_in_their_slots(
    ops, H, Hk, D, kv_dtype, dtype
):
    step = RandomStep(WRITTEN, 17, H, Hk, D, dtype, num_layers=2, kv_dtype=kv_dtype)
    check_written(ops, step)


WRITTEN = [Req(0, 4), Req(60, 1), Req(30, parents=[0, 0, 2])]


def check_written(ops, step):
    """Have `ops` write codes to a step of WRITTEN, and compare them with the reference's."""
    Hk, D = step.num_kv_heads, step.head_dim
    shape = 17, step.num_heads, Hk, D, step.dtype
    kv_dtype = step.kv.layers[1].k.dtype
    by_reference = RandomStep(WRITTEN, *shape, num_layers=2, kv_dtype=kv_dtype)
    qkv = random_tensor(9, (step.num_heads + 2 * Hk) * D, dtype=step.dtype)
    qkv[5, -1] = NAN
    both = (ops, step), (reference, by_reference)
    queries = [written(build, own, qkv).cpu() for build, own in both]
    torch.testing.assert_close(*queries, rtol=1e-2, atol=1e-2)
    got, want = (
        [x.cpu().reshape(-1, Hk, *x.shape[3:])[own.rows().slots] for x in own.kv.layers[1].parts]
        for _, own in both
    )
    assert torch.equal(got[1].float(), want[1].float())
    torch.testing.assert_close(got[3], want[3], rtol=1e-6, atol=0, equal_nan=True)
    assert got[3].isnan().sum() == 1 and not got[2].isnan().any()
    torch.testing.assert_close(got[2], want[2], rtol=1e-5, atol=0)
    # A key that was rotated in another order of operations may fall on the next code.
    apart = (got[0].float() - want[0].float()).abs()
    assert (apart > 0).float().mean() < 0.01 and (
        apart <= (1 if kv_dtype == torch.int8 else 32)
    ).all()
    untouched = [own.scales.isnan().cpu() for _, own in both]
    assert torch.equal(*untouched)


@pytest.mark.pairs
@BUILDS
@DTYPES
@KV_DTYPES
@pytest.mark.parametrize(
    ("H", "Hk", "D", "window"),
    [(4, 2, 16, None), (7, 1, 20, 37), (16, 2, 128, 37), (4, 4, 80, None)],
)
def test_attention_over_codes_is_near_that_over_what_they_stand_for(
    ops, H, Hk, D, window, kv_dtype, dtype
):
    reqs = [Req(0, 9), Req(250, 3), Req(90, parents=random_tree(random.Random(D), 20))]
    step = RandomStep(reqs, 17, H, Hk, D, dtype, kv_dtype=kv_dtype).filled()
    q = queries(step, len(step.rows().positions))
    exact = RandomStep(reqs, 16, H, Hk, D, torch.float32)
    for b, req in enumerate(reqs):
        exact.put(b, list(range(req.end)), tokens(step, b, req.end).float())
    got, want = step.attend(ops, q, window), exact.attend(reference, q.float(), window)
    assert row_errors(got, want).max() < BOUND[kv_dtype]
    # Beside the rounding of codes, which all builds share, a build has that of its own arithmetic.
    own = row_errors(got, step.attend(reference, q, window))
    assert own.max() < (6e-3 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.pairs
@EVERY_LEVEL_AND_ARM
@DTYPES
@KV_DTYPES
@pytest.mark.parametrize(("H", "Hk", "D"), [(4, 2, 20), (16, 8, 128), (3, 3, 80)])
def test_on_every_level_codes_are_written_and_read_alike(H, Hk, D, kv_dtype, dtype):
    reqs = [Req(290, 3), Req(40, 20), Req(90, parents=random_tree(random.Random(D), 20))]
    step = RandomStep(reqs, 17, H, Hk, D, dtype, num_layers=2, kv_dtype=kv_dtype).filled()
    for part, filled in zip(step.kv.layers[1].parts, step.kv.layers[0].parts, strict=True):
        part.copy_(filled)
    num_rows = len(step.rows().positions)
    written(cpu, step, random_tensor(num_rows, (H + 2 * Hk) * D, dtype=dtype))
    q = queries(step, num_rows)
    got, want = (attended_in(step, ops, q) for ops in (cpu, reference))
    assert row_errors(got, want).max() < (6e-3 if dtype == torch.bfloat16 else 1e-5)


@KV_DTYPES
def test_one_large_number_makes_a_head_coarse_and_no_other(kv_dtype):
    x = random_tensor(3, 2, 64)
    wide = x.clone()
    wide[1, 0, 5] = 1000.0
    errors = []
    for each in (x, wide):
        codes, scale = quantize(each, kv_dtype)
        errors.append((codes.float() * scale[..., None] - each).abs())
    at = torch.ones(3, 2, dtype=torch.bool)
    at[1, 0] = False
    assert torch.equal(errors[1][at], errors[0][at])
    assert (errors[1] <= 1000 / LARGEST[kv_dtype] * (0.5 if kv_dtype == torch.int8 else 16)).all()


@pytest.mark.pairs
@BUILDS
@KV_DTYPES
@DTYPES
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("window", [None, 9])
def test_a_broken_token_breaks_the_rows_that_see_it_and_no_other(
    ops, dtype, kv_dtype, which, window
):
    """One with an infinite number has the same codes and the same scale."""
    for req in (Req(30, 14), Req(130, parents=random_tree(random.Random(4), 12))):
        step = RandomStep([req], num_heads=6, dtype=dtype, kv_dtype=kv_dtype).filled()
        q = queries(step, len(step.rows().positions))
        want, place = step.attend(ops, q, window), req.start + 3
        one = tokens(step, 0, req.end)[:, [place]].clone()
        one[which, 0, 0, 3] = NAN
        step.put(0, [place], one)
        got = step.attend(ops, q, window).view_as(q)
        for r, seen in enumerate(req.visible()):
            sees = place in (seen[-window:] if window else seen)
            assert got[r, :3].isnan().all() == sees
            assert torch.equal(got[r, 3:].flatten(), want[r].view_as(q[r])[3:].flatten())


@BUILDS
@KV_DTYPES
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_a_broken_token_breaks_no_shorter_request(ops, kv_dtype, which):
    """Of which the last keys are computed together with places where the longer one has keys."""
    step = RandomStep([Req(50, 1), Req(34, 1)], kv_dtype=kv_dtype).filled()
    q = queries(step, 2)
    want = step.attend(ops, q)
    one = tokens(step, 0, 51)[:, [40]].clone()
    one[which] = NAN
    step.put(0, [40], one)
    got = step.attend(ops, q)
    assert got[0].isnan().all() and torch.equal(got[1], want[1])


@BUILDS
@KV_DTYPES
def test_moves_take_codes_and_scales_along_in_every_layer(ops, kv_dtype):
    step = RandomStep([Req(5, 1)], block_size=2, head_dim=20, num_layers=3, kv_dtype=kv_dtype)
    slots = step.slots(0, 6)
    at = slots // 2, slots % 2
    for layer in step.kv.layers:
        for part in layer.parts:
            part[at] = random_tensor(6, *part.shape[2:], seed=part.data_ptr() % 97).to(part.dtype)
    before = [[part[at].clone() for part in layer.parts] for layer in step.kv.layers]
    num_nan = step.scales.isnan().sum()
    ops.move_kv(step.kv, slots[[2, 4, 5]], slots[[1, 2, 3]])
    for layer, parts in zip(step.kv.layers, before, strict=True):
        for part, old in zip(layer.parts, parts, strict=True):
            assert torch.equal(part[at].float(), old[[0, 2, 4, 5, 4, 5]].float())
    assert step.scales.isnan().sum() == num_nan


@BUILDS
@KV_DTYPES
@pytest.mark.parametrize("window", [None, 11])
def test_a_row_reads_the_same_whenever_its_kv_was_written(ops, kv_dtype, window):
    """One step writes and reads 24 rows, or three steps eight each: a read code is a read code."""
    whole, parts = (
        RandomStep([Req(0, 24)], 16, 4, 2, 16, num_layers=2, kv_dtype=kv_dtype) for _ in range(2)
    )
    qkv = random_tensor(24, 8 * 16)
    want = attended(ops, whole, qkv, window)
    got = []
    for start in range(0, 24, 8):
        parts.reqs = [Req(start, 8)]
        got.append(attended(ops, parts, qkv[start : start + 8], window))
    assert row_errors(torch.cat(got), want).max() < 1e-5


def attended(ops, step, qkv, window):
    return attended_in(step, ops, written(ops, step, qkv), window)


def attended_in(step, ops, q, window=None):
    """Attention in the second layer, in which `written` writes."""
    plan = ops.plan(step.rows(), step.kv, step.num_heads, [window])
    return ops.attention(q, step.kv.layers[1], plan, step.head_dim**-0.5, window)
