"""KV moves: a program a piece of a token, in one layer's K or V, that makes all moves in order."""

import triton
import triton.language as tl
from torch import Tensor

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
    layer_stride,
    v_offset,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    layer, part = tl.program_id(1) // 2, tl.program_id(1) % 2
    base = k + layer.to(tl.int64) * layer_stride + part.to(tl.int64) * v_offset
    # A thread has the same elements of every token, so that it reads what it has written itself.
    for m in range(num_moves):
        s, t = tl.load(source + m), tl.load(target + m)
        s = (s // block_size) * block_stride + (s % block_size) * token
        t = (t // block_size) * block_stride + (t % block_size) * token
        x = tl.load(base + s + i, mask=i < token)
        tl.store(base + t + i, x, mask=i < token)


def move_kv(kv: KVCache, source: Tensor, target: Tensor) -> None:
    """As the reference's, with the slots on the device."""
    first = kv.layers[0]
    _, block_size, num_heads, D = first.k.shape
    size = first.k.element_size()
    pitches = {
        (b.k.data_ptr() - a.k.data_ptr(), b.v.data_ptr() - b.k.data_ptr())
        for a, b in zip(kv.layers, kv.layers[1:], strict=False)
    }
    assert len(pitches) <= 1, "layers lie at unequal distances"
    v_offset = first.v.data_ptr() - first.k.data_ptr()
    layer_stride = pitches.pop()[0] if pitches else 0
    token = num_heads * D
    if len(source):
        _move_kv[(triton.cdiv(token, BLOCK), 2 * len(kv.layers))](
            *(first.k, source, target, len(source), token, block_size),
            *(first.k.stride(0), layer_stride // size, v_offset // size),
            BLOCK=BLOCK,
            num_warps=4,
        )
