"""LoRA adapters: what they add, to which rows, and the bits of all rows of a step."""

import pytest
import torch

from specserve_kernels import AdapterRows, cpu, reference
from specserve_kernels.ops import EagerProgram
from tests.kernels.builds import BUILDS, HAS_GPU, ON_GPU, cuda, placed, recorded
from tests.kernels.levels import EVERY_LEVEL, EVERY_LEVEL_AND_ARM
from tests.kernels.maps import random_codes
from tests.kernels.random_steps import RandomStep, Req, random_tensor, row_errors

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # of a row, relative to its norm
NUM_SLOTS, RANK, K, N = 5, 12, 70, 90
EMPTY = 3  # the slot whose adapter leaves the map as it is
FORMS = [None, (8, False), (4, False), (8, True)]


def step(slots):
    """A step whose rows have these slots; -1: none."""
    told = None if slots is None else AdapterRows.of(slots, NUM_SLOTS)
    one = RandomStep([Req(1, len(slots))])
    return one.rows()._replace(adapters=told), one.kv


class Map:
    """A linear map of each op, its adapters, and rows for them."""

    def __init__(self, ops, kind, dtype, form=None):
        self.ops, self.kind, self.dtype = ops, kind, dtype
        columns = 2 * N if kind == "gated" else N
        self.bias = random_tensor(columns, dtype=dtype, seed=3)
        self.packed = ops.prepack(self.weight(columns, form), kind == "gated")
        self.slots = ops.adapter_slots(NUM_SLOTS, RANK, columns, K, dtype)
        self.pairs = [
            (
                random_tensor(RANK, K, dtype=dtype, seed=10 + s) / 8,
                random_tensor(columns, RANK, dtype=dtype, seed=20 + s),
            )
            for s in range(NUM_SLOTS)
        ]
        for s, pair in enumerate(self.pairs):
            self.slots.put(s, None if s == EMPTY else self.slots.packed(*pair))

    def weight(self, columns, form):
        if form is None:
            return random_tensor(columns, K, dtype=self.dtype, seed=2)
        bits, rounds_rows = form
        group = K if rounds_rows else 10
        codes = random_codes(columns, K, bits, group, has_zero=not rounds_rows, seed=2)
        return codes._replace(rounds_rows=rounds_rows)

    def rows(self, R, seed=7):
        residual = random_tensor(R, N, dtype=self.dtype, seed=seed + 1)
        return random_tensor(R, K, dtype=self.dtype, seed=seed), residual

    def run(self, x, residual, slots):
        rows, kv = step(slots)
        if all(s < 0 for s in slots):
            rows = rows._replace(adapters=None)
        added = self.ops.adapted(x, self.slots, self.ops.plan(rows, kv, 2))
        args = x, self.packed, self.bias
        match self.kind:
            case "plain":
                return self.ops.linear(*args, added)
            case "add":
                return self.ops.linear_add(*args, residual.clone(), 0.5, added)
            case "gated":
                return self.ops.linear_gated(*args, added=added)

    def merged(self, x, residual, slots):
        """The same in float64, with an adapter's matrices merged into the weight."""
        weight = self.weight(2 * N if self.kind == "gated" else N, None).double()
        out = []
        for row, more, slot in zip(x.double(), residual.double(), slots, strict=True):
            own = weight
            if slot >= 0 and slot != EMPTY:
                down, up = self.pairs[slot]
                own = weight + up.double() @ down.double()
            y = own @ row + self.bias.double()
            match self.kind:
                case "plain":
                    out.append(y)
                case "add":
                    out.append(more + 0.5 * y)
                case "gated":
                    gate, up = y.chunk(2)
                    out.append(torch.nn.functional.silu(gate) * up)
        return torch.stack(out)


KINDS = pytest.mark.parametrize("kind", ["plain", "add", "gated"])
MIXED = [0, -1, 4, 2, -1, 3, 0, 1, 4, -1, 0]


@BUILDS
@DTYPES
@KINDS
def test_a_rows_adapter_is_as_if_it_were_merged_into_the_weight(ops, dtype, kind):
    one = Map(ops, kind, dtype)
    x, residual = one.rows(len(MIXED))
    got, want = one.run(x, residual, MIXED), one.merged(x, residual, MIXED)
    assert row_errors(got, want.float()).max() < TOLERANCE[dtype]
    without = one.run(x, residual, [-1] * len(MIXED))
    changed = (got != without).any(dim=1).tolist()
    assert changed == [s not in (-1, EMPTY) for s in MIXED]


@pytest.mark.pairs
@EVERY_LEVEL_AND_ARM
@DTYPES
@KINDS
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_build_adds_what_the_reference_adds(form, kind, dtype):
    maps = [Map(ops, kind, dtype, form) for ops in (cpu, reference)]
    x, residual = maps[0].rows(len(MIXED))
    got, want = (one.run(x, residual, MIXED) for one in maps)
    assert row_errors(got, want).max() < TOLERANCE[dtype]


@BUILDS
@KINDS
def test_rows_without_an_adapter_have_the_bits_of_a_step_without_any(ops, kind):
    one = Map(ops, kind, torch.bfloat16)
    x, residual = one.rows(len(MIXED))
    got, want = (one.run(x, residual, slots) for slots in (MIXED, [-1] * len(MIXED)))
    base = [i for i, slot in enumerate(MIXED) if slot < 0]
    assert torch.equal(got[base], want[base])


def assert_equal_bits(ops, kind, dtype, form, numbers):
    most = max(numbers)
    one = Map(ops, kind, dtype, form)
    x, residual = one.rows(most)
    slots = torch.randint(-1, NUM_SLOTS, (most,), generator=torch.Generator().manual_seed(1))
    want = one.run(x, residual, slots.tolist())
    for R in numbers:
        order = torch.randperm(most, generator=torch.Generator().manual_seed(R))[:R]
        got = one.run(x[order], residual[order], slots[order].tolist())
        assert torch.equal(got, want[order]), f"{R} rows have other bits than {most}"


@pytest.mark.pairs
@EVERY_LEVEL
@DTYPES
@KINDS
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_row_has_the_same_bits_among_any_others(form, kind, dtype):
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert_equal_bits(cpu, kind, dtype, form, [1, 2, 3, 7, 16, 17, 33, 64, 130])


@BUILDS
@KINDS
def test_a_row_has_the_same_bits_among_any_others_in_each_build(ops, kind):
    if HAS_GPU and ops is placed:
        pytest.skip("cuBLAS sums a row in another order beside other rows")
    assert_equal_bits(ops, kind, torch.bfloat16, None, [1, 2, 7, 17, 33])


@BUILDS
def test_what_is_put_into_a_slot_replaces_what_was_there(ops):
    one = Map(ops, "plain", torch.float32)
    x, residual = one.rows(4)
    before = one.run(x, residual, [0, 0, 1, -1])
    one.slots.put(0, one.slots.packed(*one.pairs[1]))
    assert torch.equal(one.run(x, residual, [0, 0, 1, -1]), one.run(x, residual, [1, 1, 1, -1]))
    one.slots.put(0, one.slots.packed(*one.pairs[0]))
    assert torch.equal(one.run(x, residual, [0, 0, 1, -1]), before)
    one.slots.put(0, None)
    assert torch.equal(one.run(x, residual, [0, 0, 1, -1])[:2], one.run(x, residual, [-1] * 4)[:2])


@pytest.mark.parametrize(
    ("slots", "order", "begins", "places"),
    [
        ([1, -1, 0, 1], [2, 0, 3], [0, 1, 3, 3], [1, -1, 0, 2]),
        ([-1, -1], [], [0, 0, 0, 0], [-1, -1]),
        ([2], [0], [0, 0, 0, 1], [0]),
    ],
)
def test_rows_are_listed_by_slot_in_their_order(slots, order, begins, places):
    told = AdapterRows.of(slots, 3)
    assert [x.tolist() for x in told] == [order, begins, places]
    assert all(x.dtype == torch.int32 for x in told)


class OneMap:
    """A model that is one map of each kind, with adapters."""

    num_heads, windows = 2, (None,)

    def __init__(self, ops, maps):
        self.ops, self.maps = ops, maps

    def on(self, ops):
        return OneMap(ops, self.maps)

    def embed(self, token_ids):
        return self.ops.embed(self.maps["table"], token_ids, torch.bfloat16)

    def plan(self, rows, kv, also=()):
        return self.ops.plan(rows, kv, 2, self.windows, also)

    def forward(self, residual, kv, plan, aux_layer_ids=()):
        ops, (gated, add) = self.ops, (self.maps[kind] for kind in ("gated", "add"))
        h = ops.linear_gated(
            residual, gated.packed, None, added=ops.adapted(residual, gated.slots, plan)
        )
        return ops.linear_add(
            residual, add.packed, None, h, 1.0, ops.adapted(residual, add.slots, plan)
        ), {}

    def logits(self, residual, rows):
        return self.ops.take_rows(residual, rows)


@EVERY_LEVEL
def test_a_program_gives_the_bits_of_ops_that_are_called_one_by_one():
    maps = {kind: Map(cpu, kind, torch.bfloat16) for kind in ("gated", "add")}
    model = OneMap(cpu, maps | {"table": random_tensor(20, K, dtype=torch.bfloat16)})
    kv = RandomStep([Req(1, 4)]).kv
    program = cpu.program(model, kv, 2, 2)
    names = program.native_ops
    assert names.count("adapter_maps") == 4 and not program.host_ops
    for slots in ([0, -1], [-1, -1], [4, 4, 3, -1, 2, 0], [-1] * 6, [1]):
        rows, _ = step(slots)
        ids = torch.arange(len(slots))
        for told in (rows, rows._replace(adapters=None)) if max(slots) < 0 else (rows,):
            got = program.run(told, ids, ids)
            want = EagerProgram(model, kv).run(told, ids, ids)
            assert torch.equal(got.residual, want.residual), slots
            assert torch.equal(got.logits, want.logits), slots


@ON_GPU
def test_a_recorded_step_has_the_bits_of_the_step_op_by_op(monkeypatch):
    """With adapters or without, from token ids or from a residual."""
    monkeypatch.setattr(cuda, "flashinfer", None)
    maps = {kind: Map(placed, kind, torch.bfloat16) for kind in ("gated", "add")}
    table = cuda.place(random_tensor(20, K, dtype=torch.bfloat16))
    model, kv = OneMap(cuda, maps | {"table": table}), RandomStep([Req(1, 4)]).kv
    program, eager = recorded(model, kv), EagerProgram(model, kv)
    for slots in ([0, -1], [4, 4, 3, -1, 2, 0], [-1] * 6, [1], [0, 1, 2, -1, 4, 3, 3], [2, 4]):
        rows, _ = step(slots)
        if max(slots) < 0:
            rows = rows._replace(adapters=None)
        ids = torch.arange(len(slots))
        residual = cuda.place(random_tensor(len(slots), K, dtype=torch.bfloat16, seed=sum(slots)))
        for entry in (None, residual):
            got = program.run(rows, ids, ids, residual=entry)
            got = [x.cpu().clone() for x in (got.residual, got.logits)]
            want = eager.run(rows, ids, ids, residual=entry)
            assert torch.equal(got[0], want.residual.cpu()), (slots, entry is None)
            assert torch.equal(got[1], want.logits.cpu()), (slots, entry is None)
    assert program.eager.residual is None, "a step was not recorded"
    assert len(program.recordings) == 8 == len(set(program.recordings))
