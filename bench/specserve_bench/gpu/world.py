"""A model of a known shape with random weights, and requests of any context, made on the device."""

import math
import random
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from specserve.engine.draws import greedy_draws
from specserve.engine.runner import Runner
from specserve.engine.step_input import RowGroup, build_step_input
from specserve.memory import Arena, BlockPool, BlockTable
from specserve.memory.arena import used_bytes
from specserve.models import families, rotary
from specserve.models.decoder import Decoder, Layer, Weights
from specserve_bench.shapes import SHAPES
from specserve_drafters import Draft
from specserve_kernels import Ops, QKNorm, Rotary

BLOCK_SIZE = 16
STD = 0.02


class Timed(NamedTuple):
    """Seconds: the median of a number of runs, and what a tenth of them stayed below and above."""

    median: float
    p10: float
    p90: float


def random_decoder(
    shape: str, ops: Ops, max_len: int, dtype: torch.dtype = torch.bfloat16, **overrides: Any
) -> Decoder:
    fields = SHAPES[shape] | {"max_position_embeddings": max_len} | overrides
    config = families.parse(CONFIG_MAPPING[fields["model_type"]](**fields).to_dict() | fields)
    device = ops.place(torch.empty(0)).device

    def weight(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0, STD)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    hidden, D = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    tables = rotary.tables(config.rope_parameters, D, max_len + 64)
    table = Rotary(*map(ops.place, tables))
    embedding = weight(config.vocab_size, hidden)
    layers = tuple(
        Layer(
            window=config.windows[i],
            rotary=table,
            qk_norm=QKNorm(ones(D), ones(D), config.rms_eps) if config.qk_norm else None,
            attention_norm=ones(hidden),
            qkv=ops.prepack(weight((heads + 2 * kv_heads) * D, hidden)),
            qkv_bias=None,
            out=ops.prepack(weight(hidden, heads * D)),
            out_bias=None,
            mlp_norm=ones(hidden),
            gate_up=ops.prepack(weight(2 * config.intermediate_size, hidden)),
            gate_up_bias=None,
            down=ops.prepack(weight(hidden, config.intermediate_size)),
            down_bias=None,
        )
        for i in range(config.num_layers)
    )
    head = ops.prepack(embedding if config.tied else weight(config.vocab_size, hidden))
    return Decoder(config, ops, table, Weights(embedding, layers, ones(hidden), head))


def streamed_bytes(decoder: Decoder) -> int:
    """Of the weights that a step of few rows reads: an embedding of its own is not among them."""
    shapes = families.tensor_shapes(decoder.config)
    numbers = sum(map(math.prod, shapes.values()))
    if not decoder.config.tied:
        numbers -= math.prod(shapes["model.embed_tokens.weight"])
    return numbers * decoder.dtype.itemsize


def token_bytes(decoder: Decoder) -> int:
    """Of a token's KV in all layers."""
    return used_bytes(decoder.kv_layouts, BLOCK_SIZE) // BLOCK_SIZE


class World:
    """A runner whose KV is random, with room for `num_tokens`."""

    def __init__(self, decoder: Decoder, num_tokens: int) -> None:
        self.decoder, size = decoder, used_bytes(decoder.kv_layouts, BLOCK_SIZE)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.arena = Arena(decoder.ops.allocate(num_blocks * size), size)
        self.arena.blocks.view(decoder.dtype).normal_()
        self.arena.add_view("target", decoder.kv_layouts, BLOCK_SIZE)
        self.runner = Runner(decoder, self.arena, "target")
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
        """A root and a random tree behind a context, each; `chain`: causal rows."""
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
        """All that the target does in a step: its rows up, the tokens after them down."""
        num_read = sum(g.num_read for g in groups)

        def run() -> list[int]:
            step = build_step_input(groups, self.pool.updates, greedy_draws(num_read))
            answers = self.runner.collect(step, self.runner.launch(step))
            return answers.after([*range(num_read)])

        return run


def timed(run: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> Timed:
    """Seconds by the host's clock of something that waits for the device."""
    for _ in range(warm_up):
        run()
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        run()
        seconds.append(perf_counter() - start)
    seconds.sort()
    return Timed(median(seconds), seconds[len(seconds) // 10], seconds[-1 - len(seconds) // 10])


def device_seconds(run: Callable[[], object]) -> Timed:
    """Of a launch alone, by the device's clock and with cold caches; by the host's on a CPU."""
    if not torch.cuda.is_available():
        return timed(run, repeats=3, warm_up=1)
    from triton.testing import do_bench

    p10, p50, p90 = do_bench(run, warmup=5, rep=40, quantiles=[0.1, 0.5, 0.9])
    return Timed(p50 / 1e3, p10 / 1e3, p90 / 1e3)
