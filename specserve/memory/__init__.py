"""The paged KV pool: bytes, blocks, who holds them, and how they are found again."""

from specserve.memory.arena import Arena, KVLayout
from specserve.memory.block_table import BlockTable
from specserve.memory.pool import BlockPool
from specserve.memory.prefix_cache import Chain, root_key

__all__ = ["Arena", "BlockPool", "BlockTable", "Chain", "KVLayout", "root_key"]
