"""Blocks of KV: the pool, block tables, keys of blocks, and the arena that holds them."""
