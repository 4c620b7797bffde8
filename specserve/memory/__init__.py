"""The paged KV pool: its memory, its blocks, block tables, and the prefix cache."""

from specserve.memory.arena import Arena, KVLayout
from specserve.memory.block_keys import BlockHasher, root_key
from specserve.memory.block_table import BlockTable
from specserve.memory.pool import BlockPool, KVUpdates, PendingUpdates

__all__ = [
    "Arena",
    "BlockHasher",
    "BlockPool",
    "BlockTable",
    "KVLayout",
    "KVUpdates",
    "PendingUpdates",
    "root_key",
]
