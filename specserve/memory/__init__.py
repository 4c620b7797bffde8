"""The paged KV cache: block pool, block tables, prefix-cache keys, the memory arena, and tiers."""
