"""The memory of the KV pool: equal blocks in one flat arena, and each model's view of them."""

from collections.abc import Callable, Sequence
from math import prod

import msgspec
import torch
from torch import Tensor

from specserve.memory.blocks import KVUpdates
from specserve_kernels import HostMemory, KVCache, KVLayer, StateLayer, reserve

ALIGNMENT = 16  # bytes, for vector loads


class KVLayout(msgspec.Struct, frozen=True):
    """The layout of one layer's KV in a block: [K|V][slot][kv_head][head_dim]. An 8-bit dtype adds
    scales after it: [K|V][kv_head][slot] float32.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # may be narrower than the dtype of the activations

    @property
    def has_scales(self) -> bool:
        return self.dtype.itemsize == 1

    def slab_bytes(self, block_size: int) -> int:
        """Bytes of the layer's K in a block, or of its V."""
        return aligned(block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize)

    def scales_bytes(self, block_size: int) -> int:
        """Bytes of the scales for the layer's K in a block, or for its V."""
        return aligned(block_size * self.num_kv_heads * 4) if self.has_scales else 0

    def layer_bytes(self, block_size: int) -> int:
        return 2 * (self.slab_bytes(block_size) + self.scales_bytes(block_size))


class StateLayout(msgspec.Struct, frozen=True):
    """The state of one recurrent op: pieces of equal shape, each within one block."""

    num_pieces: int
    shape: tuple[int, int]
    dtype: torch.dtype
    kept_width: int  # elements of the inputs that the op keeps per draft token
    num_groups: int = 0  # as in `StateLayer`

    @property
    def piece_bytes(self) -> int:
        return aligned(prod(self.shape) * self.dtype.itemsize)


def place_states(layouts: Sequence[StateLayout], block_bytes: int) -> tuple[int, list[Tensor]]:
    """Pack the pieces of a model's state into blocks, large pieces first. Return the number of
    blocks, and the places of each op's pieces: [P, 2] int64, block and first byte.
    """
    block, begin = 0, 0
    places = [torch.empty(layout.num_pieces, 2, dtype=torch.int64) for layout in layouts]
    for i in sorted(range(len(layouts)), key=lambda i: -layouts[i].piece_bytes):
        size = layouts[i].piece_bytes
        for piece in range(layouts[i].num_pieces):
            if begin + size > block_bytes:
                block, begin = block + 1, 0
            places[i][piece] = torch.tensor([block, begin])
            begin += size
    return block + (begin > 0), places


def aligned(size: int) -> int:
    """Round a size up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def used_bytes(layouts: Sequence[KVLayout], block_size: int) -> int:
    """Bytes that `block_size` tokens of a model take in a block."""
    return sum(layout.layer_bytes(block_size) for layout in layouts)


def block_bytes(layouts: Sequence[KVLayout], block_size: int, others: Sequence[KVLayout]) -> int:
    """Bytes of a block for `block_size` target model tokens or one token of the other model."""
    return max(used_bytes(layouts, block_size), used_bytes(others, 1))


def shard_block_bytes(
    layouts: Sequence[KVLayout], states: Sequence[StateLayout], block_size: int
) -> int:
    """Bytes of a block for `block_size` tokens of one rank's layers, and for a piece of a state."""
    pieces = (layout.piece_bytes for layout in states)
    return max(used_bytes(layouts, block_size), *pieces, 0)


def tokens_that_fit(layouts: Sequence[KVLayout], block_bytes: int) -> int:
    """The maximum number of a model's tokens in a block of `block_bytes`."""
    size = 0
    while used_bytes(layouts, size + 1) <= block_bytes:
        size += 1
    return size


class Arena:
    """All blocks of `block_bytes` that fit into `memory`.

    blocks  [num_blocks, block_bytes]  uint8, zeroed
    views   by model name: all blocks as that model's KV; one model at a time uses a block
    states  of the target's recurrent ops, in blocks of the same arena
    state_size  blocks of a request's state; 0: no op has a state
    host    the blocks of the host tier; None without one
    repeat  repeats updates in the arenas of other ranks; None without ranks
    """

    def __init__(self, memory: Tensor, block_bytes: int) -> None:
        num_blocks = len(memory) // block_bytes
        self.blocks = memory[: num_blocks * block_bytes].view(num_blocks, block_bytes)
        self.views: dict[str, KVCache] = {}
        self.states: tuple[StateLayer, ...] = ()
        self.state_size = 0
        self.host: HostMemory | None = None
        self.repeat: Callable[[KVUpdates], None] | None = None

    def add_view(self, name: str, layouts: Sequence[KVLayout], block_size: int) -> KVCache:
        """Add and return a `view`; later updates of this model's KV use it."""
        self.views[name] = self.view(layouts, block_size)
        return self.views[name]

    def view(self, layouts: Sequence[KVLayout], block_size: int) -> KVCache:
        """All blocks as a model's KV; the layers follow each other within a block."""
        used, block_bytes = used_bytes(layouts, block_size), self.blocks.shape[1]
        assert used <= block_bytes, "block_size does not fit into a block"
        layers, begin = [], 0
        for layout in layouts:
            layers.append(self.layer(layout, block_size, begin))
            begin += layout.layer_bytes(block_size)
        return KVCache(tuple(layers))

    def add_states(
        self, layouts: Sequence[StateLayout], num_kept: int, state_size: int | None = None
    ) -> tuple[StateLayer, ...]:
        """Place the states of recurrent ops, which keep the inputs of `num_kept` draft tokens.
        `state_size` is the number of blocks of a state in all ranks; None: as many as needed.
        """
        needed, _ = place_states(layouts, self.blocks.shape[1])
        self.state_size = needed if state_size is None else state_size
        assert needed <= self.state_size, "other ranks use fewer blocks for a state"
        self.states = self.state_layers(layouts, num_kept)
        return self.states

    def state_layers(self, layouts: Sequence[StateLayout], num_kept: int) -> tuple[StateLayer, ...]:
        """The states of a model's recurrent ops in the arena's blocks."""
        _, places = place_states(layouts, self.blocks.shape[1])
        states = tuple(
            StateLayer(
                self.blocks,
                place,
                layout.shape,
                layout.dtype,
                self.blocks.new_empty(0, layout.kept_width, dtype=layout.dtype),
                layout.num_groups,
            )
            for layout, place in zip(layouts, places, strict=True)
        )
        reserve(states, max(1, num_kept))
        return states

    def layer(self, layout: KVLayout, block_size: int, begin: int) -> KVLayer:
        """The KV of a layer that begins at byte `begin` of every block."""
        slab, heads, D = layout.slab_bytes(block_size), layout.num_kv_heads, layout.head_dim
        inner, strides = (block_size, heads, D), (heads * D, D, 1)
        k, v = (self.strided(layout.dtype, at, inner, strides) for at in (begin, begin + slab))
        if not layout.has_scales:
            return KVLayer(k, v)
        begin, slab = begin + 2 * slab, layout.scales_bytes(block_size)
        scales = (
            self.strided(torch.float32, at, (block_size, heads), (1, block_size))
            for at in (begin, begin + slab)
        )
        return KVLayer(k, v, *scales)

    def strided(
        self, dtype: torch.dtype, begin: int, inner: Sequence[int], strides: Sequence[int]
    ) -> Tensor:
        """A strided view of every block from byte `begin` on: [num_blocks, *inner]."""
        num_blocks, block_bytes = self.blocks.shape
        flat, size = self.blocks.view(-1).view(dtype), dtype.itemsize
        at = flat.storage_offset() + begin // size
        return flat.as_strided((num_blocks, *inner), (block_bytes // size, *strides), at)
