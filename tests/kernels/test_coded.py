"""The Triton kernels for maps of codes; test_gpu.py has the sizes that take a GPU."""

import pytest
import torch

from specserve_kernels import reference
from specserve_kernels.cuda.coded import MAX_ROWS
from tests.kernels.builds import HAS_GPU, ON_GPU, placed
from tests.kernels.random_steps import random_tensor
from tests.kernels.test_codes import FORMS, TABLE, codes_of, random_codes

pytestmark = ON_GPU

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
TOLERANCE = {
    FP32: 3e-6 if HAS_GPU else 1e-6,
    BF16: 6e-3,
}  # of an output, by its norm; the interpreter cuts bfloat16 off
KINDS = pytest.mark.parametrize(
    ("bits", "form"), [(4, "no zeros"), (4, "zeros"), (8, "no zeros"), (8, "offsets")]
)
GROUPS = [  # group, K
    (16, 80),
    (32, 256),
    (64, 512),
    (128, 512),
    (20, 60),
    (331, 331),
    (1024, 1024),
]


@pytest.fixture(autouse=True)
def poisoned():
    """What a kernel has not written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def check_close(got, want, roundings=1):
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    limit = roundings * TOLERANCE[got.dtype]
    assert (got.double() - want.double()).norm() < limit * want.double().norm()


@DTYPES
@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_a_value_is_a_code_less_its_zero_times_its_scale(row, dtype):
    *parts, want = row
    packed, values = placed.prepack(codes_of(*parts)), torch.tensor(want, dtype=dtype)
    assert torch.equal(placed.linear(torch.eye(4, dtype=dtype), packed)[:, 0], values)
    assert torch.equal(packed.widen(dtype)[0].cpu(), values)


@pytest.mark.pairs
@DTYPES
@KINDS
@pytest.mark.parametrize(("group", "K"), GROUPS)
def test_few_rows_are_multiplied_as_by_the_reference(group, K, bits, form, dtype):
    weight, gated = (random_codes(n, K, bits, group, seed=n, **FORMS[form]) for n in (9, 18))
    bias, both = (random_tensor(n, dtype=dtype, seed=n) for n in (9, 18))
    x, residual = (random_tensor(5, n, dtype=dtype, seed=n) for n in (K, 9))
    outputs = []
    for ops in (placed, reference):
        packed, gate_up, stream = ops.prepack(weight), ops.prepack(gated, True), residual.clone()
        assert ops.linear_add(x, packed, bias, stream) is stream
        rounded = ops.linear(x, packed), stream, ops.linear_gated(x, gate_up, both)
        outputs.append((*rounded, ops.lm_head(x, packed)))
    for got, want, roundings in zip(*outputs, (1, 1, 3, 1), strict=True):
        check_close(got, want, roundings)


@pytest.mark.parametrize(("R", "N"), [(1, 64), (16, 70), (17, 32), (33, 9), (MAX_ROWS, 33)])
def test_rows_and_outputs_are_dealt_to_programs(R, N):
    codes, x = random_codes(N, 256, 4, 32, True), random_tensor(R, 256)
    check_close(*(ops.linear(x, ops.prepack(codes)) for ops in (placed, reference)))


@pytest.mark.pairs
@DTYPES
@KINDS
@pytest.mark.parametrize(("group", "K"), [(16, 80), (128, 512), (150, 150)])
def test_many_rows_are_multiplied_by_the_widened_weight(group, K, bits, form, dtype):
    R, N = MAX_ROWS + 1, 9
    codes, bias = random_codes(N, K, bits, group, **FORMS[form]), random_tensor(N, dtype=dtype)
    x, residual = (random_tensor(R, n, dtype=dtype, seed=n) for n in (K, N))
    packed = placed.prepack(codes)
    widened, want = packed.widen(FP32).cpu(), codes.centered().widen(FP32)
    if HAS_GPU:  # it rounds a product and a sum once
        check_close(widened, want)
    else:
        assert torch.equal(widened, want)
    weight = packed.widen(dtype).cpu()
    check_close(weight, codes.widen(dtype))
    plain = placed.prepack(weight)
    for op in (placed.linear, placed.lm_head):
        assert torch.equal(op(x, packed), op(x, plain))
    stream, want = (placed.linear_add(x, p, bias, residual.clone()) for p in (packed, plain))
    assert torch.equal(stream, want)


@pytest.mark.pairs
@DTYPES
@pytest.mark.parametrize(("group", "K"), [(16, 144), (128, 512), (150, 150)])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_next_to_any_others(bits, group, K, dtype):
    """Sums of a chunk are exact here: those of the interpreter depend on where a row stands."""
    packed = placed.prepack(random_codes(8, K, bits, group, has_offset=True))
    x = torch.randint(-9, 10, (MAX_ROWS, K), generator=torch.Generator().manual_seed(0)).to(dtype)
    want = placed.linear(x, packed)
    for rows in ([5], [63, 0], [*range(23, 6, -1)]):
        assert torch.equal(placed.linear(x[rows], packed), want[rows])


@pytest.mark.parametrize("R", [3, 40])
def test_a_row_of_nan_stays_alone(R):
    packed = placed.prepack(random_codes(40, 96, 4, 32, has_offset=True))
    x = random_tensor(R, 96)
    want = placed.linear(x, packed)
    x[1] = float("nan")
    got = placed.linear(x, packed)
    others = [0, *range(2, R)]
    assert got[1].isnan().all() and torch.equal(got[others], want[others])


@pytest.mark.parametrize("R", [3, MAX_ROWS + 1])
def test_codes_may_have_a_table(R):
    codes, x = random_codes(40, 96, 4, 32, has_table=True), random_tensor(R, 96)
    check_close(*(ops.linear(x, ops.prepack(codes)) for ops in (placed, reference)))


def test_no_rows_are_no_error():
    packed = placed.prepack(random_codes(6, 32, 4, 16, False))
    none = torch.empty(0, 32)
    assert placed.linear(none, packed).shape == (0, 6)
    assert placed.linear_add(none, packed, None, torch.empty(0, 6)).shape == (0, 6)
    assert placed.linear_gated(none, packed).shape == (0, 3)


def test_rows_with_gaps_are_refused():
    packed = placed.prepack(random_codes(8, 32, 4, 16, False))
    wide = torch.zeros(2, 64)
    with pytest.raises(AssertionError, match="gaps"):
        placed.linear(wide[:, ::2], packed)
    with pytest.raises(AssertionError, match="gaps"):
        placed.linear_add(wide[:, :32].contiguous(), packed, None, wide[:, :8])


CHUNKS = [  # bits, group, K -> columns of a chunk
    (4, 128, 4096, 64),
    (8, 4096, 4096, 64),
    (4, 64, 4864, 64),
    (4, 32, 4096, 32),
    (4, 16, 4096, 16),
    (8, 64, 896, 32),  # of 64 an eighth would be padding
    (4, 64, 576, 16),
]


@pytest.mark.parametrize(("bits", "group", "K", "chunk"), CHUNKS)
def test_codes_take_their_bits_of_memory_and_an_eighth_for_padding(bits, group, K, chunk):
    packed = placed.prepack(random_codes(64, K, bits, group, False))
    assert packed.chunk == chunk
    assert 64 * K * bits <= 8 * packed.words.nbytes <= 64 * K * bits * 9 / 8
