"""The library as Python sees it: the structs of its ops' arguments, and running a list of ops."""

import ctypes
from ctypes import Structure, byref, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specserve_kernels.cpu import build
from specserve_kernels.types import Edits as EditTensors
from specserve_kernels.types import Masks as MaskTensors
from specserve_kernels.types import Rows as RowTensors
from specserve_kernels.types import SampleParams as SampleTensors

# The fields of Rows that the kernels read, in the order of rows.h.
ROW_FIELDS = ("qo_indptr", "indptr", "indices", "positions", "prefix", "slots", "mask")


class Rows(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_requests", "num_rows")),
        *((name, c_void_p) for name in ROW_FIELDS),
    ]


class KV(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("k", "v", "k_scale", "v_scale")),
        *((name, c_int64) for name in ("block_stride", "scale_stride", "block_size")),
        *((name, c_int64) for name in ("num_heads", "head_dim", "stored")),
    ]


class SampleParams(Structure):
    _fields_ = [
        *((name, c_void_p) for name in SampleTensors._fields[:-2]),  # all but edits and masks
        *((name, c_void_p) for some in (EditTensors, MaskTensors) for name in some._fields),
    ]


class Norm(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("is_bf16", "domain")),
        *((name, c_void_p) for name in ("x", "weight", "out")),
        *((name, c_int64) for name in ("width", "x_stride", "out_stride", "is_centered", "adds")),
        ("eps", c_float),
    ]


class Elementwise(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("is_bf16", "domain")),
        ("x", c_void_p),
        *((name, c_int64) for name in ("width", "curve")),
        ("number", c_float),
    ]


class Pack(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("value_bytes", "is_gated")),
        *((name, c_void_p) for name in ("weight", "packed")),
        *((name, c_int64) for name in ("N", "K")),
    ]


class PackCodes(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "zero", "scale", "offset", "packed")),
        *((name, c_int64) for name in ("N", "K", "bits", "group", "is_gated")),
    ]


class Quantize(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("is_bf16", "bits")),
        *((name, c_void_p) for name in ("weight", "q", "scale")),
        *((name, c_int64) for name in ("N", "K")),
    ]


class Linear(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("is_bf16", "domain")),
        *((name, c_void_p) for name in ("x", "packed", "bias", "out")),
        *(
            (name, c_int64)
            for name in ("N", "K", "epilogue", "bits", "group", "has_zeros", "has_offsets")
        ),
        ("rounds_rows", c_int64),
        ("factor", c_float),
        *((name, c_void_p) for name in ("order", "added", "places")),
        ("limit", c_float),
    ]


class Route(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("is_bf16", "domain")),
        *(
            (name, c_void_p)
            for name in ("logits", "weights", "experts", "places", "rows", "begins")
        ),
        *((name, c_int64) for name in ("num_experts", "k", "normalizes")),
    ]


class ExpertMaps(Structure):
    _fields_ = [
        ("map", Linear),
        *((name, c_void_p) for name in ("packed", "begins")),
        ("num_experts", c_int64),
    ]


class AdapterMaps(Structure):
    _fields_ = [
        ("map", Linear),
        *((name, c_void_p) for name in ("packed", "begins")),
        ("num_slots", c_int64),
    ]


class AddExperts(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("is_bf16", "domain")),
        *((name, c_void_p) for name in ("sums", "weights", "places", "residual")),
        *((name, c_int64) for name in ("N", "k")),
    ]


class AddGated(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("is_bf16", "domain")),
        *((name, c_void_p) for name in ("x", "gate", "residual")),
        ("N", c_int64),
    ]


class Rope(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("kv", "qkv", "q_norm", "k_norm", "q", "cos", "sin")),
        ("num_heads", c_int64),
        ("eps", c_float),
        ("is_bf16", c_int64),
    ]


class PlanAttention(Structure):
    _fields_ = [
        ("windows", c_void_p),
        *((name, c_int64) for name in ("num_windows", "num_heads", "num_kv_heads", "head_dim")),
    ]


class Attention(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("kv", "q", "out")),
        ("num_heads", c_int64),
        *((name, c_float) for name in ("scale", "soft_cap")),
        ("sinks", c_void_p),
        ("window", c_int64),
        ("is_bf16", c_int64),
    ]


class Moves(Structure):
    _fields_ = [
        ("layers", c_void_p),
        ("num_layers", c_int64),
        *((name, c_void_p) for name in ("source", "target")),
        ("num_moves", c_int64),
    ]


class Sample(Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("vocab_size", c_int64),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("params", SampleParams),
        ("out", c_void_p),
    ]


class Logprobs(Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("vocab_size", c_int64),
        *((name, c_void_p) for name in ("rows", "tokens")),
        *((name, c_int64) for name in ("num_rows", "k")),
        *((name, c_void_p) for name in ("token", "rank", "ids", "top")),
    ]


class TopChildren(Structure):
    _fields_ = [
        ("logits", c_void_p),
        *((name, c_int64) for name in ("num_rows", "vocab_size")),
        ("params", SampleParams),
        ("k", c_int64),
        ("tau", c_float),
        *((name, c_void_p) for name in ("ids", "weight")),
    ]


class Copy(Structure):
    _fields_ = [
        ("domain", c_int64),
        *((name, c_void_p) for name in ("x", "out")),
        ("row_bytes", c_int64),
    ]


class GatherCodes(Structure):
    _fields_ = [
        ("is_bf16", c_int64),
        *((name, c_void_p) for name in ("q", "zero", "scale", "offset", "out")),
        *((name, c_int64) for name in ("width", "group", "middle")),
    ]


class Step(Structure):
    _fields_ = [
        ("num_rows", c_int64 * 3),
        *((name, c_void_p) for name in ("token_ids", "read", "rows", "attention")),
    ]


class Op(Structure):
    _fields_ = [("run", c_void_p), ("args", c_void_p), ("domain", c_int64)]


def is_bf16(x: Tensor) -> bool:
    """Whether a tensor is bfloat16, else float32; the kernels take no other."""
    assert x.is_contiguous(), "a kernel was handed a tensor with gaps"
    if x.dtype == torch.bfloat16:
        return True
    assert x.dtype == torch.float32, f"no kernel computes in {x.dtype}"
    return False


def sample_params_of(params: SampleTensors) -> SampleParams:
    """With null pointers for what no row has."""
    native = SampleParams(*[x.data_ptr() for x in params.columns])
    for some in (params.edits, params.masks):
        for name, x in zip(some._fields, some, strict=True) if some is not None else ():
            assert x.is_contiguous(), "a kernel was handed a tensor with gaps"
            setattr(native, name, x.data_ptr())
    return native


def rows_of(rows: RowTensors) -> Rows:
    sizes = len(rows.qo_indptr) - 1, len(rows.positions)
    return Rows(*sizes, *(getattr(rows, name).data_ptr() for name in ROW_FIELDS))


@cache
def _symbol(kernels: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(kernels, f"specserve_{name}"), c_void_p).value


def address(name: str) -> int | None:
    """Of a C++ op."""
    return _symbol(build.kernels().library, name)


def call(name: str, result: Any, *args: Any) -> Any:
    function = getattr(build.kernels().library, f"specserve_{name}")
    function.restype = result
    return function(*args)


@cache
def _run_list(kernels: ctypes.CDLL) -> Any:
    run = kernels.specserve_run
    run.argtypes, run.restype = [c_void_p, c_int64, c_void_p, c_int], None
    return run


def run(ops: Any, step: Step, threads: int) -> None:
    """Run an array of ops, one after the other, each on all of the threads."""
    _run_list(build.kernels().library)(byref(ops), len(ops), byref(step), threads)


def code_bytes(N: int, K: int, form: tuple[int, int, bool, bool], is_gated: bool) -> int:
    """Of a packed weight of codes: bits, group, whether it has zeros, and offsets."""
    count = build.kernels().library.specserve_code_bytes
    count.argtypes, count.restype = [c_int64] * 7, c_int64
    return int(count(N, K, *form, is_gated))


def packed_words(N: int, K: int, value_bytes: int, is_gated: bool) -> int:
    count = build.kernels().library.specserve_packed_words
    count.argtypes, count.restype = [c_int64] * 4, c_int64
    return int(count(N, K, value_bytes, is_gated))
