"""Mixtures of experts: the router's table, what is added to the residual stream, and its bits."""

import itertools
import math
import random

import pytest
import torch

from specserve_kernels import Codes, cpu, reference
from specserve_kernels.ops import EagerProgram
from tests.kernels.builds import BUILDS
from tests.kernels.levels import EVERY_LEVEL, EVERY_LEVEL_AND_ARM
from tests.kernels.maps import chunks, random_codes
from tests.kernels.random_steps import RandomStep, Req, random_tensor, row_errors

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}  # of a row, relative to its norm
EVERY = (*range(1, 131), 513)
EDGES = (1, 2, 3, 6, 7, 15, 16, 17, 31, 33, 130)

ROUTES = {  # logits, k, normalizes -> experts
    "the largest first": ([0.0, 2.0, 1.0], 2, False, [1, 2]),
    "of equal ones the lowest": ([1.0, 3.0, 3.0, 3.0], 2, False, [1, 2]),
    "all are equal": ([0.0] * 40, 3, False, [0, 1, 2]),
    "all are chosen": ([-1.0, 5.0, 0.0], 3, True, [1, 2, 0]),
    "one is chosen": ([-1.0, 5.0, 0.0], 1, True, [1]),
    "large logits": ([1e4, 1e4 - 1, -1e4], 2, True, [0, 1]),
}


@BUILDS
@DTYPES
@pytest.mark.parametrize(("logits", "k", "normalizes", "want"), ROUTES.values(), ids=ROUTES)
def test_a_row_has_its_k_likeliest_experts(ops, dtype, logits, k, normalizes, want):
    given = torch.tensor([logits]).to(dtype)
    routing = ops.route(given, k, normalizes)
    weights = given[0].double().softmax(0)[want]
    if normalizes:
        weights /= weights.sum()
    assert routing.experts.tolist() == [want] and routing.experts.dtype == torch.int32
    torch.testing.assert_close(routing.weights[0].double(), weights, rtol=1e-6, atol=1e-12)


LOGIT = {0.25: -math.log(3), 0.5: 0.0, 0.75: math.log(3)}  # sigmoid -> logit
RULES = {  # sigmoids of logits, normalizes, correction, factor -> experts, weights
    "sigmoids": ([0.25, 0.75, 0.5], False, None, 1.0, [1, 2], [0.75, 0.5]),
    "sigmoids that are normalized": ([0.25, 0.75, 0.5], True, None, 1.0, [1, 2], [0.6, 0.4]),
    "a correction chooses, and is no part of a weight": (
        [0.25, 0.75, 0.5],
        False,
        [0.6, 0.0, -0.5],
        1.0,
        [0, 1],
        [0.25, 0.75],
    ),
    "a factor, after the sum": ([0.25, 0.75, 0.5], True, None, 2.5, [1, 2], [1.5, 1.0]),
}


@BUILDS
@DTYPES
@pytest.mark.parametrize(
    ("scores", "normalizes", "correction", "factor", "want", "weights"), RULES.values(), ids=RULES
)
def test_scores_of_experts_may_be_sigmoids(
    ops, dtype, scores, normalizes, correction, factor, want, weights
):
    logits = torch.tensor([[LOGIT[score] for score in scores]]).to(dtype)
    correction = None if correction is None else torch.tensor(correction)
    routing = ops.route(logits, 2, normalizes, True, correction, factor)
    assert routing.experts.tolist() == [want]
    error = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(routing.weights, torch.tensor([weights]), rtol=error, atol=error)


@BUILDS
def test_a_correction_is_added_to_probabilities(ops):
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    routing = ops.route(logits, 2, True, False, torch.tensor([0.6, 0.0, 0.0]), 3.0)
    probabilities = logits[0].softmax(0)[[0, 2]]
    assert routing.experts.tolist() == [[0, 2]]
    torch.testing.assert_close(routing.weights[0], 3 * probabilities / probabilities.sum())


@BUILDS
def test_each_expert_may_have_a_factor(ops):
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 0.0]])
    factors = torch.tensor([0.5, 2.0, 3.0])
    routing = ops.route(logits, 2, True, False, None, factors)
    plain = reference.route(logits, 2, True)
    assert routing.experts.tolist() == [[2, 1], [0, 1]]
    own = torch.tensor([[3.0, 2.0], [0.5, 2.0]])
    torch.testing.assert_close(routing.weights, plain.weights * own)


@pytest.mark.pairs
@EVERY_LEVEL_AND_ARM
@DTYPES
@pytest.mark.parametrize(("E", "k"), [(1, 1), (8, 2), (64, 8), (131, 5)])
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_the_build_routes_as_the_reference(E, k, normalizes, is_sigmoid, dtype):
    logits = (4 * random_tensor(40, E)).round().to(dtype)  # with ties
    correction = random_tensor(E, seed=1) if is_sigmoid else None
    rule = k, normalizes, is_sigmoid, correction, 1.5
    got, want = (ops.route(logits, *rule) for ops in (cpu, reference))
    assert torch.equal(got.experts, want.experts)
    torch.testing.assert_close(got.weights, want.weights, rtol=1e-5, atol=1e-12)


@EVERY_LEVEL
@pytest.mark.parametrize("R", [1, 16, 17, 200])
def test_a_routing_lists_each_experts_rows_in_their_order(R):
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        routing = cpu.route(random_tensor(R, 64), 8, False)
        begins = routing.begins.tolist()
        assert begins[0] == 0 and begins[-1] == 8 * R
        rows = routing.rows.flatten()
        for e, (begin, end) in enumerate(itertools.pairwise(begins)):
            want, rank = (routing.experts == e).nonzero(as_tuple=True)
            assert torch.equal(rows[begin:end].long(), want)
            assert routing.places[want, rank].tolist() == list(range(begin, end))


def test_a_row_of_nan_spoils_no_other():
    logits = random_tensor(3, 8)
    want = cpu.route(logits, 2, True)
    logits[1] = float("nan")
    got = cpu.route(logits, 2, True)
    assert torch.equal(got.experts[::2], want.experts[::2]) and got.weights[1].isnan().all()
    assert torch.equal(got.weights[::2], want.weights[::2])


class Mixture:
    """Random experts of a form, packed by a build, and rows for them."""

    def __init__(self, ops, E=6, K=70, F=50, N=90, dtype=torch.float32, form=None, limit=None):
        """With a limit, they have biases and clamped gates."""
        self.ops, self.dtype, self.limit = ops, dtype, limit
        self.num_experts, self.K, self.N = E, K, N
        make = self.plain if form is None else self.codes
        gate_up = [make(2 * F, K, form, e) for e in range(E)]
        down = [make(N, F, form, 50 + e) for e in range(E)]
        biases = None, None
        if limit is not None:
            biases = [random_tensor(E, n, dtype=dtype, seed=90 + n) for n in (2 * F, N)]
        self.biases, self.weights = biases, (gate_up, down)
        self.gate_up = ops.prepack_experts(gate_up, is_gated=True, bias=biases[0])
        self.down = ops.prepack_experts(down, bias=biases[1])
        # Each as a linear map of its own.
        self.each = [
            (ops.prepack(g, is_gated=True), ops.prepack(d))
            for g, d in zip(gate_up, down, strict=True)
        ]

    def plain(self, N, K, form, seed):
        return random_tensor(N, K, dtype=self.dtype, seed=seed)

    def codes(self, N, K, form, seed):
        bits, rounds_rows = form
        group = K if rounds_rows else 10
        codes = random_codes(N, K, bits, group, has_zero=not rounds_rows, seed=seed)
        return codes._replace(rounds_rows=rounds_rows)

    def rows(self, R, seed=7):
        """x, logits and residual."""
        x = random_tensor(R, self.K, dtype=self.dtype, seed=seed)
        logits = random_tensor(R, self.num_experts, dtype=self.dtype, seed=seed + 1)
        return x, logits, random_tensor(R, self.N, dtype=self.dtype, seed=seed + 2)

    def run(self, x, logits, residual, k=3):
        routing = self.ops.route(logits, k, True)
        packed = self.gate_up, self.down
        return self.ops.experts(x, routing, *packed, residual.clone(), self.limit)

    def one_by_one(self, x, logits, residual, k=3):
        """The same from linear maps of single rows, in float32."""
        routing, out = self.ops.route(logits, k, True), residual.clone()
        for r in range(len(x)):
            total = torch.zeros(self.N)
            for weight, e in zip(routing.weights[r], routing.experts[r].tolist(), strict=True):
                gate_up, down = self.each[e]
                inner = self.ops.linear_gated(x[r : r + 1].clone(), gate_up)
                total += weight * self.ops.linear(inner, down)[0]
            out[r] += total
        return out


FORMS = {"plain": None, "4 bits": (4, False), "8 bits": (8, False), "rounded rows": (8, True)}
FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
LIMIT = pytest.mark.parametrize("limit", [None, 7.0], ids=["plain gate", "biases and a limit"])


def test_the_sum_over_a_rows_experts_is_added_to_the_residual():
    mixture = Mixture(reference)
    x, logits, residual = mixture.rows(7)
    got = mixture.run(x, logits, residual, k=2)
    for r, row in enumerate(x.double()):
        want = residual[r].double()
        weights, chosen = logits[r].double().softmax(0).topk(2)
        for weight, e in zip(weights / weights.sum(), chosen.tolist(), strict=True):
            gate, up = (mixture.gate_up.each[e].double() @ row).chunk(2)
            want = want + weight * (mixture.down.each[e].double() @ (gate * gate.sigmoid() * up))
        torch.testing.assert_close(got[r].double(), want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("limit", [7.0, 30.0])
def test_experts_may_have_biases_and_clamped_gates(limit):
    mixture = Mixture(reference, limit=limit)
    x, logits, residual = mixture.rows(7)
    got, sums = mixture.run(x, logits, residual, k=2), []
    for r, row in enumerate(x.double()):
        want = residual[r].double()
        weights, chosen = logits[r].double().topk(2)
        for weight, e in zip(weights.softmax(0), chosen.tolist(), strict=True):
            first, second = (bias[e].double() for bias in mixture.biases)
            sums.append(mixture.gate_up.each[e].double() @ row + first)
            gate, up = sums[-1].chunk(2)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            want = want + weight * (mixture.down.each[e].double() @ inner + second)
        torch.testing.assert_close(got[r].double(), want, rtol=1e-5, atol=1e-3)
    assert torch.stack(sums).abs().amax() > limit > torch.stack(sums).abs().median()


@DTYPES
@FORM
@LIMIT
def test_the_build_adds_what_the_reference_adds(gemm, form, dtype, limit):
    compare(gemm, form, dtype, limit)


@BUILDS
@DTYPES
@LIMIT
@pytest.mark.parametrize("form", [None, (4, False)], ids=["plain", "4 bits"])
def test_every_build_adds_what_the_reference_adds(ops, form, dtype, limit):
    compare(ops, form, dtype, limit, roundings=2)


@BUILDS
@DTYPES
@pytest.mark.parametrize("form", [None, (4, False)], ids=["plain", "4 bits"])
def test_a_sum_of_gelu_experts_may_stand_alone(ops, form, dtype):
    mixture = Mixture(ops, dtype=dtype, form=form)
    x, logits, residual = mixture.rows(9)
    routing, packed = ops.route(logits, 3, True), (mixture.gate_up, mixture.down)
    got = ops.experts(x, routing, *packed, None, gate="gelu_tanh")
    want = torch.zeros(residual.shape)
    for r in range(9):
        for weight, e in zip(routing.weights[r], routing.experts[r].tolist(), strict=True):
            gate_up, down = mixture.each[e]
            inner = ops.linear_gated(x[r : r + 1].clone(), gate_up, None, "gelu_tanh")
            want[r] += weight * ops.linear(inner, down)[0].float()
    assert got.dtype == dtype
    assert (row_errors(got, want.to(dtype)) < 3 * TOLERANCE[dtype]).all()


@BUILDS
@DTYPES
def test_experts_may_have_no_gate(ops, dtype):
    """In a recorded step, too: see the parity of Nemotron H with experts."""
    E, K, F, R = 5, 48, 40, 9
    ups, downs = random_tensor(E, F, K, seed=1) / 7, random_tensor(E, K, F, seed=2) / 7
    x = random_tensor(R, K, seed=3).to(dtype)
    routing = ops.route(random_tensor(R, E, seed=4).to(dtype), 2, True)
    maps = [ops.prepack_experts([w.to(dtype) for w in each]) for each in (ups, downs)]
    got, want = ops.experts(x.clone(), routing, *maps, None, gate="relu2"), torch.zeros(R, K)
    for r in range(R):
        for weight, e in zip(routing.weights[r], routing.experts[r].tolist(), strict=True):
            up = (ups[e].to(dtype) @ x[r]).float().clamp(min=0).square()
            want[r] += weight * (downs[e].to(dtype).float() @ up)
    assert (row_errors(got, want.to(dtype)) < 3 * TOLERANCE[dtype]).all()


def compare(ops, form, dtype, limit, R=45, roundings=1):
    """A GPU rounds what each map makes."""
    mixtures = [Mixture(each, dtype=dtype, form=form, limit=limit) for each in (ops, reference)]
    given = mixtures[1].rows(R)
    got, want = (mixture.run(*given) for mixture in mixtures)
    assert got.dtype == dtype
    assert (row_errors(got, want) < roundings * TOLERANCE[dtype]).all()


@FORM
def test_a_rows_bits_are_those_of_linear_maps(gemm, form):
    mixture = Mixture(gemm, form=form)
    given = mixture.rows(40)
    assert torch.equal(mixture.run(*given), mixture.one_by_one(*given))


@pytest.mark.pairs
@DTYPES
@FORM
@LIMIT
@pytest.mark.parametrize("shape", [(6, 70, 50, 90), (3, 2100, 170, 40)], ids=["small", "wide"])
def test_a_rows_bits_depend_on_no_other_row_and_no_thread(gemm, form, shape, dtype, limit):
    mixture = Mixture(gemm, *shape, dtype=dtype, form=form, limit=limit)
    sizes = EVERY if form is None and shape[1] < 100 else EDGES
    x, logits, residual = mixture.rows(max(sizes))
    want = mixture.run(x, logits, residual)
    steps = [(1 + size % 3, list(range(size))) for size in sizes]
    steps += [(2, rows) for rows in chunks(random.Random(1), max(sizes))]
    for threads, rows in steps:
        torch.set_num_threads(threads)
        got = mixture.run(x[rows], logits[rows], residual[rows])
        assert torch.equal(got, want[rows]), (threads, rows)


@DTYPES
@LIMIT
def test_a_rows_bits_of_the_reference_depend_on_no_other_row(dtype, limit):
    mixture = Mixture(reference, dtype=dtype, limit=limit)
    x, logits, residual = mixture.rows(31)
    want = mixture.run(x, logits, residual)
    for rows in ([3], [30, 0, 7], list(range(30, -1, -1))):
        assert torch.equal(mixture.run(x[rows], logits[rows], residual[rows]), want[rows])


@FORM
def test_all_rows_may_have_the_same_experts(gemm, form):
    mixture = Mixture(gemm, form=form)
    x, logits, residual = mixture.rows(70)
    logits[:] = torch.tensor([0.0, -9, -9, 8, -9, 7])  # the first, the fourth and the last
    for R in (1, 5, 70):
        given = x[:R], logits[:R], residual[:R]
        for k in (1, 3):
            assert torch.equal(mixture.run(*given, k), mixture.one_by_one(*given, k))


@BUILDS
@LIMIT
@pytest.mark.parametrize("R", [1, 16, 37])
def test_experts_may_have_all_rows_or_none(ops, R, limit):
    """Beside some that share the others; rows of one expert make several tiles on a GPU."""
    mixtures = [Mixture(each, limit=limit) for each in (ops, reference)]
    x, logits, residual = mixtures[1].rows(R)
    logits[:, 2] += 100
    logits[:, [0, 5]] -= 100
    got, want = (mixture.run(x, logits, residual, k=2) for mixture in mixtures)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@BUILDS
def test_no_rows_are_no_error(ops):
    mixture = Mixture(ops)
    assert mixture.run(*mixture.rows(0)).shape == (0, 90)


@BUILDS
@DTYPES
def test_rows_are_added_with_a_gate_for_each(ops, dtype):
    R, K = 45, 600
    x, gate, residual = (random_tensor(R, n, dtype=dtype, seed=n) for n in (K, 1, K + 1))
    residual = residual[:, :K].contiguous()
    want = residual.double() + gate.double().sigmoid() * x.double()
    got = ops.add_gated(x, gate, residual.clone())
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=1e-5)
    for rows in ([3], [44, 0, 7]):
        assert torch.equal(ops.add_gated(x[rows], gate[rows], residual[rows]), got[rows])


@BUILDS
@DTYPES
def test_rows_are_weighed_by_their_largest_logit(ops, dtype):
    R, K = 45, 600
    x, logits = (random_tensor(R, n, dtype=dtype, seed=n) for n in (K, 7))
    want = x.double() * logits.double().amax(1, keepdim=True).sigmoid()
    got = ops.weigh_rows(x, logits)
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=1e-5)
    for rows in ([3], [44, 0, 7]):
        assert torch.equal(ops.weigh_rows(x[rows], logits[rows]), got[rows])


def test_experts_of_different_forms_are_refused():
    weights = [random_tensor(8, 8), random_tensor(8, 8, dtype=torch.bfloat16)]
    with pytest.raises(AssertionError, match="experts of different forms"):
        cpu.prepack_experts(weights)


STEP = RandomStep([Req(20, 40)])


class Sparse:
    """A model of two layers that are mixtures."""

    def __init__(self, ops, dtype, form, limit):
        self.ops, self.dtype, self.limit = ops, dtype, limit
        self.made = dtype, form, limit
        self.table = random_tensor(50, 90, dtype=dtype)
        self.layers = [Mixture(cpu, 6, 90, 50, 90, dtype, form, limit) for _ in range(2)]
        self.router = cpu.prepack(random_tensor(6, 90, dtype=dtype, seed=3))
        self.gate = cpu.prepack(random_tensor(1, 90, dtype=dtype, seed=4))

    def on(self, ops):
        return Sparse(ops, *self.made)

    def plan(self, rows, kv, also=()):
        return self.ops.plan(rows, kv, STEP.num_heads, [None], also)

    def embed(self, token_ids):
        return self.ops.embed(self.table, token_ids, self.dtype)

    def forward(self, x, kv, plan, aux_layer_ids=()):
        for layer in self.layers:
            h = self.ops.rms_norm(x, self.table[0].float(), 1e-6)
            logits = self.ops.linear(h, self.router)
            routing, weighed = self.ops.route(logits, 2, True), self.ops.weigh_rows(h, logits)
            x = self.ops.experts(weighed, routing, layer.gate_up, layer.down, x, self.limit)
            x = self.ops.add_gated(h, self.ops.linear(h, self.gate), x)
        return x, {}

    def logits(self, residual, rows):
        return self.ops.take_rows(residual, rows)


@DTYPES
@FORM
@LIMIT
def test_a_recorded_forward_has_the_bits_of_its_ops(gemm, form, dtype, limit):
    model = Sparse(gemm, dtype, form, limit)
    program, eager = cpu.program(model, STEP.kv, 40, 4), EagerProgram(model, STEP.kv)
    assert program.host_ops == []
    for n in (1, 5, 40, 17, 1):
        ids, read = torch.arange(n), torch.tensor([0])
        want, got = eager.run(STEP.rows(), ids, read), program.run(STEP.rows(), ids, read)
        assert torch.equal(got.residual, want.residual)


@pytest.mark.parametrize("odd", ["no form", "another interval", "another scale"])
def test_experts_whose_codes_need_other_bits_get_a_common_form(odd):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, generator=draw)
    weights = []
    for _ in range(3):
        q = torch.randint(112, 144, (16, 64), generator=draw).byte()
        codes = Codes(8, 32, q, torch.rand(16, 2, generator=draw).half().float(), rounds_rows=True)
        weights.append(codes)
    if odd == "another interval":
        weights[1] = weights[1]._replace(q=weights[1].q + 3)
    if odd == "another scale":
        weights[1] = weights[1]._replace(scale=weights[1].scale + 1e-6)
    packed = cpu.prepack_experts(weights)
    assert len({(each.kind, len(each.words)) for each in packed.each}) == 1
    assert packed.each[0].kind.bits == (8 if odd == "another interval" else 5)
    for weight, each in zip(weights, packed.each, strict=True):
        assert torch.equal(cpu.lm_head(x, each), reference.lm_head(x, weight))
