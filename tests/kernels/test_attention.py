"""Attention, the KV write and KV moves: the reference by hand, the C++ build by the reference."""

import itertools
import math
import random

import pytest
import torch

from specserve_kernels import Chunks, KVCache, QKNorm, Rotary, cpu, reference
from tests.kernels.builds import BUILDS
from tests.kernels.levels import EVERY_LEVEL
from tests.kernels.random_steps import (
    RandomStep,
    Req,
    queries,
    random_reqs,
    random_tensor,
    random_tree,
    row_errors,
    tokens,
    within,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}  # of a row, relative to its norm

VISIBLE = {  # a request's rows, the window -> the slots that each row sees
    "a first token sees itself": (Req(0, 1), None, [{0}]),
    "a chunk is causal": (Req(2, 3), None, [{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}]),
    "a root sees the prefix and itself": (Req(3, parents=[]), None, [{0, 1, 2, 3}]),
    "a root may have no prefix": (Req(0, parents=[0]), None, [{0}, {0, 1}]),
    "siblings do not see each other": (
        Req(1, parents=[0, 0]),
        None,
        [{0, 1}, {0, 1, 2}, {0, 1, 3}],
    ),
    "a node sees its ancestors only": (
        Req(1, parents=[0, 1, 0, 3]),
        None,
        [{0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 4}, {0, 1, 4, 5}],
    ),
    "a window of one is the token itself": (Req(2, 2), 1, [{2}, {3}]),
    "a window counts its own token": (Req(2, 2), 2, [{1, 2}, {2, 3}]),
    "a window as long as the text hides nothing": (Req(2, 1), 3, [{0, 1, 2}]),
    "a window longer than the text hides nothing": (Req(1, 1), 9, [{0, 1}]),
    "in a tree a window counts positions, not slots": (
        Req(2, parents=[0, 0, 2]),
        3,
        [{0, 1, 2}, {1, 2, 3}, {1, 2, 4}, {2, 4, 5}],
    ),
    "a chunk begins at its multiples": (
        Req(1, 5),
        Chunks(3),
        [{0, 1}, {0, 1, 2}, {3}, {3, 4}, {3, 4, 5}],
    ),
    "chunks of one token": (Req(2, 2), Chunks(1), [{2}, {3}]),
    "a chunk longer than the text hides nothing": (Req(2, 1), Chunks(3), [{0, 1, 2}]),
    "in a tree a chunk counts positions, not slots": (
        Req(2, parents=[0, 0, 2, 3]),
        Chunks(4),
        [{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 4}, {5}, {5, 6}],
    ),
}


@BUILDS
@pytest.mark.parametrize(("req", "window", "seen"), VISIBLE.values(), ids=VISIBLE)
def test_a_row_attends_to_exactly_what_it_may_see(ops, req, window, seen):
    step = RandomStep([req], block_size=2, num_heads=1, num_kv_heads=1, head_dim=8)
    values = 2.0 ** torch.arange(req.end).view(-1, 1, 1).expand(-1, 1, 8)
    step.put(0, list(range(req.end)), [torch.zeros_like(values), values])
    out = step.attend(ops, queries(step, len(seen)), window)
    # Equal scores: the mean of the values, whose sum names the slots.
    want = torch.tensor([[sum(2.0**s for s in slots) / len(slots)] * 8 for slots in seen])
    torch.testing.assert_close(out, want, rtol=1e-6, atol=0)


@BUILDS
def test_weights_are_the_softmax_of_the_scaled_scores(ops):
    step = RandomStep([Req(2, 1)], num_heads=1, num_kv_heads=1, head_dim=4)
    weights = torch.tensor([1.0, 2.0, 5.0])
    keys = torch.zeros(3, 1, 4)
    keys[:, 0, 1] = weights.log() / 4
    step.put(0, [0, 1, 2], [keys, torch.eye(4)[:3, None]])
    plan = ops.plan(step.rows(), step.kv, 1)
    out = ops.attention(torch.tensor([[[9.0, 2, 0, 0]]]), step.kv.layers[0], plan, 2.0)
    torch.testing.assert_close(out, torch.tensor([[0.125, 0.25, 0.625, 0]]))


@BUILDS
def test_a_soft_cap_bends_scores_before_they_become_weights(ops):
    step = RandomStep([Req(1, 1)], num_heads=1, num_kv_heads=1, head_dim=2)
    keys = torch.tensor([[[0.0, 1]], [[0, 100]]])
    step.put(0, [0, 1], [keys, torch.eye(2)[:, None]])
    plan = ops.plan(step.rows(), step.kv, 1, has_plain_scores=False)
    out = ops.attention(torch.tensor([[[0.0, 2]]]), step.kv.layers[0], plan, 0.5, None, 3.0)
    weights = torch.tensor([3 * math.tanh(1 / 3), 3.0]).softmax(0)
    torch.testing.assert_close(out, weights[None])


@BUILDS
def test_a_sink_takes_its_share_of_the_weights_of_its_head_and_has_no_value(ops):
    step = RandomStep([Req(1, 1)], num_heads=3, num_kv_heads=1, head_dim=2)
    step.put(0, [0, 1], [torch.zeros(2, 1, 2), torch.tensor([[[3.0, 0]], [[0, 6]]])])
    plan = ops.plan(step.rows(), step.kv, 3, has_plain_scores=False)
    sinks = torch.tensor([0.0, -math.inf, math.log(2.0)])
    q = queries(step, 1)
    out = ops.attention(q, step.kv.layers[0], plan, 0.5, sinks=sinks)
    torch.testing.assert_close(out, torch.tensor([[1.0, 2, 1.5, 3, 0.75, 1.5]]))


@BUILDS
def test_query_heads_share_kv_heads_in_order(ops):
    step = RandomStep([Req(0, 1)], num_heads=6, num_kv_heads=2, head_dim=2)
    step.put(0, [0], [torch.zeros(1, 2, 2), torch.tensor([[[1.0, 2], [3, 4]]])])
    out = step.attend(ops, queries(step, 1))
    assert out.tolist() == [[1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4]]


@BUILDS
def test_requests_see_their_own_blocks_only(ops):
    step = RandomStep([Req(4, 2), Req(9, 1)], block_size=4, num_heads=1, num_kv_heads=1, head_dim=2)
    for b, r in enumerate(step.reqs):
        step.put(b, list(range(r.end)), torch.full((2, r.end, 1, 2), float(b + 1)))
    out = step.attend(ops, queries(step, 3))
    torch.testing.assert_close(out, torch.tensor([[1.0, 1], [1, 1], [2, 2]]))


@BUILDS
@pytest.mark.parametrize("place", [0, 20, 31, 32, 40], ids="slot {}".format)
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_what_a_row_does_see_is_not_hidden_even_if_it_is_no_number(ops, which, place):
    step = RandomStep([Req(40, 1)], num_heads=1, num_kv_heads=1).filled()
    broken = tokens(step, 0, 41)[:, [place]]
    broken[which] = float("nan")
    step.put(0, [place], broken)
    assert step.attend(ops, queries(step, 1)).isnan().all()


WINDOWS = itertools.cycle([None, 1000, 40, Chunks(31), None, 31, 5, Chunks(100), 1])
BLOCK_SIZES = itertools.cycle([16, 1, 17, 20, 64])
SHAPES = [  # every ratio of heads with every size of a head, windows and block sizes in turn
    (*heads, D, next(BLOCK_SIZES), next(WINDOWS))
    for heads in ((2, 2), (4, 2), (8, 2), (7, 1), (16, 2))
    for D in (16, 20, 64, 80, 128)
]


@pytest.mark.pairs
@EVERY_LEVEL
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("H", "Hk", "D", "block_size", "window"), SHAPES)
def test_the_build_attends_as_the_reference(H, Hk, D, block_size, window, dtype):
    reqs = random_reqs(random.Random(H * D))
    step = RandomStep(reqs, block_size, H, Hk, D, dtype).filled()
    q = queries(step, len(step.rows().positions))
    got, want = (step.attend(ops, q, window) for ops in (cpu, reference))
    assert got.dtype == dtype
    assert row_errors(got, want).max() < TOLERANCE[dtype]


@EVERY_LEVEL
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize(("H", "Hk", "D", "window"), [(4, 2, 16, None), (7, 1, 80, 40)])
def test_the_build_caps_scores_and_drains_sinks_as_the_reference(H, Hk, D, window, kv_dtype, dtype):
    reqs = [*random_reqs(random.Random(H)), Req(3000, 1)]  # one context is cut
    step = RandomStep(reqs, 17, H, Hk, D, dtype, kv_dtype=kv_dtype).filled()
    q, sinks = queries(step, len(step.rows().positions)), random_tensor(H, seed=3)
    for asked in ({"soft_cap": 0.5}, {"sinks": sinks}, {"soft_cap": 0.5, "sinks": sinks}):
        got, want = (step.attend(ops, q, window, **asked) for ops in (cpu, reference))
        assert row_errors(got, want).max() < TOLERANCE[dtype]


@pytest.mark.parametrize("size", range(1, 64))
def test_the_build_attends_to_trees_of_every_size(size):
    rng = random.Random(size)
    parents = [rng.randrange(k + 1) for k in range(size)]
    step = RandomStep([Req(rng.randrange(70), parents=parents)], block_size=16).filled()
    q = queries(step, 1 + size)
    assert row_errors(step.attend(cpu, q), step.attend(reference, q)).max() < 1e-5


def exact(step, q, window):
    """What each row should be, and the mean of |values| by its weights, in float64."""
    (req,), group = step.reqs, step.num_heads // step.num_kv_heads
    k, v = (x.double().repeat_interleave(group, 1) for x in tokens(step, 0, req.end))
    want, mean = [], []
    for row, seen in zip(q.double(), req.visible(), strict=True):
        seen = within(seen, window)
        weight = (torch.einsum("hd,shd->hs", row, k[seen]) * step.head_dim**-0.5).softmax(-1)
        want.append(torch.einsum("hs,shd->hd", weight, v[seen]))
        mean.append(torch.einsum("hs,shd->hd", weight, v[seen].abs()))
    return torch.stack(want).flatten(1), torch.stack(mean).flatten(1)


BRANCHES = [0, 1, 1, 2, 0, 5]


@pytest.mark.pairs
@EVERY_LEVEL
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("req", "window"),
    [
        *itertools.product([Req(700, 1), Req(500, 40), Req(250, parents=BRANCHES)], [None, 300]),
        (Req(700, 150), Chunks(300)),
        (Req(16_383, 2), None),
        (Req(32_760, parents=[0, 0]), None),
    ],
    ids=repr,
)
def test_no_element_is_further_from_float64_than_rounding_explains(req, window, dtype):
    H, D, n = 4, 64, req.end
    step = RandomStep([req], 16, H, 2, D, dtype).filled()
    q = queries(step, len(step.rows().positions))
    want, mean = exact(step, q, window)
    # Scores are sums of D products and below 8 here: the error of a weight. One that is rounded to
    # bf16 is off by 2^-9 more, and so is the sum of weights. Then n products are added.
    eps = 2.0**-24
    weight = 8 * D * eps + (2.0**-9 if dtype == torch.bfloat16 else 0)
    rounding = 2.0**-9 if dtype == torch.bfloat16 else eps
    bound = (2 * weight + n * eps) * mean + rounding * want.abs() + 1e-30
    got = step.attend(cpu, q, window).double()
    assert ((got - want).abs() <= bound).all()


@EVERY_LEVEL
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("window", [None, 9])
def test_a_broken_token_breaks_no_row_that_does_not_see_it(dtype, broken, which, window):
    reqs = Req(30, 40), Req(230, parents=random_tree(random.Random(4), 40)), Req(19, 4)
    for req in reqs:
        step = RandomStep([req], num_heads=6, dtype=dtype).filled()
        q = queries(step, len(step.rows().positions))
        want, place = step.attend(cpu, q, window), req.start + 3
        one = tokens(step, 0, req.end)[:, [place]].clone()
        one[which] = broken
        step.put(0, [place], one)
        got = step.attend(cpu, q, window)
        for r, seen in enumerate(req.visible()):
            if place in within(seen, window):
                assert which == 0 or not got[r].isfinite().all()
            else:
                assert torch.equal(got[r], want[r])


@pytest.mark.parametrize("value", [-200.0, 200.0], ids=["far below", "far above"])
def test_a_key_that_outshines_another_tile_is_no_overflow(value):
    step = RandomStep([Req(69, 1)], num_heads=1, num_kv_heads=1, head_dim=16).filled()
    step.put(0, [40], torch.full((2, 1, 1, 16), value))
    q = torch.ones(1, 1, 16)
    assert row_errors(step.attend(cpu, q), step.attend(reference, q)).max() < 1e-5


ROTATIONS = {  # cosine, sine, norm -> the heads 3 4 | 5 12
    "no angle": (1.0, 0.0, None, [3, 4, 5, 12]),
    "a quarter turn pairs i with i + D/2": (0.0, 1.0, None, [-5, -12, 3, 4]),
    "a scale lies in the table": (2.0, 0.0, None, [6, 8, 10, 24]),
    "the norm comes first, with its weight": (0.0, 1.0, [1, 1, 1, 2], [-0.05, -0.24, 0.03, 0.04]),
    "the norm is last": (0.0, 1.0, [1, 1, 1, 2], [-0.05, -0.12, 0.03, 0.08], {"is_last": True}),
    "the mean is taken off": (
        1.0,
        0.0,
        [1] * 4,
        [-0.03, -0.02, -0.01, 0.06],
        {"is_centered": True},
    ),
    "the mean is taken off, last": (
        *(0.0, 1.0, [1] * 4, [-0.025, -0.095, 0.055, 0.065]),
        {"is_centered": True, "is_last": True},
    ),
    "each head has its own weight": (1.0, 0.0, [[1, 1, 1, 2]], [0.03, 0.04, 0.05, 0.24]),
}


@BUILDS
@pytest.mark.parametrize("case", ROTATIONS.values(), ids=ROTATIONS)
def test_queries_and_keys_are_rotated_and_values_are_not(ops, case):
    cos, sin, weight, want, *flags = case
    step = RandomStep([Req(1, 1)], num_heads=1, num_kv_heads=1, head_dim=4)
    rotary = Rotary(torch.tensor([[7.0] * 2, [cos] * 2]), torch.tensor([[7.0] * 2, [sin] * 2]))
    eps = 100**2 - (3**2 + 4**2 + 5**2 + 12**2) / 4  # mean square and eps make 100^2
    if flags and "is_centered" in flags[0]:
        x = torch.tensor([3.0, 4, 5, 12] if cos else [-5.0, -12, 3, 4])
        eps = 100**2 - (x - x.mean()).square().mean().item()
    norm = weight and QKNorm(*[torch.tensor(weight).float()] * 2, eps, **dict(*flags))
    plan = ops.plan(step.rows(), step.kv, 1)
    q = ops.rope_write_kv(
        torch.tensor([[3.0, 4, 5, 12] * 3]), rotary, norm, step.kv.layers[0], plan
    )
    (slot,) = step.rows().slots.tolist()
    torch.testing.assert_close(q.flatten(), torch.tensor(want).float())
    torch.testing.assert_close(step.kv.layers[0].k[slot // 16, slot % 16, 0], q.flatten())
    assert step.kv.layers[0].v[slot // 16, slot % 16, 0].tolist() == [3, 4, 5, 12]


@BUILDS
def test_a_factor_by_position_is_of_queries_only(ops):
    step = RandomStep([Req(1, 1)], num_heads=2, num_kv_heads=1, head_dim=2)
    rotary = Rotary(torch.ones(2, 1), torch.zeros(2, 1), torch.tensor([7.0, 3.0]))
    plan = ops.plan(step.rows(), step.kv, 2)
    q = ops.rope_write_kv(torch.tensor([[1.0, 2, 3, 4] * 2]), rotary, None, step.kv.layers[0], plan)
    (slot,) = step.rows().slots.tolist()
    assert q.flatten().tolist() == [3, 6, 9, 12]
    assert step.kv.layers[0].k[slot // 16, slot % 16, 0].tolist() == [1, 2]


@BUILDS
def test_values_may_be_normalized_without_a_weight(ops):
    step = RandomStep([Req(0, 1)], num_heads=1, num_kv_heads=1, head_dim=2)
    rotary = Rotary(torch.ones(1, 1), torch.zeros(1, 1))
    norm = QKNorm(torch.tensor([1.0, 2]), torch.tensor([3.0, 4]), 100 - 12.5, has_values=True)
    plan = ops.plan(step.rows(), step.kv, 1)
    q = ops.rope_write_kv(torch.tensor([[3.0, 4] * 3]), rotary, norm, step.kv.layers[0], plan)
    (slot,) = step.rows().slots.tolist()
    k, v = (x[slot // 16, slot % 16, 0] for x in step.kv.layers[0].parts)
    torch.testing.assert_close(
        torch.stack([q.flatten(), k, v]) * 10, torch.tensor([[3.0, 8], [9, 16], [3, 4]])
    )


@BUILDS
def test_rows_may_have_only_queries(ops):
    step = RandomStep([Req(0, 2)], num_heads=2, num_kv_heads=1, head_dim=2)
    rotary = Rotary(torch.zeros(2, 1), torch.tensor([[1.0], [2.0]]))
    norm = QKNorm(*[torch.ones(2)] * 2, 100 - 12.5, has_values=True)
    before, plan = step.arena.clone(), ops.plan(step.rows(), step.kv, 2)
    q = ops.rope_write_kv(torch.tensor([[3.0, 4, -3, -4]] * 2), rotary, norm, None, plan)
    want = torch.tensor([[[-0.4, 0.3], [0.4, -0.3]], [[-0.8, 0.6], [0.8, -0.6]]])
    torch.testing.assert_close(q, want)
    assert torch.equal(step.arena.isnan(), before.isnan())


@BUILDS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_layers_of_different_heads_share_a_plan(ops, dtype):
    reqs = [Req(300, 3), Req(5, 2), Req(40, parents=[0, 0, 1])]
    shapes = [(4, 16), (1, 40), (4, 24)]
    steps = [RandomStep(reqs, 16, 4, Hk, D, dtype).filled() for Hk, D in shapes]
    kv = KVCache(tuple(layer for step in steps for layer in step.kv.layers))
    plan = ops.plan(steps[0].rows(), kv, 4, [None, 7])
    for window in (7, None):
        for step, layer in zip(steps, kv.layers, strict=True):
            q = queries(step, len(step.rows().positions))
            got = ops.attention(q, layer, plan, step.head_dim**-0.5, window)
            assert row_errors(got, step.attend(reference, q, window)).max() < TOLERANCE[dtype]


@BUILDS
def test_each_head_has_its_own_norm(ops):
    step = RandomStep([Req(0, 1)], num_heads=2, num_kv_heads=1, head_dim=2)
    rotary = Rotary(torch.ones(1, 1), torch.zeros(1, 1))
    norm = QKNorm(torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[5.0, 6]]), 1e-12)
    plan = ops.plan(step.rows(), step.kv, 2)
    q = ops.rope_write_kv(torch.ones(1, 8), rotary, norm, step.kv.layers[0], plan)
    (slot,) = step.rows().slots.tolist()
    torch.testing.assert_close(q.flatten(), torch.tensor([1.0, 2, 3, 4]))
    torch.testing.assert_close(
        step.kv.layers[0].k[slot // 16, slot % 16, 0], torch.tensor([5.0, 6])
    )


NORMS = {  # whether heads have their own weights, and the other properties
    "plain": None,
    "qk-norm": (False, {}),
    "layer norm by head": (True, {"is_centered": True}),
    "last": (False, {"is_last": True}),
    "all": (True, {"is_centered": True, "is_last": True}),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize(("H", "Hk", "D"), [(4, 2, 16), (7, 1, 20), (8, 8, 80), (2, 1, 128)])
def test_the_build_writes_as_the_reference_and_only_its_slots(H, Hk, D, norm, dtype):
    has_norm = norm is not None
    is_each, flags = norm or (False, {})
    reqs = random_reqs(random.Random(D))
    angle = torch.outer(torch.arange(400.0), random_tensor(D // 2))
    shapes = ((H, D), (Hk, D)) if is_each else ((D,), (D,))
    weights = [random_tensor(*shape, seed=i) for i, shape in enumerate(shapes, 1)]
    norm = QKNorm(*weights, 1e-6, **flags)
    steps, q = {}, {}
    for ops in (cpu, reference):
        steps[ops] = step = RandomStep(reqs, 17, H, Hk, D, dtype, num_layers=2)
        plan = ops.plan(step.rows(), step.kv, H)
        qkv = random_tensor(len(step.rows().positions), (H + 2 * Hk) * D, dtype=dtype)
        rotary = Rotary(angle.cos(), angle.sin(), random_tensor(400) if has_norm else None)
        q[ops] = ops.rope_write_kv(qkv, rotary, norm if has_norm else None, step.kv.layers[1], plan)
    slots, layers = step.rows().slots, [steps[ops].kv.layers[1] for ops in (cpu, reference)]
    got, want = ([x.reshape(-1, Hk, D)[slots] for x in (layer.k, layer.v)] for layer in layers)
    assert row_errors(q[cpu], q[reference]).max() < TOLERANCE[dtype]
    assert row_errors(got[0], want[0]).max() < TOLERANCE[dtype]
    assert torch.equal(got[1], want[1])
    assert torch.equal(steps[cpu].arena.isnan(), steps[reference].arena.isnan())


MOVES = {  # source, target slots, tokens 0 .. 5 of one request -> what stands there afterwards
    "nothing moves": ([], [], [0, 1, 2, 3, 4, 5]),
    "one moves, its source stays": ([4], [1], [0, 4, 2, 3, 4, 5]),
    "onto itself": ([2], [2], [0, 1, 2, 3, 4, 5]),
    "a path closes up": ([2, 4, 5], [1, 2, 3], [0, 2, 4, 5, 4, 5]),
    "in the order given: a chain carries one token on": ([3, 2, 1], [2, 1, 0], [3, 3, 3, 3, 4, 5]),
}


@BUILDS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("source", "target", "want"), MOVES.values(), ids=MOVES)
def test_moves_copy_tokens_in_every_layer_in_order(ops, source, target, want, dtype):
    step = RandomStep([Req(5, 1)], block_size=2, head_dim=20, dtype=dtype, num_layers=3)
    slots = step.slots(0, 6)
    flat = step.arena.view(-1, 6, 2, 40)  # [block, layer and K|V, slot, head and dim]
    at = slots // 2, slice(None), slots % 2
    flat[at] = before = random_tensor(6, 6, 40, dtype=dtype)
    ops.move_kv(step.kv, slots[source], slots[target])
    assert torch.equal(flat[at], before[want])
    assert flat.isnan().sum() == (len(flat) * 2 - 6) * 6 * 40  # what was not addressed


@BUILDS
def test_moves_cross_requests_and_blocks_of_a_real_arena(ops):
    step = RandomStep([Req(40, 1), Req(20, 1)], block_size=17, num_layers=2).filled()
    cache = KVCache(step.kv.layers[:1])
    ops.move_kv(cache, step.slots(0, 41)[[33, 40]], step.slots(1, 21)[[16, 17]])
    world_k = cache.layers[0].k.reshape(-1, 2, 16)[step.slots(1, 21)]
    want = tokens(step, 1, 21)[0].clone()
    want[[16, 17]] = tokens(step, 0, 41)[0][[33, 40]]
    assert torch.equal(world_k, want)
