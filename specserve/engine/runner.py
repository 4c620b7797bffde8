"""A model with its KV: rows in, logits out. Target and draft model run through the same class."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specserve.engine.batch import Batch, RowGroup, build_batch
from specserve.memory import BlockTable
from specserve.models.decoder import Decoder
from specserve_kernels import KVCache, SampleParams, Threads


class Runner:
    def __init__(self, decoder: Decoder, kv: KVCache) -> None:
        self.decoder, self.kv, self.ops = decoder, kv, decoder.ops
        self.threads: Threads | None = None  # None leaves them as they are

    def forward(self, groups: Sequence[RowGroup]) -> Tensor:
        """Write the KV of all rows; the logits [n, V] of those that are read, in order.

        The caller holds torch.inference_mode: entering it for every draft level would add up.
        """
        logits, _ = self.run(build_batch(groups))
        return logits

    def answers(self, groups: Sequence[RowGroup], params: SampleParams) -> list[int]:
        """As `forward`, and the token after each row that is read: all at once, in one wait."""
        batch = build_batch(groups)
        rows = torch.arange(len(batch.logit_rows))
        logits, (rows, *asked) = self.run(batch, [rows, *params])
        tokens: list[int] = self.ops.sample(logits, rows, SampleParams(*asked)).tolist()
        return tokens

    def run(self, batch: Batch, also: Sequence[Tensor] = ()) -> tuple[Tensor, Sequence[Tensor]]:
        """The logits, and host tensors that went along where the ops read them."""
        if self.threads is not None:
            self.threads.use(len(batch.token_ids))
        plan = self.decoder.plan(batch.rows, self.kv, [batch.token_ids, batch.logit_rows, *also])
        token_ids, logit_rows, *placed = plan.also
        hidden = self.decoder.forward(token_ids, self.kv, plan)
        if len(logit_rows) < len(hidden):
            hidden = hidden.index_select(0, logit_rows)
        if len(hidden) == 0:
            return hidden.new_empty(0, self.decoder.config.vocab_size), placed
        return self.decoder.logits(hidden), placed

    def move(self, moves: Sequence[tuple[BlockTable, int, int]]) -> None:
        """Copy KV from slot to slot of a request's table, in the order given."""
        if not moves:
            return
        source = [flat_slot(table, slot) for table, slot, _ in moves]
        target = [flat_slot(table, slot) for table, _, slot in moves]
        self.ops.move_kv(self.kv, torch.tensor(source), torch.tensor(target))


def flat_slot(table: BlockTable, slot: int) -> int:
    return table.blocks[slot // table.block_size] * table.block_size + slot % table.block_size
