"""Small random steps for the attention ops: prefixes and trees over shuffled blocks."""

import random
from dataclasses import dataclass

import torch

from specserve_kernels import Chunks, KVCache, KVLayer, Rows
from specserve_kernels.reference.kv import put


@dataclass
class Req:
    """Rows [start, start + n) of a request: causal, or a root and guesses under `parents`."""

    start: int
    num_rows: int = 1
    parents: list[int] | None = None  # of guess k, at k - 1; None: causal rows

    def masks(self):
        masks = [1]
        for k, parent in enumerate(self.parents, 1):
            masks.append(masks[parent] | 1 << k)
        return masks

    @property
    def end(self):
        return self.start + (self.num_rows if self.parents is None else 1 + len(self.parents))

    def visible(self):
        """For every row, the slots it sees, in the order of their positions."""
        if self.parents is None:
            return [[*range(self.start + i + 1)] for i in range(self.num_rows)]
        path = [[*range(self.start + 1)]]
        for k, parent in enumerate(self.parents, 1):
            path.append([*path[parent], self.start + k])
        return path


def random_tree(rng, size):
    """Parents of `size` guesses: a chain, a wide tree, or mostly something between."""
    depth = rng.choice([0.0, 0.5, 0.9, 1.0])
    return [k if rng.random() < depth else rng.randrange(k + 1) for k in range(size)]


def random_reqs(rng, longest=300):
    """A prompt's first chunk, a later one, roots without and with a mask, and three trees."""
    starts = [rng.randrange(longest) for _ in range(6)]
    trees = [random_tree(rng, size) for size in (1, rng.randint(2, 20), rng.randint(21, 63))]
    return [
        Req(0, rng.randint(1, 40)),
        Req(starts[0], rng.randint(1, 40)),
        Req(starts[1], 1),
        Req(starts[2], parents=[]),
        *(Req(start, parents=tree) for start, tree in zip(starts[3:], trees, strict=True)),
    ]


@dataclass
class RandomStep:
    """A step of some requests, and a KV cache in which their blocks lie in a random order.

    A slot that nothing was put into holds `fill`.
    """

    reqs: list[Req]
    block_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0  # of the block order
    num_layers: int = 1
    fill: float = float("nan")
    kv_dtype: torch.dtype | None = None  # None: as the queries

    def __post_init__(self):
        counts = [-(-r.end // self.block_size) for r in self.reqs]
        numbers = list(range(sum(counts) + 3))
        random.Random(self.seed).shuffle(numbers)
        self.tables = [[numbers.pop() for _ in range(n)] for n in counts]
        shape = (sum(counts) + 3, self.num_layers * 2, self.block_size, self.num_kv_heads)
        dtype = self.kv_dtype or self.dtype
        has_scales = dtype.itemsize == 1
        fill = 99.0 if dtype == torch.int8 else self.fill
        self.arena = torch.full((*shape, self.head_dim), fill, dtype=dtype)
        parts = [self.arena[:, i::2].unbind(1) for i in (0, 1)]
        if has_scales:
            inner = (self.num_kv_heads, self.block_size)
            self.scales = torch.full((*shape[:2], *inner), self.fill).mT  # [Hk][slot] in memory
            parts += [self.scales[:, i::2].unbind(1) for i in (0, 1)]
        self.kv = KVCache(tuple(map(KVLayer, *parts)))

    def slots(self, b, n):
        """Where request b's first n tokens stand: block number * block_size + offset."""
        i = torch.arange(n)
        return torch.tensor(self.tables[b])[i // self.block_size] * self.block_size + (
            i % self.block_size
        )

    def put(self, b, slots, tokens):
        """Write K and V, [2, n, Hk, D], into some of request b's slots, in layer 0."""
        at = self.slots(b, self.reqs[b].end)[slots]
        k, v = (values.float() for values in tokens)
        put(self.kv.layers[0], (at // self.block_size, at % self.block_size), k, v)

    def filled(self):
        """Every token of every request is in its place."""
        for b, r in enumerate(self.reqs):
            self.put(b, list(range(r.end)), tokens(self, b, r.end))
        return self

    def rows(self):
        qo, indptr, indices = [0], [0], []
        positions, slots, prefix, mask = [], [], [], []
        for b, r in enumerate(self.reqs):
            masks = [0] * r.num_rows if r.parents is None else r.masks()
            for i, m in enumerate(masks):
                depth = i if r.parents is None else m.bit_count() - 1
                positions.append(r.start + depth)
                prefix.append(r.start + i + 1 if r.parents is None else r.start)
                mask.append(m - (1 << 64) if m >> 63 else m)
            slots += self.slots(b, r.end)[r.start :].tolist()
            qo.append(len(slots))
            indices += self.tables[b]
            indptr.append(len(indices))
        last = [(r.end - 1) % self.block_size + 1 for r in self.reqs]
        ints = [torch.tensor(x, dtype=torch.int32) for x in (qo, indptr, indices, last, positions)]
        return Rows(
            *ints,
            torch.tensor(slots, dtype=torch.int64),
            torch.tensor(prefix, dtype=torch.int32),
            torch.tensor(mask, dtype=torch.int64),
        )

    def attend(self, ops, q, window=None, rows=None, soft_cap=None, sinks=None):
        rows = self.rows() if rows is None else rows
        is_plain = soft_cap is None and sinks is None
        plan = ops.plan(rows, self.kv, self.num_heads, [window], (), is_plain)
        scale = self.head_dim**-0.5
        return ops.attention(q, self.kv.layers[0], plan, scale, window, soft_cap, sinks)


def within(slots, window):
    """The slots of a row's visible positions, of which it sees those in the window."""
    if isinstance(window, Chunks):
        return slots[(len(slots) - 1) // window.size * window.size :]
    return slots[-window:] if window else slots


def only(rows, chosen):
    """The step that has some of the rows and no others; `chosen` ascends."""
    chosen = torch.as_tensor(chosen)
    qo = torch.searchsorted(chosen, rows.qo_indptr.long()).int()
    each = ("positions", "slots", "prefix", "mask")
    return rows._replace(qo_indptr=qo, **{name: getattr(rows, name)[chosen] for name in each})


def tokens(step, b, n):
    """K and V of request b's first n tokens, [2, n, Hk, D]: the same however the blocks lie."""
    shape = (n, 2, step.num_kv_heads, step.head_dim)
    return random_tensor(*shape, dtype=step.dtype, seed=b).transpose(0, 1)


def queries(step, num_rows):
    return random_tensor(num_rows, step.num_heads, step.head_dim, dtype=step.dtype, seed=99)


def random_tensor(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def row_errors(got, want):
    """How far each row is off, relative to its norm."""
    got, want = (x.cpu().double().flatten(1) for x in (got, want))
    return (got - want).norm(dim=1) / want.norm(dim=1)
