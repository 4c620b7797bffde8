"""A row's bits depend on the row only: not on other rows, its slots or the threads."""

import random

import pytest
import torch

from specserve_kernels import Chunks, QKNorm, Rotary, SampleParams, cpu, reference
from tests.kernels.edits import random_edits, random_masks
from tests.kernels.levels import EVERY_LEVEL
from tests.kernels.random_steps import (
    RandomStep,
    Req,
    only,
    queries,
    random_reqs,
    random_tensor,
    random_tree,
    row_errors,
    tokens,
    within,
)

SIZES = {cpu: (1, 2, 3, 7, 8, 31, 64, 130, 513), reference: (1, 2, 3, 8, 31)}
BUILDS = pytest.mark.parametrize("ops", SIZES, ids=["cpu", "reference"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
KINDS = {  # how queries and KV are kept
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "bf16 over int8": {"dtype": torch.bfloat16, "kv_dtype": torch.int8},
    "fp32 over fp8": {"dtype": torch.float32, "kv_dtype": torch.float8_e4m3fn},
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def companies(ops, num_rows):
    """Sets of rows in which a row may find itself, ascending, and the threads that run them."""
    rng = random.Random(0)
    for size in (*(s for s in SIZES[ops] if s < num_rows), num_rows):
        for rows in (list(range(size)), sorted(rng.sample(range(num_rows), size))):
            yield 1, rows
        if ops is cpu and size in (1, 8, 130, num_rows):
            yield 2, rows


def assert_invariant(op, ops, x):
    """op(x, rows) with x [R, ..] gives the same bits for a row whatever stands beside it."""
    want = op(x, list(range(len(x))))
    for threads, rows in companies(ops, len(x)):
        torch.set_num_threads(threads)
        assert torch.equal(op(x[rows], rows), want[rows]), (threads, rows)
        rows.reverse()
        assert torch.equal(op(x[rows], rows), want[rows]), (threads, rows)


@pytest.mark.pairs
@EVERY_LEVEL
@BUILDS
@DTYPES
@pytest.mark.parametrize("width", [150, 331, 853, 4097])
def test_norms(ops, dtype, width):
    x = 3 * random_tensor(max(SIZES[ops]), 2 * width, dtype=dtype)
    weight = random_tensor(2 * width, seed=1)
    assert_invariant(lambda x, _: ops.rms_norm(x, weight, 1e-6), ops, x)
    assert_invariant(lambda x, _: ops.layer_norm(x, weight, 1e-6), ops, x)
    assert_invariant(lambda x, _: ops.rms_norm_add(x, weight, 1e-6, x.clone()), ops, x)
    part = weight[:width]
    assert_invariant(lambda x, _: ops.rms_norm_columns(x.clone(), width, part, 1e-6), ops, x)
    assert_invariant(lambda x, _: ops.soft_cap(x.clone(), 2.0), ops, x)


def linear_ops(ops, N, K, dtype):
    """Every op with a linear map as a function of x and rows; some have a bias."""
    weight, gated = (random_tensor(n, K, dtype=dtype, seed=n) for n in (N, 2 * N))
    bias, both = (random_tensor(n, dtype=dtype, seed=n) for n in (N, 2 * N))
    residual = random_tensor(513, N, dtype=dtype, seed=4)
    packed, gate_up = ops.prepack(weight), ops.prepack(gated, is_gated=True)
    return {
        "linear": lambda x, _: ops.linear(x, packed),
        "lm_head": lambda x, _: ops.lm_head(x, packed),
        "linear with a bias": lambda x, _: ops.linear(x, packed, bias),
        "linear_add": lambda x, rows: ops.linear_add(x, packed, bias, residual[rows]),
        "linear_gated": lambda x, _: ops.linear_gated(x, gate_up, both),
    }


OPS = ("linear", "lm_head", "linear with a bias", "linear_add", "linear_gated")


@pytest.mark.pairs
@DTYPES
@pytest.mark.parametrize(("N", "K"), [(960, 320), (1024, 4096), (4096, 1024), (331, 150), (50, 7)])
@pytest.mark.parametrize("name", OPS)
def test_linear(name, dtype, N, K):
    x = random_tensor(513, K, dtype=dtype)
    assert_invariant(linear_ops(cpu, N, K, dtype)[name], cpu, x)


@DTYPES
@pytest.mark.parametrize("name", OPS)
def test_linear_of_the_reference(name, dtype):
    x = random_tensor(31, 1150, dtype=dtype)
    assert_invariant(linear_ops(reference, 331, 1150, dtype)[name], reference, x)


def params(temperature, top_k, n):
    """Every third row is greedy, and filters are asked for by some rows only."""
    i = torch.arange(n)
    top_k = torch.where(i % 5 == 0, top_k, 0).int()
    top_p = torch.where(i % 7 == 0, 0.8, 1.0)
    return SampleParams(temperature * (i % 3 > 0), top_k, top_p, (i % 4 == 0) * 0.01, i * i, i)


@pytest.mark.pairs
@EVERY_LEVEL
@BUILDS
@pytest.mark.parametrize(("V", "is_plain"), [(320, True), (320, False), (4097, True)])
def test_choices(ops, V, is_plain):
    n = max(SIZES[ops])
    logits, asked = 2 * random_tensor(n, V), params(1.0, 50, n)
    if not is_plain:
        asked = asked._replace(edits=random_edits(n, V), masks=random_masks(n, V))

    def sample(_, rows):
        return ops.sample(logits, torch.tensor(rows), asked.take(rows))

    def children(x, rows):
        ids, weight = ops.top_children(x, asked.take(rows), 4, 0.8)
        return torch.stack((ids.int(), weight.view(torch.int32)))[:, :, None].movedim(1, 0)

    assert_invariant(sample, ops, logits)
    assert_invariant(children, ops, logits)


def crowd(ops, seed):
    """Requests of every kind: at least 513 rows for the build, some 100 for the reference."""
    rng = random.Random(seed)
    reqs = [r for _ in range(4 if ops is cpu else 1) for r in random_reqs(rng, 200)]
    return [*reqs, Req(rng.randrange(50), 300)] if ops is cpu else reqs[2:6]


def rope(ops, step, rows, qkv, has_norm):
    """Rotated queries, and what stands in the cache afterwards; a row each."""
    D = step.head_dim
    norm = QKNorm(random_tensor(D, seed=1), random_tensor(D), 1e-6)
    angle = torch.outer(torch.arange(400.0), random_tensor(D // 2))
    plan = ops.plan(rows, step.kv, step.num_heads)
    rotary = Rotary(angle.cos(), angle.sin())
    layer = step.kv.layers[0]
    q = ops.rope_write_kv(qkv, rotary, norm if has_norm else None, layer, plan)
    at = rows.slots // step.block_size, rows.slots % step.block_size
    return torch.cat([x.flatten(1).float() for x in (q, *(x[at] for x in layer.parts))], dim=1)


@pytest.mark.pairs
@BUILDS
@EVERY_KIND
@pytest.mark.parametrize(("has_norm", "D"), [(True, 16), (False, 80), (True, 20)])
def test_rope_and_the_kv_write(ops, kind, has_norm, D):
    step = RandomStep(crowd(ops, 1), 16, 4, 2, D, **kind)
    every = step.rows()
    qkv = random_tensor(len(every.slots), 8 * D, dtype=step.dtype)
    want = rope(ops, step, every, qkv, has_norm)
    for threads, rows in companies(ops, len(qkv)):
        torch.set_num_threads(threads)
        size = 17 if threads == 1 else 1
        step = RandomStep(step.reqs, size, 4, 2, D, seed=len(rows), **kind)
        got = rope(ops, step, only(step.rows(), rows), qkv[rows], has_norm)
        assert torch.equal(got, want[rows]), (threads, rows)


@pytest.mark.pairs
@BUILDS
@EVERY_KIND
@pytest.mark.parametrize("window", [None, 37, Chunks(37)])
@pytest.mark.parametrize(("H", "D"), [(2, 16), (14, 20), (8, 64)])
def test_attention_next_to_any_other_rows(ops, kind, window, H, D):
    step = RandomStep(crowd(ops, H), 16, H, 2, D, **kind).filled()
    every = step.rows()
    q = queries(step, len(every.slots))
    want = step.attend(ops, q, window)
    for threads, rows in companies(ops, len(q)):
        torch.set_num_threads(threads)
        got = step.attend(ops, q[rows], window, only(every, rows))
        assert torch.equal(got, want[rows]), (threads, rows)


@pytest.mark.pairs
@EVERY_LEVEL
@EVERY_KIND
@pytest.mark.parametrize("num_heads", [2, 6, 14])
def test_attention_of_few_rows_and_of_many(kind, num_heads):
    tree = random_tree(random.Random(1), 40)
    step = RandomStep([Req(500, 70), Req(470, parents=tree)], 16, num_heads, 2, 20, **kind).filled()
    every = step.rows()
    q = queries(step, len(every.slots))
    want = step.attend(cpu, q)
    for n in (1, 2, 3, 4, 8, 9, 33):
        for rows in (list(range(70 - n, 70)), list(range(70, 70 + n)), list(range(69, 70 + n))):
            assert torch.equal(step.attend(cpu, q[rows], None, only(every, rows)), want[rows])


CUTS = {  # rows of a request, beside which the context is long enough to be cut
    "a row": Req(2100, 1),
    "just before a cut": Req(1023, 1),
    "the first row behind a cut": Req(1024, 1),
    "a chunk over a cut": Req(1000, 50),
    "a tree over a cut": Req(1000, parents=random_tree(random.Random(3), 60)),
    "a long context": Req(8200, parents=[0, 1, 0]),
    "a very long context": Req(32_760, parents=[0]),
    "the longest context": pytest.param(Req(131_000, parents=[0, 0]), marks=pytest.mark.slow),
}


@pytest.mark.pairs
@EVERY_LEVEL
@EVERY_KIND
@pytest.mark.parametrize("window", [None, 900])
@pytest.mark.parametrize("req", CUTS.values(), ids=CUTS)
def test_attention_by_any_number_of_threads(req, window, kind):
    step = RandomStep([req], 16, 4, 1, 16, **kind).filled()
    q = queries(step, len(req.visible()))
    want = step.attend(cpu, q, window)
    assert row_errors(want[:2], step.attend(reference, q, window)[:2]).max() < 1e-2
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        assert torch.equal(step.attend(cpu, q, window), want)


@pytest.mark.pairs
@BUILDS
@EVERY_KIND
@pytest.mark.parametrize("window", [None, 37])
def test_attention_from_any_blocks_and_slots(ops, kind, window):
    steps = [
        RandomStep(crowd(ops, 3), block_size, seed=seed, fill=fill, **kind).filled()
        for block_size in (16, 1, 17, 64)
        for seed, fill in ((0, 0.0), (1, float("nan")))
    ]
    q = queries(steps[0], len(steps[0].rows().slots))
    want, *others = (step.attend(ops, q, window) for step in steps)
    assert all(torch.equal(got, want) for got in others)


@BUILDS
@EVERY_KIND
@pytest.mark.parametrize("window", [None, 5, 37, Chunks(37)])
def test_what_a_row_may_not_see_may_be_anything(ops, kind, window):
    req = Req(75, parents=random_tree(random.Random(5), 40))
    step = RandomStep([req], **kind).filled()
    q = queries(step, 41)
    want = step.attend(ops, q, window)
    for r, seen in enumerate(req.visible()):
        bare = RandomStep([req], fill=float("nan"), **kind)
        slots = within(seen, window)
        bare.put(0, slots, tokens(step, 0, req.end)[:, slots])
        assert torch.equal(bare.attend(ops, q[[r]], window, only(bare.rows(), [r]))[0], want[r])


def as_plain_text(step, req):
    """Every path of a tree as a request of its own that was never anything but text."""
    paths = req.visible()
    plain = RandomStep(
        [Req(len(path) - 1, 1) for path in paths],
        17,
        step.num_heads,
        step.num_kv_heads,
        step.head_dim,
        step.dtype,
        seed=1,
        kv_dtype=step.kv_dtype,
    )
    for b, path in enumerate(paths):
        plain.put(b, list(range(len(path))), tokens(step, 0, req.end)[:, path])
    return plain


@pytest.mark.pairs
@EVERY_KIND
@pytest.mark.parametrize("start", [*range(36), 63, 64, 65, 95, 200])
def test_a_tree_row_attends_as_its_path_would_as_plain_text(start, kind):
    rng = random.Random(start)
    req = Req(start, parents=random_tree(rng, rng.choice([5, 40, 63])))
    step = RandomStep([req], **kind).filled()
    q = queries(step, len(req.visible()))
    plain = as_plain_text(step, req)
    for window in (None, 1, 32, 50):
        assert torch.equal(step.attend(cpu, q, window), plain.attend(cpu, q, window))


@pytest.mark.pairs
@EVERY_KIND
@pytest.mark.parametrize(("H", "Hk", "D"), [(7, 1, 20), (16, 2, 128), (2, 2, 80)])
@pytest.mark.parametrize("start", [0, 1, 31, 33])
def test_a_chain_that_crosses_tiles_attends_as_plain_text(start, H, Hk, D, kind):
    req = Req(start, parents=list(range(63)))
    step = RandomStep([req], 20, H, Hk, D, **kind).filled()
    chunk = RandomStep([Req(start, 64)], 1, H, Hk, D, **kind).filled()
    q = queries(step, 64)
    assert torch.equal(step.attend(cpu, q), chunk.attend(cpu, q))


@pytest.mark.parametrize("start", [0, 5, 31, 40])
def test_a_tree_row_of_the_reference_attends_as_plain_text(start):
    req = Req(start, parents=random_tree(random.Random(start), 20))
    step = RandomStep([req]).filled()
    q = queries(step, 21)
    plain = as_plain_text(step, req)
    assert torch.equal(step.attend(reference, q), plain.attend(reference, q))
