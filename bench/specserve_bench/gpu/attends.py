"""Which kernels compute attention on this machine, of steps that are too large for CUDA graphs:
other results depend on it.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from specserve_bench.gpu.compiling import attempt, in_process
from specserve_bench.gpu.random_batches import RandomBatches
from specserve_bench.gpu.random_model import random_decoder
from specserve_bench.gpu.record import Record
from specserve_bench.suite import machine
from specserve_kernels import Ops, load

SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 4099}
EXPECTED = {  # head size and dtype -> what attends: the demo's, known models', no kernels, float32
    (64, torch.bfloat16): "FlashInfer",
    (128, torch.bfloat16): "FlashInfer",
    (80, torch.bfloat16): "Triton",
    (64, torch.float32): "Triton",
}


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=int, default=200)
    args = p.parse_args(argv)
    record = Record(args.out, machine("python -m specserve_bench.gpu attends"))
    with ThreadPoolExecutor() as pool:  # built side by side where they are not there yet
        sizes = [D for (D, _), name in EXPECTED.items() if name == "FlashInfer"]
        built = pool.map(lambda D: attempt(lambda: in_process((D, "fa2", None))), sizes)
        for D, outcome in zip(sizes, built, strict=True):
            record.put(f"FlashInfer, heads of {D}", outcome)
    record.put("summary", (found := attending(load("cuda"))))
    is_expected = found == {name_of(*kind): name for kind, name in EXPECTED.items()}
    print(found)
    record.save(done=is_expected)
    return 0 if is_expected else 1


def attending(ops: Any) -> dict[str, str]:
    """What attends in a step of causal rows and trees, for every kind of heads."""
    return {name_of(D, dtype): who_attends(ops, D, dtype) for D, dtype in EXPECTED}


def who_attends(ops: Any, D: int, dtype: torch.dtype) -> str:
    batches = RandomBatches(random_model(ops, D, dtype), 2048)
    before = ops.num_planned.copy()
    with torch.inference_mode():
        rows = 60 if ops.device.type == "cuda" else 7  # without a GPU nothing is recorded
        batches.step(batches.groups(3, 1, 100) + batches.groups(5, rows, 100))()
    return " and ".join(ops.num_planned - before)


def random_model(ops: Ops, D: int, dtype: torch.dtype) -> Any:
    return random_decoder("qwen3-0.6b", ops, 512, dtype, head_dim=D, **SMALL)


def name_of(D: int, dtype: torch.dtype) -> str:
    return f"{dtype}, heads of {D}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
