"""The paged KV pool: bytes, blocks, and who holds them."""

from specserve.memory.arena import Arena, KVLayout
from specserve.memory.block_table import BlockTable
from specserve.memory.pool import BlockPool

__all__ = ["Arena", "BlockPool", "BlockTable", "KVLayout"]
