"""Linear maps of codes whose rows become int8 codes by group: every level has the same bits."""

import itertools
from fractions import Fraction

import pytest
import torch

from specserve_kernels import Codes, cpu, reference
from specserve_kernels.codes import MAX_ROUNDED, MAX_ROUNDED_GROUP
from specserve_kernels.reference.kv import quantize
from specserve_kernels.reference.rounded import fma
from specserve_kernels.types import AdapterSums
from tests.kernels.maps import VALUES, check_bits, maps_of, random_codes, widened
from tests.kernels.random_steps import random_tensor
from tests.kernels.test_codes import BUILDS, DTYPES, STEP, Coded, made

EXACT = ("linear", "lm_head", "linear with a bias", "linear_add")  # exp has other bits in torch
FORMS = {
    "4 bits": (4, {}),
    "8 bits": (8, {}),
    "4 bits, zeros": (4, {"has_zero": True}),
    "8 bits, zeros": (8, {"has_zero": True}),
    "4 bits, offsets": (4, {"has_offset": True}),
    "8 bits, offsets": (8, {"has_offset": True}),
    "a table": (4, {"has_table": True}),
}
FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
SHAPES = {  # N, K, group
    "of GGUF": (331, 160, 32),
    "the largest": (50, 512, 256),
    "small ones": (65, 304, 16),
    "odd ones": (17, 63, 7),
    "not of eight": (40, 300, 100),
    "one code": (1, 1, 1),
}


def rounding(N, K, group, form, seed=0):
    bits, others = form
    return random_codes(N, K, bits, group, seed=seed, **others)._replace(rounds_rows=True)


def rounding_maps(ops, shape, form, dtype, num_rows):
    N, K, group = shape
    both = (rounding(n, K, group, form, n) for n in (N, 2 * N))
    return maps_of(ops, *both, dtype, num_rows)


TABLE = {  # row, bits, codes, scales, zeros, offsets -> the sum, in groups of 2
    "a group has its own scale": ([127.0, 0, 0, 254], 8, [129, 0, 0, 130], [1, 1], 0, 0, 635),
    "codes of 4 bits": ([127.0, -127, 1, 0], 4, [0, 15, 9, 9], [2, 1], 0, 0, -3809),
    "a zero": ([127.0, 127, 0, 1], 4, [3, 15, 0, 1], [1, 8], [16, 0], 0, -1770),
    "a zero of 8 bits": ([127.0, 0, 127, 0], 8, [0, 0, 255, 0], [1, 1], [255, 0], 0, 0),
    "an offset": ([127.0, -1, 0, 2], 8, [128, 128, 0, 129], [1, 1], 0, [0.5, 3], 71),
    "a zero and an offset": ([127.0, 0, 1, 1], 4, [3, 0, 0, 0], [2, 1], [1, 8], [1, 0], 619),
    "the middle is zero": ([3.0, -1, 7, 7], 4, [8, 8, 8, 8], [1, 1], 0, 0, 0),
    "ties go to even": ([127.0, 2.5, 127, 3.5], 8, [128, 129, 128, 144], [1, 1], 0, 0, 66),
}


@BUILDS
@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE)
def test_a_sum_is_that_of_rounded_groups(ops, case):
    row, bits, q, scale, zero, offset, want = case
    zero = torch.tensor([zero], dtype=torch.uint8) if zero else None
    offset = torch.tensor([offset], dtype=torch.float32) if offset else None
    q, scale = torch.tensor([q], dtype=torch.uint8), torch.tensor([scale], dtype=torch.float32)
    codes = Codes(bits, 2, q, scale, zero, offset, rounds_rows=True)
    assert ops.linear(torch.tensor([row]), ops.prepack(codes)).item() == want


@BUILDS
def test_a_code_may_be_the_index_of_a_table(ops):
    q = torch.tensor([[0, 15, 7, 7]], dtype=torch.uint8)
    codes = Codes(4, 2, q, torch.tensor([[1.0, 0.5]]), rounds_rows=True, table=VALUES)
    got = ops.linear(torch.tensor([[127.0, 127, 0, 254]]), ops.prepack(codes))
    assert got.item() == 127 * (VALUES[0] + VALUES[15]) + 127 * VALUES[7]


def test_a_fused_product_is_rounded_once():
    """Numbers of which many sums are near the middle of two float32 numbers."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randint(1, 1 << 24, (4000,), generator=draw).float() for _ in range(2))
    c = -(a.double() * b.double()).float() * (1 + 2.0 ** -torch.randint(1, 40, (4000,)).float())
    got = fma(a, b, c)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        error = abs(Fraction(x) * Fraction(y) + Fraction(z) - Fraction(r))
        near = torch.tensor([r]).view(torch.int32) + torch.tensor([-1, 1], dtype=torch.int32)
        for other in near.view(torch.float32).tolist() if r else ():
            assert error <= abs(Fraction(x) * Fraction(y) + Fraction(z) - Fraction(other))


@pytest.mark.parametrize(
    "numbers", [(float("inf"), 1.0, 0.0), (float("nan"), 1.0, 1.0), (2e38, 4.0, 1.0)]
)
def test_a_fused_product_may_be_infinite_or_nan(numbers):
    a, b, c = (torch.tensor([x]) for x in numbers)
    torch.testing.assert_close(fma(a, b, c), a * b + c, rtol=0, atol=0, equal_nan=True)


@DTYPES
@FORM
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_level_has_the_bits_of_the_reference(gemm, shape, form, dtype):
    R = 45
    x = random_tensor(R, shape[1], dtype=dtype)
    got, want = (
        rounding_maps(ops, shape, form, dtype, R).outputs(ops, x, list(range(R)))
        for ops in (gemm, reference)
    )
    for name in EXACT:
        assert torch.equal(got[name], want[name]), name
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    name = "linear_gated"
    torch.testing.assert_close(got[name], want[name], rtol=tolerance, atol=tolerance)


@DTYPES
@FORM
def test_the_error_is_that_of_rounded_rows_and_of_the_groups_additions(form, dtype):
    """Against float64: a group rounds once in two products and twice in two additions."""
    N, K, group = 50, 1024, 32
    x, codes = random_tensor(9, K, dtype=dtype), rounding(N, K, group, form)
    q, scale = quantize(x.float().view(9, -1, group), torch.int8)
    rows = (q.double() * scale.double()[..., None]).view(9, K)
    got = reference.lm_head(x, codes).double()
    values = widened(codes)
    parts = widened(codes._replace(zero=None, offset=None)).abs() + values.abs()
    rounded = 3 * (K // group) * 2.0**-24 * (rows.abs() @ parts.T)
    assert ((got - rows @ values.T).abs() <= rounded).all()
    half = (0.5 * scale.double()).repeat_interleave(group, 1)  # of a step of the codes
    assert ((got - x.double() @ values.T).abs() <= rounded + half @ values.abs().T).all()


EVERY = (*range(1, 40), 513)
EDGES = (1, 2, 3, 4, 5, 7, 8, 12, 13, 14, 15, 24, 25, 64, 130)  # of blocks of rows


@pytest.mark.pairs
@DTYPES
@pytest.mark.parametrize(
    ("shape", "form", "sizes"),
    [
        ((50, 64, 32), "4 bits, offsets", EVERY),
        ((331, 152, 8), "8 bits, zeros", EDGES),
        ((33, 2048, 256), "4 bits", (*EDGES, 300)),
        ((70, 192, 32), "a table", EDGES),
    ],
)
def test_a_rows_bits_depend_on_no_other_row_and_no_thread(gemm, shape, form, sizes, dtype):
    R = max(sizes)
    maps = rounding_maps(gemm, shape, FORMS[form], dtype, R)
    maps.check_rows(gemm, random_tensor(R, shape[1], dtype=dtype), sizes)


def test_rows_that_threads_quantize_together_have_the_bits_of_one_thread():
    """Small groups take so much memory that the rows are quantized in two parts."""
    R, N, K = 400, 17, 4096
    x, packed = random_tensor(R, K), cpu.prepack(rounding(N, K, 8, FORMS["8 bits"]))
    sums, rows = random_tensor(R, N, seed=1), torch.arange(R, dtype=torch.int32)
    added = AdapterSums(sums, torch.where(rows % 3 == 0, -1, rows.flip(0)).int())
    outputs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outputs.append(torch.cat([cpu.linear(x, packed, None, added), cpu.lm_head(x, packed)]))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_the_largest_sums_are_exact(gemm):
    the_largest_sums_are_exact(gemm)


def the_largest_sums_are_exact(gemm):
    group = MAX_ROUNDED_GROUP
    for bits, most in ((4, 15), (8, 255)):
        q = torch.tensor([0, most]).byte()[:, None].repeat(1, 2 * group)
        x = torch.ones(3, 2 * group) * torch.tensor([127.0, -127.0, 63.5])[:, None]
        for zero in (None, 0, most):
            zeros = None if zero is None else torch.full((2, 2), zero, dtype=torch.uint8)
            codes = Codes(bits, group, q, torch.ones(2, 2), zeros, rounds_rows=True)
            value = torch.tensor([0, most]) - (codes.middle if zero is None else zero)
            want = x[:, :1] * value * 2 * group
            assert torch.equal(gemm.lm_head(x, gemm.prepack(codes)), want)


@DTYPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_no_other(gemm, bad, dtype):
    x = random_tensor(34, 160, dtype=dtype)
    maps = rounding_maps(gemm, (50, 160, 32), FORMS["4 bits, offsets"], dtype, 34)
    want = maps.outputs(gemm, x, list(range(34)))
    spoiled = [0, 7, 8, 19, 33]
    x[spoiled, 77] = bad
    for rows in (range(34), range(4), range(1)):
        fine = [r for r in rows if r not in spoiled]
        for name, out in maps.outputs(gemm, x[: len(rows)], list(rows)).items():
            assert torch.equal(out[fine], want[name][fine]), name
            assert out[0].isnan().all(), name


BYTES = {"4 bits": 0.5 + 4 / 32, "8 bits": 1 + 4 / 32}


@pytest.mark.parametrize("name", BYTES)
def test_packed_codes_take_no_more_memory_than_with_float_rows(name):
    codes = rounding(64, 4096, 32, FORMS[name])
    packed, plain = (cpu.prepack(codes._replace(rounds_rows=r)).words.nbytes for r in (True, False))
    assert packed == plain == 64 * 4096 * BYTES[name]


def narrow(low, high, group, scale, offset=None, zero=None, N=50, K=512, **others):
    """Codes from `low` to `high` that round rows."""
    draw = torch.Generator().manual_seed(0)
    shape = N, K // group
    q = torch.randint(low, high + 1, (N, K), generator=draw).byte()
    q[0, :2] = torch.tensor([low, high])
    numbers = {
        "singles": lambda: torch.randn(shape, generator=draw),
        "bf16": lambda: torch.randn(shape, generator=draw).bfloat16().float(),
        "halves": lambda: torch.randn(shape, generator=draw).half().float(),
        "tiny halves": lambda: torch.randint(-1023, 1024, shape, generator=draw) * 2.0**-24,
        "zeros": lambda: torch.zeros(shape),
        "products": lambda: (
            torch.randn(N, K // 256, generator=draw)
            .half()
            .float()
            .repeat_interleave(256 // group, 1)
            * torch.randint(-128, 128, shape, generator=draw)
        ),
        "small products": lambda: (
            torch.rand(N, K // 256, generator=draw)
            .half()
            .float()
            .repeat_interleave(256 // group, 1)
            * -torch.randint(0, 64, shape, generator=draw)
        ),
    }
    offset = None if offset is None else numbers[offset]()
    zero = None if zero is None else torch.full(shape, zero, dtype=torch.uint8)
    bits = 4 if high < 16 else 8
    return Codes(bits, group, q, numbers[scale](), zero, offset, rounds_rows=True, **others)


SINGLES, BF16S, HALVES, PRODUCTS = range(4)
NARROW = {  # codes, bits, scaling, bytes of a group of the 50 columns' two panels
    "Q4_0": (narrow(0, 15, 32, "halves"), 4, HALVES, 512 + 64),
    "Q4_1": (narrow(0, 15, 32, "halves", "halves", 0), 4, HALVES, 512 + 128),
    "Q4_1 of bf16": (narrow(0, 15, 32, "bf16", "bf16", 0), 4, BF16S, 512 + 128),
    "Q5_0": (narrow(112, 143, 32, "halves"), 5, HALVES, 640 + 64),
    "Q5_0 of bf16": (narrow(112, 143, 32, "bf16"), 5, BF16S, 640 + 64),
    "Q5_1": (narrow(112, 143, 32, "halves", "halves", 112), 5, HALVES, 640 + 128),
    "Q8_0": (narrow(0, 255, 32, "tiny halves"), 8, HALVES, 1024 + 64),
    "Q4_K": (narrow(0, 15, 32, "small products", "products", 0), 4, PRODUCTS, 512 + 64 + 16),
    "Q5_K": (narrow(112, 143, 32, "products", "small products", 112), 5, PRODUCTS, 640 + 64 + 16),
    "Q6_K": (narrow(96, 159, 16, "products"), 6, PRODUCTS, 384 + 32 + 4),
    "Q6_K and Q4_K": (narrow(120, 159, 16, "products", "zeros", 120), 6, PRODUCTS, 384 + 64 + 8),
    "IQ4_XS": (narrow(0, 15, 32, "products", table=VALUES), 4, PRODUCTS, 512 + 32 + 8),
    "zeros": (narrow(0, 15, 32, "halves", zero=7), 4, HALVES, 512 + 64 + 64),
    "8 bits and offsets": (narrow(0, 255, 32, "halves", "halves"), 8, HALVES, 1024 + 128),
    "w4": (narrow(0, 15, 64, "bf16"), 4, BF16S, 1024 + 64),
    "w4 in a byte": (narrow(120, 135, 64, "bf16"), 4, BF16S, 1024 + 64),
    "5 bits in groups of 64": (narrow(112, 143, 64, "bf16"), 8, BF16S, 2048 + 64),
    "one code more": (narrow(112, 144, 32, "halves"), 8, HALVES, 1024 + 64),
    "one code less": (narrow(95, 158, 16, "halves"), 8, HALVES, 512 + 64),
    "offsets of another form": (narrow(0, 15, 32, "bf16", "products", 0), 4, SINGLES, 512 + 256),
}


@pytest.mark.pairs
@pytest.mark.parametrize("case", NARROW.values(), ids=NARROW)
def test_codes_and_scales_take_few_bits_and_have_the_bits_of_the_reference(gemm, case):
    codes, bits, scaling, group_bytes = case
    N, K = codes.q.shape
    R = 45
    x = random_tensor(R, K)
    both = (codes, codes.take(torch.arange(2 * N) % N))
    maps, want = (maps_of(ops, *both, torch.float32, R) for ops in (gemm, reference))
    packed = gemm.prepack(codes)
    assert (packed.kind.bits, packed.kind.scaling) == (bits, scaling)
    table = 64 if codes.table else 0
    assert packed.words.nbytes == 2 * K // codes.group * group_bytes + table
    want = want.outputs(reference, x, list(range(R)))
    for n in (1, 2, 3, 4, 5, 8, 13, 17, R):
        got = maps.outputs(gemm, x[:n], list(range(n)))
        assert all(torch.equal(got[name], want[name][:n]) for name in EXACT)


@pytest.mark.parametrize("group", [16, 32])
def test_a_scale_that_no_narrow_form_holds_keeps_its_bits(group):
    exact = narrow(0, 255, group, "products")
    for at, other in ((0, 1e-9), (5, float("nan")), (7, 3e38), (-1, 1 + 2.0**-23)):
        scale = exact.scale.clone()
        scale.view(-1)[at] = other
        codes = exact._replace(scale=scale)
        packed = cpu.prepack(codes)
        assert packed.kind.scaling == SINGLES
        x = random_tensor(3, 512)
        want = reference.lm_head(x, codes)
        torch.testing.assert_close(cpu.lm_head(x, packed), want, rtol=0, atol=0, equal_nan=True)


def test_zeros_with_offsets_are_folded_into_codes_exactly():
    codes = narrow(112, 143, 32, "halves", "halves", 112)
    folded = codes.without_zeros()
    assert folded.zero is None and torch.equal(folded.offset, codes.offset)
    assert torch.equal(folded.widen(torch.float32), codes.widen(torch.float32))
    wide = narrow(0, 255, 32, "halves", "halves", 0)  # no byte holds 255 - 0 + 128
    assert torch.equal(wide.without_zeros().offset, wide.centered().offset)


def test_codes_that_cannot_round_rows_are_refused():
    for other in (
        random_codes(4, 514, 4, 257),
        random_codes(4, 300, 8, 300, has_zero=True),
        random_codes(1, MAX_ROUNDED + 1, 8, MAX_ROUNDED + 1),
    ):
        with pytest.raises(
            AssertionError,
            match="at most 256 columns; or 8 bits, one scale per row and at most 65536",
        ):
            cpu.prepack(other._replace(rounds_rows=True))


@DTYPES
def test_a_recorded_forward_has_the_bits_of_its_ops(dtype):
    weights = (rounding(n, 64, 32, FORMS["4 bits, offsets"], n) for n in (64, 128))
    packed = (cpu.prepack(w, is_gated) for w, is_gated in zip(weights, (False, True), strict=True))
    model = Coded(cpu, (random_tensor(50, 64, dtype=dtype), *packed), dtype)
    program, eager = (make(model, STEP.kv, 40, 4) for make in (cpu.program, made))
    for n in (1, 5, 40):
        ids, read = torch.arange(n), torch.tensor([0])
        want, got = eager.run(STEP.rows(), ids, read), program.run(STEP.rows(), ids, read)
        assert torch.equal(got.residual, want.residual) and torch.equal(got.logits, want.logits)


ARM_ROWS = 1, 2, 3, 4, 9  # of 4 bits, more than 8 multiply decoded codes


def has_bits_of_the_reference(shape, form, dtype, num_rows):
    x = random_tensor(max(num_rows), shape[1], dtype=dtype)
    packed, codes = (rounding_maps(ops, shape, form, dtype, len(x)) for ops in (cpu, reference))
    check_bits(packed, codes, x, num_rows, EXACT)


@pytest.mark.slow
@pytest.mark.usefixtures("arm_level")
@FORM
def test_rounded_groups_on_arm_too(form):
    for dtype, shape in itertools.product(
        (torch.float32, torch.bfloat16), ((40, 96, 32), (17, 63, 7))
    ):
        has_bits_of_the_reference(shape, form, dtype, ARM_ROWS)


@pytest.mark.slow
@pytest.mark.usefixtures("arm_level")
def test_the_largest_sums_are_exact_on_arm_too():
    the_largest_sums_are_exact(cpu)


@pytest.mark.slow
@pytest.mark.usefixtures("arm_level")
def test_narrow_codes_have_the_bits_of_the_reference_on_arm_too():
    for codes, *_ in NARROW.values():
        packed, x = cpu.prepack(codes), random_tensor(9, codes.q.shape[1])
        for n in ARM_ROWS:
            assert torch.equal(cpu.lm_head(x[:n], packed), reference.lm_head(x[:n], codes))
