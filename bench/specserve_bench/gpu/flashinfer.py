"""Compiles FlashInfer's kernels in another process: a head size takes about a minute."""

import subprocess
import sys
from typing import Any

import torch

from specserve_kernels import KVCache, KVLayer, Rows
from specserve_kernels.cuda.attention import FlashInfer, load_flashinfer, run_parts


def main(argv: list[str]) -> int:
    compile_for(int(argv[0]), torch.device("cuda"))
    return 0


def begin(head_dim: int) -> "subprocess.Popen[str]":
    """Compile for heads of this size, at low priority; it ends with its stage."""
    module = [sys.executable, "-m", "specserve_bench.gpu.flashinfer", str(head_dim)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(["nice", *module], text=True, **pipes)


def outcome(process: "subprocess.Popen[str]") -> dict[str, str]:
    """Whether they are compiled, or how the compiler failed."""
    said, _ = process.communicate()
    return {"state": "ready"} if process.returncode == 0 else {"error": said[-500:]}


def compile_for(head_dim: int, device: torch.device) -> None:
    """Plan and run one step of four causal rows."""
    k, v = torch.randn(2, 4, 16, 2, head_dim, device=device).bfloat16().unbind(0)
    kv = KVCache((KVLayer(k, v),))
    rows = Rows(
        qo_indptr=torch.tensor([0, 4], dtype=torch.int32),
        indptr=torch.tensor([0, 1], dtype=torch.int32),
        indices=torch.tensor([0], dtype=torch.int32),
        last_page_len=torch.tensor([4], dtype=torch.int32),
        positions=torch.arange(4, dtype=torch.int32),
        slots=torch.arange(4),
        prefix=torch.arange(1, 5, dtype=torch.int32),
        mask=torch.zeros(4, dtype=torch.int64),
    )
    flashinfer = FlashInfer(device, load_flashinfer(), "fa2")
    flashinfer.build(kv, [None])
    parts = flashinfer.plan(rows, rows.indices.to(device), kv, 4, [None], {})
    q = torch.randn(4, 4, head_dim, device=device).bfloat16()
    assert run_parts(q, kv.layers[0], parts, 0.1, None).isfinite().all(), "it is not finite"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
