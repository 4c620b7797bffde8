"""What the KV of a block is known by: a chain of hashes over all that it depends on."""

import hashlib
from array import array

import msgspec


def root_key(*parts: str) -> bytes:
    """The beginning of a chain: what KV depends on beside the tokens."""
    return hashlib.sha256(msgspec.json.encode(parts)).digest()


class BlockHasher:
    """The keys of one request's full blocks of one model, in order.

    key = SHA-256(parent key, tokens): equal keys mean equal tokens from the first one on. Not a
    cheaper hash, whose collisions somebody could look for, and be answered from another's prompt.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root, self.block_size = root, block_size
        self.keys: list[bytes] = []

    def extend(self, token_ids: "array[int]", num_tokens: int) -> list[bytes]:
        """All keys, those of the full blocks among so many tokens included."""
        size, keys = self.block_size, self.keys
        for start in range(len(keys) * size, num_tokens - size + 1, size):
            tokens = token_ids[start : start + size].tobytes()
            keys.append(hashlib.sha256((keys[-1] if keys else self.root) + tokens).digest())
        return keys
