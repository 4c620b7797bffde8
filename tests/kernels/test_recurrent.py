"""Recurrent ops: the builds against the definition, and equal bits for any cut of the rows."""

import random
from itertools import product

import pytest
import torch

from specserve_kernels import (
    DeltaParams,
    MambaParams,
    Replays,
    StateLayer,
    StateRows,
    cpu,
    reference,
    reserve,
)
from tests.kernels.builds import BUILDS, HAS_GPU, ON_GPU, placed
from tests.kernels.random_steps import RandomStep, Req, random_tensor, random_tree

BLOCK_BYTES, NUM_BLOCKS, OWN = 4096, 40, [7, 3, 9, 30]
DK, DV, HV, HK = 24, 40, 4, 2
INNER = 2 * HK * DK + HV * DV
GROUPS = 2
XBC = HV * DV + 2 * GROUPS * DK


def conv_state(C=100, taps=4, dtype=torch.float32, num_kept=64):
    memory = torch.full((NUM_BLOCKS, BLOCK_BYTES), 255, dtype=torch.uint8)  # NaN
    kept = torch.full((num_kept, C), float("nan"), dtype=dtype)
    return StateLayer(memory, torch.tensor([[1, 64]]), (taps - 1, C), dtype, kept)


def delta_state(num_kept=64, kept_width=HV * (DK + DV + 2), num_groups=0):
    memory = torch.full((NUM_BLOCKS, BLOCK_BYTES), 255, dtype=torch.uint8)
    kept = torch.full((num_kept, kept_width), float("nan"))
    places = torch.tensor([[3, 0], [1, 128], [0, 64], [2, 0]])
    return StateLayer(memory, places, (DK, DV), torch.float32, kept, num_groups)


def states(committed, kept=None, snapshot_at=None, blocks=(OWN,), snapshots=None):
    B = len(committed)
    ints = lambda x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    snapshots = [[0, 0, 0, 0]] * B if snapshots is None else snapshots
    return StateRows(
        ints([*blocks]),
        ints(committed),
        ints(kept or [0] * B),
        ints(snapshot_at or [0] * B),
        ints(snapshots),
    )


class Conv:
    """Runs a convolution on given rows of one text."""

    def __init__(self, ops, form, dtype=torch.float32, seed=0, bias=True):
        self.ops, self.form, self.dtype = ops, form, dtype
        self.weight = random_tensor(100, 4, seed=seed + 1)
        self.bias = random_tensor(100, seed=seed + 2) if bias else None
        self.width = 300 if form == "gated" else 130

    def state(self, num_kept=64):
        return conv_state(dtype=self.dtype, num_kept=num_kept)

    def inputs(self, n, seed=5):
        return random_tensor(n, self.width, dtype=self.dtype, seed=seed)

    def run(self, x, state, rows):
        plan = self.ops.plan(rows, RandomStep([Req(0)]).kv, 4)
        return self.ops.causal_conv(x, self.weight, self.bias, state, plan, self.form)


class Delta(Conv):
    """Runs the delta rule on given rows of one text."""

    def __init__(self, ops, dtype=torch.float32):
        self.ops, self.dtype = ops, dtype
        rate, dt_bias, norm = (random_tensor(n, seed=n) for n in (HV, HV + 1, DV))
        self.params = DeltaParams(-rate.exp(), dt_bias[:HV].clone(), norm, 1e-6, HK, 1.9)

    def state(self, num_kept=64):
        return delta_state(num_kept)

    def inputs(self, n, seed=5):
        return random_tensor(n, 2 * INNER + HV * (DV + 2), dtype=self.dtype, seed=seed)

    def run(self, x, state, rows):
        plan = self.ops.plan(rows, RandomStep([Req(0)]).kv, 4)
        qkv, rest = x[:, :INNER].contiguous(), x[:, INNER:].contiguous()
        return self.ops.delta_rule(qkv, rest, self.params, state, plan)


class Mamba(Conv):
    """Runs Mamba-2's selective update on given rows of one text."""

    def __init__(self, ops, dtype=torch.float32, norm="after gates"):
        self.ops, self.dtype = ops, dtype
        rate, dt_bias, D = (random_tensor(HV, seed=HV + i) for i in range(3))
        weight = None if norm == "none" else random_tensor(HV * DV, seed=9)
        parts = -rate.exp(), dt_bias, D, weight, 1e-5, GROUPS, norm == "after gates"
        self.params = MambaParams(*parts, z_factor=0.8, dt_factor=1.3)

    def state(self, num_kept=64):
        return delta_state(num_kept, GROUPS * DK + HV * (DV + 1), GROUPS)

    def inputs(self, n, seed=5):
        return random_tensor(n, 2 * XBC + HV * (DV + 1), dtype=self.dtype, seed=seed)

    def run(self, x, state, rows):
        plan = self.ops.plan(rows, RandomStep([Req(0)]).kv, 4)
        xbc, rest = x[:, :XBC].contiguous(), x[:, XBC:].contiguous()
        return self.ops.selective_state_update(xbc, rest, self.params, state, plan)


KINDS = {
    "gated": lambda ops, dtype=torch.float32: Conv(ops, "gated", dtype),
    "silu": lambda ops, dtype=torch.float32: Conv(ops, "silu", dtype, bias=False),
    "delta": Delta,
    "mamba": Mamba,
    "mamba, gates last": lambda ops, dtype=torch.float32: Mamba(ops, dtype, "before gates"),
    "mamba without a norm": lambda ops, dtype=torch.float32: Mamba(ops, dtype, "none"),
}
USUAL = "gated", "delta", "mamba"  # the others differ in what they do with outputs


def cases(*builds):
    """Each kind on each build; in the interpreter, the unusual ones are slow."""
    found = []
    for (ops, name), kind in product(builds, KINDS):
        marks = [ON_GPU] if ops is placed else []
        marks += [pytest.mark.slow] if ops is placed and kind not in USUAL else []
        found.append(pytest.param(ops, kind, id=f"{name}, {kind}", marks=marks))
    return found


BUILT = (cpu, "cpu"), (placed, "cuda")
each_kind = pytest.mark.parametrize(("ops", "kind"), cases((reference, "reference"), *BUILT))


def rows_of(*reqs, **given):
    return RandomStep([*reqs]).rows()._replace(states=states(**given))


def bytes_of(state, blocks):
    return [state.piece(p, blocks).clone() for p in range(len(state.places))]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("build", "kind"), cases(*BUILT))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_build_computes_what_the_definition_does(build, kind, dtype):
    rng = random.Random(1)
    tree = random_tree(rng, 20)
    blocks, snapshots = [OWN, [1, 2, 4, 5], [6, 8, 10, 11]], [[0] * 4, [12, 13, 14, 15], [0] * 4]
    rows = rows_of(
        Req(0, 9),
        Req(5, 11),
        Req(40, parents=tree),
        committed=[9, 11, 1],
        snapshot_at=[0, 3, 0],
        blocks=blocks,
        snapshots=snapshots,
    )
    found = []
    for ops in (reference, build):
        op = KINDS[kind](ops, dtype)
        state = op.state()
        for number in range(len(state.places)):
            for b in blocks[1:]:
                piece = state.piece(number, b)
                piece.copy_(random_tensor(*piece.shape, seed=b[0]).to(piece.dtype))
        x = op.inputs(len(rows.positions))
        out = op.run(x, state, rows)
        after = [bytes_of(state, b) for b in (*blocks, snapshots[1])]
        found.append([out, *(piece for pieces in after for piece in pieces), state.kept[:20]])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    if build is placed and not HAS_GPU and dtype == torch.bfloat16:
        tolerance = 6e-2  # the interpreter cuts bfloat16 off
    elif build is placed and HAS_GPU and dtype == torch.float32:
        tolerance = 5e-5  # a GPU approximates exponentials and quotients
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@each_kind
def test_any_cut_of_the_rows_gives_the_same_bits(ops, kind):
    op = KINDS[kind](ops)
    x, results = op.inputs(37), []
    single = [] if ops is placed and not HAS_GPU else [[*range(1, 38)]]
    for cuts in ([37], [1, 2, 3, 20, 37], [16, 37], *single):
        state, out, start = op.state(), [], 0
        for end in cuts:
            rows = rows_of(Req(start, end - start), committed=[end - start])
            out.append(op.run(x[start:end], state, rows))
            start = end
        results.append([torch.cat(out), *bytes_of(state, OWN)])
    assert all(equal(results[0], each) for each in results[1:])


@BUILDS
def test_a_gate_multiplies_in_place(ops):
    x, by = random_tensor(3, 50, seed=1), random_tensor(3, 50, seed=2)
    want = x * by.sigmoid()
    assert ops.gate(x, by) is x
    torch.testing.assert_close(x, want)


def replays(places, snapshot_at=-1, snapshot=(0, 0, 0, 0)):
    ints = lambda x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    given = ints([OWN]), ints([0, len(places)]), ints(places), ints([snapshot_at])
    return Replays(*given, ints([[*snapshot]]))


@each_kind
@pytest.mark.parametrize("has_masks", [True, False])
def test_a_path_of_a_tree_and_its_replay_equal_the_same_rows_alone(ops, kind, has_masks):
    """The second chain of draft tokens is the right one, behind a wrong one."""
    op = KINDS[kind](ops)
    x, wrong, prompt = op.inputs(17), op.inputs(3, seed=9), 12
    plain = op.state()
    want = op.run(x, plain, rows_of(Req(0, 17), committed=[17]))
    state = op.state()
    op.run(x[:prompt], state, rows_of(Req(0, prompt), committed=[prompt]))
    if has_masks:  # nodes 1 to 3 are wrong, 4 to 7 right
        tree = Req(prompt, parents=[0, 1, 2, 0, 4, 5, 6])
        given = torch.cat([x[prompt : prompt + 1], wrong, x[prompt + 1 :]])
        right = [4, 5, 6, 7]
    else:
        tree, given, right = Req(prompt, 5), x[prompt:], [1, 2, 3, 4]
    out = op.run(given, state, rows_of(tree, committed=[1], kept=[2]))
    assert torch.equal(out[[0, *right]], want[prompt:])
    after_root = op.state()
    op.run(x[: prompt + 1], after_root, rows_of(Req(0, prompt + 1), committed=[prompt + 1]))
    assert equal(bytes_of(state, OWN), bytes_of(after_root, OWN)), "draft tokens changed the state"
    snapshot = [20, 21, 22, 23]
    ops.replay((state,), replays([1 + node for node in right], 2, snapshot))
    assert equal(bytes_of(state, OWN), bytes_of(plain, OWN))
    at_two = op.state()
    op.run(x[: prompt + 3], at_two, rows_of(Req(0, prompt + 3), committed=[prompt + 3]))
    assert equal(bytes_of(state, snapshot), bytes_of(at_two, OWN))


@each_kind
def test_a_snapshot_is_the_state_after_its_row(ops, kind):
    op = KINDS[kind](ops)
    x, blocks = op.inputs(20), [20, 21, 22, 23]
    for at in (2, 16) if ops is placed else (1, 2, 16, 20):
        state, part = op.state(), op.state()
        rows = rows_of(Req(0, 20), committed=[20], snapshot_at=[at], snapshots=[blocks])
        op.run(x, state, rows)
        op.run(x[:at], part, rows_of(Req(0, at), committed=[at]))
        assert equal(bytes_of(state, blocks), bytes_of(part, OWN))


@each_kind
def test_a_replay_of_no_tokens_only_copies_the_state(ops, kind):
    op = KINDS[kind](ops)
    state, blocks = op.state(), [20, 21, 22, 23]
    op.run(op.inputs(5), state, rows_of(Req(0, 5), committed=[5]))
    before = bytes_of(state, OWN)
    ops.replay((state,), replays([], 0, blocks))
    assert equal(before, bytes_of(state, OWN)) and equal(before, bytes_of(state, blocks))


@each_kind
def test_a_later_snapshot_may_be_in_the_blocks_of_an_earlier_replay(ops, kind):
    """The earlier request has ended, so its blocks are free."""
    op, other = KINDS[kind](ops), [20, 21, 22, 23]
    state, x = op.state(), op.inputs(10)
    for blocks, rows in ((OWN, x[:5]), (other, x[5:])):
        op.run(rows, state, rows_of(Req(0, 5), committed=[4], blocks=[blocks]))
    ints = lambda x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    ends = ints([OWN, other]), ints([0, 1, 2]), ints([0, 0]), ints([-1, 1])
    ops.replay((state,), Replays(*ends, ints([[0] * 4, OWN[::-1]])))
    assert equal(bytes_of(state, other), bytes_of(state, OWN[::-1]))


def layers_of(op):
    """States of three equal ops in one arena. The last one keeps its inputs elsewhere."""
    first = op.state()
    parts = first.shape, first.dtype, first.kept[:0], first.num_groups
    places = [first.places + torch.tensor([4 * i, 0]) for i in range(3)]
    layers = [StateLayer(first.memory, each, *parts) for each in places]
    reserve(layers[:2], 8)
    assert not reserve(layers[:2], 8)
    reserve(layers[2:], 8)
    return layers


@each_kind
def test_a_replay_of_several_layers_equals_one_of_each(ops, kind):
    op, blocks, after = KINDS[kind](ops), [*range(12)], []
    for is_whole in (True, False):
        layers = layers_of(op)
        for seed, state in enumerate(layers):
            op.run(op.inputs(4, seed), state, rows_of(Req(0, 4), committed=[2], blocks=[blocks]))
        given = replays([0, 1])._replace(blocks=torch.tensor([blocks], dtype=torch.int32))
        given = given._replace(snapshots=torch.zeros(1, 12, dtype=torch.int32))
        for some in [layers] if is_whole else [[x] for x in layers]:
            ops.replay(tuple(some), given)
        after.append([piece for x in layers for piece in bytes_of(x, blocks)])
    assert equal(*after)
