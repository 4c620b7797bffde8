"""A step without speculation of one request, against its lower bound: GEMMs and reading KV."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specserve.config import load_config
from specserve.engine.build import assemble
from specserve.engine.runner import Runner
from specserve.engine.step_input import RowGroup, build_step_input
from specserve.engine.tuning import model_key
from specserve.memory import BlockTable
from specserve.models.decoder import Decoder
from specserve.models.loader import load_decoder
from specserve_kernels import load

CONTEXT = 512
ROWS = (1, 4, 8)
MAX_ROWS = 64
REPEATS = 30


@torch.inference_mode()
def plain_step_figures(folder: Path) -> list[dict[str, Any]]:
    """For each number of rows: step, GEMM and KV seconds, and step / (GEMM + KV)."""
    decoder = load_decoder(folder, "bf16", load(torch.device("cpu")), CONTEXT + MAX_ROWS)
    config = load_config(
        None, {"memory.kv_bytes": 1 << 28, "scheduler.max_running": 2, "drafter.name": "none"}
    )
    engine = assemble(config, decoder, None, CONTEXT + MAX_ROWS)
    table = BlockTable(engine.pool, engine.target.kv.block_size)
    table.try_reserve(CONTEXT + MAX_ROWS)
    group = RowGroup(table, [1] * CONTEXT, 0, 1)
    engine.target.launch(build_step_input([group], engine.pool.updates))
    target = engine.target
    settle_threads(target, table)
    bandwidth = read_bandwidth()
    print(f"qwen3-0.6b shape, context {CONTEXT}: {bandwidth / 1e9:.1f} GB/s read")
    kv_seconds = CONTEXT * kv_token_bytes(decoder) / bandwidth
    return [one_size(engine.target, table, rows, kv_seconds) for rows in ROWS]


def one_size(target: Runner, table: BlockTable, rows: int, kv_seconds: float) -> dict[str, Any]:
    gemms = all_gemms(target.decoder, rows)
    steps, bare = [], []
    for _ in range(REPEATS):
        steps.append(seconds(lambda: step(target, table, rows)))
        bare.append(seconds(gemms))
    step_ms, gemm_ms = 1e3 * median(steps), 1e3 * median(bare)
    ratios = sorted(s / (g + kv_seconds) for s, g in zip(steps, bare, strict=True))
    figure = {
        "rows": rows,
        "step_ms": round(step_ms, 2),
        "gemm_ms": round(gemm_ms, 2),
        "kv_ms": round(1e3 * kv_seconds, 2),
        "ratio": round(median(ratios), 3),
        "ratio_p10_p90": [round(ratios[len(ratios) * p // 100], 3) for p in (10, 90)],
        "threads": torch.get_num_threads(),
    }
    print(figure)
    return figure


def settle_threads(target: Runner, table: BlockTable) -> None:
    """Run steps until the number of threads for each of the sizes is found."""
    key = model_key(target.decoder)
    target.threads, _ = target.ops.tune(lambda rows: step(target, table, rows), 64, None, key)
    for rows in ROWS:
        while not target.threads.is_settled(rows):
            step(target, table, rows)


def step(target: Runner, table: BlockTable, rows: int) -> Tensor:
    """A root and rows - 1 guesses, as a verification has them."""
    masks = [(2 << k) - 1 for k in range(rows)]
    group = RowGroup(table, [7] * rows, CONTEXT, rows, CONTEXT, masks)
    return target.launch(build_step_input([group], table.pool.updates)).logits


def all_gemms(decoder: Decoder, rows: int) -> Callable[[], None]:
    """The step's linear maps alone, in its order, on activations of its shapes."""
    c, ops, weights = decoder.config, decoder.ops, decoder.weights
    hidden, residual = torch.randn(2, rows, c.hidden_size).to(decoder.dtype)
    heads = torch.randn(rows, c.num_heads * c.head_dim).to(decoder.dtype)
    wide = torch.randn(rows, c.intermediate_size).to(decoder.dtype)

    def run() -> None:
        for layer in weights.layers:
            ops.linear(hidden, layer.qkv)
            ops.linear_add(heads, layer.out, None, residual)
            ops.linear_silu_mul(hidden, layer.gate_up)
            ops.linear_add(wide, layer.down, None, residual)
        ops.linear(hidden, weights.head)

    return run


def kv_token_bytes(decoder: Decoder) -> int:
    c = decoder.config
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * decoder.dtype.itemsize


def read_bandwidth() -> float:
    """Bytes a second of summing memory outside the CPU's caches, with the threads of a step."""
    memory: Tensor = torch.ones(1 << 28, dtype=torch.int8).view(torch.int64)
    memory.sum()
    return memory.numel() * 8 / min(seconds(memory.sum) for _ in range(5))


def seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
