"""Keys of the prefix cache: a chain of hashes over all that a block's KV depends on."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence

import msgspec

Keys = dict[str, list[bytes]]  # of a prompt's full blocks, by the name of the KV's format


def root_key(*parts: str | int) -> bytes:
    """The first key of a chain, over what KV depends on besides the tokens."""
    return hashlib.sha256(msgspec.json.encode(parts)).digest()


class BlockHasher:
    """The keys of one request's full blocks of one model, in order.

    key = SHA-256(parent key, tokens): equal keys mean equal tokens from the first one on. Not a
    weaker hash: by a collision, one prompt could be answered with the KV of another.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root, self.block_size = root, block_size
        self.keys: list[bytes] = []

    def extend(self, token_ids: "array[int]", num_tokens: int) -> list[bytes]:
        """Add the keys of full blocks among the first `num_tokens` tokens; returns all keys."""
        size, keys = self.block_size, self.keys
        for start in range(len(keys) * size, num_tokens - size + 1, size):
            tokens = token_ids[start : start + size].tobytes()
            keys.append(hashlib.sha256((keys[-1] if keys else self.root) + tokens).digest())
        return keys


class KVFormat(msgspec.Struct, frozen=True):
    """What the keys of one model's blocks depend on besides tokens and salt."""

    name: str  # the model, and the dtype of its KV
    block_size: int  # tokens
    is_per_tenant: bool = False  # each API key finds only blocks of its own requests

    def hasher(self, salt: str, adapter: str = "", tenant: int = 0) -> BlockHasher:
        """`adapter` is the digest of what changes the model, if anything does."""
        parts: list[str | int] = [salt, adapter] if adapter else [salt]
        if self.is_per_tenant and tenant:
            parts.append(tenant)  # a number, as an adapter is a text
        return BlockHasher(root_key(self.name, *parts), self.block_size)


def prompt_keys(
    formats: Mapping[str, KVFormat],
    token_ids: Sequence[int],
    salt: str,
    adapter: str = "",
    tenant: int = 0,
) -> Keys:
    """The keys of a prompt's full blocks for every model with a prefix cache. Adapters change the
    target alone.
    """
    tokens = array("i", token_ids)
    hashers = {
        of.name: of.hasher(salt, adapter if model == "target" else "", tenant)
        for model, of in formats.items()
    }
    return {name: hasher.extend(tokens, len(tokens)) for name, hasher in hashers.items()}
