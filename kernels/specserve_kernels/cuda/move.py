"""KV moves; each program does all of them, in order, for a piece of a token of one K or V."""

from collections.abc import Iterator, Sequence

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.types import KVCache, KVLayer

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
    # A thread has the same elements of every token, so that it reads only what it wrote itself.
    for m in range(num_moves):
        s, t = tl.load(source + m), tl.load(target + m)
        s = (s // block_size) * block_stride + (s % block_size) * token
        t = (t // block_size) * block_stride + (t % block_size) * token
        x = tl.load(base + s + i, mask=i < token)
        tl.store(base + t + i, x, mask=i < token)


def move_kv(kv: KVCache, source: Tensor, target: Tensor) -> None:
    """As the reference's, with the slots on the device: a launch for each run of layers alike."""
    if not len(source):
        return
    for layers in runs(kv.layers):
        k, v = layers[0].k, layers[0].v
        _, block_size, num_heads, D = k.shape
        token, size = num_heads * D, k.element_size()
        pitch = layers[1].k.data_ptr() - k.data_ptr() if len(layers) > 1 else 0
        _move_kv[(triton.cdiv(token, BLOCK), 2 * len(layers))](
            *(k, source, target, len(source), token, block_size),
            *(k.stride(0), pitch // size, (v.data_ptr() - k.data_ptr()) // size),
            BLOCK=BLOCK,
            num_warps=4,
        )


def runs(layers: Sequence[KVLayer]) -> Iterator[list[KVLayer]]:
    """Neighbors with KV of one shape and dtype, at equal distances from one to the next."""
    run: list[KVLayer] = []
    for layer in layers:
        if run and not (is_alike(run[-1], layer) and is_spaced_as(run, layer)):
            yield run
            run = []
        run.append(layer)
    if run:
        yield run


def is_alike(a: KVLayer, b: KVLayer) -> bool:
    offsets = [x.v.data_ptr() - x.k.data_ptr() for x in (a, b)]
    return (a.k.shape, a.k.dtype) == (b.k.shape, b.k.dtype) and offsets[0] == offsets[1]


def is_spaced_as(run: Sequence[KVLayer], layer: KVLayer) -> bool:
    at = [x.k.data_ptr() for x in (*run, layer)]
    return at[-1] - at[-2] == at[1] - at[0]
