"""The paged KV cache: block pool, block tables, prefix-cache keys, and the memory arena."""
