"""Linear maps: plain weights with cuBLAS, coded weights with Triton.

Few rows are multiplied while the kernel decodes; many rows by a widened weight.

A group of columns is cut into chunks. An int32 word holds one code of each of several chunks, so
adjacent words hold codes of adjacent columns. A tile is one program's read: a word for each column
of a chunk, for some rows of the weight.
"""

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, pad

from specserve_kernels.codes import Codes
from specserve_kernels.cuda.paged import IS_COMPILED, MIN_DOT


class LinearMap(Protocol):
    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor: ...

    def linear_add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor: ...

    def floats(self, x: Tensor) -> Tensor:
        """Return the sums [R, N] as float32, not rounded to the dtype of x."""
        ...


class PlainMap(NamedTuple):
    weight: Tensor  # [N, K]

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, self.weight, bias)

    def linear_add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        if bias is None:
            return residual.addmm_(x, self.weight.t())
        return residual.add_(linear(x, self.weight, bias))

    def floats(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return linear(x.float(), self.weight.float())  # the CPU's mm has no `out_dtype`


WORD = 32  # bits per word
CHUNKS = 64, 32  # columns per chunk, if they divide a group; else MIN_DOT
MAX_PADDED = 1.1  # maximum ratio of padded to actual columns
OUTPUTS = 32  # rows of the weight per program
ROWS = MIN_DOT  # rows per half program, for every step, so that a row's sums are batch-invariant
MAX_ROWS = 64  # maximum rows of the decoding kernel; for more, widening is estimated to be faster


@triton.jit
def _place(chunk, K, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Return a chunk's group, its columns, and which exist. A group's last chunk may be short."""
    EACH: tl.constexpr = (GROUP + CHUNK - 1) // CHUNK
    group = chunk // EACH
    i = chunk % EACH * CHUNK + tl.arange(0, CHUNK)
    k = group * GROUP + i
    return group, k, (i < GROUP) & (k < K)


@triton.jit
def _codes(word, PART: tl.constexpr, BITS: tl.constexpr, DOT: tl.constexpr):
    """Return the codes in a part of each word minus the middle: integers, exact in bfloat16."""
    if BITS == 4:
        # The bits 0x4300 | nibble are the bfloat16 128 + nibble. One operation decodes two parts.
        two = ((word >> 4 * (PART % 4)) & 0x000F000F) | 0x43004300
        one = (two >> 16 * (PART // 4)).to(tl.int16)
        return one.to(tl.bfloat16, bitcast=True).to(DOT) - 136
    else:
        return (word >> 8 * PART).to(tl.int8).to(DOT)


@triton.jit
def _product(x, row, k, exists, code, scale, offset, R, K, DOT: tl.constexpr):
    """Multiply columns of some rows by values. `offset` is None without offsets."""
    some = tl.load(x + row * K + k[None, :], mask=(row < R) & exists[None, :], other=0.0)
    product = tl.dot(some.to(DOT), tl.trans(code), input_precision="ieee") * scale
    if offset is not None:
        product += tl.sum(some.to(tl.float32), 1)[:, None] * offset
    return product


@triton.jit
def _finish(total, row, n, bias, out, R, N, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr):
    """Add the bias and the residual to some rows, and store them."""
    at, is_out = out + row * N + n[None, :], (row < R) & (n < N)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ADDS:
        total += tl.load(at, mask=is_out, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["R"])  # R changes from step to step
def _multiply(
    x,
    words,  # [outputs / OUTPUTS, tiles, OUTPUTS, CHUNK]
    scale,  # [groups, outputs]
    zero,  # as scale
    offset,  # as scale
    bias,
    out,
    R,
    N,
    K,
    tiles,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the operands of dots
):
    PARTS: tl.constexpr = 32 // BITS
    # Two halves share the decoded codes. In one dot of all rows, two warps would decode each code.
    upper = (tl.program_id(1) * 2 * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    lower = upper + ROWS
    each = tl.arange(0, OUTPUTS)
    n = tl.program_id(0) * OUTPUTS + each
    width = tl.num_programs(0) * OUTPUTS
    words += tl.program_id(0).to(tl.int64) * tiles * OUTPUTS * CHUNK
    words += each[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    upper_total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    lower_total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for tile in range(tiles):
        word = tl.load(words + tile * OUTPUTS * CHUNK)
        for part in tl.static_range(PARTS):
            group, k, exists = _place(tile * PARTS + part, K, GROUP, CHUNK)
            code = _codes(word, part, BITS, DOT)
            if HAS_ZERO:
                code -= tl.load(zero + group * width + n).to(DOT)[:, None]
            factor = tl.load(scale + group * width + n)[None, :]
            more = tl.load(offset + group * width + n)[None, :] if HAS_OFFSET else None
            upper_total += _product(x, upper, k, exists, code, factor, more, R, K, DOT)
            lower_total += _product(x, lower, k, exists, code, factor, more, R, K, DOT)
    _finish(upper_total, upper, n, bias, out, R, N, HAS_BIAS, ADDS)
    _finish(lower_total, lower, n, bias, out, R, N, HAS_BIAS, ADDS)


@triton.jit
def _widen(
    words,
    scale,
    zero,
    offset,
    out,  # [N, K]
    N,
    K,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Write the values of a tile."""
    PARTS: tl.constexpr = 32 // BITS
    each = tl.arange(0, OUTPUTS)
    n = tl.program_id(0) * OUTPUTS + each
    width = tl.num_programs(0) * OUTPUTS
    tile = tl.program_id(1)
    words += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tile) * OUTPUTS * CHUNK
    word = tl.load(words + each[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :])
    for part in tl.static_range(PARTS):
        group, k, exists = _place(tile * PARTS + part, K, GROUP, CHUNK)
        value = _codes(word, part, BITS, tl.float32)
        if HAS_ZERO:
            value -= tl.load(zero + group * width + n).to(tl.float32)[:, None]
        value *= tl.load(scale + group * width + n)[:, None]
        if HAS_OFFSET:
            value += tl.load(offset + group * width + n)[:, None]
        at = out + n.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=(n < N)[:, None] & exists[None, :])


class CodedMap(NamedTuple):
    """A coded weight [N, K] in the kernels' layout. Outputs and groups are padded."""

    bits: int
    group: int
    chunk: int
    words: Tensor  # [outputs / OUTPUTS, tiles, OUTPUTS, chunk] int32
    scale: Tensor  # [groups, outputs] float32
    zero: Tensor | None  # [groups, outputs] int8, less the middle
    offset: Tensor | None  # [groups, outputs] float32; excludes zeros
    N: int
    K: int

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) > MAX_ROWS:
            return PlainMap(self.widen(x.dtype)).linear(x, bias)
        return self.multiply(x, bias, x.new_empty(len(x), self.N), adds=False)

    def linear_add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        if len(x) > MAX_ROWS:
            return PlainMap(self.widen(x.dtype)).linear_add(x, bias, residual)
        return self.multiply(x, bias, residual, adds=True)

    def floats(self, x: Tensor) -> Tensor:
        if len(x) > MAX_ROWS:
            return PlainMap(self.widen(x.dtype)).floats(x)
        out = x.new_empty(len(x), self.N, dtype=torch.float32)
        return self.multiply(x, None, out, adds=False)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor, adds: bool) -> Tensor:
        assert x.is_contiguous() and out.is_contiguous(), "rows with gaps"
        if len(x):
            _multiply[(len(self.words), triton.cdiv(len(x), 2 * ROWS))](
                *(x, *self.tensors()),
                *(x if bias is None else bias, out, len(x), self.N, self.K, self.words.shape[1]),
                **self.constants(),
                HAS_BIAS=bias is not None,
                ADDS=adds,
                ROWS=ROWS,
                DOT=tl.bfloat16 if x.dtype == torch.bfloat16 and IS_COMPILED else tl.float32,
                num_warps=4,
                num_stages=3,
            )
        return out

    def widen(self, dtype: torch.dtype) -> Tensor:
        """Same as `Codes.widen`, with the offsets of `Codes.centered`."""
        out = torch.empty(self.N, self.K, dtype=dtype, device=self.words.device)
        _widen[tuple(self.words.shape[:2])](
            *(*self.tensors(), out, self.N, self.K),
            **self.constants(),
            num_warps=4,
        )
        return out

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the kernels' tensors. The scale stands in for a missing zero or offset."""
        more = (self.scale if x is None else x for x in (self.zero, self.offset))
        return self.words, self.scale, *more

    def constants(self) -> dict[str, int]:
        return {
            "BITS": self.bits,
            "GROUP": self.group,
            "CHUNK": self.chunk,
            "HAS_ZERO": self.zero is not None,
            "HAS_OFFSET": self.offset is not None,
            "OUTPUTS": OUTPUTS,
        }


def pack(codes: Codes, device: torch.device) -> CodedMap:
    """Pack codes into tiles on the device."""
    codes = codes.without_table().centered()
    N, K = codes.q.shape
    chunk, parts = chunk_of(codes), WORD // codes.bits
    groups, group_chunks = K // codes.group, triton.cdiv(codes.group, chunk)
    tiles = triton.cdiv(groups * group_chunks, parts)
    outputs = triton.cdiv(N, OUTPUTS) * OUTPUTS

    q = codes.q.to(device)
    if codes.bits == 8:
        q = q ^ 128  # minus the middle, as an int8
    q = pad(q.view(N, groups, codes.group), (0, group_chunks * chunk - codes.group)).view(N, -1)
    q = pad(q, (0, tiles * parts * chunk - q.shape[1], 0, outputs - N))
    q = q.view(-1, OUTPUTS, tiles, parts, chunk).permute(3, 0, 2, 1, 4)
    words = torch.zeros(q.shape[1:], dtype=torch.int32, device=device)
    for part, code in enumerate(q):
        words |= code.int() << codes.bits * part

    def by_group(x: Tensor) -> Tensor:
        more = triton.cdiv(tiles * parts, group_chunks) - groups
        return pad(x.to(device).t(), (0, outputs - N, 0, more)).contiguous()

    zero = offset = None
    if codes.zero is not None:
        zero = by_group((codes.zero.short() - codes.middle).to(torch.int8))
    if codes.offset is not None:
        offset = by_group(codes.offset)
    scale = by_group(codes.scale)
    return CodedMap(codes.bits, codes.group, chunk, words, scale, zero, offset, N, K)


def chunk_of(codes: Codes) -> int:
    """Return the columns per chunk: many, for a shorter loop, unless padding exceeds MAX_PADDED."""
    K = codes.q.shape[1]
    for chunk in CHUNKS:
        tile = chunk * WORD // codes.bits
        if codes.group % chunk == 0 and triton.cdiv(K, tile) * tile <= MAX_PADDED * K:
            return chunk
    return MIN_DOT
