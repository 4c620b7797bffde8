"""The C++ kernels and oneDNN's GEMM as functions from tensors to tensors."""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve_kernels.cpu.build import library
from specserve_kernels.types import (
    NO_WINDOW,
    KVCache,
    KVLayer,
    QKNorm,
    Rotary,
    Rows,
    SampleParams,
)

# Private to torch, but the only way to oneDNN's prepacked GEMM; tests pin its numerics.
_linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
_reorder: Callable[..., Tensor] = torch.ops.mkldnn._reorder_linear_weight.default
_EXPECTED_ROWS = 8  # rows of a step for which oneDNN chooses the weight's layout
# oneDNN runs one row with another kernel, and other bits; from two rows on all are equal. Two rows
# take longer than four: `make bench` prints both, as gemm_ms for 1 and for 4 rows of a step.
_MIN_ROWS = 4
# With AMX the order in which a row's bfloat16 products are summed depends on the number of rows,
# but not up to 32 of them.
_MAX_ROWS: int | None = 32 if torch.cpu.get_capabilities().get("amx_bf16") else None


# The fields of Rows that the kernels read, in the order of rows.h.
_POINTERS = ("qo_indptr", "indptr", "indices", "positions", "prefix", "slots", "mask")


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_requests", "num_rows")),
        *((name, c_void_p) for name in _POINTERS),
    ]


class _KV(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("k", "v")),
        *((name, c_int64) for name in ("block_stride", "block_size", "num_heads", "head_dim")),
        ("is_bf16", c_int64),
    ]


class _Rope(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "q_norm", "k_norm", "q", "cos", "sin")),
        ("num_heads", c_int64),
        ("eps", c_float),
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "out")),
        ("num_heads", c_int64),
        ("scale", c_float),
        ("window", c_int64),
    ]


class _SampleParams(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in SampleParams._fields]


class Plan(NamedTuple):
    """A step's rows as the kernels read them, and the tensors that keep the memory alive."""

    rows: Rows
    also: Sequence[Tensor]
    native: Any
    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


_SIGNATURES: dict[str, list[Any]] = {
    "rms_norm": [c_int, *[c_void_p] * 4, c_int64, c_int64, c_float],
    "silu_mul": [c_int, c_void_p, c_void_p, c_int64, c_int64],
    "rope_write_kv": [c_void_p] * 3,
    "attention": [c_void_p] * 3,
    "move_kv": [c_void_p, c_int64, c_void_p, c_void_p, c_int64],
    "sample": [c_int, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p],
    "top_children": [c_int, c_void_p, *[c_int64] * 2, c_void_p, c_int64, c_float, *[c_void_p] * 2],
}


@cache
def _kernel(name: str) -> Any:
    function = getattr(library(), f"specserve_{name}")
    function.argtypes, function.restype = _SIGNATURES[name], None
    return function


def _is_bf16(x: Tensor) -> bool:
    """Whether a tensor is bfloat16, else float32; the kernels take no other."""
    assert x.is_contiguous(), "a kernel was handed a tensor with gaps"
    if x.dtype == torch.bfloat16:
        return True
    assert x.dtype == torch.float32, f"no kernel computes in {x.dtype}"
    return False


def prepack(weight: Tensor) -> Tensor:
    return _reorder(weight.contiguous(), _EXPECTED_ROWS)


def linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    R = x.shape[0]
    if _MAX_ROWS is not None and R > _MAX_ROWS and x.dtype == torch.bfloat16:
        parts = [x[i : i + _MAX_ROWS] for i in range(0, R, _MAX_ROWS)]
        return torch.cat([linear(part, packed, bias) for part in parts])
    if R >= _MIN_ROWS or R == 0:
        return _linear(x, packed, bias, "none", [], "")
    padded = torch.cat((x,) * -(-_MIN_ROWS // R))
    return _linear(padded, packed, bias, "none", [], "")[:R]


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    return table.index_select(0, token_ids)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows)


def add(x: Tensor, residual: Tensor) -> Tensor:
    return residual.add_(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    _kernel("rms_norm")(
        _is_bf16(x), x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), *x.shape, eps
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    pointers = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr()
    _kernel("rms_norm")(_is_bf16(x), *pointers, *x.shape, eps)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    R, F = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(R, F)
    _kernel("silu_mul")(_is_bf16(gate_up), gate_up.data_ptr(), out.data_ptr(), R, F)
    return out


def plan(
    rows: Rows,
    kv: KVCache,
    num_heads: int,
    windows: Sequence[int | None] = NO_WINDOW,
    also: Sequence[Tensor] = (),
) -> Plan:
    sizes = len(rows.qo_indptr) - 1, len(rows.positions)
    native = _Rows(*sizes, *(getattr(rows, name).data_ptr() for name in _POINTERS))
    _, _, num_kv_heads, D = kv.layers[0].k.shape
    return Plan(rows, also, native, sizes[1], num_heads, num_kv_heads, D)


def _layer(kv: KVLayer) -> Any:
    if kv.native is None:
        _, block_size, num_heads, D = kv.k.shape
        stride, *inner = kv.k.stride()
        assert kv.v.stride() == kv.k.stride(), "K and V have different strides"
        assert inner == [num_heads * D, D, 1], "KV with gaps in a block"
        is_bf16 = kv.k.dtype == torch.bfloat16
        assert is_bf16 or kv.k.dtype == torch.float32, f"no kernel reads {kv.k.dtype} KV"
        pointers = kv.k.data_ptr(), kv.v.data_ptr()
        kv.native = _KV(*pointers, stride, block_size, num_heads, D, is_bf16)
    return kv.native


def rope_write_kv(
    qkv: Tensor, rotary: Rotary, norm: QKNorm | None, kv: KVLayer, plan: Plan
) -> Tensor:
    q = qkv.new_empty(plan.num_rows, plan.num_heads, plan.head_dim)
    norms = (norm.q.data_ptr(), norm.k.data_ptr()) if norm else (None, None)
    pointers = qkv.data_ptr(), *norms, q.data_ptr(), rotary.cos.data_ptr(), rotary.sin.data_ptr()
    rope = _Rope(*pointers, plan.num_heads, norm.eps if norm else 0.0)
    _kernel("rope_write_kv")(byref(plan.native), byref(_layer(kv)), byref(rope))
    return q


def attention(
    q: Tensor, kv: KVLayer, plan: Plan, scale: float, window: int | None = None
) -> Tensor:
    out = torch.empty_like(q)
    call = _Attention(q.data_ptr(), out.data_ptr(), plan.num_heads, scale, window or 0)
    _kernel("attention")(byref(plan.native), byref(_layer(kv)), byref(call))
    return out.flatten(1)


def move_kv(kv: KVCache, source: Tensor, target: Tensor) -> None:
    layers = (_KV * len(kv.layers))(*(_layer(layer) for layer in kv.layers))
    pointers = source.data_ptr(), target.data_ptr()
    _kernel("move_kv")(byref(layers), len(layers), *pointers, len(source))


def sample(logits: Tensor, rows: Tensor, params: SampleParams) -> Tensor:
    out = torch.empty(len(rows), dtype=torch.int64)
    native = _SampleParams(*(x.data_ptr() for x in params))
    _kernel("sample")(
        *(_is_bf16(logits), logits.data_ptr(), logits.shape[1], rows.data_ptr(), len(rows)),
        *(byref(native), out.data_ptr()),
    )
    return out


def top_children(logits: Tensor, params: SampleParams, k: int, tau: float) -> tuple[Tensor, Tensor]:
    R, V = logits.shape
    ids, weight = torch.empty(R, k, dtype=torch.int64), torch.empty(R, k)
    native = _SampleParams(*(x.data_ptr() for x in params))
    pointers = ids.data_ptr(), weight.data_ptr()
    _kernel("top_children")(
        _is_bf16(logits), logits.data_ptr(), R, V, byref(native), k, tau, *pointers
    )
    return ids, weight
