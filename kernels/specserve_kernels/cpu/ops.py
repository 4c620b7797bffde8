"""The C++ kernels as functions on tensors: each call runs a list of one op."""

from collections.abc import Iterable, Sequence
from ctypes import Structure, addressof
from functools import lru_cache
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve_kernels.codes import GROUP, MAX_ROUNDED, MAX_ROUNDED_GROUP, Codes
from specserve_kernels.cpu import arguments, native
from specserve_kernels.cpu.arguments import (
    ADD,
    CURVES,
    FLOATS,
    GATES,
    PLAIN,
    SCALE,
    SOFT_CAP,
    AttentionPlan,
    Coding,
    Packed,
)
from specserve_kernels.host import allocate
from specserve_kernels.ranks import Gathering, Ranks
from specserve_kernels.states import DeltaParams, MambaParams, Replays, StateLayer
from specserve_kernels.types import (
    NO_WINDOW,
    AdapterSums,
    KVCache,
    KVLayer,
    Logprobs,
    QKNorm,
    Rotary,
    Rows,
    SampleParams,
    Window,
    all_rows,
)

SHORT = 1 << 16  # elements; smaller ops run on one thread, as waking threads takes longer


class CpuPlan(NamedTuple):
    """A step's rows in the kernels' form, and the tensors that own their memory."""

    rows: Rows
    also: Sequence[Tensor]
    native: Any
    attention: AttentionPlan
    num_rows: int


def run(
    name: str,
    args: Structure,
    num_rows: int,
    size: int,
    plan: CpuPlan | None = None,
    token_ids: Tensor | None = None,
    num_adapted: int = 0,
) -> None:
    """Run one op on `num_rows` rows, on all threads if `size` (elements) is at least SHORT."""
    planned = (addressof(plan.native), plan.attention.address) if plan else (None, None)
    ids = None if token_ids is None else token_ids.data_ptr()
    step = native.StepStruct((num_rows, 0, num_adapted), ids, None, *planned)
    ops = (native.Op * 1)(native.Op(native.address(name), addressof(args), 0))
    native.run(ops, step, torch.get_num_threads() if size >= SHORT else 1)


def prepack(weight: Tensor | Codes, is_gated: bool = False) -> Packed:
    return prepack_as(weight, is_gated, None)


def prepack_as(weight: Tensor | Codes, is_gated: bool, wider: Coding | None) -> Packed:
    """Pack a weight. `wider` is the `common_form` of it and others; None: its narrowest form."""
    if isinstance(weight, Codes):
        _check(weight)
        if weight.rounds_rows and weight.are_whole_rows:
            return _prepack_rounding(weight, is_gated)
        return _prepack_codes(weight, is_gated, wider)
    words, N = _pack(weight, is_gated)
    return Packed(words, N, weight.shape[1], is_gated, weight.dtype)


def _pack(weight: Tensor, is_gated: bool, tail: int = 0) -> tuple[Tensor, int]:
    """Return the panels, followed by `tail` free words, and the number of output columns."""
    weight = weight.contiguous()
    rows, K = weight.shape
    N = rows // 2 if is_gated else rows
    kind = weight.itemsize, is_gated
    words = allocate(4 * (native.packed_words(N, K, *kind) + tail)).view(torch.int32)
    fields = "i64 value_bytes is_gated ptr weight packed i64 N K"
    args = native.filled(fields, *kind, weight.data_ptr(), words.data_ptr(), N, K)
    run("pack", args, 1, weight.numel())
    return words, N


def _prepack_rounding(codes: Codes, is_gated: bool) -> Packed:
    rows, K = codes.q.shape
    words, N = _pack(codes.q, is_gated, tail=rows)
    words[-rows:].view(torch.float32).copy_(codes.scale[:, 0])
    return Packed(words, N, K, is_gated, Coding(8, K, False, False, True))


def _prepack_codes(codes: Codes, is_gated: bool, wider: Coding | None) -> Packed:
    codes = codes.without_zeros() if codes.rounds_rows else codes.centered()
    bits, group, q, scale, zero, offset, rounds_rows, table = codes
    q, scale = q.contiguous(), scale.contiguous()
    zero, offset = (None if x is None else x.contiguous() for x in (zero, offset))
    rows, K = q.shape
    N = rows // 2 if is_gated else rows
    form = bits, group, zero is not None, offset is not None
    values = None if table is None else torch.tensor(table, dtype=torch.int8)
    coding, base = Coding(*form, rounds_rows, table is not None), 0
    if rounds_rows:
        narrow = _narrow_form(codes, coding) if wider is None else wider
        base = 128 - narrow.zero if coding.bits == 8 and narrow.bits < 8 else 0
        coding = narrow
        words = allocate(native.integer_bytes(N, K, coding, is_gated))
    else:
        words = allocate(native.code_bytes(N, K, (*form, table is not None), is_gated))
    pointers = (
        None if x is None else x.data_ptr() for x in (q, zero, scale, offset, values, words)
    )
    numbers = N, K, coding.bits, group, is_gated
    fields = "ptr q zero scale offset table packed i64 N K bits group is_gated base scaling"
    args = native.filled(fields, *pointers, *numbers, base, coding.scaling)
    run("pack_integers" if rounds_rows else "pack_codes", args, 1, codes.q.numel())
    return Packed(words, N, K, is_gated, coding)


# Bits, the least code, and the groups of intervals of 8-bit codes that fewer bits hold.
INTERVALS = (4, 120, 0), (4, 128, 0), (5, 112, 32), (5, 128, 32), (6, 96, 16), (6, 128, 16)


def _narrowest(low: int, high: int, group: int) -> tuple[int, int]:
    """Return the fewest bits that hold 8-bit codes from `low` to `high`, and the code of 0 if the
    least code becomes 0.
    """
    for bits, base, only in INTERVALS:
        if only in (0, group) and base <= low and high < base + (1 << bits):
            return bits, 128 - base
    return 8, 0


def _narrow_form(codes: Codes, coding: Coding) -> Coding:
    """Return the smallest form that represents codes that round rows exactly."""
    if codes.bits == 8 and codes.zero is None:
        low, high = (int(x) for x in codes.q.aminmax())
        bits, zero = _narrowest(low, high, codes.group)
    else:
        bits, zero = codes.bits, codes.middle if codes.bits == 4 else 0
    scaling = _scaling(codes.q.shape[1], codes.group, codes.scale, codes.offset)
    return coding._replace(bits=bits, zero=zero, scaling=scaling)


def common_form(forms: Iterable[Coding]) -> Coding | None:
    """Return a form of all codes of narrow forms; None: they differ in more than that."""
    first, *others = forms
    for other in others:
        if first._replace(bits=other.bits, zero=other.zero, scaling=other.scaling) != other:
            return None
        if (first.bits, first.zero) != (other.bits, other.zero):
            both = [f if f.bits < 8 else f._replace(zero=128) for f in (first, other)]
            low = min(128 - f.zero for f in both)
            high = max(127 - f.zero + (1 << f.bits) for f in both)
            bits, zero = _narrowest(low, high, first.group)
            first = first._replace(bits=bits, zero=zero)
        if first.scaling != other.scaling:
            first = first._replace(scaling=SINGLES)
    return first


SINGLES, BF16S, HALVES, PRODUCTS = range(4)  # Scaling in numbers.h
BLOCK = 256  # columns with a common factor, as in numbers.h


def _scaling(K: int, group: int, scale: Tensor, offset: Tensor | None) -> int:
    """Return the first form that represents all scales and offsets exactly."""
    block = BLOCK // group if K % BLOCK == 0 and BLOCK % group == 0 else 0
    exact = native.scalings(scale, block)
    if offset is not None:
        exact &= native.scalings(offset, block)
    return next((form for form in (BF16S, HALVES, PRODUCTS) if exact >> form & 1), SINGLES)


def _check(codes: Codes) -> None:
    bits, group, q, scale, zero, offset, rounds_rows, table = codes
    assert bits in (4, 8) and q.dtype == torch.uint8, (
        f"kernels read uint8 codes of 4 or 8 bits, not {bits} bits in {q.dtype}"
    )
    assert q.shape[1] % group == 0, f"group size {group} does not divide the {q.shape[1]} columns"
    shape = q.shape[0], q.shape[1] // group
    assert scale.shape == shape and scale.dtype == torch.float32, (
        "scale needs one float32 value per group"
    )
    is_zero = zero is None or (zero.shape == shape and zero.dtype == torch.uint8)
    assert is_zero, "zero needs one uint8 value per group"
    is_offset = offset is None or (offset.shape == shape and offset.dtype == torch.float32)
    assert is_offset, "offset needs one float32 value per group"
    is_plain = bits == 4 and zero is None and offset is None
    assert table is None or (is_plain and len(table) == 16), (
        "a table needs 16 values, 4 bits, no zeros and no offsets"
    )
    may_round = (
        f"rounding rows needs groups of at most {MAX_ROUNDED_GROUP} columns; or 8 bits, one scale "
        f"per row and at most {MAX_ROUNDED} columns"
    )
    assert codes.may_round_rows or not rounds_rows, may_round


def quantize(weight: Tensor, bits: int) -> Codes:
    weight = weight.contiguous()
    N, K = weight.shape
    group = GROUP if bits == 4 else K
    assert bits in (4, 8) and K % group == 0, f"{K} columns cannot be quantized to {bits}-bit codes"
    # Not allocated with malloc: freeing it would leave a hole in the heap between weights.
    q, scale = allocate(N * K).view(N, K), torch.empty(N, K // group)
    pointers = weight.data_ptr(), q.data_ptr(), scale.data_ptr()
    args = native.filled(
        "i64 is_bf16 bits ptr weight q scale i64 N K", native.is_bf16(weight), bits, *pointers, N, K
    )
    run("quantize", args, 1, weight.numel())
    return Codes(bits, group, q, scale)


def linear(
    x: Tensor, packed: Packed, bias: Tensor | None = None, added: AdapterSums | None = None
) -> Tensor:
    return _multiply(x, packed, bias, x.new_empty(len(x), packed.N), PLAIN, added=added)


def lm_head(x: Tensor, packed: Packed) -> Tensor:
    out = x.new_empty(len(x), packed.N, dtype=torch.float32)
    return _multiply(x, packed, None, out, FLOATS)


def linear_add(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    residual: Tensor,
    factor: float = 1.0,
    added: AdapterSums | None = None,
) -> Tensor:
    assert len(residual) == len(x), "residual and x differ in their number of rows"
    return _multiply(x, packed, bias, residual, ADD, factor, added)


def linear_gated(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None = None,
    gate: str = "silu",
    added: AdapterSums | None = None,
) -> Tensor:
    return _multiply(x, packed, bias, x.new_empty(len(x), packed.N), GATES[gate], added=added)


def _multiply(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    out: Tensor,
    epilogue: int,
    factor: float = 1.0,
    added: AdapterSums | None = None,
) -> Tensor:
    args = arguments.linear(0, x, packed, bias, out, epilogue, factor, added)
    num_adapted = 0 if added is None else len(added.sums)
    run("linear", args, len(x), len(x) * packed.N * packed.K // 4, num_adapted=num_adapted)
    return out


def embed(table: Tensor | Codes, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(table, Tensor):
        return table.index_select(0, token_ids)
    _check(table)
    out = torch.empty(len(token_ids), table.q.shape[1], dtype=dtype)
    args = arguments.gather_codes(table, out)
    run("gather_codes", args, len(out), out.numel(), token_ids=token_ids)
    return out


def copy(x: Tensor) -> Tensor:
    return x.clone()


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(arguments.norm(0, x, weight, out := torch.empty_like(x), eps), out)


def layer_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    out = torch.empty_like(x)
    return _norm(arguments.norm(0, x, weight, out, eps, bias=bias, is_centered=True), out)


def rms_norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor, begin: int = 0) -> Tensor:
    assert len(residual) == len(x), "residual and x differ in their number of rows"
    columns = residual[:, begin : begin + x.shape[1]]
    return _norm(arguments.norm(0, x, weight, columns, eps, adds=True), residual)


def rms_norm_columns(x: Tensor, begin: int, weight: Tensor, eps: float) -> Tensor:
    columns = x[:, begin : begin + len(weight)]
    return _norm(arguments.norm(0, columns, weight, columns, eps), x)


def _norm(args: Structure, out: Tensor) -> Tensor:
    run("norm", args, len(out), out.numel())
    return out


def scale(x: Tensor, factor: float) -> Tensor:
    return _curve(x, SCALE, factor)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return _curve(x, SOFT_CAP, cap)


def activate(x: Tensor, curve: str, alphas: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    return _curve(x, CURVES[curve], *alphas)


def gate_columns(x: Tensor, curve: str, other: Tensor, begin: int) -> Tensor:
    run("gate_columns", arguments.gate_columns(0, x, curve, other, begin), len(x), x.numel())
    return x


def spread_streams(x: Tensor, first: Tensor) -> Tensor:
    out = x.new_empty(len(x), x.shape[1] + first.shape[1])
    return _streams("spread_streams", x, first, out, first.shape[1])


def add_matched(x: Tensor, first: Tensor, total: Tensor) -> Tensor:
    return _streams("add_matched", x, first, total, x.shape[1])


def mix_streams(streams: Tensor, coefficients: Tensor) -> Tensor:
    width = streams.shape[1] // isqrt(coefficients.shape[1])
    return _streams("mix_streams", streams, coefficients, torch.empty_like(streams), width)


def correct_streams(streams: Tensor, x: Tensor, coefficients: Tensor) -> Tensor:
    return _streams("correct_streams", x, coefficients, streams, x.shape[1])


def _streams(name: str, x: Tensor, coefficients: Tensor, out: Tensor, width: int) -> Tensor:
    run(name, arguments.streams(0, x, coefficients, out, width), len(x), out.numel())
    return out


def sparse_gated(x: Tensor, curve: str, deviations: float) -> Tensor:
    out = x.new_empty(len(x), x.shape[1] // 2)
    run("sparse_gated", arguments.sparse_gated(0, x, curve, deviations, out), len(x), x.numel())
    return out


def weigh_columns(x: Tensor, begin: int, weight: Tensor) -> Tensor:
    out = x.new_empty(len(x), len(weight))
    run("weigh_columns", arguments.weigh_columns(0, x, begin, weight, out), len(x), out.numel())
    return out


def _curve(x: Tensor, curve: int, *numbers: float) -> Tensor:
    run("elementwise", arguments.elementwise(0, x, curve, *numbers), len(x), x.numel())
    return x


def plan(
    rows: Rows,
    kv: KVCache,
    num_heads: int,
    windows: Sequence[Window] = NO_WINDOW,
    also: Sequence[Tensor] = (),
    has_plain_scores: bool = True,
) -> CpuPlan:
    made = CpuPlan(rows, also, native.rows_of(rows), AttentionPlan(), len(rows.positions))
    args, _ = arguments.plan_attention(kv, num_heads, windows)
    run("plan_attention", args, made.num_rows, SHORT, made)
    return made


def rope_write_kv(
    qkv: Tensor, rotary: Rotary, norm: QKNorm | None, kv: KVLayer | None, plan: CpuPlan
) -> Tensor:
    q = qkv.new_empty(plan.num_rows, *arguments.num_query_heads(qkv, rotary, kv))
    args = arguments.rope_write_kv(qkv, rotary, norm, kv, q)
    run("rope_write_kv", args, len(q), qkv.numel(), plan)
    return q


def attention(
    q: Tensor,
    kv: KVLayer,
    plan: CpuPlan,
    scale: float,
    window: Window = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    out = torch.empty_like(q)
    args = arguments.attention(q, kv, out, scale, window, soft_cap, sinks)
    run("attention", args, plan.num_rows, SHORT, plan)
    return out.flatten(1)


def gate(x: Tensor, gate: Tensor) -> Tensor:
    run("gate", arguments.gate(0, x, gate), len(x), x.numel())
    return x


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: StateLayer, plan: CpuPlan, form: str
) -> Tensor:
    out = x.new_empty(plan.num_rows, len(weight))
    args, _kept = arguments.causal_conv(x, weight, bias, state, form, out)
    run("causal_conv", args, plan.num_rows, x.numel(), plan)
    return out


def delta_rule(
    qkv: Tensor, x: Tensor, params: DeltaParams, state: StateLayer, plan: CpuPlan
) -> Tensor:
    out = qkv.new_empty(plan.num_rows, len(state.places) * state.shape[1])
    args = arguments.delta_rule(qkv, x, params, state, out)
    run("delta_rule", args, plan.num_rows, SHORT, plan)
    return out


def selective_state_update(
    xbc: Tensor, x: Tensor, params: MambaParams, state: StateLayer, plan: CpuPlan
) -> Tensor:
    out = xbc.new_empty(plan.num_rows, len(state.places) * state.shape[1])
    args = arguments.selective_state_update(xbc, x, params, state, out)
    run("selective_state_update", args, plan.num_rows, SHORT, plan)
    return out


def replay(states: tuple[StateLayer, ...], replays: Replays) -> None:
    args, _kept = arguments.replay(states, replays)
    size = sum(state.kept.shape[1] for state in states) * len(replays.places)
    run("replay", args, len(replays.blocks), size)


def move_kv(kv: KVCache, source: Tensor, target: Tensor) -> None:
    layers = (native.KV * len(kv.layers))(*(arguments.layer(layer) for layer in kv.layers))
    pointers = source.data_ptr(), target.data_ptr()
    fields = "ptr layers i64 num_layers ptr source target i64 num_moves"
    args = native.filled(fields, addressof(layers), len(layers), *pointers, len(source))
    run("move_kv", args, len(source), 0)


def floats(logits: Tensor) -> int:
    """The address of logits."""
    assert logits.dtype == torch.float32 and logits.is_contiguous(), (
        "logits must be contiguous float32"
    )
    return logits.data_ptr()


def sample(logits: Tensor, rows: Tensor, params: SampleParams) -> Tensor:
    n, V = rows.shape[0], logits.shape[1]
    out = torch.empty(n, dtype=torch.int64)
    if rows is all_rows(n) and params is SampleParams.greedy(n):
        call = greedy_call(floats(logits), n, V)
        call.args.out = out.data_ptr()
        native.run(call.ops, call.step, torch.get_num_threads() if call.is_long else 1)
        return out
    args = sample_args(floats(logits), V, rows, params)
    args.out = out.data_ptr()
    run("sample", args, n, n * V if n > 1 else 0)
    return out


def sample_args(logits: int, V: int, rows: Tensor, params: SampleParams) -> Any:
    fields = "ptr logits i64 vocab_size ptr rows i64 num_rows sampling params ptr out"
    places = rows.data_ptr(), rows.shape[0], native.sample_params_of(params)
    return native.filled(fields, logits, V, *places)


class GreedyCall(NamedTuple):
    """A call of `sample` for the most likely tokens of all rows, without the address of `out`."""

    args: Any
    ops: Any
    step: native.StepStruct
    is_long: bool  # it runs on all threads


@lru_cache(maxsize=64)
def greedy_call(logits: int, n: int, V: int) -> GreedyCall:
    """Return the call for logits at an address. A program has them at the same one in each step."""
    args = sample_args(logits, V, all_rows(n), SampleParams.greedy(n))
    ops = (native.Op * 1)(native.Op(native.address("sample"), addressof(args), 0))
    return GreedyCall(args, ops, native.StepStruct((n, 0, 0)), n > 1 and n * V >= SHORT)


def logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, k: int) -> Logprobs:
    n, V = len(rows), logits.shape[1]
    assert k <= V, "k exceeds the vocabulary size"
    ids = torch.empty(n, k, dtype=torch.int64)
    out = Logprobs(torch.empty(n), torch.empty(n, dtype=torch.int64), ids, torch.empty(n, k))
    given = floats(logits), V, rows.data_ptr(), tokens.data_ptr(), n, k
    fields = "ptr logits i64 vocab_size ptr rows tokens i64 num_rows k ptr token rank ids top"
    args = native.filled(fields, *given, *(x.data_ptr() for x in out))
    run("logprobs", args, n, n * V if n > 1 else 0)
    return out


def top_children(logits: Tensor, params: SampleParams, k: int, tau: float) -> tuple[Tensor, Tensor]:
    R, V = logits.shape
    ids, weight = torch.empty(R, k, dtype=torch.int64), torch.empty(R, k)
    asked = native.sample_params_of(params), k, tau, ids.data_ptr(), weight.data_ptr()
    fields = "ptr logits i64 num_rows vocab_size sampling params i64 k f32 tau ptr ids weight"
    args = native.filled(fields, floats(logits), R, V, *asked)
    run("top_children", args, R, R * V if R > 1 else 0)
    return ids, weight


class SlotMaps:
    """One of the two linear maps of each slot's adapter. Programs hold the address of `addresses`,
    so a change of a slot applies from the next step on.
    """

    def __init__(self, num_slots: int, N: int, K: int, dtype: torch.dtype) -> None:
        self.packed: list[Packed | None] = [None] * num_slots
        self.addresses = torch.zeros(num_slots, dtype=torch.int64)  # of packed words; 0: empty slot
        self.form = prepack(torch.zeros(N, K, dtype=dtype))._replace(words=self.addresses)

    def pack(self, weight: Tensor) -> Packed:
        packed = prepack(weight)
        assert packed[1:] == self.form[1:], "the adapter's shape or dtype differs from the slot's"
        return packed

    def put(self, slot: int, packed: Packed | None) -> None:
        self.packed[slot] = packed
        self.addresses[slot] = 0 if packed is None else packed.words.data_ptr()


class CpuMapAdapters:
    """The adapter weights for one linear map [N, K], packed for the C++ kernels."""

    def __init__(self, num_slots: int, rank: int, N: int, K: int, dtype: torch.dtype) -> None:
        self.down = SlotMaps(num_slots, rank, K, dtype)
        self.up = SlotMaps(num_slots, N, rank, dtype)

    def packed(self, down: Tensor, up: Tensor) -> tuple[Packed, Packed]:
        return self.down.pack(down), self.up.pack(up)

    def put(self, slot: int, packed: tuple[Packed, Packed] | None) -> None:
        down, up = packed or (None, None)
        self.down.put(slot, down)
        self.up.put(slot, up)


def adapted(x: Tensor, adapters: CpuMapAdapters, plan: CpuPlan) -> AdapterSums | None:
    adapted_rows = plan.rows.adapters
    if adapted_rows is None:
        return None
    A, down, up = len(adapted_rows.order), adapters.down, adapters.up
    inner, sums = x.new_empty(A, down.form.N), torch.empty(A, up.form.N)
    first = arguments.adapter_maps(x, adapted_rows.order, down, adapted_rows.begins, inner, PLAIN)
    second = arguments.adapter_maps(inner, None, up, adapted_rows.begins, sums, FLOATS)
    run("adapter_maps", first, A, A * x.shape[1] * down.form.N)
    run("adapter_maps", second, A, sums.numel() * down.form.N)
    return AdapterSums(sums, adapted_rows.places)


def all_gather(x: Tensor, gathering: Gathering, reader: int | None = None) -> Tensor:
    out = x.new_empty(len(x), gathering.width)
    args, _ = arguments.all_gather(0, x, gathering, reader, out)
    run("all_gather", args, len(x), 0)
    gathering.ranks.check()
    return out


def take_columns(x: Tensor, begin: int, end: int) -> Tensor:
    return x[:, begin:end].clone(memory_format=torch.contiguous_format)


def send(x: Tensor, ranks: Ranks, other: int) -> Tensor:
    run("send", arguments.message(0, x, ranks, other), len(x), 0)
    ranks.check()
    return x


def receive(rows: Tensor, width: int, dtype: torch.dtype, ranks: Ranks, other: int) -> Tensor:
    out = rows.new_empty(len(rows), width, dtype=dtype)
    run("receive", arguments.message(0, out, ranks, other), len(out), 0)
    ranks.check()
    return out
