"""KV moves. Each program does all moves, in order, for a piece of a token's K or V in one layer."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.cuda.kv_codes import as_bytes
from specserve_kernels.types import KVCache

BLOCK = 512


@triton.jit(do_not_specialize=["num_moves"])
def _move_kv(
    k,
    source,
    target,
    num_moves,
    token,  # elements of a token in one layer's K
    block_size,
    block_stride,
    slot_stride,
    stride,  # between the elements of a token
    layer_stride,
    v_offset,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    layer, part = tl.program_id(1) // 2, tl.program_id(1) % 2
    base = k + layer.to(tl.int64) * layer_stride + part.to(tl.int64) * v_offset + i * stride
    # A thread handles the same elements of every token, so it reads only its own writes.
    for m in range(num_moves):
        s, t = tl.load(source + m), tl.load(target + m)
        s = (s // block_size) * block_stride + (s % block_size) * slot_stride
        t = (t // block_size) * block_stride + (t % block_size) * slot_stride
        x = tl.load(base + s, mask=i < token)
        tl.store(base + t, x, mask=i < token)


class Pair(NamedTuple):
    """A layer's K and V, or their scales: [num_blocks, block_size, elements of a token]."""

    k: Tensor
    v: Tensor


def move_kv(kv: KVCache, source: Tensor, target: Tensor) -> None:
    """Same as the reference op, with slots on the device. One launch per run of equal layers."""
    if not len(source):
        return
    stored = [Pair(as_bytes(x.k).flatten(2), as_bytes(x.v).flatten(2)) for x in kv.layers]
    scales = [
        Pair(x.k_scale, x.v_scale)
        for x in kv.layers
        if x.k_scale is not None and x.v_scale is not None
    ]
    for pairs in (*runs(stored), *runs(scales)):
        k, v = pairs[0]
        _, block_size, token = k.shape
        size = k.element_size()
        pitch = pairs[1].k.data_ptr() - k.data_ptr() if len(pairs) > 1 else 0
        _move_kv[(triton.cdiv(token, BLOCK), 2 * len(pairs))](
            *(k, source, target, len(source), token, block_size, *k.stride()),
            *(pitch // size, (v.data_ptr() - k.data_ptr()) // size),
            BLOCK=BLOCK,
            num_warps=4,
        )


def runs(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Group adjacent pairs of equal shape and dtype at equal distances in memory."""
    run: list[Pair] = []
    last: Any = None
    for pair in pairs:
        offset = pair.v.data_ptr() - pair.k.data_ptr()
        alike = pair.k.shape, pair.k.dtype, offset
        at = [x.k.data_ptr() for x in (*run, pair)]
        is_spaced = len(at) < 2 or at[-1] - at[-2] == at[1] - at[0]
        if run and not (alike == last and is_spaced):
            yield run
            run = []
        last = alike
        run.append(pair)
    if run:
        yield run
