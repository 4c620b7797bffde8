"""The C++ kernels as functions from tensors to tensors."""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import addressof, byref, c_float, c_int, c_int64, c_void_p
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


class _SampleParams(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in SampleParams._fields]


class _Norm(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("is_bf16", "domain")),
        *((name, c_void_p) for name in ("x", "weight", "out")),
        ("width", c_int64),
        ("eps", c_float),
    ]


class _Pack(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("is_bf16", "is_gated")),
        *((name, c_void_p) for name in ("weight", "packed")),
        *((name, c_int64) for name in ("N", "K")),
    ]


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("is_bf16", "domain")),
        *((name, c_void_p) for name in ("x", "packed", "bias", "out")),
        *((name, c_int64) for name in ("N", "K", "epilogue")),
    ]


class _Rope(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("kv", "qkv", "q_norm", "k_norm", "q", "cos", "sin")),
        ("num_heads", c_int64),
        ("eps", c_float),
    ]


class _PlanAttention(ctypes.Structure):
    _fields_ = [
        ("windows", c_void_p),
        *((name, c_int64) for name in ("num_windows", "num_heads", "num_kv_heads", "head_dim")),
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("kv", "q", "out")),
        ("num_heads", c_int64),
        ("scale", c_float),
        ("window", c_int64),
    ]


class _Moves(ctypes.Structure):
    _fields_ = [
        ("layers", c_void_p),
        ("num_layers", c_int64),
        *((name, c_void_p) for name in ("source", "target")),
        ("num_moves", c_int64),
    ]


class _Sample(ctypes.Structure):
    _fields_ = [
        ("is_bf16", c_int64),
        ("logits", c_void_p),
        ("vocab_size", c_int64),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("params", _SampleParams),
        ("out", c_void_p),
    ]


class _TopChildren(ctypes.Structure):
    _fields_ = [
        ("is_bf16", c_int64),
        ("logits", c_void_p),
        *((name, c_int64) for name in ("num_rows", "vocab_size")),
        ("params", _SampleParams),
        ("k", c_int64),
        ("tau", c_float),
        *((name, c_void_p) for name in ("ids", "weight")),
    ]


class Gather(ctypes.Structure):
    _fields_ = [
        ("domain", c_int64),
        *((name, c_void_p) for name in ("x", "out")),
        ("row_bytes", c_int64),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        ("num_rows", c_int64 * 2),
        *((name, c_void_p) for name in ("token_ids", "read", "rows", "attention")),
    ]


class Op(ctypes.Structure):
    _fields_ = [("run", c_void_p), ("args", c_void_p), ("domain", c_int64)]


class Packed(NamedTuple):
    """A weight as gemm.h describes it; N is half of the weight's rows if it is gated."""

    words: Tensor
    N: int
    K: int
    is_gated: bool
    dtype: torch.dtype


class AttentionPlan:
    """What the attention of all layers of a step shares, as the op `plan_attention` fills it in."""

    def __init__(self) -> None:
        self.address = _call("attention_plan", c_void_p)
        weakref.finalize(self, _call, "free_attention_plan", None, c_void_p(self.address))


class Plan(NamedTuple):
    """A step's rows as the kernels read them, and the tensors that keep the memory alive."""

    rows: Rows
    also: Sequence[Tensor]
    native: Any
    attention: AttentionPlan
    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


MAX_HEAD_DIM, MAX_TOKEN = 512, 1 << 15  # as in layouts.h
SHORT = 1 << 16  # elements: an op on fewer is done before further threads are awake


@cache
def _symbol(kernels: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(kernels, f"specserve_{name}"), c_void_p).value


def address(name: str) -> int | None:
    """Of a C++ op."""
    return _symbol(library(), name)


def _call(name: str, result: Any, *args: Any) -> Any:
    function = getattr(library(), f"specserve_{name}")
    function.restype = result
    return function(*args)


@cache
def _runner(kernels: ctypes.CDLL) -> Any:
    run = kernels.specserve_run
    run.argtypes, run.restype = [c_void_p, c_int64, c_void_p, c_int], None
    return run


def run(ops: Any, step: Step, threads: int) -> None:
    """Run an array of ops, one after the other, each on all of the threads."""
    _runner(library())(byref(ops), len(ops), byref(step), threads)


def _packed_words(N: int, K: int, is_bf16: bool, is_gated: bool) -> int:
    count = library().specserve_packed_words
    count.argtypes, count.restype = [c_int64] * 4, c_int64
    return int(count(N, K, is_bf16, is_gated))


def _run(
    name: str, args: ctypes.Structure, num_rows: int, size: int, plan: Plan | None = None
) -> None:
    """Run one op on `num_rows` rows; `size` elements decide whether on all threads."""
    planned = (addressof(plan.native), plan.attention.address) if plan else (None, None)
    step = Step((num_rows, 0), None, None, *planned)
    ops = (Op * 1)(Op(address(name), addressof(args), 0))
    run(ops, step, torch.get_num_threads() if size >= SHORT else 1)


def _is_bf16(x: Tensor) -> bool:
    """Whether a tensor is bfloat16, else float32; the kernels take no other."""
    assert x.is_contiguous(), "a kernel was handed a tensor with gaps"
    if x.dtype == torch.bfloat16:
        return True
    assert x.dtype == torch.float32, f"no kernel computes in {x.dtype}"
    return False


def prepack(weight: Tensor, is_gated: bool = False) -> Packed:
    weight = weight.contiguous()
    is_bf16, (rows, K) = _is_bf16(weight), weight.shape
    N = rows // 2 if is_gated else rows
    words = torch.empty(_packed_words(N, K, is_bf16, is_gated), dtype=torch.int32)
    args = _Pack(is_bf16, is_gated, weight.data_ptr(), words.data_ptr(), N, K)
    _run("pack", args, 1, weight.numel())
    return Packed(words, N, K, is_gated, weight.dtype)


PLAIN, ADD, SILU_MUL = range(3)  # Epilogue in gemm.cpp


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    return _multiply(x, packed, bias, x.new_empty(len(x), packed.N), PLAIN)


def linear_add(x: Tensor, packed: Packed, bias: Tensor | None, residual: Tensor) -> Tensor:
    assert len(residual) == len(x), "a residual of another number of rows"
    return _multiply(x, packed, bias, residual, ADD)


def linear_silu_mul(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    return _multiply(x, packed, bias, x.new_empty(len(x), packed.N), SILU_MUL)


def _multiply(x: Tensor, packed: Packed, bias: Tensor | None, out: Tensor, epilogue: int) -> Tensor:
    args = linear_args(0, x, packed, bias, out, epilogue)
    _run("linear", args, len(x), len(x) * packed.N * packed.K // 4)
    return out


def linear_args(
    domain: int, x: Tensor, packed: Packed, bias: Tensor | None, out: Tensor, epilogue: int
) -> ctypes.Structure:
    assert packed.is_gated == (epilogue == SILU_MUL), "a weight that is packed for another op"
    assert x.shape[1] == packed.K, "rows of another width than the weight's"
    assert out.shape[1] == packed.N, "a residual of another width than the weight's"
    assert x.dtype == packed.dtype == out.dtype, "rows and weight of different dtypes"
    is_bf16 = _is_bf16(x) and _is_bf16(out)
    pointers = x.data_ptr(), packed.words.data_ptr(), None if bias is None else bias.data_ptr()
    return _Linear(is_bf16, domain, *pointers, out.data_ptr(), packed.N, packed.K, epilogue)


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    return table.index_select(0, token_ids)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    _run("rms_norm", norm_args(0, x, weight, out, eps), len(x), x.numel())
    return out


def norm_args(domain: int, x: Tensor, weight: Tensor, out: Tensor, eps: float) -> ctypes.Structure:
    pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    return _Norm(_is_bf16(x), domain, *pointers, x.shape[1], eps)


def plan(
    rows: Rows,
    kv: KVCache,
    num_heads: int,
    windows: Sequence[int | None] = NO_WINDOW,
    also: Sequence[Tensor] = (),
) -> Plan:
    _, _, num_kv_heads, D = kv.layers[0].k.shape
    heads = num_heads, num_kv_heads, D
    made = Plan(rows, also, native_rows(rows), AttentionPlan(), len(rows.positions), *heads)
    args, _ = plan_attention_args(kv, num_heads, windows)
    _run("plan_attention", args, made.num_rows, SHORT, made)
    return made


def plan_attention_args(
    kv: KVCache, num_heads: int, windows: Sequence[int | None]
) -> tuple[ctypes.Structure, Any]:
    """The op's arguments, and what they hold the address of."""
    _, _, num_kv_heads, D = kv.layers[0].k.shape
    assert D <= MAX_HEAD_DIM and num_kv_heads * D <= MAX_TOKEN, "larger heads than kernels take"
    lengths = (c_int64 * len(windows))(*(window or 0 for window in windows))
    heads = num_heads, num_kv_heads, D
    return _PlanAttention(addressof(lengths), len(windows), *heads), lengths


def native_rows(rows: Rows) -> Any:
    sizes = len(rows.qo_indptr) - 1, len(rows.positions)
    return _Rows(*sizes, *(getattr(rows, name).data_ptr() for name in _POINTERS))


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
    _run("rope_write_kv", rope_args(qkv, rotary, norm, kv, q), len(q), qkv.numel(), plan)
    return q


def rope_args(
    qkv: Tensor, rotary: Rotary, norm: QKNorm | None, kv: KVLayer, q: Tensor
) -> ctypes.Structure:
    norms = (norm.q.data_ptr(), norm.k.data_ptr()) if norm else (None, None)
    pointers = qkv.data_ptr(), *norms, q.data_ptr(), rotary.cos.data_ptr(), rotary.sin.data_ptr()
    return _Rope(addressof(_layer(kv)), *pointers, q.shape[1], norm.eps if norm else 0.0)


def attention(
    q: Tensor, kv: KVLayer, plan: Plan, scale: float, window: int | None = None
) -> Tensor:
    out = torch.empty_like(q)
    args = attention_args(q, kv, out, scale, window)
    _run("attention", args, plan.num_rows, SHORT, plan)
    return out.flatten(1)


def attention_args(
    q: Tensor, kv: KVLayer, out: Tensor, scale: float, window: int | None
) -> ctypes.Structure:
    pointers = addressof(_layer(kv)), q.data_ptr(), out.data_ptr()
    return _Attention(*pointers, q.shape[1], scale, window or 0)


def move_kv(kv: KVCache, source: Tensor, target: Tensor) -> None:
    layers = (_KV * len(kv.layers))(*(_layer(layer) for layer in kv.layers))
    pointers = source.data_ptr(), target.data_ptr()
    args = _Moves(addressof(layers), len(layers), *pointers, len(source))
    _run("move_kv", args, len(source), 0)


def _params(params: SampleParams) -> _SampleParams:
    return _SampleParams(*(x.data_ptr() for x in params))


def sample(logits: Tensor, rows: Tensor, params: SampleParams) -> Tensor:
    n, V = len(rows), logits.shape[1]
    out = torch.empty(n, dtype=torch.int64)
    places = rows.data_ptr(), n, _params(params), out.data_ptr()
    args = _Sample(_is_bf16(logits), logits.data_ptr(), V, *places)
    _run("sample", args, n, n * V if n > 1 else 0)
    return out


def top_children(logits: Tensor, params: SampleParams, k: int, tau: float) -> tuple[Tensor, Tensor]:
    R, V = logits.shape
    ids, weight = torch.empty(R, k, dtype=torch.int64), torch.empty(R, k)
    asked = _params(params), k, tau, ids.data_ptr(), weight.data_ptr()
    args = _TopChildren(_is_bf16(logits), logits.data_ptr(), R, V, *asked)
    _run("top_children", args, R, R * V if R > 1 else 0)
    return ids, weight
