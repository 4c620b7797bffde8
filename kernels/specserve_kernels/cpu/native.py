"""Bindings of the C++ library: argument structs of the ops, and a function that runs ops."""

import ctypes
from ctypes import Structure, byref, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specserve_kernels.cpu import build
from specserve_kernels.states import StateRows
from specserve_kernels.types import Edits, Masks, Rows, SampleParams, StepColumns

# Fields of Rows that the kernels read, in the order of rows.h
ROW_FIELDS = ("qo_indptr", "indptr", "indices", "positions", "prefix", "slots", "mask")


def declared(fields: str, **nested: Any) -> list[tuple[str, Any]]:
    """Parse the fields of a C struct: a type precedes the names of its fields."""
    kinds = {"i64": c_int64, "f32": c_float, "ptr": c_void_p, **nested}
    kind: Any = None
    found: list[tuple[str, Any]] = []
    for word in fields.split():
        if word in kinds:
            kind = kinds[word]
        else:
            found.append((word, kind))
    return found


class RowsStruct(Structure):
    _fields_ = declared(
        "i64 num_requests num_rows ptr " + " ".join(ROW_FIELDS) + " i64 num_state_blocks "
        "ptr state_blocks committed kept snapshot_at snapshots"
    )


class StateStruct(Structure):
    _fields_ = declared(
        "ptr memory i64 block_bytes ptr places i64 num_pieces ptr kept "
        "i64 kept_width kind is_bf16 height width num_groups"
    )


class KV(Structure):
    _fields_ = declared(
        "ptr k v k_scale v_scale i64 block_stride scale_stride block_size num_heads head_dim stored"
    )


class SampleStruct(Structure):
    _fields_ = declared(
        "ptr " + " ".join((*SampleParams._fields[:-2], *Edits._fields, *Masks._fields))
    )


class Linear(Structure):
    _fields_ = [
        *declared("i64 is_bf16 domain ptr x packed bias out"),
        *declared("i64 N K epilogue bits group has_zeros has_offsets rounds_rows has_table"),
        *declared("i64 zero scaling"),
        *declared("f32 factor ptr order added places f32 limit"),
    ]


class RanksStruct(Structure):
    _fields_ = declared(
        "i64 rank size ptr sockets meeting slots i64 slot_bytes turn has_failed "
        "num_bytes num_exchanges nanoseconds"
    )


class StepStruct(Structure):
    _fields_ = [("num_rows", c_int64 * 3), *declared("ptr token_ids read rows attention")]


class Op(Structure):
    _fields_ = declared("ptr run args i64 domain")


@cache
def _struct(fields: str) -> type[Structure]:
    parsed = declared(fields, linear=Linear, sampling=SampleStruct)
    return type("Args", (Structure,), {"_fields_": parsed})


def filled(fields: str, *values: Any) -> Structure:
    """Create the argument struct of an op."""
    return _struct(fields)(*values)


def is_bf16(x: Tensor) -> bool:
    """Whether a tensor is bfloat16 instead of float32. The kernels accept no other dtype."""
    assert x.is_contiguous(), "kernels need contiguous tensors"
    if x.dtype == torch.bfloat16:
        return True
    assert x.dtype == torch.float32, f"kernels compute in bfloat16 or float32, not in {x.dtype}"
    return False


def sample_params_of(params: SampleParams) -> SampleStruct:
    """Return pointers to the parameters. Edits or masks that no row has are null pointers."""
    n = params.seeds.shape[0]
    return greedy_params(n) if params is SampleParams.greedy(n) else new_sample_params(params)


@cache
def greedy_params(n: int) -> SampleStruct:
    """Return pointers to `SampleParams.greedy(n)`, which is never freed."""
    return new_sample_params(SampleParams.greedy(n))


def new_sample_params(params: SampleParams) -> SampleStruct:
    native = SampleStruct(*[x.data_ptr() for x in params.columns])
    for some in (params.edits, params.masks):
        for name, x in zip(some._fields, some, strict=True) if some is not None else ():
            assert x.is_contiguous(), "kernels need contiguous tensors"
            setattr(native, name, x.data_ptr())
    return native


def rows_of(rows: Rows) -> RowsStruct:
    sizes = len(rows.qo_indptr) - 1, len(rows.positions)
    pointers = [getattr(rows, name).data_ptr() for name in ROW_FIELDS]
    return RowsStruct(*sizes, *pointers, *state_pointers(rows.states))


def rows_of_columns(columns: StepColumns, states: StateRows | None) -> RowsStruct:
    """Do the same for arrays."""
    _, qo_indptr, indptr, indices, _, positions, slots, prefix, mask, _ = columns
    each = qo_indptr, indptr, indices, positions, prefix, slots, mask  # as in ROW_FIELDS
    pointers = [column.buffer_info()[0] for column in each]
    if states is None:
        return RowsStruct(len(qo_indptr) - 1, len(positions), *pointers)
    return RowsStruct(len(qo_indptr) - 1, len(positions), *pointers, *state_pointers(states))


def state_pointers(states: StateRows | None) -> list[int]:
    if states is None:
        return []
    return [states.blocks.shape[1], *(x.data_ptr() for x in states)]


@cache
def _symbol(kernels: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(kernels, f"specserve_{name}"), c_void_p).value


def address(name: str) -> int | None:
    """The address of a C++ op."""
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


def run(ops: Any, step: StepStruct, threads: int) -> None:
    """Run an array of ops one after another, each on `threads` threads."""
    _run_list(build.kernels().library)(byref(ops), len(ops), byref(step), threads)


def code_bytes(N: int, K: int, form: tuple[int, int, bool, bool, bool], is_gated: bool) -> int:
    """Size of a packed weight of codes without `rounds_rows`.

    form  bits, group, whether the codes have zeros, offsets, a table
    """
    return int(call("code_bytes", c_int64, *map(c_int64, (N, K, *form, is_gated))))


def integer_bytes(N: int, K: int, coding: Any, is_gated: bool) -> int:
    """Size of a packed weight of codes with `rounds_rows`."""
    c = coding
    form = c.bits, c.group, c.has_zeros, c.has_offsets, c.has_table, c.scaling
    return int(call("integer_bytes", c_int64, *map(c_int64, (N, K, *form, is_gated))))


def scalings(numbers: Tensor, block: int) -> int:
    """The forms that represent scales or offsets exactly, as bits; see `numbers.h`."""
    args = c_void_p(numbers.data_ptr()), c_int64(numbers.numel()), c_int64(block)
    return int(call("scalings", c_int64, *args))


def packed_words(N: int, K: int, value_bytes: int, is_gated: bool) -> int:
    count = build.kernels().library.specserve_packed_words
    count.argtypes, count.restype = [c_int64] * 4, c_int64
    return int(count(N, K, value_bytes, is_gated))
