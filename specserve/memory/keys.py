"""The keys of full KV blocks, by which the prefix cache and the tiers find them."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence

import msgspec

Keys = dict[str, list[bytes]]  # keys of a prompt's full blocks, by name of the KV format


def root_key(*parts: str | int) -> bytes:
    """The first key of a chain: a hash of everything besides tokens that KV depends on."""
    return hashlib.sha256(msgspec.json.encode(parts)).digest()


class BlockHasher:
    """The keys of one request's full blocks for one model, in order.

    key = SHA-256(parent key, tokens): equal keys mean equal prefixes. A weaker hash could collide,
    and give one prompt the KV of another.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root, self.block_size = root, block_size
        self.keys: list[bytes] = []

    def extend(self, token_ids: "array[int]", num_tokens: int) -> list[bytes]:
        """Add the keys of full blocks in the first `num_tokens` tokens; return all keys."""
        size, keys = self.block_size, self.keys
        for start in range(len(keys) * size, num_tokens - size + 1, size):
            tokens = token_ids[start : start + size].tobytes()
            keys.append(hashlib.sha256((keys[-1] if keys else self.root) + tokens).digest())
        return keys


class KVFormat(msgspec.Struct, frozen=True):
    """The inputs of one model's block keys besides tokens and salt."""

    name: str  # the model, and the dtype of its KV
    block_size: int  # tokens
    is_per_tenant: bool = False  # an API key finds only blocks of its own requests
    tenants: tuple[str, ...] = ()  # what identifies each API key after a restart; () if nothing
    has_state: bool = False  # the model has recurrent layers: prefixes end at checkpoints

    def hasher(self, salt: str, adapter: str = "", tenant: int = 0) -> BlockHasher:
        """A hasher for one request; `adapter` is the digest of its LoRA adapter, or ""."""
        parts: list[str | int] = [salt, adapter] if adapter else [salt]
        if self.is_per_tenant and self.tenants:
            parts.append(f"tenant {self.tenants[tenant]}")  # differs from any adapter's digest
        elif self.is_per_tenant and tenant:
            parts.append(tenant)  # an int, so that it differs from any adapter
        return BlockHasher(root_key(self.name, *parts), self.block_size)


def state_key(key: bytes, number: int) -> bytes:
    """The key in tiers of one of the blocks of a checkpoint."""
    return hashlib.sha256(b"%b state %d" % (key, number)).digest()


def state_keys(key: bytes, num_blocks: int) -> list[bytes]:
    """The keys in tiers of the blocks of a checkpoint."""
    return [state_key(key, number) for number in range(num_blocks)]


def prompt_keys(
    formats: Mapping[str, KVFormat],
    token_ids: Sequence[int],
    salt: str,
    adapter: str = "",
    tenant: int = 0,
) -> Keys:
    """The keys of a prompt's full blocks for every model with a prefix cache. Adapters change only
    the target model.
    """
    tokens = array("i", token_ids)
    hashers = {
        of.name: of.hasher(salt, adapter if model == "target" else "", tenant)
        for model, of in formats.items()
    }
    return {name: hasher.extend(tokens, len(tokens)) for name, hasher in hashers.items()}
