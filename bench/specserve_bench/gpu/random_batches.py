"""Batches of random requests, of any number of rows and any context, over a random KV cache."""

import random
from collections.abc import Callable

from specserve.engine.engine import Engine
from specserve.engine.runner import RowGroup, Runner, build_step_input, greedy_draws
from specserve.memory.arena import Arena, used_bytes
from specserve.memory.blocks import BlockPool, BlockTable, KVTables
from specserve.models.decoder import Decoder
from specserve.models.eagle_head import EagleHead
from specserve.scheduling import Scheduler
from specserve.scheduling.scheduler import StepBudget
from specserve_bench.figures.steps import plain_sampling
from specserve_drafters import Draft

BLOCK_SIZE = 16  # tokens; the default on GPUs


def token_bytes(decoder: Decoder | EagleHead) -> int:
    """Bytes of a token's KV in all layers."""
    return used_bytes(decoder.kv_layouts(), BLOCK_SIZE) // BLOCK_SIZE


class RandomBatches:
    """Batches of requests that have room for `num_tokens` in all."""

    def __init__(self, decoder: Decoder | EagleHead, num_tokens: int) -> None:
        self.decoder, size = decoder, used_bytes(decoder.kv_layouts(), BLOCK_SIZE)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.arena = Arena(decoder.ops.allocate(num_blocks * size), size)
        self.arena.blocks.view(decoder.dtype).normal_()
        self.arena.add_view("target", decoder.kv_layouts(), BLOCK_SIZE)
        self.runner = Runner(decoder, self.arena, self.arena.views["target"])
        self.pool = BlockPool(num_blocks, size)
        random.Random(0).shuffle(self.pool.free)
        self.random = random.Random(0)

    def tables(self, num_requests: int, num_slots: int) -> list[BlockTable]:
        tables = [BlockTable(self.pool, BLOCK_SIZE) for _ in range(num_requests)]
        assert all(table.try_reserve(num_slots) for table in tables), "the pool is too small"
        return tables

    def groups(
        self, num_requests: int, rows: int, context: int, kind: str = "tree"
    ) -> list[RowGroup]:
        """For each request a root and a random tree after its context; `chain`: causal rows."""
        groups = []
        for table in self.tables(num_requests, context + rows):
            tokens = [self.random.randrange(self.decoder.config.vocab_size) for _ in range(rows)]
            if rows == 1 or kind == "chain":
                groups.append(RowGroup(table, tokens, context, rows))
                continue
            parents = [self.random.randrange(max(0, k - 3), k + 1) for k in range(rows - 1)]
            masks = Draft(tokens[1:], parents).masks()
            groups.append(RowGroup(table, tokens, context, rows, context, masks))
        return groups

    def release(self, groups: list[RowGroup]) -> None:
        for group in groups:
            group.table.clear()

    def step(self, groups: list[RowGroup]) -> Callable[[], object]:
        """A whole step of the target: inputs to the device, a forward, tokens back to the host."""
        num_read = sum(g.num_read for g in groups)

        def run() -> list[int]:
            step = build_step_input(groups, self.pool.updates, greedy_draws(num_read))
            answers = self.runner.collect(step, self.runner.launch(step))
            return answers.after([*range(num_read)])

        return run

    def engine(self, chunk: int, max_running: int) -> Engine:
        """An engine without drafting that computes a prompt in chunks of so many rows."""
        budget = StepBudget(
            max_running=max_running,
            max_batched_tokens=chunk + 64,
            prefill_chunk=chunk,
            max_nodes=0,
            max_step_nodes=0,
        )
        pool = BlockPool(self.pool.num_blocks, self.pool.block_bytes)
        tables = KVTables(pool, {"target": self.runner.kv.block_size})
        return Engine(self.runner, Scheduler(budget, pool), tables)

    def prompt(self, size: int) -> list[int]:
        vocab_size = self.decoder.config.vocab_size
        return [self.random.randrange(vocab_size) for _ in range(size)]

    def first_token(self, engine: Engine, size: int) -> None:
        """Compute a prompt, and its first token, in an engine without other requests."""
        engine.add(self.prompt(size), plain_sampling(1))
        while not engine.is_idle:
            engine.step()
