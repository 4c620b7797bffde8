"""Attention's time over KV of 8 bits and of bf16: layer by layer, as a step reads it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specserve.engine.runner import RowGroup, build_step_input
from specserve.memory.arena import Arena, KVLayout, used_bytes
from specserve.memory.blocks import BlockPool, BlockTable
from specserve.models.decoder_config import DecoderConfig
from specserve.models.reader import KV_DTYPES
from specserve_bench.demo.scaled_model import shape_config
from specserve_bench.figures.steps import BLOCK_SIZE, typical
from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes, extremes_over
from specserve_kernels import Ops, load

# Context and rows of a request
SIZES = *((context, rows) for context in (512, 8192) for rows in (1, 8, 32)), (32768, 1), (32768, 8)


def measure(
    config: DecoderConfig | None = None,
    sizes: Sequence[tuple[int, int]] = SIZES,
    rounds: int = 5,
) -> dict[str, Any]:
    """Every dtype in turn in every round."""
    config, ops = config or shape_config("qwen3-0.6b"), load(torch.device("cpu"))
    figures = [figure(config, ops, *size, rounds) for size in sizes]
    return {"rounds": rounds, "threads": torch.get_num_threads(), "attention": figures}


def figure(config: DecoderConfig, ops: Ops, context: int, rows: int, rounds: int) -> dict[str, Any]:
    """Milliseconds in all layers, and over those with KV in bf16 of the same round."""
    dtypes = {"bf16": torch.bfloat16} | KV_DTYPES
    layers = {name: AllLayers(config, ops, d, context, rows) for name, d in dtypes.items()}
    taken: dict[str, list[float]] = {name: [] for name in layers}
    for number in range(1 + rounds):
        for name, each in layers.items():
            ms = 1e3 * typical(each.attend)
            taken[name] += [ms] if number else []  # the first round warms up
    return {"context": context, "rows": rows} | {
        name: {"ms": extremes(ms), "over_bf16": extremes_over(ms, taken["bf16"])}
        for name, ms in taken.items()
    }


class AllLayers:
    """The KV of one request in every layer, and some rows behind it that attend."""

    def __init__(
        self, config: DecoderConfig, ops: Ops, dtype: torch.dtype, context: int, rows: int
    ) -> None:
        c, self.ops = config, ops
        layouts = [KVLayout(c.num_kv_heads, c.head_dim, dtype)] * c.num_layers
        size = used_bytes(layouts, BLOCK_SIZE)
        pool = BlockPool(-(-(context + rows) // BLOCK_SIZE))
        arena = Arena(ops.allocate(pool.num_blocks * size), size)
        arena.blocks.fill_(0x3C)  # numbers near 0.01 in any dtype; pages of zeros would be one page
        self.kv = arena.add_view("target", layouts, BLOCK_SIZE)
        table = BlockTable(pool, BLOCK_SIZE)
        assert table.try_reserve(context + rows), "the pool has room for the request"
        group = RowGroup(table, [0] * rows, context, rows)
        step = build_step_input([group], pool.updates)
        self.plan = ops.plan(step.rows(), self.kv, c.num_heads)
        self.q = torch.ones(rows, c.num_heads, c.head_dim, dtype=torch.bfloat16)
        self.scale = c.head_dim**-0.5

    def attend(self) -> None:
        for layer in self.kv.layers:
            self.ops.attention(self.q, layer, self.plan, self.scale)


def table(result: Mapping[str, Any]) -> str:
    """A row for each context and number of rows."""
    names = ["bf16", *KV_DTYPES]
    head = [*(f"{name}, ms" for name in names), *(f"{name} / bf16" for name in KV_DTYPES)]
    rows = (
        [
            str(each["context"]),
            str(each["rows"]),
            *(f"{each[name]['ms']['median']:.2f}" for name in names),
            *(extremes_words(each[name]["over_bf16"]) for name in KV_DTYPES),
        ]
        for each in result["attention"]
    )
    return markdown_table(["context", "rows", *head], rows)
