"""The memory of the pool: equal blocks in one flat arena, and each model's view of them."""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from specserve_kernels import KVCache, KVLayer

ALIGNMENT = 16  # bytes: vector loads


class KVLayout(msgspec.Struct, frozen=True):
    """How one layer's KV lies in a block: [K|V][slot][kv_head][head_dim], and behind them, where
    the dtype has 8 bits, the scales: [K|V][kv_head][slot] float32.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # its own: KV may be narrower than the activations

    @property
    def has_scales(self) -> bool:
        return self.dtype.itemsize == 1

    def slab_bytes(self, block_size: int) -> int:
        """Bytes of its K in a block, or of its V."""
        return aligned(block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize)

    def scales_bytes(self, block_size: int) -> int:
        """Bytes of the scales of its K in a block, or of its V."""
        return aligned(block_size * self.num_kv_heads * 4) if self.has_scales else 0

    def layer_bytes(self, block_size: int) -> int:
        return 2 * (self.slab_bytes(block_size) + self.scales_bytes(block_size))


def aligned(size: int) -> int:
    """Rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def used_bytes(layouts: Sequence[KVLayout], block_size: int) -> int:
    """Bytes of a block that `block_size` tokens of a model take."""
    return sum(layout.layer_bytes(block_size) for layout in layouts)


def block_bytes(layouts: Sequence[KVLayout], block_size: int, others: Sequence[KVLayout]) -> int:
    """Bytes of a block that fits `block_size` target tokens or one token of the other model."""
    return max(used_bytes(layouts, block_size), used_bytes(others, 1))


def tokens_that_fit(layouts: Sequence[KVLayout], block_bytes: int) -> int:
    """The largest block size of a model whose KV lies in blocks of so many bytes."""
    size = 0
    while used_bytes(layouts, size + 1) <= block_bytes:
        size += 1
    return size


class Arena:
    """As many blocks of `block_bytes` as there is memory for.

    blocks  [num_blocks, block_bytes]  uint8, zeroed
    views   all blocks as each model's KV, by its name; at a time one model uses a block
    """

    def __init__(self, memory: Tensor, block_bytes: int) -> None:
        num_blocks = len(memory) // block_bytes
        self.blocks = memory[: num_blocks * block_bytes].view(num_blocks, block_bytes)
        self.views: dict[str, KVCache] = {}

    def add_view(self, name: str, layouts: Sequence[KVLayout], block_size: int) -> KVCache:
        """`view`, by which updates of the model's KV go from now on."""
        self.views[name] = self.view(layouts, block_size)
        return self.views[name]

    def view(self, layouts: Sequence[KVLayout], block_size: int) -> KVCache:
        """All blocks as a model's KV: its layers lie in a block one by one."""
        used, block_bytes = used_bytes(layouts, block_size), self.blocks.shape[1]
        assert used <= block_bytes, "more tokens a block than fit into it"
        layers, begin = [], 0
        for layout in layouts:
            layers.append(self.layer(layout, block_size, begin))
            begin += layout.layer_bytes(block_size)
        return KVCache(tuple(layers))

    def layer(self, layout: KVLayout, block_size: int, begin: int) -> KVLayer:
        """A layer, which begins at this byte of every block."""
        slab, heads, D = layout.slab_bytes(block_size), layout.num_kv_heads, layout.head_dim
        inner, strides = (block_size, heads, D), (heads * D, D, 1)
        k, v = (self.strided(layout.dtype, at, inner, strides) for at in (begin, begin + slab))
        if not layout.has_scales:
            return KVLayer(k, v)
        begin, slab = begin + 2 * slab, layout.scales_bytes(block_size)
        scales = (
            self.strided(torch.float32, at, (block_size, heads), (1, block_size))
            for at in (begin, begin + slab)
        )
        return KVLayer(k, v, *scales)

    def strided(
        self, dtype: torch.dtype, begin: int, inner: Sequence[int], strides: Sequence[int]
    ) -> Tensor:
        """The numbers of this shape and these strides from this byte on, in every block."""
        num_blocks, block_bytes = self.blocks.shape
        flat, size = self.blocks.view(-1).view(dtype), dtype.itemsize
        at = flat.storage_offset() + begin // size
        return flat.as_strided((num_blocks, *inner), (block_bytes // size, *strides), at)
