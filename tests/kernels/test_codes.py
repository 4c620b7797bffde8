"""Linear maps of 4- and 8-bit codes: what they mean, and that every level computes it."""

import itertools

import pytest
import torch

from specserve_kernels import Codes, codes, cpu, reference
from specserve_kernels.ops import EagerProgram
from tests.kernels.levels import EVERY_LEVEL_AND_ARM
from tests.kernels.maps import VALUES, maps_of, random_codes
from tests.kernels.random_steps import RandomStep, Req, random_tensor, row_errors

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
BUILDS = pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
BITS = pytest.mark.parametrize("bits", [4, 8])
FORMS = {"no zeros": {}, "zeros": {"has_zero": True}, "offsets": {"has_offset": True}}
FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)

SHAPES = {  # N, K, group
    "several groups of a block": (33, 160, 32),
    "a group is half a block": (50, 192, 64),
    "a group is a block": (331, 256, 128),
    "a group of several blocks": (20, 576, 288),
    "many groups of a block": (65, 304, 16),
    "odd groups": (17, 63, 7),
    "groups that are padded": (40, 300, 100),
    "a channel": (50, 150, 150),
    "a long channel": (33, 2101, 2101),
    "one code": (1, 1, 1),
}
EACH = pytest.mark.parametrize(("N", "K", "group"), SHAPES.values(), ids=SHAPES)

TABLE = {  # bits, q, scale, zero, offset -> values, in groups of 2
    "the middle is zero": (4, [8, 9, 0, 15], [1.0, 2.0], None, None, [0, 1, -16, 14]),
    "and of 8 bits": (8, [128, 129, 0, 255], [1.0, 0.5], None, None, [0, 1, -64, 63.5]),
    "a zero per group": (4, [0, 15, 0, 15], [1.0, 2.0], [0, 15], None, [0, 15, -30, 0]),
    "a zero beyond all codes": (4, [0, 15, 0, 8], [1.0, 2.0], [16, 0], None, [-16, -1, 0, 16]),
    "a zero of 8 bits": (8, [0, 255, 0, 255], [1.0, 2.0], [255, 0], None, [-255, 0, 0, 510]),
    "an offset per group": (4, [8, 9, 0, 15], [1.0, 2.0], None, [0.5, -6.0], [0.5, 1.5, -22, 8]),
    "beside a zero": (8, [0, 31, 120, 121], [0.5, 2.0], [0, 120], [-8, 0.5], [-8, 7.5, 0.5, 2.5]),
    "codes without a meaning": (8, [0, 255, 0, 15], [0.0, 0.0], [0, 9], [3.0, 0.0], [3, 3, 0, 0]),
    "codes that drown": (
        4,
        [0, 15, 0, 15],
        [1e-38, -1e-12],
        None,
        [2048.0, -2.5],
        [2048, 2048, -2.5, -2.5],
    ),
}


def codes_of(bits, q, scale, zero, offset):
    zero = None if zero is None else torch.tensor([zero], dtype=torch.uint8)
    offset = None if offset is None else torch.tensor([offset], dtype=torch.float32)
    q, scale = torch.tensor([q], dtype=torch.uint8), torch.tensor([scale])
    return Codes(bits, 2, q, scale, zero, offset)


@BUILDS
@DTYPES
@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_a_value_is_a_code_less_its_zero_times_its_scale(ops, row, dtype):
    *parts, want = row
    got = ops.linear(torch.eye(4, dtype=dtype), ops.prepack(codes_of(*parts)))
    assert torch.equal(got[:, 0], torch.tensor(want, dtype=dtype))


@BUILDS
@DTYPES
def test_a_value_may_be_an_entry_of_a_table(ops, dtype):
    q = torch.tensor([[0, 15, 7, 8]], dtype=torch.uint8)
    made = Codes(4, 2, q, torch.tensor([[1.0, 0.5]]), table=VALUES)
    want = torch.tensor([-128, 127, -5, 0.5], dtype=dtype)
    assert torch.equal(ops.linear(torch.eye(4, dtype=dtype), ops.prepack(made))[:, 0], want)
    assert torch.equal(made.without_table().widen(dtype), made.widen(dtype))


@pytest.mark.pairs
@DTYPES
@EACH
def test_codes_with_a_table_have_the_bits_of_8_bit_codes(gemm, N, K, group, dtype):
    x = random_tensor(45, K, dtype=dtype)
    both = [random_codes(n, K, 4, group, has_table=True) for n in (N, 2 * N)]
    with_table = maps_of(gemm, *both, dtype, 45)
    without = maps_of(gemm, *(codes.without_table() for codes in both), dtype, 45)
    for n in (1, 3, 45):
        want = without.outputs(gemm, x[:n], list(range(n)))
        for name, got in with_table.outputs(gemm, x[:n], list(range(n))).items():
            assert torch.equal(got, want[name]), (name, n)
    with_table.check(with_table.outputs(gemm, x, list(range(45))), x)


@FORM
def test_values_are_the_same_in_pieces(form, monkeypatch):
    made = random_codes(7, 96, 4, 32, **form)
    whole = made.widen(torch.bfloat16)
    monkeypatch.setattr(codes, "WIDENED", 3 * 96)
    assert torch.equal(made.widen(torch.bfloat16), whole)


@BITS
@FORM
@DTYPES
def test_the_reference_widens_codes(bits, form, dtype):
    codes, x = random_codes(50, 96, bits, 32, **form), random_tensor(5, 96, dtype=dtype)
    want = x.double() @ codes.widen(torch.float32).double().T
    got = reference.linear(x, reference.prepack(codes))
    assert (row_errors(got, want) < {torch.float32: 1e-5, torch.bfloat16: 6e-3}[dtype]).all()


def code_maps(gemm, shape, bits, form, dtype, num_rows):
    N, K, group = shape
    both = (random_codes(n, K, bits, group, seed=n, **form) for n in (N, 2 * N))
    return maps_of(gemm, *both, dtype, num_rows)


@pytest.mark.pairs
@DTYPES
@BITS
@FORM
@EACH
def test_the_error_is_within_the_bound_of_its_roundings(gemm, N, K, group, bits, form, dtype):
    R = 45
    maps = code_maps(gemm, (N, K, group), bits, form, dtype, R)
    x = random_tensor(R, K, dtype=dtype)
    maps.check(maps.outputs(gemm, x, list(range(R))), x)


EVERY = (*range(1, 131), 513)
EDGES = (1, 2, 3, 5, 6, 7, 13, 14, 15, 16, 17, 31, 32, 33, 64, 130)  # of blocks of rows


@pytest.mark.pairs
@DTYPES
@BITS
@pytest.mark.parametrize(
    ("shape", "sizes", "form"),
    [
        ((50, 64, 32), EVERY, "no zeros"),
        pytest.param((50, 64, 32), EVERY, "offsets", marks=pytest.mark.slow),
        pytest.param((331, 152, 8), EDGES, "zeros", marks=pytest.mark.slow),
        ((331, 152, 8), EDGES, "offsets"),
        ((33, 1030, 515), (*EDGES, 300), "zeros"),
        ((33, 1030, 515), (*EDGES, 300), "offsets"),
    ],
)
def test_a_rows_bits_depend_on_no_other_row_and_no_thread(gemm, shape, sizes, form, bits, dtype):
    R = max(sizes)
    maps = code_maps(gemm, shape, bits, FORMS[form], dtype, R)
    maps.check_rows(gemm, random_tensor(R, shape[1], dtype=dtype), sizes)


@DTYPES
@BITS
@EACH
def test_a_row_that_is_not_finite_spoils_no_other(gemm, N, K, group, bits, dtype):
    x = random_tensor(34, K, dtype=dtype)
    maps = code_maps(gemm, (N, K, group), bits, FORMS["offsets"], dtype, 34)
    want = maps.outputs(gemm, x, list(range(34)))
    spoiled = [0, 7, 8, 19, 33]
    x[spoiled] = float("nan")
    for rows in (range(34), range(4), range(1)):
        fine = [r for r in rows if r not in spoiled]
        for name, out in maps.outputs(gemm, x[: len(rows)], list(rows)).items():
            assert torch.equal(out[fine], want[name][fine]), name
            assert not out[0].isfinite().any(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "bytes_a_code"), [(4, 0.5), (8, 1.0)])
def test_codes_take_as_many_bits_as_they_have(bits, bytes_a_code, dtype):
    """And a float for each group, and two bytes for its zero, or a float for its offset."""
    for more, form in ((0, "no zeros"), (2, "zeros"), (4, "offsets")):
        for group in (16, 32, 128, 4096):
            words = cpu.prepack(random_codes(64, 4096, bits, group, **FORMS[form])).words
            assert words.nbytes == 64 * 4096 * (bytes_a_code + (4 + more) / group)


def test_codes_of_another_shape_are_refused():
    codes = random_codes(4, 32, 4, 8, has_offset=True)
    with pytest.raises(AssertionError, match="group size 5 does not divide the 32"):
        cpu.prepack(codes._replace(group=5))
    with pytest.raises(AssertionError, match="scale needs one float32 value per group"):
        cpu.prepack(codes._replace(scale=codes.scale[:, :2]))
    with pytest.raises(AssertionError, match="zero needs one uint8 value per group"):
        cpu.prepack(codes._replace(zero=codes.zero[:2]))
    with pytest.raises(AssertionError, match="offset needs one float32 value per group"):
        cpu.prepack(codes._replace(offset=codes.offset.double()))
    with pytest.raises(AssertionError, match="a table needs 16 values, 4 bits, no zeros"):
        cpu.prepack(codes._replace(table=VALUES))
    with pytest.raises(AssertionError, match="codes of 4 or 8 bits, not 3 bits"):
        cpu.prepack(codes._replace(bits=3))


class Coded:
    """A model of a table and maps of codes, and what may follow them."""

    def __init__(self, ops, weights, dtype):
        self.ops, self.weights, self.dtype = ops, weights, dtype

    def on(self, ops):
        return Coded(ops, self.weights, self.dtype)

    def plan(self, rows, kv, also=()):
        return self.ops.plan(rows, kv, STEP.num_heads, [None], also)

    def embed(self, token_ids):
        return self.ops.embed(self.weights[0], token_ids, self.dtype)

    def forward(self, x, kv, plan, aux_layer_ids=()):
        _, plain, gated = self.weights
        x = self.ops.linear_add(self.ops.linear(x, plain), plain, None, x)
        return self.ops.linear_gated(x, gated), {}

    def logits(self, residual, rows):
        return self.ops.lm_head(self.ops.take_rows(residual, rows), self.weights[1])


STEP = RandomStep([Req(20, 5)])


TABLES = {  # V, K, group
    "a scale for a row of odd width": (9, 331, 331),
    "odd groups": (9, 63, 7),
    "groups of a vector": (9, 96, 16),
}


@EVERY_LEVEL_AND_ARM
@pytest.mark.parametrize(("V", "K", "group"), TABLES.values(), ids=TABLES)
def test_an_embedding_is_the_row_as_it_is_widened(V, K, group):
    """Bit by bit, so that it matters to no text which build embeds."""
    token_ids = torch.tensor([8, 0, 3, 3])
    for dtype, form in itertools.product((torch.float32, torch.bfloat16), FORMS.values()):
        for bits in (4, 8):
            table = random_codes(V, K, bits, group, **form)
            want = table.widen(dtype)[token_ids]
            got = cpu.embed(table, token_ids, dtype)
            assert got.dtype == dtype and torch.equal(got, want)


@DTYPES
@BITS
def test_a_recorded_forward_has_the_bits_of_its_ops(bits, dtype):
    plain = random_codes(64, 64, bits, 32, has_zero=True)
    gated = random_codes(128, 64, bits, 32, has_offset=True)
    table = random_codes(50, 64, bits, 16, has_offset=True)
    weights = table, cpu.prepack(plain), cpu.prepack(gated, True)
    model = Coded(cpu, weights, dtype)
    program, eager = (make(model, STEP.kv, 40, 4) for make in (cpu.program, made))
    assert "gather_codes" in program.native_ops and program.host_ops == []
    for n in (1, 5, 40):
        ids, read = torch.arange(n), torch.tensor([0])
        want, got = eager.run(STEP.rows(), ids, read), program.run(STEP.rows(), ids, read)
        assert torch.equal(got.residual, want.residual) and torch.equal(got.logits, want.logits)


def made(model, kv, *_):
    return EagerProgram(model, kv)


@pytest.mark.usefixtures("every_level_and_arm")
@DTYPES
@BITS
def test_codes_on_arm_too(bits, dtype):
    x = random_tensor(9, 96, dtype=dtype)
    forms = [(24, FORMS["zeros"]), (24, FORMS["offsets"]), (96, FORMS["offsets"])]
    forms += [(24, {"has_table": True})] if bits == 4 else []
    for group, form in forms:
        maps = code_maps(cpu, (40, 96, group), bits, form, dtype, 9)
        maps.check(maps.outputs(cpu, x, list(range(9))), x)
