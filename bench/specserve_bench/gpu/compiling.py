"""Whether everything can be imported and compiled, and how long that takes."""

import argparse
import importlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

MODULES = ("torch", "triton", "transformers", "msgspec", "flashinfer", "specserve", "tests.kernels")
# Head size, backend, window: each is a module that FlashInfer compiles at its first use.
VARIANTS = [
    (128, "fa2", None),
    (64, "fa2", None),
    (128, "fa3", None),
    (128, "fa2", 5),
    (64, "fa2", 5),
    (256, "fa2", None),
]
AT_ONCE = 6


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path)
    p.add_argument("--seconds", type=int, default=540)
    p.add_argument("--one", help="only this variant, as JSON")
    args = p.parse_args(argv)
    if args.one:
        flashinfer_variant(*json.loads(args.one))
        return 0
    return every(args.out)


def every(out: Path) -> int:
    from specserve_bench.gpu.record import Record
    from specserve_bench.suite import machine

    record = Record(out, machine("python -m specserve_bench.gpu compile"))
    for name in MODULES:
        record.put(f"import {name}", attempt(lambda name=name: importlib.import_module(name)))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = [(v, pool.submit(attempt, lambda v=v: in_process(v))) for v in VARIANTS]
        record.put("own kernels", attempt(own_kernels))
        for (D, backend, window), future in done:
            name = f"FlashInfer {backend}, head size {D}{'' if window is None else ', window'}"
            record.put(name, future.result())
    failed = {name: said for name, said in record.figures.items() if not said["ok"]}
    for name, said in record.figures.items():
        reason = "" if said["ok"] else said["error"].strip().splitlines()[-1]
        print(f"{name:40} {said['seconds']:6.1f} s {reason}")
    record.save(done=not failed)
    return 1 if failed else 0


def attempt(run: Any) -> dict[str, Any]:
    start = perf_counter()
    try:
        run()
    except Exception as e:  # a failure is this stage's result
        return {"ok": False, "seconds": perf_counter() - start, "error": f"{type(e).__name__}: {e}"}
    return {"ok": True, "seconds": perf_counter() - start}


def in_process(variant: tuple[int, str, int | None]) -> None:
    command = [sys.executable, "-m", "specserve_bench.gpu.compiling", "--one", json.dumps(variant)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])


def flashinfer_variant(D: int, backend: str, window: int | None) -> None:
    """Plan and run one step of four causal rows."""
    import torch

    from specserve_kernels import KVCache, KVLayer, Rows
    from specserve_kernels.cuda.attention import FlashInfer, load_flashinfer, run_parts

    device = torch.device("cuda")
    k, v = torch.randn(2, 4, 16, 2, D, device=device).bfloat16().unbind(0)
    kv = KVCache((KVLayer(k, v),))
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 4], [0, 1], [0], [4], [0, 1, 2, 3])]
    slots, prefix = torch.arange(4), torch.arange(1, 5, dtype=torch.int32)
    rows = Rows._make((*ints, slots, prefix, torch.zeros(4, dtype=torch.int64)))
    flashinfer = FlashInfer(device, load_flashinfer(), backend)
    parts = flashinfer.plan(rows, rows.indices.to(device), kv, 4, [window], {})
    out = run_parts(
        torch.randn(4, 4, D, device=device).bfloat16(), kv.layers[0], parts, 0.1, window
    )
    assert out.isfinite().all(), "FlashInfer's output is not finite"


def own_kernels() -> None:
    """A step, a sample, children and moves, in both dtypes and on both paths of attention."""
    import torch

    from specserve.engine.step_input import build_step_input
    from specserve_bench.gpu.random_batches import RandomBatches
    from specserve_bench.gpu.random_model import random_decoder
    from specserve_kernels import SampleParams, load

    small = {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 4099}
    ops = load("cuda")
    for dtype, head_dim in ((torch.bfloat16, 80), (torch.float32, 128)):
        decoder = random_decoder("qwen3-0.6b", ops, 512, dtype, head_dim=head_dim, **small)
        batches = RandomBatches(decoder, 4096)
        groups = batches.groups(3, 1, 100) + batches.groups(2, 7, 300)
        with torch.inference_mode():
            batches.step(groups)()
            batches.pool.updates.move("target", [(3, 2)])
            launched = batches.runner.launch(build_step_input(groups, batches.pool.updates))
            ops.top_children(launched.logits, SampleParams.greedy(17), 4, 1.0)
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
