"""The bytes of the pool: equal blocks in one flat arena, and a model's view of them."""

import msgspec
import torch
from torch import Tensor

from specserve_kernels import KVCache, KVLayer

ALIGNMENT = 16  # bytes: vector loads


class KVLayout(msgspec.Struct, frozen=True):
    """How one model's KV lies in a block: [layer][K|V][slot][kv_head][head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def block_size(self, block_bytes: int) -> int:
        """Tokens that fit into a block."""
        return block_bytes // self.token_bytes


def block_bytes(target: KVLayout, block_size: int, others: list[KVLayout]) -> int:
    """A block holds `block_size` target tokens, and at least one token of any model."""
    size = max(target.token_bytes * block_size, *(x.token_bytes for x in [target, *others]))
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """As many blocks of `block_bytes` as there is memory for; bytes [..] uint8, zeroed."""

    def __init__(self, memory: Tensor, block_bytes: int) -> None:
        self.num_blocks, self.block_bytes = len(memory) // block_bytes, block_bytes
        self.bytes = memory

    def copy(self, source: int, target: int) -> None:
        """All layers of a block."""
        blocks = self.bytes.view(self.num_blocks, self.block_bytes)
        blocks[target].copy_(blocks[source])

    def view(self, layout: KVLayout, block_size: int) -> KVCache:
        """All blocks as one model sees them; only the blocks that it holds are its own."""
        used = block_size * layout.token_bytes
        assert used <= self.block_bytes, "more tokens a block than fit into it"
        flat = self.bytes.view(layout.dtype)
        inner = (block_size, layout.num_kv_heads, layout.head_dim)
        slab = block_size * layout.num_kv_heads * layout.head_dim  # one layer's K, or its V
        shape = (self.num_blocks, *inner)
        token = layout.num_kv_heads * layout.head_dim
        stride = (self.block_bytes // layout.dtype.itemsize, token, layout.head_dim, 1)
        views = [flat.as_strided(shape, stride, i * slab) for i in range(2 * layout.num_layers)]
        return KVCache(tuple(map(KVLayer, views[0::2], views[1::2])))
