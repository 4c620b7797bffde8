"""The memory of the pool: equal blocks in one flat arena, and each model's view of them."""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from specserve_kernels import KVCache, KVLayer

ALIGNMENT = 16  # bytes: vector loads


class KVLayout(msgspec.Struct, frozen=True):
    """How one layer's KV lies in a block: [K|V][slot][kv_head][head_dim]."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # its own: KV may be narrower than the activations

    def slab_bytes(self, block_size: int) -> int:
        """Bytes of its K in a block, or of its V, rounded up to a multiple of ALIGNMENT."""
        size = block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


def used_bytes(layouts: Sequence[KVLayout], block_size: int) -> int:
    """Bytes of a block that `block_size` tokens of a model take."""
    return sum(2 * layout.slab_bytes(block_size) for layout in layouts)


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
        """Add a model's view of all blocks: its layers' K and V lie in a block one by one."""
        used, block_bytes = used_bytes(layouts, block_size), self.blocks.shape[1]
        assert used <= block_bytes, "more tokens a block than fit into it"
        layers, begin = [], 0
        for layout in layouts:
            slab = layout.slab_bytes(block_size)
            k, v = (self.slab(layout, block_size, at) for at in (begin, begin + slab))
            layers.append(KVLayer(k, v))
            begin += 2 * slab
        self.views[name] = KVCache(tuple(layers))
        return self.views[name]

    def slab(self, layout: KVLayout, block_size: int, begin: int) -> Tensor:
        """K or V of a layer, which begins at this byte of every block."""
        num_blocks, block_bytes = self.blocks.shape
        shape = (num_blocks, block_size, layout.num_kv_heads, layout.head_dim)
        token, itemsize = layout.num_kv_heads * layout.head_dim, layout.dtype.itemsize
        stride = (block_bytes // itemsize, token, layout.head_dim, 1)
        flat = self.blocks.view(-1).view(layout.dtype)
        return flat.as_strided(shape, stride, flat.storage_offset() + begin // itemsize)
