"""Argument structs of C++ ops, from tensors or from a program's buffers."""

import weakref
from collections.abc import Sequence
from ctypes import Structure, addressof, c_int, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve_kernels.codes import Codes
from specserve_kernels.cpu import build, native
from specserve_kernels.ranks import HEADER, Gathering, Ranks
from specserve_kernels.states import DeltaParams, MambaParams, Replays, StateLayer
from specserve_kernels.types import (
    AdapterSums,
    Chunks,
    KVCache,
    KVLayer,
    PackedExperts,
    QKNorm,
    Rotary,
    Window,
)

MAX_HEAD_DIM, MAX_TOKEN = 512, 1 << 15  # as in rows.h and layouts.h
PLAIN, ADD, FLOATS, SILU_MUL, GELU_MUL, CLAMPED_MUL = range(6)  # Epilogue in linear.h
GATES = {"silu": SILU_MUL, "gelu_tanh": GELU_MUL}
SCALE, SOFT_CAP, SILU, GELU, RELU2, XIELU = range(6)  # Curve in layers.cpp
CURVES = {"silu": SILU, "gelu_tanh": GELU, "relu2": RELU2, "xielu": XIELU}
MAX_EXPERTS = 1024  # as in experts.cpp
MAX_STREAMS = 8  # as in streams.cpp
MAX_TAPS, MAX_STATE_DIM = 8, 256  # as in recurrent.cpp
CONV, DELTA, MAMBA = range(3)  # StateKind in recurrent.cpp
STORED = torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn  # in rows.h's order


class Coding(NamedTuple):
    """The form of a packed coded weight; fields as in Codes.

    zero     stored code of 0, if the weight rounds rows and has less than 8 bits
    scaling  `Scaling` in numbers.h, if the weight rounds rows
    """

    bits: int  # also 5 or 6 if the weight rounds rows
    group: int
    has_zeros: bool
    has_offsets: bool
    rounds_rows: bool = False
    has_table: bool = False
    zero: int = 0
    scaling: int = 0


class Packed(NamedTuple):
    """A packed weight. gemm.h defines the layout; gemm_codes.h for codes without `rounds_rows`.

    N is half of the weight's rows if it is gated.
    """

    words: Tensor
    N: int
    K: int
    is_gated: bool
    kind: torch.dtype | Coding  # dtype of rows; codes accept either dtype


class AttentionPlan:
    """The C++ attention plan of a step, which the op `plan_attention` fills."""

    def __init__(self) -> None:
        self.address = native.call("attention_plan", c_void_p)
        free = build.library().specserve_free_attention_plan  # of the library that has made it
        free.restype = None
        weakref.finalize(self, free, c_void_p(self.address))


def linear(
    domain: int,
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    out: Tensor,
    epilogue: int,
    factor: float = 1.0,
    added: AdapterSums | None = None,
) -> Structure:
    assert packed.is_gated == (epilogue >= SILU_MUL), "the weight is packed for another op"
    assert x.shape[1] == packed.K, "the rows' width differs from the weight's K"
    assert out.shape[1] == packed.N, "the output's width differs from the weight's N"
    coding = packed.kind if isinstance(packed.kind, Coding) else Coding(0, 0, False, False)
    assert packed.kind in (x.dtype, coding), "rows and weight have different dtypes"
    dtype = torch.float32 if epilogue == FLOATS else x.dtype
    assert out.dtype == dtype, "rows and output have different dtypes"
    is_bf16 = native.is_bf16(x)
    native.is_bf16(out)  # checks that it is contiguous
    pointers = x.data_ptr(), packed.words.data_ptr(), None if bias is None else bias.data_ptr()
    shape = packed.N, packed.K, epilogue
    args = native.Linear(is_bf16, domain, *pointers, out.data_ptr(), *shape, *coding, factor)
    if added is not None:
        assert added.sums.shape[1] == packed.N * (1 + packed.is_gated), (
            "the adapter's width differs from the weight's"
        )
        args.added, args.places = (part.data_ptr() for part in added)
    return args


def route(
    domain: int,
    logits: Tensor,
    routing: Any,
    normalizes: bool,
    is_sigmoid: bool = False,
    correction: Tensor | None = None,
    factor: float | Tensor = 1.0,
) -> Structure:
    num_experts, k = logits.shape[1], routing.weights.shape[1]
    assert 1 <= k <= num_experts <= MAX_EXPERTS, f"k={k} of {num_experts} experts is out of range"
    factors = factor if isinstance(factor, Tensor) else None
    for each in (correction, factors):
        assert each is None or (each.shape == (num_experts,) and each.dtype == torch.float32), (
            "the correction or the factors are not [E] float32"
        )
    pointers = (None if x is None else x.data_ptr() for x in (logits, correction, factors))
    return native.filled(
        "i64 is_bf16 domain ptr logits correction factors weights experts places rows begins "
        "i64 num_experts k normalizes is_sigmoid f32 factor",
        native.is_bf16(logits),
        domain,
        *pointers,
        *(part.data_ptr() for part in routing),
        num_experts,
        k,
        normalizes,
        is_sigmoid,
        1.0 if isinstance(factor, Tensor) else factor,
    )


def expert_maps(
    x: Tensor,
    order: Tensor | None,
    experts: PackedExperts,
    begins: Tensor,
    out: Tensor,
    limit: float | None = None,
    curve: str = "silu",
) -> Structure:
    """Return the arguments of one of the two maps of all experts.

    Rows of x are in the order of places, or `order` lists the row of each place. Rows of `out` are
    in the order of places.
    """
    assert len(begins) == len(experts.each) + 1, "the routing has another number of experts"
    first, bias = experts.each[0], experts.bias
    assert bias is None or bias.dtype == x.dtype, "rows and biases have different dtypes"
    epilogue = FLOATS if order is None else PLAIN
    if first.is_gated:
        epilogue = GATES[curve] if limit is None else CLAMPED_MUL
    args = linear(0, x, first, bias, out, epilogue)
    args.order = None if order is None else order.data_ptr()
    args.limit = limit or 0.0
    assert experts.joined is not None, "the experts are not packed"
    pointers = experts.joined.ctypes.data, begins.data_ptr()
    return native.filled(
        "linear map ptr packed begins i64 num_experts", args, *pointers, len(experts.each)
    )


def adapter_maps(
    x: Tensor, order: Tensor | None, maps: Any, begins: Tensor, out: Tensor, epilogue: int
) -> Structure:
    """Return the arguments of one of the two maps of all slots, as in `expert_maps`."""
    assert len(begins) == len(maps.addresses) + 1, "the rows have another number of slots"
    args = linear(0, x, maps.form, None, out, epilogue)
    args.order = None if order is None else order.data_ptr()
    pointers = maps.addresses.data_ptr(), begins.data_ptr()
    return native.filled(
        "linear map ptr packed begins i64 num_slots", args, *pointers, len(maps.addresses)
    )


def add_experts(
    domain: int, sums: Tensor, weights: Tensor, places: Tensor, residual: Tensor, adds: bool = True
) -> Structure:
    pointers = sums.data_ptr(), weights.data_ptr(), places.data_ptr(), residual.data_ptr()
    shape = residual.shape[1], weights.shape[1]
    fields = "i64 is_bf16 domain ptr sums weights places residual i64 N k adds"
    return native.filled(fields, native.is_bf16(residual), domain, *pointers, *shape, adds)


def add_gated(domain: int, x: Tensor, gate: Tensor, residual: Tensor) -> Structure:
    assert x.shape == residual.shape and x.dtype == gate.dtype == residual.dtype, "rows differ"
    assert gate.shape == (len(x), 1), "the gate is not [R, 1]"
    pointers = x.data_ptr(), gate.data_ptr(), residual.data_ptr()
    fields = "i64 is_bf16 domain ptr x gate residual i64 N"
    return native.filled(fields, native.is_bf16(residual), domain, *pointers, x.shape[1])


def weigh_rows(domain: int, x: Tensor, logits: Tensor, out: Tensor) -> Structure:
    assert len(x) == len(logits) and x.dtype == logits.dtype == out.dtype, "rows differ"
    pointers = x.data_ptr(), logits.data_ptr(), out.data_ptr()
    fields = "i64 is_bf16 domain ptr x logits out i64 N num_experts"
    shape = x.shape[1], logits.shape[1]
    return native.filled(fields, native.is_bf16(x), domain, *pointers, *shape)


def gather_codes(table: Codes, out: Tensor) -> Structure:
    parts = table.q, table.zero, table.scale, table.offset
    assert all(x is None or x.is_contiguous() for x in parts), "the table is not contiguous"
    assert table.table is None, "an embedding has no codes with a table"
    pointers = (None if x is None else x.data_ptr() for x in parts)
    sizes = out.shape[1], table.group, table.middle
    fields = "i64 is_bf16 ptr q zero scale offset out i64 width group middle"
    return native.filled(fields, native.is_bf16(out), *pointers, out.data_ptr(), *sizes)


def norm(
    domain: int,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    is_centered: bool = False,
    adds: bool = False,
) -> Structure:
    """Return the arguments of a norm of whole rows, or of the same columns of `x` and `out`. If the
    weight is shorter, groups of columns are normalized.
    """
    assert weight.dtype == torch.float32 and weight.is_contiguous(), "a norm's weight is float32"
    num_groups, rest = divmod(x.shape[1], len(weight))
    assert x.dtype == out.dtype and x.shape[1:] == out.shape[1:] and not rest, "a norm's shapes"
    assert num_groups == 1 or not is_centered, "only an RMSNorm may have groups"
    assert x.dtype in (torch.float32, torch.bfloat16), f"no kernel computes in {x.dtype}"
    assert bias is None or (bias.dtype == torch.float32 and bias.shape == weight.shape), (
        "a norm's bias is as its weight"
    )
    own = weight.data_ptr(), None if bias is None else bias.data_ptr()
    pointers = x.data_ptr(), *own, out.data_ptr()
    sizes = len(weight), x.stride(0), out.stride(0), num_groups
    is_bf16 = x.dtype == torch.bfloat16
    fields = (
        "i64 is_bf16 domain ptr x weight bias out "
        "i64 width x_stride out_stride num_groups is_centered adds f32 eps"
    )
    return native.filled(fields, is_bf16, domain, *pointers, *sizes, is_centered, adds, eps)


def elementwise(
    domain: int, x: Tensor, curve: int, first: float = 0.0, second: float = 0.0
) -> Structure:
    fields = "i64 is_bf16 domain ptr x i64 width curve f32 first second"
    width = x.shape[1]
    return native.filled(
        fields, native.is_bf16(x), domain, x.data_ptr(), width, curve, first, second
    )


def gate_columns(domain: int, x: Tensor, curve: str, other: Tensor, begin: int) -> Structure:
    assert curve in GATES, f"no kernel implements the gate {curve}"
    assert other.dtype == x.dtype and begin + x.shape[1] <= other.shape[1], "columns beyond a row"
    native.is_bf16(other)  # checks that it is contiguous
    fields = "i64 is_bf16 domain ptr x other i64 width other_width begin curve"
    pointers = x.data_ptr(), other.data_ptr()
    sizes = x.shape[1], other.shape[1], begin, CURVES[curve]
    return native.filled(fields, native.is_bf16(x), domain, *pointers, *sizes)


def streams(domain: int, x: Tensor, coefficients: Tensor, out: Tensor, width: int) -> Structure:
    """Return the arguments of the ops on streams of `width` columns."""
    number = out.shape[1] // width
    assert number <= MAX_STREAMS and out.shape[1] == number * width, "the number of streams"
    assert x.dtype == coefficients.dtype == out.dtype, "streams of different dtypes"
    for each in (coefficients, out):
        native.is_bf16(each)  # checks that it is contiguous
    pointers = x.data_ptr(), coefficients.data_ptr(), out.data_ptr()
    fields = "i64 is_bf16 domain ptr x coefficients out i64 width num"
    return native.filled(fields, native.is_bf16(x), domain, *pointers, width, number)


def sparse_gated(domain: int, x: Tensor, curve: str, deviations: float, out: Tensor) -> Structure:
    assert curve in GATES, f"no kernel implements the gate {curve}"
    sizes = out.shape[1], curve == "gelu_tanh"
    fields = "i64 is_bf16 domain ptr x out i64 width is_gelu f32 deviations"
    pointers = x.data_ptr(), out.data_ptr()
    return native.filled(fields, native.is_bf16(x), domain, *pointers, *sizes, deviations)


def weigh_columns(domain: int, x: Tensor, begin: int, weight: Tensor, out: Tensor) -> Structure:
    assert weight.dtype == torch.float32 and begin + len(weight) <= x.shape[1], "the weight"
    pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    fields = "i64 is_bf16 domain ptr x weight out i64 width x_width begin"
    sizes = len(weight), x.shape[1], begin
    return native.filled(fields, native.is_bf16(x), domain, *pointers, *sizes)


def connections(ranks: Ranks) -> Any:
    """Return the struct of a rank's connections, which also counts exchanges."""
    if ranks.native is None:
        fds = (ranks.sockets.get(r) for r in range(ranks.size))
        sockets = (c_int * ranks.size)(*(-1 if s is None else s.fileno() for s in fds))
        made = native.RanksStruct(ranks.rank, ranks.size, addressof(sockets))
        made.kept = sockets
        if ranks.shared is not None:
            made.meeting = ranks.shared.data_ptr()
            made.slots = ranks.shared.data_ptr() + HEADER
            made.slot_bytes = (len(ranks.shared) - HEADER) // 2
        ranks.native = made
    return ranks.native


def all_gather(
    domain: int, x: Tensor, gathering: Gathering, reader: int | None, out: Tensor
) -> tuple[Structure, Any]:
    """Return the op's arguments, and the object whose address they contain."""
    begin, end = gathering.own
    ranks, size = connections(gathering.ranks), x.itemsize
    assert x.shape[-1] == end - begin, "x differs from this rank's columns"
    assert out.shape[-1] == gathering.width and out.dtype == x.dtype, "the output's shape or dtype"
    assert x.is_contiguous() and out.is_contiguous(), "kernels need contiguous tensors"
    assert ranks.meeting is None or gathering.width * size <= ranks.slot_bytes, (
        f"a row of {gathering.width * size} bytes exceeds the {ranks.slot_bytes} bytes of a slot"
    )
    begins = (c_int64 * len(gathering.begins))(*(size * b for b in gathering.begins))
    rows = x[0].numel() // x.shape[-1] if x.dim() > 2 else 1
    pointers = addressof(ranks), x.data_ptr(), out.data_ptr(), addressof(begins)
    fields = "i64 domain rows_per_row ptr ranks x out begins i64 reader"
    args = native.filled(fields, domain, rows, *pointers, -1 if reader is None else reader)
    return args, begins


def gather_pairs(
    domain: int, sums: Tensor, begins: Tensor, holders: Gathering
) -> tuple[Structure, Any]:
    """Return the op's arguments, and the object whose address they contain.

    sums    [.., k, N] or [.. k, N]  float32, in the order of places
    begins  [E + 1]                  int32    first place of each expert, and the end
    """
    ranks, row_bytes = connections(holders.ranks), sums.itemsize * sums.shape[-1]
    assert holders.width + 1 == len(begins), "the ranks hold another number of experts"
    assert sums.is_contiguous() and begins.is_contiguous(), "kernels need contiguous tensors"
    assert ranks.meeting is None or row_bytes <= ranks.slot_bytes, (
        f"a row of {row_bytes} bytes exceeds the {ranks.slot_bytes} bytes of a slot"
    )
    experts = (c_int64 * len(holders.begins))(*holders.begins)
    pointers = addressof(ranks), sums.data_ptr(), begins.data_ptr(), addressof(experts)
    fields = "i64 domain ptr ranks sums begins experts i64 row_bytes"
    return native.filled(fields, domain, *pointers, row_bytes), experts


def take_columns(domain: int, x: Tensor, begin: int, end: int, out: Tensor) -> Structure:
    size = x.itemsize
    interval = size * begin, size * end
    fields = "i64 domain ptr x out i64 row_bytes begin end"
    pointers = x.data_ptr(), out.data_ptr()
    return native.filled(fields, domain, *pointers, size * x.shape[1], *interval)


def put_columns(domain: int, x: Tensor, begin: int, columns: Tensor) -> Structure:
    assert x.dtype == columns.dtype and begin + columns.shape[1] <= x.shape[1], "columns of x"
    size = x.itemsize
    interval = size * begin, size * (begin + columns.shape[1])
    fields = "i64 domain ptr x out i64 row_bytes begin end"
    pointers = columns.data_ptr(), x.data_ptr()
    return native.filled(fields, domain, *pointers, size * x.shape[1], *interval)


def message(domain: int, x: Tensor, ranks: Ranks, other: int) -> Structure:
    """Return the arguments of `send` and `receive`."""
    pointers = addressof(connections(ranks)), x.data_ptr()
    fields = "i64 domain ptr ranks x i64 row_bytes other"
    return native.filled(fields, domain, *pointers, x.itemsize * x.shape[1], other)


def encoded(window: Window) -> int:
    """Return a window as in attention_plan.h."""
    return -window.size if isinstance(window, Chunks) else window or 0


def plan_attention(kv: KVCache, num_heads: int, windows: Sequence[Window]) -> tuple[Structure, Any]:
    """Return the op's arguments, and the object whose address they contain."""
    kinds = kv.kinds(windows)
    for _, num_kv_heads, D in kinds:
        assert D <= MAX_HEAD_DIM and num_kv_heads * D <= MAX_TOKEN, (
            "the heads exceed MAX_HEAD_DIM or MAX_TOKEN"
        )
    numbers = [n for window, *sizes in kinds for n in (encoded(window), *sizes)]
    placed = (c_int64 * len(numbers))(*numbers)
    fields = "ptr kinds i64 num_kinds num_heads"
    return native.filled(fields, addressof(placed), len(kinds), num_heads), placed


def layer(kv: KVLayer) -> Any:
    if kv.native is None:
        _, block_size, num_heads, D = kv.k.shape
        stride, *inner = kv.k.stride()
        assert kv.v.stride() == kv.k.stride(), "K and V have different strides"
        assert inner == [num_heads * D, D, 1], "KV blocks are not contiguous"
        assert kv.k.dtype in STORED, f"no kernel reads {kv.k.dtype} KV"
        pointers = [x.data_ptr() for x in kv.parts]
        pointers += [0] * (4 - len(pointers))
        strides = stride, 0 if kv.k_scale is None else kv.k_scale.stride(0)
        if kv.k_scale is not None and kv.v_scale is not None:
            assert kv.v_scale.stride() == kv.k_scale.stride(), "scales have different strides"
            assert kv.k_scale.stride()[1:] == (1, block_size), "scale blocks are not contiguous"
        stored = STORED.index(kv.k.dtype)
        kv.native = native.KV(*pointers, *strides, block_size, num_heads, D, stored)
    return kv.native


def is_bf16(x: Tensor, kv: KVLayer | None) -> bool:
    """Whether queries are bf16. KV has the dtype of the queries, or is codes."""
    if kv is None:
        return native.is_bf16(x)
    has_codes = kv.k_scale is not None
    assert has_codes or kv.k.dtype == x.dtype, f"{x.dtype} queries over {kv.k.dtype} KV"
    return native.is_bf16(x)


def rope_write_kv(
    qkv: Tensor, rotary: Rotary, norm: QKNorm | None, kv: KVLayer | None, q: Tensor
) -> Structure:
    D, is_each = q.shape[2], norm is not None and norm.q.dim() == 2
    num_kv_heads = 0 if kv is None else kv.k.shape[2]
    assert kv is None or kv.k.shape[3] == D, "the KV has another head size"
    for weight, heads in ((norm.q, q.shape[1]), (norm.k, num_kv_heads)) if norm else ():
        assert weight.dtype == torch.float32 and weight.is_contiguous(), "a norm's weight"
        assert weight.shape == ((heads, D) if is_each else (D,)), "a norm's shape"
    norms = (norm.q.data_ptr(), norm.k.data_ptr()) if norm else (None, None)
    scale = None if rotary.query_scale is None else rotary.query_scale.data_ptr()
    tables = rotary.cos.data_ptr(), rotary.sin.data_ptr(), scale
    return native.filled(
        "ptr kv qkv q_norm k_norm q cos sin query_scale i64 num_heads head_dim f32 eps "
        "i64 is_bf16 norm_stride is_centered is_last norms_values",
        None if kv is None else addressof(layer(kv)),
        qkv.data_ptr(),
        *norms,
        q.data_ptr(),
        *tables,
        q.shape[1],
        D,
        norm.eps if norm else 0.0,
        is_bf16(qkv, kv),
        D if is_each else 0,
        norm is not None and norm.is_centered,
        norm is not None and norm.is_last,
        norm is not None and norm.has_values,
    )


def num_query_heads(qkv: Tensor, rotary: Rotary, kv: KVLayer | None) -> tuple[int, int]:
    """Return the number of query heads, and the head size."""
    D = 2 * rotary.cos.shape[1]
    return qkv.shape[1] // D - (0 if kv is None else 2 * kv.k.shape[2]), D


def attention(
    q: Tensor,
    kv: KVLayer,
    out: Tensor,
    scale: float,
    window: Window,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Structure:
    pointers = addressof(layer(kv)), q.data_ptr(), out.data_ptr()
    if sinks is not None:
        assert sinks.dtype == torch.float32 and sinks.shape == q.shape[1:2], (
            "sinks are not [H] float32"
        )
    scores = scale, soft_cap or 0.0, None if sinks is None else sinks.data_ptr()
    fields = "ptr kv q out i64 num_heads f32 scale soft_cap ptr sinks i64 window is_bf16"
    return native.filled(fields, *pointers, q.shape[1], *scores, encoded(window), is_bf16(q, kv))


def gate(domain: int, x: Tensor, gate: Tensor) -> Structure:
    assert x.shape == gate.shape and x.dtype == gate.dtype, "x and its gate differ"
    assert x.is_contiguous() and gate.is_contiguous(), "kernels need contiguous tensors"
    pointers = x.data_ptr(), gate.data_ptr()
    fields = "i64 is_bf16 domain ptr x gate i64 width"
    return native.filled(fields, native.is_bf16(x), domain, *pointers, x.shape[1])


def state(layer: StateLayer) -> Any:
    if layer.native is None:
        height, width = layer.shape
        assert layer.places.dtype == torch.int64 and layer.places.is_contiguous(), "state places"
        assert layer.is_conv or layer.dtype == torch.float32, "a head's matrix is float32"
        assert height < MAX_TAPS if layer.is_conv else max(height, width) <= MAX_STATE_DIM, (
            "the state exceeds MAX_TAPS or MAX_STATE_DIM"
        )
        layer.native = native.StateStruct(
            layer.memory.data_ptr(),
            layer.memory.stride(0),
            layer.places.data_ptr(),
            len(layer.places),
            layer.kept.data_ptr(),
            layer.kept.shape[1],
            CONV if layer.is_conv else MAMBA if layer.num_groups else DELTA,
            native.is_bf16(layer.kept),
            height,
            width,
            layer.num_groups,
        )
    return layer.native


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: StateLayer, form: str, out: Tensor
) -> tuple[Structure, Any]:
    """Return the op's arguments, and the tensor whose address they contain."""
    C, L = weight.shape
    assert layer.shape == (L - 1, C) and layer.dtype == x.dtype, "the state's shape or dtype"
    assert x.shape[1] >= (3 * C if form == "gated" else C), "x has too few columns"
    assert weight.dtype == torch.float32, "a convolution's weight is float32"
    by_tap = weight.T.contiguous()
    pointers = x.data_ptr(), by_tap.data_ptr(), None if bias is None else bias.data_ptr()
    fields = "ptr state x weight bias out i64 is_bf16 is_gated x_stride"
    forms = native.is_bf16(x), form == "gated", x.shape[1]
    args = native.filled(fields, addressof(state(layer)), *pointers, out.data_ptr(), *forms)
    return args, (by_tap, layer)


def delta_rule(
    qkv: Tensor, x: Tensor, params: DeltaParams, layer: StateLayer, out: Tensor
) -> Structure:
    (Dk, Dv), Hv, Hk = layer.shape, len(layer.places), params.num_k_heads
    assert qkv.shape[1] == 2 * Hk * Dk + Hv * Dv and Hv % Hk == 0, "the heads of qkv"
    assert x.shape[1] == qkv.shape[1] + Hv * (Dv + 2) and x.dtype == qkv.dtype, "the columns of x"
    tensors = params.rate, params.dt_bias, params.norm
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors), "the parameters"
    pointers = qkv.data_ptr(), x.data_ptr(), *(t.data_ptr() for t in tensors), out.data_ptr()
    fields = "ptr state qkv x rate dt_bias norm out i64 is_bf16 num_k_heads x_stride"
    sizes = native.is_bf16(qkv), Hk, x.shape[1], params.eps, params.beta_factor
    fields += " f32 eps beta_factor"
    return native.filled(fields, addressof(state(layer)), *pointers, *sizes)


def selective_state_update(
    xbc: Tensor, x: Tensor, params: MambaParams, layer: StateLayer, out: Tensor
) -> Structure:
    (N, P), H, G = layer.shape, len(layer.places), params.num_groups
    assert layer.num_groups == G and H % G == 0, "the groups of the heads"
    assert xbc.shape[1] == H * P + 2 * G * N, "the columns of xbc"
    assert x.shape[1] == xbc.shape[1] + H * (P + 1) and x.dtype == xbc.dtype, "the columns of x"
    tensors, norm = (params.rate, params.dt_bias, params.D), params.norm
    given = tensors if norm is None else (*tensors, norm)
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in given), "the parameters"
    pointers = xbc.data_ptr(), x.data_ptr(), *(t.data_ptr() for t in tensors)
    fields = (
        "ptr state xbc x rate dt_bias D norm out i64 is_bf16 x_stride gates_first "
        "f32 eps z_factor dt_factor"
    )
    sizes = native.is_bf16(xbc), x.shape[1], params.gates_first
    factors = params.eps, params.z_factor, params.dt_factor
    weight = None if norm is None else norm.data_ptr()
    parts = *pointers, weight, out.data_ptr(), *sizes, *factors
    return native.filled(fields, addressof(state(layer)), *parts)


def replay(layers: Sequence[StateLayer], replays: Replays) -> tuple[Structure, Any]:
    """Return the op's arguments, and the object whose address they contain."""
    each = (c_void_p * len(layers))(*(addressof(state(layer)) for layer in layers))
    fields = (
        "ptr states i64 num_states ptr blocks begins places snapshot_at snapshots "
        "i64 num_replays num_blocks"
    )
    sizes = len(replays.blocks), replays.blocks.shape[1]
    pointers = (x.data_ptr() for x in replays)
    return native.filled(fields, addressof(each), len(layers), *pointers, *sizes), each
