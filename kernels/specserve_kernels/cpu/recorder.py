"""Ops that record their calls instead of computing, and return a program's buffers."""

from collections.abc import Callable, Sequence
from ctypes import Structure
from dataclasses import dataclass, field
from math import isqrt, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve_kernels.codes import Codes
from specserve_kernels.cpu import arguments, native, ops
from specserve_kernels.cpu.arguments import Packed
from specserve_kernels.cpu.experts import RoutedPairs, held
from specserve_kernels.cpu.ops import CpuMapAdapters
from specserve_kernels.ranks import Gathering, Ranks
from specserve_kernels.states import DeltaParams, MambaParams, StateLayer
from specserve_kernels.types import (
    AdapterRows,
    AdapterSums,
    KVCache,
    KVLayer,
    PackedExperts,
    QKNorm,
    Rotary,
    Window,
)

STEP, READ, ADAPTED = range(3)  # domains of rows, as in op.h
ALIGNMENT = 64  # bytes: a cache line


class Memory:
    """The arena of a program. A buffer takes bytes, and frees them when its last reference ends.

    Ops run in the order of recording, so a later op may write to bytes that an earlier op read.
    """

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []
        self.free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return the smallest free chunk that is large enough, or a new one with touched pages."""
        fits = [chunk for chunk in self.free if len(chunk) >= num_bytes]
        if fits:
            best = min(fits, key=len)
            self.free = [chunk for chunk in self.free if chunk is not best]
            return best
        chunk = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8).fill_(0)
        start = -chunk.data_ptr() % ALIGNMENT
        self.chunks.append(chunk[start : start + num_bytes])
        return self.chunks[-1]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.chunks))


class Buffer:
    """A placeholder for a tensor [rows of a domain, ...] during recording.

    After the forward's last reference ends, later ops may reuse its memory.
    """

    def __init__(
        self, memory: Memory, domain: int, max_rows: int, inner: Sequence[int], dtype: torch.dtype
    ) -> None:
        size = max_rows * prod(inner) * dtype.itemsize
        self.chunk = memory.take(max(1, size))
        self.memory, self.domain = memory, domain
        self.tensor = self.chunk[:size].view(dtype).view(max_rows, *inner)

    def __del__(self) -> None:
        if hasattr(self, "memory"):  # else __init__ failed
            self.memory.free.append(self.chunk)


class Native(NamedTuple):
    """A call of a C++ op."""

    name: str
    args: Structure
    domain: int


class Hosted(NamedTuple):
    """A call of an op without a C++ form. Python makes it in every run, between native ops.

    args    the op's arguments; a run replaces buffers by views of their rows
    out     the buffer of the result; None if the op works in place
    """

    name: str
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    domain: int
    out: Buffer | None

    def run(self, num_rows: Sequence[int]) -> None:
        given = [x.tensor[: num_rows[x.domain]] if isinstance(x, Buffer) else x for x in self.args]
        result = self.function(*given)
        if self.out is not None:
            self.out.tensor[: num_rows[self.out.domain]].copy_(result)


class RecordedPlan(NamedTuple):
    """The part of a plan that is equal in all steps."""

    also: "tuple[Index, Index]"  # token ids, and the rows that are read


@dataclass(eq=False)
class Index:
    """A placeholder for a list of the step: its token ids, or the rows that are read."""

    domain: int


@dataclass(eq=False)
class Recorder:
    """The `Ops` of a recording, for steps of up to max_rows[domain] rows."""

    max_rows: tuple[int, int, int]
    memory: Memory = field(default_factory=Memory)
    calls: list[Native | Hosted] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)  # objects whose addresses the calls contain
    adapter_rows: AdapterRows | None = None  # buffers for a step's adapter rows; None: no slots

    def new(self, domain: int, inner: Sequence[int], dtype: torch.dtype) -> Any:
        return Buffer(self.memory, domain, self.max_rows[domain], inner, dtype)

    def note(self, name: str, args: Structure, domain: int, *kept: Any) -> None:
        self.calls.append(Native(name, args, domain))
        self.kept += kept

    def plan(
        self,
        rows: Any,
        kv: KVCache,
        num_heads: int,
        windows: Any,
        also: Any,
        has_plain_scores: bool = True,
    ) -> RecordedPlan:
        args, lengths = arguments.plan_attention(kv, num_heads, windows)
        self.note("plan_attention", args, STEP, lengths)
        return RecordedPlan((Index(STEP), Index(READ)))

    def embed(self, table: Tensor | Codes, token_ids: Any, dtype: torch.dtype) -> Any:
        if isinstance(table, Tensor):
            return self.gather(table, table, token_ids)
        out = self.new(STEP, (table.q.shape[1],), dtype)
        self.note("gather_codes", arguments.gather_codes(table, out.tensor), STEP, table)
        return out

    def take_rows(self, x: Any, rows: Any) -> Any:
        return self.gather(x, x.tensor, rows)

    def copy(self, x: Any) -> Any:
        out = self.new(x.domain, x.tensor.shape[1:], x.tensor.dtype)
        pointers = x.tensor.data_ptr(), out.tensor.data_ptr()
        fields = "i64 domain ptr x out i64 row_bytes"
        args = native.filled(fields, x.domain, *pointers, x.tensor[0].numel() * x.tensor.itemsize)
        self.note("copy", args, x.domain)
        return out

    def all_gather(self, x: Any, gathering: Gathering, reader: int | None = None) -> Any:
        *rows, _ = x.tensor.shape[1:]
        out = self.new(x.domain, (*rows, gathering.width), x.tensor.dtype)
        args, begins = arguments.all_gather(x.domain, x.tensor, gathering, reader, out.tensor)
        self.note("all_gather", args, x.domain, begins, gathering)
        return out

    def take_columns(self, x: Any, begin: int, end: int) -> Any:
        out = self.new(x.domain, (end - begin,), x.tensor.dtype)
        args = arguments.take_columns(x.domain, x.tensor, begin, end, out.tensor)
        self.note("columns", args, x.domain)
        return out

    def put_columns(self, x: Any, begin: int, columns: Any) -> Any:
        args = arguments.put_columns(x.domain, x.tensor, begin, columns.tensor)
        self.note("put_columns", args, x.domain)
        return x

    def send(self, x: Any, ranks: Ranks, other: int) -> Any:
        self.note("send", arguments.message(x.domain, x.tensor, ranks, other), x.domain, ranks)
        return x

    def receive(self, rows: Any, width: int, dtype: torch.dtype, ranks: Ranks, other: int) -> Any:
        out = self.new(rows.domain, (width,), dtype)
        args = arguments.message(rows.domain, out.tensor, ranks, other)
        self.note("receive", args, rows.domain, ranks)
        return out

    def gather(self, x: Any, tensor: Tensor, index: Index) -> Any:
        out = self.new(index.domain, tensor.shape[1:], tensor.dtype)
        pointers = tensor.data_ptr(), out.tensor.data_ptr()
        fields = "i64 domain ptr x out i64 row_bytes"
        args = native.filled(fields, index.domain, *pointers, tensor[0].numel() * tensor.itemsize)
        self.note("gather", args, index.domain, *([x] if isinstance(x, Tensor) else []))
        return out

    def rms_norm(self, x: Any, weight: Tensor, eps: float) -> Any:
        return self.norm(x, weight, eps, is_centered=False)

    def layer_norm(self, x: Any, weight: Tensor, eps: float, bias: Tensor | None = None) -> Any:
        return self.norm(x, weight, eps, is_centered=True, bias=bias)

    def norm(
        self, x: Any, weight: Tensor, eps: float, is_centered: bool, bias: Tensor | None = None
    ) -> Any:
        out = self.new(x.domain, x.tensor.shape[1:], x.tensor.dtype)
        tensors = x.tensor, weight, out.tensor
        args = arguments.norm(x.domain, *tensors, eps, bias=bias, is_centered=is_centered)
        self.note("norm", args, x.domain, weight, bias)
        return out

    def rms_norm_add(
        self, x: Any, weight: Tensor, eps: float, residual: Any, begin: int = 0
    ) -> Any:
        columns = residual.tensor[:, begin : begin + x.tensor.shape[1]]
        args = arguments.norm(x.domain, x.tensor, weight, columns, eps, adds=True)
        self.note("norm", args, x.domain, weight)
        return residual

    def rms_norm_columns(self, x: Any, begin: int, weight: Tensor, eps: float) -> Any:
        columns = x.tensor[:, begin : begin + len(weight)]
        self.note("norm", arguments.norm(x.domain, columns, weight, columns, eps), x.domain, weight)
        return x

    def scale(self, x: Any, factor: float) -> Any:
        return self.curve(x, arguments.SCALE, factor)

    def soft_cap(self, x: Any, cap: float) -> Any:
        return self.curve(x, arguments.SOFT_CAP, cap)

    def activate(self, x: Any, curve: str, alphas: tuple[float, float] = (0.0, 0.0)) -> Any:
        return self.curve(x, arguments.CURVES[curve], *alphas)

    def gate_columns(self, x: Any, curve: str, other: Any, begin: int) -> Any:
        args = arguments.gate_columns(x.domain, x.tensor, curve, other.tensor, begin)
        self.note("gate_columns", args, x.domain)
        return x

    def spread_streams(self, x: Any, first: Any) -> Any:
        width = first.tensor.shape[1]
        out = self.new(x.domain, (x.tensor.shape[1] + width,), x.tensor.dtype)
        return self.streams("spread_streams", x, first, out, width)

    def add_matched(self, x: Any, first: Any, total: Any) -> Any:
        return self.streams("add_matched", x, first, total, x.tensor.shape[1])

    def mix_streams(self, streams: Any, coefficients: Any) -> Any:
        columns = streams.tensor.shape[1]
        out = self.new(streams.domain, (columns,), streams.tensor.dtype)
        width = columns // isqrt(coefficients.tensor.shape[1])
        return self.streams("mix_streams", streams, coefficients, out, width)

    def correct_streams(self, streams: Any, x: Any, coefficients: Any) -> Any:
        return self.streams("correct_streams", x, coefficients, streams, x.tensor.shape[1])

    def streams(self, name: str, x: Any, coefficients: Any, out: Any, width: int) -> Any:
        tensors = x.tensor, coefficients.tensor, out.tensor
        self.note(name, arguments.streams(x.domain, *tensors, width), x.domain)
        return out

    def sparse_gated(self, x: Any, curve: str, deviations: float) -> Any:
        out = self.new(x.domain, (x.tensor.shape[1] // 2,), x.tensor.dtype)
        args = arguments.sparse_gated(x.domain, x.tensor, curve, deviations, out.tensor)
        self.note("sparse_gated", args, x.domain)
        return out

    def weigh_columns(self, x: Any, begin: int, weight: Tensor) -> Any:
        out = self.new(x.domain, (len(weight),), x.tensor.dtype)
        args = arguments.weigh_columns(x.domain, x.tensor, begin, weight, out.tensor)
        self.note("weigh_columns", args, x.domain, weight)
        return out

    def curve(self, x: Any, curve: int, *numbers: float) -> Any:
        args = arguments.elementwise(x.domain, x.tensor, curve, *numbers)
        self.note("elementwise", args, x.domain)
        return x

    def linear(
        self, x: Any, packed: Packed, bias: Tensor | None = None, added: AdapterSums | None = None
    ) -> Any:
        out = self.new(x.domain, (packed.N,), x.tensor.dtype)
        return self.multiply(x, packed, bias, out, arguments.PLAIN, added=added)

    def lm_head(self, x: Any, packed: Packed) -> Any:
        out = self.new(x.domain, (packed.N,), torch.float32)
        return self.multiply(x, packed, None, out, arguments.FLOATS)

    def linear_add(
        self,
        x: Any,
        packed: Packed,
        bias: Tensor | None,
        residual: Any,
        factor: float = 1.0,
        added: AdapterSums | None = None,
    ) -> Any:
        return self.multiply(x, packed, bias, residual, arguments.ADD, factor, added)

    def linear_gated(
        self,
        x: Any,
        packed: Packed,
        bias: Tensor | None = None,
        gate: str = "silu",
        added: AdapterSums | None = None,
    ) -> Any:
        out = self.new(x.domain, (packed.N,), x.tensor.dtype)
        return self.multiply(x, packed, bias, out, arguments.GATES[gate], added=added)

    def multiply(
        self,
        x: Any,
        packed: Packed,
        bias: Tensor | None,
        out: Any,
        epilogue: int,
        factor: float = 1.0,
        added: AdapterSums | None = None,
    ) -> Any:
        more = None if added is None else added._replace(sums=added.sums.tensor)
        args = arguments.linear(
            x.domain, x.tensor, packed, bias, out.tensor, epilogue, factor, more
        )
        self.note("linear", args, x.domain, packed, bias)
        return out

    def adapted(self, x: Any, adapters: CpuMapAdapters, plan: RecordedPlan) -> AdapterSums:
        down, up = adapters.down, adapters.up
        if self.adapter_rows is None:
            order, places = torch.zeros(2, self.max_rows[STEP], dtype=torch.int32)
            begins = torch.zeros(len(down.addresses) + 1, dtype=torch.int32)
            self.adapter_rows = AdapterRows(order, begins, places)
        told = self.adapter_rows
        inner = self.new(ADAPTED, (down.form.N,), x.tensor.dtype)
        sums = self.new(ADAPTED, (up.form.N,), torch.float32)
        first = x.tensor, told.order, down, told.begins, inner.tensor, arguments.PLAIN
        self.note("adapter_maps", arguments.adapter_maps(*first), ADAPTED, adapters)
        second = inner.tensor, None, up, told.begins, sums.tensor, arguments.FLOATS
        self.note("adapter_maps", arguments.adapter_maps(*second), ADAPTED, adapters)
        return AdapterSums(sums, told.places)

    def route(
        self,
        logits: Any,
        k: int,
        normalizes: bool,
        is_sigmoid: bool = False,
        correction: Tensor | None = None,
        factor: float | Tensor = 1.0,
    ) -> RoutedPairs:
        # Pairs are [row, k], so that no buffer needs a domain of pairs.
        domain, begins = logits.domain, torch.zeros(logits.tensor.shape[1] + 1, dtype=torch.int32)
        weights = self.new(domain, (k,), torch.float32)
        chosen, places, rows = (self.new(domain, (k,), torch.int32) for _ in range(3))
        tensors = RoutedPairs(weights.tensor, chosen.tensor, places.tensor, rows.tensor, begins)
        rule = normalizes, is_sigmoid, correction, factor
        args = arguments.route(domain, logits.tensor, tensors, *rule)
        self.note("route", args, domain, begins, correction, factor)
        return RoutedPairs(weights, chosen, places, rows, begins)

    def experts(
        self,
        x: Any,
        routing: Any,
        gate_up: PackedExperts,
        down: PackedExperts,
        residual: Any,
        limit: float | None = None,
        gathering: Gathering | None = None,
        holders: Gathering | None = None,
        gate: str = "silu",
    ) -> Any:
        begins = held(routing.begins, holders)
        weights, k = routing.weights.tensor, routing.weights.tensor.shape[1]
        inner = self.new(x.domain, (k, gate_up.each[0].N), x.tensor.dtype)
        rows, pairs = routing.rows.tensor, inner.tensor.flatten(0, 1)
        args = arguments.expert_maps(x.tensor, rows, gate_up, begins, pairs, limit, gate)
        self.note("expert_maps", args, x.domain, gate_up)
        if not gate_up.each[0].is_gated:
            rows = inner.tensor.flatten(1)
            args = arguments.elementwise(x.domain, rows, arguments.CURVES[gate])
            self.note("elementwise", args, x.domain)
        if gathering is not None:
            inner = self.all_gather(inner, gathering)
            pairs = inner.tensor.flatten(0, 1)
        sums = self.new(x.domain, (k, down.each[0].N), torch.float32)
        found = sums.tensor.flatten(0, 1)
        args = arguments.expert_maps(pairs, None, down, begins, found)
        self.note("expert_maps", args, x.domain, down)
        if holders is not None:
            args, kept = arguments.gather_pairs(x.domain, found, routing.begins, holders)
            self.note("gather_pairs", args, x.domain, kept, holders)
        adds = residual is not None
        out = residual if adds else self.new(x.domain, (down.each[0].N,), x.tensor.dtype)
        places = routing.places.tensor
        args = arguments.add_experts(x.domain, found, weights, places, out.tensor, adds)
        self.note("add_experts", args, x.domain)
        return out

    def add_gated(self, x: Any, gate: Any, residual: Any) -> Any:
        args = arguments.add_gated(x.domain, x.tensor, gate.tensor, residual.tensor)
        self.note("add_gated", args, x.domain)
        return residual

    def weigh_rows(self, x: Any, logits: Any) -> Any:
        out = self.new(x.domain, x.tensor.shape[1:], x.tensor.dtype)
        args = arguments.weigh_rows(x.domain, x.tensor, logits.tensor, out.tensor)
        self.note("weigh_rows", args, x.domain)
        return out

    def rope_write_kv(
        self, qkv: Any, rotary: Rotary, norm: QKNorm | None, kv: KVLayer | None, plan: RecordedPlan
    ) -> Any:
        heads = arguments.num_query_heads(qkv.tensor, rotary, kv)
        q = self.new(qkv.domain, heads, qkv.tensor.dtype)
        args = arguments.rope_write_kv(qkv.tensor, rotary, norm, kv, q.tensor)
        self.note("rope_write_kv", args, qkv.domain, rotary, norm, kv)
        return q

    def attention(
        self,
        q: Any,
        kv: KVLayer,
        plan: RecordedPlan,
        scale: float,
        window: Window = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Any:
        out = self.new(q.domain, (q.tensor[0].numel(),), q.tensor.dtype)
        args = arguments.attention(q.tensor, kv, out.tensor, scale, window, soft_cap, sinks)
        self.note("attention", args, q.domain, kv, sinks)
        return out

    def gate(self, x: Any, gate: Any) -> Any:
        self.note("gate", arguments.gate(x.domain, x.tensor, gate.tensor), x.domain)
        return x

    def causal_conv(
        self,
        x: Any,
        weight: Tensor,
        bias: Tensor | None,
        state: StateLayer,
        plan: RecordedPlan,
        form: str,
    ) -> Any:
        out = self.new(x.domain, (len(weight),), x.tensor.dtype)
        args, kept = arguments.causal_conv(x.tensor, weight, bias, state, form, out.tensor)
        self.note("causal_conv", args, x.domain, kept, bias)
        return out

    def delta_rule(
        self, qkv: Any, x: Any, params: DeltaParams, state: StateLayer, plan: RecordedPlan
    ) -> Any:
        width = len(state.places) * state.shape[1]
        out = self.new(qkv.domain, (width,), qkv.tensor.dtype)
        args = arguments.delta_rule(qkv.tensor, x.tensor, params, state, out.tensor)
        self.note("delta_rule", args, qkv.domain, params, state)
        return out

    def selective_state_update(
        self, xbc: Any, x: Any, params: MambaParams, state: StateLayer, plan: RecordedPlan
    ) -> Any:
        width = len(state.places) * state.shape[1]
        out = self.new(xbc.domain, (width,), xbc.tensor.dtype)
        args = arguments.selective_state_update(xbc.tensor, x.tensor, params, state, out.tensor)
        self.note("selective_state_update", args, xbc.domain, params, state)
        return out

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Record a Python call of any other op. A trial on one row gives the result's shape."""
        if name.startswith("_"):
            raise AttributeError(name)
        function = getattr(ops, name)

        def call(*args: Any) -> Any:
            buffers = [x for x in args if isinstance(x, Buffer)]
            for x in buffers:
                x.tensor[:1].zero_()
            tried = function(*(x.tensor[:1] if isinstance(x, Buffer) else x for x in args))
            own = [x for x in buffers if x.tensor.data_ptr() == tried.data_ptr()]
            domain = buffers[0].domain
            out = own[0] if own else self.new(domain, tried.shape[1:], tried.dtype)
            self.calls.append(Hosted(name, function, args, domain, None if own else out))
            return out

        return call
