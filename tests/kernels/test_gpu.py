"""The build for the GPU, on one: every op by float64, with new random inputs in every run."""

import copy
import gc
import itertools
import os
import random

import numpy as np
import pytest
import torch

from specserve_kernels import (
    Chunks,
    KVCache,
    KVLayer,
    QKNorm,
    Rotary,
    SampleParams,
    load,
    reference,
)
from specserve_kernels.cuda import gated
from specserve_kernels.cuda.graphs import Capture, ChildGraphs
from specserve_kernels.cuda.pinned import PinnedBlocks
from specserve_kernels.cuda.top_children import launch_top_children
from specserve_kernels.reference.sampling import allowed, edited, gumbel, transform
from tests.kernels.edits import random_edits, random_masks
from tests.kernels.random_steps import RandomStep, Req, random_tree, row_errors, within
from tests.kernels.test_codes import FORM, random_codes
from tests.kernels.test_kv import KV_DTYPES, WRITTEN, check_written
from tests.kernels.test_sampling import MIXES, mixed

pytestmark = [
    pytest.mark.gpu,
    # Warnings of libraries at first use, and of deterministic mode, fail no test.
    pytest.mark.filterwarnings("default", "ignore:.*determin"),
]
DEVICE = "cuda"
SEED = int.from_bytes(os.urandom(4))
LONGEST = 8192  # slots of a context
VOCAB = 151_936
ROUNDS = 200  # steps that are launched back to back
BALLAST = 8192  # width of a product that the device takes long for
GIB = 1 << 30
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
LIMITS = {BF16: (5e-3, 2e-2), FP32: (1e-5, 5e-5)}  # of a whole output, of its worst row
FAR_LIMITS = {BF16: (5e-3, 2e-2), FP32: (2e-5, 1e-4)}  # where scores are as large as 50
HIDDEN = 1000.0  # in slots that no row sees: finite, as FlashInfer multiplies it by 0


@pytest.fixture(scope="session")
def ops():
    return load(DEVICE)


@pytest.fixture(autouse=True)
def poisoned():
    """What an op has not written is NaN, or the greatest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Draw:
    """Random inputs of one test."""

    def __init__(self, name):
        self.rng = random.Random(f"{SEED} {name}")
        self.generator = torch.Generator(DEVICE).manual_seed(self.rng.getrandbits(60))

    def normal(self, *shape, dtype=FP32, scale=1.0):
        x = torch.randn(shape, generator=self.generator, device=DEVICE)
        return (scale * x).to(dtype)

    def context(self, longest=None):
        return self.rng.randrange(LONGEST if longest is None else longest)

    def tree(self, start, size=None):
        size = self.rng.randint(1, 63) if size is None else size
        return Req(start, parents=random_tree(self.rng, size))

    def batch(self):
        """A prompt's first chunk, later ones, single rows, and trees; half of all are long."""
        context, far = self.context, LONGEST // 2
        return [
            Req(0, self.rng.randint(1, 80)),
            Req(far + self.context(far), self.rng.randint(2, 80)),
            Req(context(), self.rng.randint(2, 20)),
            Req(far + self.context(far)),
            Req(context()),
            Req(0),
            self.tree(far + self.context(far)),
            self.tree(context()),
            self.tree(context(), 63),
            self.tree(0),
            Req(context(), parents=[]),
        ]


@pytest.fixture
def draw(request):
    return Draw(request.node.name)


class Measured:
    """How far an op is off; the worst of a test is put on record."""

    def __init__(self):
        self.op, self.errors = "", [0.0, 0.0]  # of the whole, of a row

    def close(self, op, got, want, limits=LIMITS):
        assert got.shape == want.shape, f"{op}: {got.shape}"
        limits = limits[got.dtype]
        got, want = got.double().flatten(1), want.flatten(1)
        off, size = (got - want).norm(dim=1), want.norm(dim=1)
        errors = (off.norm() / size.norm()).item(), (off / size).max().item()
        self.note(op, *errors)
        for what, error, limit in zip(("output", "worst row"), errors, limits, strict=True):
            assert error < limit, f"{op}: the {what} is off by {error:.2e}; seed {SEED}"

    def same(self, op, got, want):
        is_same = torch.equal(got, want)
        self.note(op, 0.0 if is_same else float("inf"), 0.0)
        assert is_same, f"{op}: not the same; seed {SEED}"

    def note(self, op, *errors):
        self.op = op
        both = torch.tensor([self.errors, errors], dtype=torch.float64)
        self.errors = both.amax(0).tolist()  # of numbers and a NaN, the NaN


@pytest.fixture
def measured(record_property):
    record_property("seed", SEED)
    measured = Measured()
    yield measured
    if measured.op:
        record_property("op", measured.op)
        record_property("error", measured.errors[0])
        record_property("worst row", measured.errors[1])


def furnished(draw, reqs, scale=1.0, v_scale=1.0, **fields):
    """A step on the device, and the K and V of every request's tokens, which its last layer has.

    Slots without a token hold values that no row may see.
    """
    step = RandomStep(reqs, seed=draw.rng.getrandbits(30), num_layers=2, fill=HIDDEN, **fields)
    step.arena = step.arena.to(DEVICE)
    k, v = step.arena[:, 0::2].unbind(1), step.arena[:, 1::2].unbind(1)
    step.kv = KVCache(tuple(map(KVLayer, k, v)))
    layer, tokens = step.kv.layers[-1], []
    for b, req in enumerate(reqs):
        shape = req.end, step.num_kv_heads, step.head_dim
        keys = draw.normal(*shape, dtype=step.dtype, scale=scale)
        values = draw.normal(*shape, dtype=step.dtype, scale=v_scale)
        at = step.slots(b, req.end).to(DEVICE)
        layer.k[at // step.block_size, at % step.block_size] = keys
        layer.v[at // step.block_size, at % step.block_size] = values
        tokens.append((keys, values))
    return step, tokens


def seen(req, window):
    """Which of its request's slots each row sees, [rows, end]."""
    each = req.visible()
    mask = np.zeros((len(each), req.end), dtype=bool)
    for row, slots in enumerate(each):
        mask[row, within(slots, window)] = True
    return torch.from_numpy(mask).to(DEVICE)


def attention_by_definition(q, reqs, tokens, scale, window):
    """[R, H D] float64, a request at a time, from its tokens as they follow one another."""
    out = []
    masks = [seen(req, window) for req in reqs]
    for x, mask, (k, v) in zip(q.split([len(m) for m in masks]), masks, tokens, strict=True):
        R, H, D = x.shape
        x = x.double().view(R, k.shape[1], -1, D)  # the heads by the KV head that they read
        score = torch.einsum("rkgd,skd->rkgs", x, k.double()) * scale
        weight = score.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
        out.append(torch.einsum("rkgs,skd->rkgd", weight, v.double()).reshape(R, H * D))
    return torch.cat(out)


def attender(step, windows=(None,)):
    """The kernels that must compute attention for heads of this kind, so that they are tested."""
    has_kernels = step.dtype == BF16 and step.head_dim in (64, 128, 256)
    has_kernels &= not any(isinstance(window, Chunks) for window in windows)
    return "FlashInfer" if has_kernels else "Triton"


def planned(ops, step, windows=(None,), also=(), rows=None):
    name = attender(step, windows)
    before, rows = ops.num_planned[name], step.rows() if rows is None else rows
    plan = ops.plan(rows, step.kv, step.num_heads, windows, also)
    assert ops.num_planned[name] == before + 1, f"{name} does not attend"
    return plan


def attend(ops, step, q, window=None):
    plan = planned(ops, step, [window])
    return ops.attention(q, step.kv.layers[-1], plan, step.head_dim**-0.5, window)


def queries(draw, step, scale=1.0):
    R = len(step.rows().positions)
    return draw.normal(R, step.num_heads, step.head_dim, dtype=step.dtype, scale=scale)


def check_attention(ops, draw, measured, reqs, window=None, **fields):
    step, tokens = furnished(draw, reqs, **fields)
    q = queries(draw, step)
    want = attention_by_definition(q, reqs, tokens, step.head_dim**-0.5, window)
    measured.close(path(step, [window]), attend(ops, step, q, window), want)


def path(step, windows=(None,)):
    return f"attention ({attender(step, windows)}, {step.dtype})"


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("block_size", [1, 16, 20, 64])
def test_flashinfer_attends_to_a_batch_of_everything(ops, draw, measured, block_size, D, group):
    fields = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": D, "dtype": BF16}
    check_attention(ops, draw, measured, draw.batch(), block_size=block_size, **fields)


TRITON = [  # heads, KV heads, head size, block size, dtype
    (4, 2, 80, 16, BF16),
    (7, 1, 80, 20, BF16),
    (16, 2, 96, 64, BF16),
    (4, 4, 20, 1, BF16),
    (4, 2, 64, 16, FP32),
    (8, 2, 128, 20, FP32),
    (14, 2, 80, 1, FP32),
    (8, 1, 16, 64, FP32),
]


@pytest.mark.parametrize(("H", "Hk", "D", "block_size", "dtype"), TRITON)
def test_triton_attends_to_a_batch_of_everything(ops, draw, measured, H, Hk, D, block_size, dtype):
    fields = {"num_heads": H, "num_kv_heads": Hk, "head_dim": D, "dtype": dtype}
    check_attention(ops, draw, measured, draw.batch(), block_size=block_size, **fields)


PATHS = pytest.mark.parametrize(
    ("D", "dtype"), [(64, BF16), (128, BF16), (80, BF16), (64, FP32)], ids=str
)


@PATHS
@pytest.mark.parametrize("window", [1, 5, 40, 1000, Chunks(40)])
def test_rows_attend_within_a_window(ops, draw, measured, window, D, dtype):
    check_attention(ops, draw, measured, draw.batch(), window, head_dim=D, dtype=dtype)


@PATHS
def test_layers_of_several_windows_share_a_plan(ops, draw, measured, D, dtype):
    reqs, windows = draw.batch(), [None, 5, 1000]
    step, tokens = furnished(draw, reqs, head_dim=D, dtype=dtype)
    q = queries(draw, step)
    plan = planned(ops, step, windows)
    for window in (5, None, 1000, 5):
        got = ops.attention(q, step.kv.layers[-1], plan, 0.1, window)
        want = attention_by_definition(q, reqs, tokens, 0.1, window)
        measured.close(path(step), got, want)


@PATHS
def test_trees_of_every_size_attend_in_one_batch(ops, draw, measured, D, dtype):
    sizes = draw.rng.sample(range(1, 64), 63)
    reqs = [draw.tree(draw.context(LONGEST // 2), size) for size in sizes]
    check_attention(ops, draw, measured, reqs, head_dim=D, dtype=dtype)


@pytest.mark.parametrize("kind", ["causal", "tree"])
@PATHS
def test_a_step_may_be_all_causal_or_all_trees(ops, draw, measured, D, dtype, kind):
    reqs = [r for r in draw.batch() if (r.parents is None) == (kind == "causal")]
    check_attention(ops, draw, measured, reqs, head_dim=D, dtype=dtype)


@PATHS
@pytest.mark.parametrize("kind", ["causal", "tree"])
@pytest.mark.parametrize("size", [1, 30])
def test_a_request_alone_attends(ops, draw, measured, size, kind, D, dtype):
    for start in (0, draw.context(), LONGEST - 1):
        req = Req(start, size) if kind == "causal" else draw.tree(start, size)
        check_attention(ops, draw, measured, [req], head_dim=D, dtype=dtype)


@pytest.mark.parametrize("num_heads", [32, 64])
def test_64_requests_attend(ops, draw, measured, num_heads):
    reqs = [Req(draw.context(LONGEST // 4)) for _ in range(32)]
    reqs += [draw.tree(draw.context(LONGEST // 4), draw.rng.randint(1, 16)) for _ in range(32)]
    fields = {"num_heads": num_heads, "num_kv_heads": 8, "head_dim": 128, "dtype": BF16}
    check_attention(ops, draw, measured, reqs, **fields)


@pytest.mark.parametrize("group", [1, 7])
def test_heads_of_256_attend(ops, draw, measured, group):
    fields = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": 256, "dtype": BF16}
    check_attention(ops, draw, measured, draw.batch(), **fields)


@PATHS
@pytest.mark.parametrize("window", [None, 40])
def test_scores_of_50_and_large_values_are_no_overflow(ops, draw, measured, window, D, dtype):
    reqs = draw.batch()
    step, tokens = furnished(draw, reqs, 3.3, 100.0, head_dim=D, dtype=dtype)
    q = queries(draw, step, 3.3)
    want = attention_by_definition(q, reqs, tokens, step.head_dim**-0.5, window)
    measured.close(path(step), attend(ops, step, q, window), want, FAR_LIMITS)


SEEN = [(64, BF16, 16), (64, BF16, 1), (128, BF16, 20), (80, BF16, 64), (64, FP32, 16)]


@pytest.mark.parametrize("window", [None, 5, 1000])
@pytest.mark.parametrize(("D", "dtype", "block_size"), SEEN, ids=str)
def test_a_row_sees_its_own_slots_and_no_others(ops, draw, measured, D, dtype, block_size, window):
    """Equal scores: an element of the output is the share of the one slot whose value is 1 there.

    Among thousands of slots a wrong one would drown in the rounding of random values.
    """
    reqs = draw.batch()
    step, _ = furnished(draw, reqs, block_size=block_size, head_dim=D, dtype=dtype)
    masks = [seen(req, window) for req in reqs]
    share = torch.cat([m.sum(1) for m in masks]).float()[:, None, None]
    place = torch.cat([torch.arange(req.end) for req in reqs]).to(DEVICE)  # in its request
    slot = torch.cat([step.slots(b, req.end) for b, req in enumerate(reqs)]).to(DEVICE)
    layer, q = step.kv.layers[-1], torch.zeros_like(queries(draw, step))
    plan = planned(ops, step, [window])
    worst = torch.zeros((), device=DEVICE)
    for begin in range(0, max(req.end for req in reqs), D):
        layer.v.zero_()
        chosen = (place >= begin) & (place < begin + D)
        at, column = slot[chosen], (place[chosen] - begin)[:, None, None]
        one = (column == torch.arange(D, device=DEVICE)).to(dtype).repeat(1, step.num_kv_heads, 1)
        layer.v[at // block_size, at % block_size] = one
        out = ops.attention(q, layer, plan, 1.0, window).view(len(q), -1, D).float() * share
        want = torch.cat(
            [torch.nn.functional.pad(m[:, begin : begin + D], (0, D))[:, :D] for m in masks]
        )
        off = (out - want[:, None].float()).abs().amax()
        worst = torch.maximum(worst, off)
    measured.note(path(step), worst.item(), 0.0)
    assert worst.item() < 0.02, f"a row sees what it may not, or not what it may; seed {SEED}"


def test_a_plan_owes_nothing_to_the_last_one(ops, draw, measured):
    """Batches of unlike sizes, by the same wrappers."""
    sizes = [draw.batch(), [Req(3)], draw.batch()[:6], [draw.tree(0, 3)], draw.batch()[6:]]
    sizes.append([Req(draw.context(LONGEST // 8)) for _ in range(40)])
    given = [furnished(draw, reqs, head_dim=64, dtype=BF16) for reqs in sizes]
    for step, tokens in (*given, *draw.rng.sample(given, len(given))):
        q = queries(draw, step)
        want = attention_by_definition(q, step.reqs, tokens, 0.125, None)
        measured.close(path(step), attend(ops, step, q), want)


def test_models_of_other_shapes_are_planned_in_turns(ops, draw, measured):
    """Layers of two kinds, as of a target and its draft model."""
    shapes = [
        {"head_dim": 128, "num_heads": 16, "num_kv_heads": 4, "dtype": BF16, "block_size": 16},
        {"head_dim": 64, "num_heads": 4, "num_kv_heads": 4, "dtype": BF16, "block_size": 37},
        {"head_dim": 80, "num_heads": 7, "num_kv_heads": 1, "dtype": BF16, "block_size": 5},
        {"head_dim": 64, "num_heads": 6, "num_kv_heads": 2, "dtype": FP32, "block_size": 9},
    ]
    given = [furnished(draw, draw.batch(), **shape) for shape in shapes]
    for step, tokens in given * 3:
        q = queries(draw, step)
        want = attention_by_definition(q, step.reqs, tokens, step.head_dim**-0.5, None)
        measured.close(path(step), attend(ops, step, q), want)


def rotated(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def normed(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


ROPE = [(4, 2, 64, 16), (32, 8, 128, 20), (7, 1, 80, 1), (9, 3, 20, 64)]


@DTYPES
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize(("H", "Hk", "D", "block_size"), ROPE)
def test_heads_are_rotated_and_kv_is_written(
    ops, draw, measured, H, Hk, D, block_size, has_norm, dtype
):
    fields = {"num_heads": H, "num_kv_heads": Hk, "head_dim": D, "dtype": dtype}
    step, _ = furnished(draw, draw.batch(), block_size=block_size, **fields)
    angle = torch.outer(torch.arange(LONGEST + 200.0, device=DEVICE), draw.normal(D // 2))
    rotary = Rotary(1.2 * angle.cos(), 1.2 * angle.sin())
    norm = QKNorm(draw.normal(D), draw.normal(D), 1e-6)
    rows, layer, before = step.rows(), step.kv.layers[-1], step.arena.clone()
    qkv = draw.normal(len(rows.positions), (H + 2 * Hk) * D, dtype=dtype)
    plan = planned(ops, step, rows=rows)
    got = ops.rope_write_kv(qkv, rotary, norm if has_norm else None, layer, plan)

    q, k, v = qkv.view(len(qkv), -1, D).split([H, Hk, Hk], dim=1)
    q, k, position = q.double(), k.double(), rows.positions.long().to(DEVICE)
    if has_norm:
        q, k = normed(q, norm.q, 1e-6), normed(k, norm.k, 1e-6)
    cos, sin = (x.double()[position][:, None] for x in (rotary.cos, rotary.sin))
    slot = rows.slots.to(DEVICE)
    at = slot // block_size, slot % block_size
    measured.close("rope_write_kv", got, rotated(q, cos, sin))
    measured.close("rope_write_kv", layer.k[at], rotated(k, cos, sin))
    measured.same("rope_write_kv", layer.v[at], v)
    may_change = torch.zeros(step.arena.shape[:3], dtype=torch.bool, device=DEVICE)
    may_change[:, -2:] = torch.isin(
        torch.arange(may_change[:, 0].numel(), device=DEVICE), slot
    ).view(-1, 1, block_size)
    has_changed = (step.arena != before).flatten(3).any(-1)
    measured.same("rope_write_kv", has_changed & ~may_change, torch.zeros_like(may_change))


WIDTHS = [1, 16, 150, 853, 4096, 4097, 14_336]
NUMS_ROWS = [1, 7, 64, 513]


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(ops, draw, measured, width, dtype):
    for R in NUMS_ROWS:
        x, weight = draw.normal(R, width, dtype=dtype, scale=3.0), draw.normal(width)
        got = ops.rms_norm(x, weight, 1e-6)
        measured.close("rms_norm", got, normed(x.double(), weight, 1e-6))


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 10.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul(draw, measured, width, scale, dtype):
    for R in NUMS_ROWS:
        both = draw.normal(R, 2 * width, dtype=dtype, scale=scale)
        gate, up = both.double().chunk(2, dim=1)
        measured.close("silu_mul", gated.gated(both), gate * gate.sigmoid() * up)


MAPS = [(13, 7), (151, 853), (512, 384), (4096, 1024), (1031, 4096), (8192, 4097)]  # N, K


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("N", "K"), MAPS)
def test_linear(ops, draw, measured, N, K, has_bias, dtype):
    assert not torch.backends.cuda.matmul.allow_tf32
    weight = draw.normal(N, K, dtype=dtype).cpu()
    packed, bias = ops.prepack(weight), draw.normal(N, dtype=dtype, scale=5.0)
    for R in (1, 2, 7, 16, 64, 65, 512, 513):
        x = draw.normal(R, K, dtype=dtype)
        got = ops.linear(x, packed, bias if has_bias else None)
        want = x.double() @ weight.to(DEVICE).double().T + (bias.double() if has_bias else 0)
        assert got.dtype == dtype
        measured.close("linear", got, want)
        head = ops.lm_head(x, packed)
        assert head.dtype == FP32
        measured.close("lm_head", head, x.double() @ weight.to(DEVICE).double().T)
        residual = draw.normal(R, N, dtype=dtype, scale=K**0.5)
        want += residual.double()
        assert ops.linear_add(x, packed, bias if has_bias else None, residual) is residual
        measured.close("linear_add", residual, want)


CODED = [  # bits, group, N, K
    (4, 128, 4096, 4096),
    (4, 64, 8192, 896),
    (4, 32, 1031, 4864),
    (4, 16, 512, 400),
    (4, 4097, 151, 4097),
    (8, 128, 4096, 1024),
    (8, 32, 2048, 14_336),
    (8, 16, 1031, 1040),
    (8, 1024, 151_936, 1024),
]


@DTYPES
@FORM
@pytest.mark.parametrize(("bits", "group", "N", "K"), CODED)
def test_maps_of_codes(ops, draw, measured, bits, group, N, K, form, dtype):
    codes = random_codes(N, K, bits, group, seed=draw.rng.getrandbits(30), **form)
    packed, bias = ops.prepack(codes), draw.normal(N, dtype=dtype, scale=5.0)
    weight, widened = (codes.widen(t).to(DEVICE).double() for t in (FP32, dtype))
    x = draw.normal(513, K, dtype=dtype)
    few = ops.linear(x[:64], packed)
    for R in (1, 2, 7, 16, 17, 64, 65, 513):
        got, want = ops.linear(x[:R], packed), x[:R].double() @ (weight if R <= 64 else widened).T
        measured.close("linear of codes", got, want)
        measured.close("lm_head of codes", ops.lm_head(x[:R], packed), want)
        if R <= 64:
            measured.same("linear of codes", got, few[:R])
        residual = draw.normal(R, N, dtype=dtype, scale=K**0.5)
        want += residual.double() + bias.double()
        assert ops.linear_add(x[:R], packed, bias, residual) is residual
        measured.close("linear_add of codes", residual, want)


def to_device(step):
    """The same step with its KV on the device."""
    step.arena, step.scales = step.arena.to(DEVICE), step.scales.to(DEVICE)
    parts = [x[:, i::2].unbind(1) for x in (step.arena, step.scales) for i in (0, 1)]
    step.kv = KVCache(tuple(map(KVLayer, *parts)))
    return step


HEADS = pytest.mark.parametrize(
    ("H", "Hk", "D"), [(4, 2, 64), (7, 1, 20), (9, 3, 80), (16, 8, 128)]
)


@DTYPES
@KV_DTYPES
@HEADS
def test_kv_of_8_bits_is_written_as_the_reference_writes_it(ops, H, Hk, D, kv_dtype, dtype):
    step = RandomStep(WRITTEN, 17, H, Hk, D, dtype, num_layers=2, kv_dtype=kv_dtype)
    check_written(ops, to_device(step))


@DTYPES
@KV_DTYPES
@pytest.mark.parametrize("window", [None, 40])
@HEADS
def test_rows_attend_to_kv_of_8_bits(ops, draw, measured, H, Hk, D, window, kv_dtype, dtype):
    starts = [draw.context(2000) for _ in range(3)]
    reqs = [Req(0, 30), Req(starts[0], 20), Req(starts[1]), draw.tree(starts[2], 40)]
    step = RandomStep(reqs, 20, H, Hk, D, dtype, kv_dtype=kv_dtype).filled()
    q = draw.normal(len(step.rows().positions), H, D, dtype=dtype)
    want = step.attend(reference, q.cpu(), window)
    got = to_device(step).attend(ops, q, window).cpu()
    error = row_errors(got, want).max().item()
    measured.note(f"attention to KV of 8 bits ({dtype})", error, error)
    assert error < (8e-3 if dtype == BF16 else 2e-5), f"seed {SEED}"


@DTYPES
@pytest.mark.parametrize(("Hk", "D", "block_size"), [(1, 20, 1), (2, 64, 16), (5, 80, 17)])
@pytest.mark.parametrize("num_moves", [1, 5, 64])
def test_moves_are_made_in_order(ops, draw, measured, num_moves, Hk, D, block_size, dtype):
    fields = {"num_heads": Hk, "num_kv_heads": Hk, "head_dim": D, "dtype": dtype}
    step, _ = furnished(draw, [Req(200, 100)], block_size=block_size, **fields)
    step.arena.copy_(draw.normal(*step.arena.shape, dtype=dtype))
    few = step.slots(0, 300)[-30:].tolist()  # so that many moves go on from others
    source, target = (draw.rng.choices(few, k=num_moves) for _ in range(2))
    want = step.arena.cpu()
    for s, t in zip(source, target, strict=True):
        want[t // block_size, :, t % block_size] = want[s // block_size, :, s % block_size].clone()
    ops.move_kv(step.kv, torch.tensor(source), torch.tensor(target))
    measured.same("move_kv", step.arena.cpu(), want)


def test_wide_tokens_are_moved_whole(ops, draw, measured):
    fields = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128, "dtype": BF16}
    step, _ = furnished(draw, [Req(63, 1)], **fields)
    step.arena.copy_(draw.normal(*step.arena.shape, dtype=BF16))
    want, at = step.arena.cpu(), step.slots(0, 64)
    for s, t in ((60, 17), (17, 18), (18, 60)):
        s, t = int(at[s]), int(at[t])
        want[t // 16, :, t % 16] = want[s // 16, :, s % 16].clone()
    ops.move_kv(step.kv, at[[60, 17, 18]], at[[17, 18, 60]])
    measured.same("move_kv", step.arena.cpu(), want)


def test_what_is_placed_is_on_the_device_as_it_was(ops, draw, measured):
    for dtype in (FP32, BF16, torch.int64, torch.int32):
        x = draw.normal(1000, 3, scale=50.0).to(dtype).cpu()
        placed = ops.place(x)
        assert (placed.dtype, placed.shape, placed.device.type) == (dtype, x.shape, DEVICE)
        measured.same("place", placed.cpu(), x)


def test_what_is_allocated_is_zero_bytes_of_the_size_asked_for(ops):
    for size in (1, 12_345_677, 1 << 26):
        memory = ops.allocate(size)
        assert (memory.dtype, memory.shape, memory.device.type) == (torch.uint8, (size,), DEVICE)
        assert not memory.any()


def test_free_memory_falls_by_what_is_allocated_and_comes_back(ops):
    memory = ops.allocate(GIB)
    del memory  # what a first allocation takes besides has been taken
    before = ops.free_memory()
    memory = ops.allocate(GIB)
    assert abs(before - ops.free_memory() - GIB) < GIB // 32
    del memory
    assert abs(before - ops.free_memory()) < GIB // 32
    assert 0 < before < torch.cuda.mem_get_info()[1]


def test_too_large_an_allocation_is_an_error_that_nothing_else_suffers_from(ops, draw, measured):
    with pytest.raises(torch.OutOfMemoryError):
        ops.allocate(ops.free_memory() + 64 * GIB)
    x, weight = draw.normal(5, 64), draw.normal(64)
    measured.close("rms_norm", ops.rms_norm(x, weight, 1e-6), normed(x.double(), weight, 1e-6))
    check_attention(ops, draw, measured, [Req(100, 3)], head_dim=64, dtype=BF16)


def fresh(draw, params):
    """The same parameters with new seeds and places."""
    n = len(params.seeds)
    seeds = torch.tensor([draw.rng.randrange(2**53) for _ in range(n)])
    index = torch.tensor([draw.rng.randrange(1 << 20) for _ in range(n)])
    return params._replace(seeds=seeds, token_index=index)


def on_device(params):
    return params.with_tensors(x.to(DEVICE) for x in params.tensors())


def is_near(row, params, i, got, want):
    """Whether a rounding explains that `got` was chosen instead of `want`."""
    temperature, top_k, top_p, min_p = (float(x[i]) for x in params[:4])
    z = transform(row.float(), temperature, top_k, top_p, min_p)
    if temperature > 0:
        z = z + gumbel(int(params.seeds[i]), int(params.token_index[i]), len(z))
    if z[want] - z[got] < 1e-4:
        return True
    return temperature > 0 and any(
        is_at_border(row.float() / temperature, top_k, top_p, min_p, t) for t in (got, want)
    )


def is_at_border(z, top_k, top_p, min_p, token):
    """Whether a hundred-thousandth of the mass decides if a filter leaves the token."""
    if min_p > 0 and abs(z[token] - z.max() - np.log(min_p)) < 1e-5:
        return True
    left = transform(z, 1.0, top_k, 1.0, min_p)
    order = left.sort(descending=True, stable=True).indices
    p = left.double().softmax(0)[order]
    before = (p.cumsum(0) - p)[order == token]
    return top_p < 1 and abs(before.item() - top_p) < 1e-5


def check_choices(record_property, got, want, excused):
    """Where a choice is another, `excused(i)` is True; how many there are goes on record."""
    others = (got != want).nonzero().flatten().tolist()
    record_property("choices", len(want))
    record_property("choices that a rounding decides", len(others))
    wrong = [i for i in others if not excused(i)]
    assert not wrong, f"{len(wrong)} of {len(want)} are wrong, the first is {wrong[0]}; seed {SEED}"


@pytest.mark.parametrize("spread", [0.5, 8.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("odd", [0, 267], ids=["even", "odd"])
def test_tokens_are_chosen_as_by_the_reference(ops, draw, record_property, odd, spread):
    logits, params = draw.normal(7, VOCAB - odd, scale=spread), fresh(draw, mixed())
    rows = torch.tensor(draw.rng.choices(range(7), k=len(MIXES)))
    got, on_host = ops.sample(logits, rows, params).cpu(), logits.cpu()
    want = reference.sample(on_host, rows, params)
    check_choices(
        record_property,
        got,
        want,
        lambda i: is_near(on_host[rows[i]], params, i, int(got[i]), int(want[i])),
    )
    uploads = ops.staging.num_uploads
    again = ops.sample(logits, rows.to(DEVICE), on_device(params))
    assert torch.equal(again.cpu(), got)
    assert ops.staging.num_uploads == uploads


def test_greedy_ties_go_to_the_lowest_id(ops, draw):
    logits = draw.normal(40, VOCAB)
    places = [sorted(draw.rng.sample(range(VOCAB), k=5)) for _ in logits]
    for row, tied in zip(logits, places, strict=True):
        row[tied] = 9.0
    got = ops.sample(logits, torch.arange(40), SampleParams.greedy(40))
    assert got.tolist() == [tied[0] for tied in places], f"seed {SEED}"


def test_few_levels_of_logits_are_filtered_as_by_the_reference(ops, draw, record_property):
    """Filters have to cut through thousands of ties."""
    logits = draw.normal(7, VOCAB // 3).mul(1.5).round()
    params, rows = fresh(draw, mixed()), torch.arange(len(MIXES)) % 7
    got, on_host = ops.sample(logits, rows, params).cpu(), logits.cpu()
    want = reference.sample(on_host, rows, params)
    check_choices(
        record_property,
        got,
        want,
        lambda i: is_near(on_host[rows[i]], params, i, int(got[i]), int(want[i])),
    )


def test_changed_rows_are_drawn_from_as_by_the_reference(ops, draw, record_property):
    n, V = len(MIXES), VOCAB - 267
    logits, rows = draw.normal(7, V, scale=3.0), torch.arange(n) % 7
    edits, masks = random_edits(n, V), random_masks(n, V)
    params = fresh(draw, mixed())._replace(edits=edits, masks=masks)
    got, on_host = ops.sample(logits, rows, params).cpu(), logits.cpu().float()
    want = reference.sample(on_host, rows, params)

    def excused(i):
        row = allowed(edited(on_host[rows[i]], edits, i), masks, i)
        return is_near(row, params, i, int(got[i]), int(want[i]))

    check_choices(record_property, got, want, excused)


@pytest.mark.parametrize("tau", [0.5, 1.0])
@pytest.mark.parametrize("odd", [0, 267], ids=["even", "odd"])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_children_are_ranked_as_by_the_reference(ops, draw, measured, record_property, k, odd, tau):
    R = 12
    logits = draw.normal(R, VOCAB - odd, scale=3.0)
    temperature = torch.tensor([0.0, 0.3, 1.0, 2.0] * 3)
    params = fresh(draw, SampleParams.greedy(R))._replace(temperature=temperature)
    got, weight = ops.top_children(logits, params, k, tau)
    want, law = reference.top_children(logits.cpu(), params, k, tau)
    assert (got.shape, got.dtype, weight.dtype) == ((R, k), torch.int64, FP32)
    z = logits.cpu().double()
    for i, t in enumerate(temperature.tolist()):
        if t > 0:
            noise = gumbel(int(params.seeds[i]), int(params.token_index[i]), z.shape[1])
            z[i] = z[i] / t + noise.double()
    exact = (z / tau).log_softmax(-1)
    off = (weight - exact.gather(1, got)).abs().max().item()
    measured.note("top_children", off, (law - exact.gather(1, want)).abs().max().item())
    assert off < 1e-4, f"a log-weight is off by {off:.2e}; seed {SEED}"

    def excused(i):
        a, b = (exact[i // k, ids.flatten()[i]] for ids in (got, want))
        return abs(a - b) < 1e-4

    check_choices(record_property, got.flatten(), want.flatten(), excused)


@pytest.mark.parametrize("k", [0, 1, 20])
def test_log_probabilities_are_the_references(ops, draw, k):
    logits, n = draw.normal(5, VOCAB - 267, scale=3.0), 40
    rows = torch.tensor(draw.rng.choices(range(5), k=n))
    tokens = torch.tensor(draw.rng.choices(range(VOCAB - 267), k=n))
    tokens[:5] = logits[rows[:5]].argmax(1).cpu()
    got = ops.logprobs(logits, rows, tokens, k)
    want = reference.logprobs(logits.cpu(), rows, tokens, k)
    assert torch.equal(got.rank, want.rank) and torch.equal(got.ids, want.ids), f"seed {SEED}"
    for a, b in ((got.token, want.token), (got.top, want.top)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5, msg=lambda m: f"{m}; seed {SEED}")


def test_recorded_launches_find_the_children_that_others_find(draw):
    graphs = ChildGraphs(torch.device(DEVICE))
    logits = draw.normal(4, VOCAB)
    graphs.follow(logits, 0)
    for n in (1, 4, 2, 3, 1, 4):
        logits.copy_(draw.normal(4, VOCAB, scale=3.0))
        greedy = SampleParams.greedy(n)
        warm = fresh(draw, greedy)._replace(temperature=torch.full((n,), 0.7))
        for params in (greedy, warm, fresh(draw, warm), greedy):
            got = graphs.launch(logits[:n], params, 4, 1.0).cpu()
            want = launch_top_children(logits[:n].clone(), on_device(params), 4, 1.0).cpu()
            assert torch.equal(got, want), f"seed {SEED}"
    assert len(graphs.recordings) == 4


def test_tied_children_are_ranked_by_id(ops, draw):
    logits = draw.normal(6, VOCAB // 3).round()
    params = SampleParams.greedy(6)
    got, want = (
        f(x, params, 16, 1.0)[0]
        for f, x in ((ops.top_children, logits), (reference.top_children, logits.cpu()))
    )
    assert torch.equal(got, want), f"seed {SEED}"


@PATHS
def test_a_plan_takes_one_upload_and_a_choice_at_most_one(ops, draw, D, dtype):
    step, _ = furnished(draw, draw.batch(), head_dim=D, dtype=dtype)
    also = [torch.arange(9), torch.ones(4)]
    logits, params = draw.normal(3, 500), SampleParams.greedy(3)
    uploads = [ops.staging.num_uploads]
    plan = planned(ops, step, [None, 5], also)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(plan.also, also, strict=True))
    uploads.append(ops.staging.num_uploads)
    ops.sample(logits, torch.arange(3), params)
    uploads.append(ops.staging.num_uploads)
    ops.top_children(logits, params, 2, 1.0)
    uploads.append(ops.staging.num_uploads)
    plan, choice, children = (b - a for a, b in itertools.pairwise(uploads))
    assert plan == 1 and choice <= 1 and children <= 1


def subset(whole, chosen):
    """The step with some of its requests only."""
    part = copy.copy(whole)
    part.reqs = [whole.reqs[b] for b in chosen]
    part.tables = [whole.tables[b] for b in chosen]
    return part


class Launches:
    """A step of some requests, from the plan to the moves."""

    def __init__(self, draw, whole, kinds):
        b = {
            "causal": [b for b, r in enumerate(whole.reqs) if r.parents is None],
            "tree": [b for b, r in enumerate(whole.reqs) if r.parents is not None],
        }
        chosen = [draw.rng.sample(b[kind], draw.rng.randint(1, 8)) for kind in kinds]
        self.part = subset(whole, [*itertools.chain(*chosen)])
        self.rows = self.part.rows()
        R, H, Hk, D = len(self.rows.slots), whole.num_heads, whole.num_kv_heads, whole.head_dim
        self.qkv = draw.normal(R, (H + 2 * Hk) * D, dtype=whole.dtype)
        self.also = [torch.tensor(draw.rng.choices(range(10**9), k=R))]
        self.logits = draw.normal(R, 3000)
        self.params = fresh(draw, SampleParams.greedy(R))._replace(temperature=torch.ones(R))
        self.moves = self.rows.slots[torch.tensor(draw.rng.choices(range(R), k=6))].view(2, 3)

    def run(self, ops, rotary, after):
        """`after` is called after every op."""
        part, (first, last) = self.part, self.part.kv.layers
        plan = planned(ops, part, [None], self.also, self.rows)
        after()
        also = plan.also[0].clone()
        q = ops.rope_write_kv(self.qkv, rotary, None, first, plan)
        after()
        out = [ops.attention(q, layer, plan, 0.1) for layer in (first, last)]
        after()
        tokens = ops.sample(self.logits, torch.arange(len(self.logits)), self.params)
        after()
        ops.move_kv(part.kv, *self.moves)
        after()
        return [also, q, *out, tokens]


@pytest.mark.parametrize(("D", "dtype"), [(64, BF16), (64, FP32)], ids=["FlashInfer", "Triton"])
def test_steps_launched_back_to_back_come_to_the_same(ops, draw, measured, D, dtype):
    """Pinned memory is not written again before the device has read it."""
    reqs = [Req(draw.context(LONGEST // 8), draw.rng.choice([1, 1, 20])) for _ in range(20)]
    reqs += [draw.tree(draw.context(LONGEST // 8), draw.rng.randint(1, 30)) for _ in range(20)]
    whole, _ = furnished(draw, reqs, head_dim=D, dtype=dtype)
    for layer in whole.kv.layers:
        layer.k.copy_(draw.normal(*layer.k.shape, dtype=dtype))
        layer.v.copy_(draw.normal(*layer.v.shape, dtype=dtype))
    angle = torch.outer(torch.arange(LONGEST + 100.0, device=DEVICE), draw.normal(D // 2))
    rotary, before = Rotary(angle.cos(), angle.sin()), whole.arena.clone()
    kinds = [("causal",), ("tree",), ("causal", "tree")]
    steps = [Launches(draw, whole, draw.rng.choice(kinds)) for _ in range(ROUNDS)]
    one_by_one = [step.run(ops, rotary, torch.cuda.synchronize) for step in steps]
    wanted = whole.arena.clone()
    whole.arena.copy_(before)
    heavy = draw.normal(BALLAST, BALLAST)
    together = []
    for i, step in enumerate(steps):
        if i % 20 == 0:
            heavy @ heavy  # so that the device falls behind
        together.append(step.run(ops, rotary, lambda: None))
    for got, want in zip(together, one_by_one, strict=True):
        for x, y in zip(got, want, strict=True):
            measured.same("uploads", x, y)
    measured.same("uploads", whole.arena, wanted)


@pytest.mark.cuda  # it takes a second, so that short checks run it, too
@pytest.mark.parametrize("block_bytes", [48, 1 << 16])
def test_blocks_move_to_pinned_memory_and_back_next_to_forwards(ops, draw, block_bytes):
    """Stores are in the order of launches, and loads behind a product that takes long."""
    num_blocks, num_host_blocks = 32, 64
    host = ops.host_blocks(num_host_blocks, block_bytes)
    assert isinstance(host, PinnedBlocks) and host.memory.is_pinned()
    blocks = torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8, device=DEVICE)
    want, want_host = blocks.cpu(), torch.zeros_like(host.memory)
    ballast = draw.normal(BALLAST // 2, BALLAST // 2, dtype=BF16)
    for _ in range(40):
        ballast @ ballast
        block = draw.rng.randrange(num_blocks)
        value = draw.rng.randrange(256)
        blocks[block] = value  # as a forward writes it, on its stream
        want[block] = value
        some, others = random_pairs(draw.rng, num_blocks, num_host_blocks)
        host.store(blocks, some)
        for source, target in some:
            want_host[target] = want[source]
        host.load(blocks, others)
        for source, target in others:
            want[target] = want_host[source]
        host.wait()  # as requests do before a forward reads what was loaded
        assert host.is_idle
    assert torch.equal(blocks.cpu(), want) and torch.equal(host.memory, want_host)


def random_pairs(rng, num_blocks, num_host_blocks):
    """Of blocks and host blocks to store to, and of host blocks and blocks to load into."""
    number = rng.randint(0, 8)
    blocks, host_blocks = rng.sample(range(num_blocks), 8), rng.sample(range(num_host_blocks), 8)
    targets = rng.sample(range(num_blocks), 8)
    stored = [*zip(blocks[:number], host_blocks[:number], strict=True)]
    return stored, [*zip(rng.sample(range(num_host_blocks), 8), targets, strict=True)]


def test_garbage_is_not_collected_while_a_graph_is_recorded():
    x, was_enabled = torch.zeros(1, device=DEVICE), []

    def forward():
        was_enabled.append(gc.isenabled())
        return x + 1

    y, replay = Capture()(forward)
    replay()
    assert y.item() == 1 and was_enabled == [False] and gc.isenabled()
