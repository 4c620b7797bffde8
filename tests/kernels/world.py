"""Small random worlds for the attention ops: requests with prefixes and trees over shuffled blocks."""

import random
from dataclasses import dataclass, field

import torch

from specserve_kernels import KVCache, KVLayer, Rows


@dataclass
class Req:
    """Rows [start, start + n) of a request: causal, or a root and guesses under `parents`."""

    start: int
    num_rows: int = 1
    parents: list[int] | None = None  # of guess k, at k - 1; None: causal rows

    def masks(self):
        masks = [1]
        for k, parent in enumerate(self.parents or [], 1):
            masks.append(masks[parent] | 1 << k)
        return masks

    @property
    def end(self):
        return self.start + (self.num_rows if self.parents is None else 1 + len(self.parents))


@dataclass
class World:
    """A KV cache whose tokens are a function of (request, slot), however the blocks lie."""

    reqs: list[Req]
    block_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0  # of the block order
    layers: int = 2
    fill: float = float("nan")
    tables: list[list[int]] = field(default_factory=list)

    def __post_init__(self):
        counts = [-(-r.end // self.block_size) for r in self.reqs]
        numbers = list(range(sum(counts) + 3))
        random.Random(self.seed).shuffle(numbers)
        self.tables = [[numbers.pop() for _ in range(n)] for n in counts]
        shape = (sum(counts) + 3, self.layers * 2, self.block_size, self.num_kv_heads)
        arena = torch.full((*shape, self.head_dim), self.fill, dtype=self.dtype)
        self.kv = KVCache(
            tuple(KVLayer(arena[:, 2 * i], arena[:, 2 * i + 1]) for i in range(self.layers))
        )
        self.arena = arena

    def slot(self, b, i):
        return self.tables[b][i // self.block_size] * self.block_size + i % self.block_size

    def write(self, b, i, layer, key, value):
        block, offset = divmod(self.slot(b, i), self.block_size)
        self.kv.layers[layer].k[block, offset] = key.to(self.dtype)
        self.kv.layers[layer].v[block, offset] = value.to(self.dtype)

    def rows(self):
        qo, indptr, indices, last = [0], [0], [], []
        positions, slots, prefix, mask = [], [], [], []
        for b, r in enumerate(self.reqs):
            masks = [0] * r.num_rows if r.parents is None else r.masks()
            for i, m in enumerate(masks):
                depth = i if r.parents is None else m.bit_count() - 1
                positions.append(r.start + depth)
                slots.append(self.slot(b, r.start + i))
                prefix.append(r.start + i + 1 if r.parents is None else r.start)
                mask.append(m - (1 << 64) if m >> 63 else m)
            qo.append(len(slots))
            indices += self.tables[b]
            indptr.append(len(indices))
            last.append((r.end - 1) % self.block_size + 1)
        ints = [torch.tensor(x, dtype=torch.int32) for x in (qo, indptr, indices, last, positions)]
        return Rows(
            *ints,
            torch.tensor(slots, dtype=torch.int64),
            torch.tensor(prefix, dtype=torch.int32),
            torch.tensor(mask, dtype=torch.int64),
        )


def tokens(b, n, world, salt=0):
    """K and V of a request's first n slots: [n, Hk, D] each."""
    g = torch.Generator().manual_seed(1000 * b + salt)
    shape = (2, n, world.num_kv_heads, world.head_dim)
    return torch.randn(shape, generator=g).to(world.dtype)
