"""Sizes the KV pool, and divides it into blocks of the target and the draft model."""

from typing import NamedTuple

import torch

from specserve.config import Config
from specserve.engine.loading import asked_for
from specserve.engine.ranks import Followers, num_sharing
from specserve.engine.runner import Runner
from specserve.errors import ConfigError
from specserve.memory.arena import (
    Arena,
    block_bytes,
    place_states,
    shard_block_bytes,
    tokens_that_fit,
)
from specserve.memory.blocks import BlockPool
from specserve.models.decoder import Decoder, LoadedModel
from specserve.models.draft_head import DraftHead
from specserve.models.layouts import kv_layouts, state_layouts
from specserve.models.reader import KV_DTYPES
from specserve.models.shard import WHOLE, Shard
from specserve_drafters.candidates import TREE_SLOTS
from specserve_kernels import DeviceError, KVCache, Ops


class Models(NamedTuple):
    """Models that share a pool."""

    target: LoadedModel
    draft: LoadedModel | None = None
    head: DraftHead | None = None
    # Number of ids that a drafter may propose; None: all that both models have
    num_ids: int | None = None


class Runners(NamedTuple):
    target: Runner
    draft: Runner | None = None
    head: Runner | None = None


CHECKPOINTS = 3  # copies of a state per running request for which the pool has room


class PoolPlan:
    """The sizes of the arena that all models share, for requests of up to `max_len` tokens.

    layouts      of each layer's KV, by the model whose blocks have it: the target's and a head's
                 layers, and the draft model's layers
    block_bytes  bytes of a block, the same for all models
    block_sizes  tokens in a block, by model
    per_request  blocks of a request of full length and its tree, by model
    state_size   blocks of a request's recurrent state; 0: the target has none
    draft_size   blocks of its draft state; 0: the draft model has none
    num_blocks   at most the need of `max_running` such requests, and at most what memory allows
    """

    def __init__(self, config: Config, models: Models, max_len: int, shard: Shard = WHOLE) -> None:
        """`shard` is the part of the target model that rank 0 runs."""
        dtype, head = KV_DTYPES.get(config.memory.kv_dtype), models.head
        layouts = [*models.target.kv_layouts(dtype), *(head.kv_layouts(dtype) if head else ())]
        self.layouts = [layouts, *([models.draft.kv_layouts(dtype)] if models.draft else [])]
        target, *drafts = self.layouts
        self.states = models.target.state_layouts()
        tokens = block_size(config, models.target)
        others = [layout for draft in drafts for layout in draft]
        self.draft_states = models.draft.state_layouts() if models.draft else ()
        pieces = (layout.piece_bytes for layout in (*self.states, *self.draft_states))
        own = block_bytes(target, tokens, others)
        self.block_bytes = max(own, *pieces, 0)
        self.state_size, _ = place_states(self.states, self.block_bytes)
        largest = self.block_bytes
        if isinstance(models.target, Decoder):  # the other ranks' states have as many blocks
            for rank in range(1, shard.size):
                num_bytes, size = state_of_rank(config, models.target, shard.at(rank))
                self.state_size = max(self.state_size, size)
                largest = max(largest, num_bytes)
        self.draft_size, _ = place_states(self.draft_states, self.block_bytes)
        self.block_sizes = [tokens]
        for draft in drafts:
            fits = tokens_that_fit(draft, self.block_bytes)
            self.block_sizes.append(draft_block_size(config.memory.draft_block_size, fits))
        self.max_len = max_len
        self.per_request = [-(-(max_len + TREE_SLOTS) // size) for size in self.block_sizes]
        self.per_request[0] += self.state_size
        if drafts:
            self.per_request[1] += self.draft_size
        self.allowed = kv_bytes(config, models.target.ops)
        needed = sum(self.per_request) + CHECKPOINTS * (self.state_size + self.draft_size)
        needed *= config.scheduler.max_running
        self.num_blocks = min(self.allowed // largest, needed)

    def check(self) -> None:
        """Raise ConfigError, with the settings to change, unless one request of full length
        fits.
        """
        if self.num_blocks >= self.per_request[0]:
            return
        fit = (self.num_blocks - self.state_size) * self.block_sizes[0] - TREE_SLOTS
        shorter = f"set scheduler.max_model_len to at most {fit}, or " if fit >= 2 else ""
        needed = self.per_request[0] * self.block_bytes
        parts = ", its tree and its recurrent state" if self.state_size else " and its tree"
        raise ConfigError(
            f"a request of {self.max_len} tokens{parts} need {needed} bytes of KV, and "
            f"memory allows {self.allowed}. To fix this, {shorter}raise memory.kv_bytes or "
            "memory.kv_fraction, or lower memory.block_size"
        )


def block_size(config: Config, target: LoadedModel) -> int:
    """Return the target model's tokens per block.

    A block holds all layers, so attention of a layer reads its KV in pieces of one block. CPUs need
    larger pieces. Checkpoints of recurrent states lie between blocks, so these stay small.
    """
    is_cpu = target.ops.place(torch.empty(0)).device.type == "cpu"
    return config.memory.block_size or (64 if is_cpu and not target.state_layouts() else 16)


def state_of_rank(config: Config, target: Decoder, shard: Shard) -> tuple[int, int]:
    """Return the bytes of a block of another rank, and the blocks of its part of a state."""
    dtype = KV_DTYPES.get(config.memory.kv_dtype, target.dtype)
    states = state_layouts(target.config, shard, target.dtype)
    own = kv_layouts(target.config, shard, dtype)
    num_bytes = shard_block_bytes(own, states, block_size(config, target))
    return num_bytes, place_states(states, num_bytes)[0]


def build_pool(
    config: Config, models: Models, max_len: int, followers: Followers | None = None
) -> tuple[Runners, BlockPool]:
    """Return a runner for each model, and the pool that they share. `followers` get pools with as
    many blocks.
    """
    plan = PoolPlan(config, models, max_len, WHOLE if followers is None else followers.shard)
    plan.check()
    arena, (target, draft, head, _) = allocate(plan, models.target.ops), models
    both = arena.view(plan.layouts[0], plan.block_sizes[0]).layers
    sizes, num_layers = rows_of_steps(config), len(target.kv_layouts())
    # Only the target's KV is moved: a head runs accepted draft tokens again.
    states = arena.add_states(plan.states, config.max_step_nodes, plan.state_size)
    arena.views["target"] = of_target = KVCache(both[:num_layers], states)
    last = target.config.num_layers
    aux_layer_ids = () if head is None else [i for i in head.aux_layer_ids if i < last]
    leading = None
    if followers is not None:
        given = plan.block_sizes[0], sizes, aux_layer_ids, plan.state_size
        followers.allocate(plan.num_blocks, *given)
        arena.repeat, leading = followers.update, followers.leading
    runners = Runners(
        Runner(target, arena, of_target, *sizes, aux_layer_ids, leading, plan.state_size)
    )
    if draft is not None:
        kv = arena.add_view("draft", plan.layouts[1], plan.block_sizes[1])
        kv = with_states(arena, kv, draft, config)
        runners = runners._replace(draft=Runner(draft, arena, kv, *sizes))
    if head is not None:
        runners = runners._replace(head=Runner(head, arena, KVCache(both[num_layers:]), *sizes))
    return runners, BlockPool(plan.num_blocks, plan.block_bytes)


def with_states(arena: Arena, kv: KVCache, draft: LoadedModel, config: Config) -> KVCache:
    """Add the states of a draft model's recurrent ops, if there are any. A level runs all draft
    tokens of a tree, and their inputs are not read later.
    """
    states = draft.state_layouts()
    return KVCache(kv.layers, arena.state_layers(states, config.max_step_nodes)) if states else kv


def another_draft(config: Config, arena: Arena, draft: LoadedModel) -> Runner:
    """Return a runner for a draft model that is added to an existing pool. ConfigError if a block
    cannot hold a token of it, or a piece of its state. The arena's view of the draft model's KV
    does not change.
    """
    layouts = draft.kv_layouts(KV_DTYPES.get(config.memory.kv_dtype))
    fits = tokens_that_fit(layouts, arena.blocks.shape[1])
    if fits == 0:
        raise ConfigError(
            f"drafter.model = {config.draft!r}: the KV of a token exceeds the "
            f"{arena.blocks.shape[1]} bytes of a block. Start the server with this model, or with "
            "a larger memory.block_size"
        )
    piece = max((layout.piece_bytes for layout in draft.state_layouts()), default=0)
    if piece > arena.blocks.shape[1]:
        raise ConfigError(
            f"drafter.model = {config.draft!r}: a piece of its recurrent state has {piece} bytes, "
            f"and a block of the pool has {arena.blocks.shape[1]}. Start the server with this "
            "model, or with a larger memory.block_size"
        )
    size = draft_block_size(config.memory.draft_block_size, fits)
    kv = with_states(arena, arena.view(layouts, size), draft, config)
    return Runner(draft, arena, kv, *rows_of_steps(config))


def rows_of_steps(config: Config) -> tuple[int, int]:
    """Return the most rows of a step, and the most rows of a step that are read."""
    c = config.scheduler
    return c.max_batched_tokens, c.max_running + config.max_step_nodes


def allocate(plan: PoolPlan, ops: Ops) -> Arena:
    size = plan.num_blocks * plan.block_bytes
    try:
        return Arena(ops.allocate(size), plan.block_bytes)
    except (OSError, OverflowError, torch.OutOfMemoryError) as e:
        raise ConfigError(
            f"the system refuses {size} bytes for the KV pool ({asked_for(e)}). Lower "
            "memory.kv_bytes or memory.kv_fraction"
        ) from e


def pool_words(
    config: Config, pool: BlockPool, size: int, state_size: int = 0, draft_size: int = 0
) -> str:
    """Return the size of the pool in words; `size` is the number of tokens per block."""
    mib = pool.num_blocks * pool.block_bytes / 2**20
    kind = "" if config.memory.kv_dtype == "auto" else f" in {config.memory.kv_dtype}"
    words = f"KV of {pool.num_blocks * size} tokens{kind}, in blocks of {size}: {mib:.0f} MiB"
    for name, number in (("recurrent", state_size), ("recurrent draft", draft_size)):
        if number:
            state = size_words(number * pool.block_bytes)
            words += f". A {name} state takes {state} of it per request or checkpoint"
    return words


def size_words(num_bytes: int) -> str:
    """Return a size in KiB, or from 1 MiB on in MiB."""
    kib = num_bytes / 2**10
    return f"{kib / 2**10:.1f} MiB" if kib >= 2**10 else f"{kib:.1f} KiB"


def draft_block_size(asked: int | None, fits: int) -> int:
    if asked is not None and asked > fits:
        raise ConfigError(
            f"memory.draft_block_size = {asked} exceeds the {fits} draft tokens that fit into "
            "a block. Lower it, or raise memory.block_size"
        )
    return asked or fits


def kv_bytes(config: Config, ops: Ops) -> int:
    if config.memory.kv_bytes is not None:
        return config.memory.kv_bytes
    try:
        return int(config.memory.kv_fraction * ops.free_memory() / num_sharing(config))
    except DeviceError as e:
        raise ConfigError(f"{e}. Set memory.kv_bytes") from e
