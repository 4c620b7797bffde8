"""Best rates of the machine: a copy and a matrix product. Also checks the imports."""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from specserve_bench.figures.steps import elapsed
from specserve_bench.gpu.stage import StageOptions, options, record_of, take_each
from specserve_bench.gpu.timing import device_seconds
from specserve_kernels import cpu

MODULES = (
    *("triton", "transformers", "msgspec", "httptools", "starlette", "uvicorn", "llguidance"),
    *("peft", "pytest", "xdist", "hypothesis"),
)


def main(argv: list[str]) -> int:
    args = options(argv)
    modules = MODULES if args.rehearse else (*MODULES, "flashinfer")
    figures: list[tuple[str, Callable[[], Any]]] = [
        *((f"import {name}", partial(imported, name)) for name in modules),
        ("copy GB/s", lambda: copy_bandwidth(args) / 1e9),
        ("GEMM TFLOP/s", lambda: gemm_rate(args) / 1e12),
        ("kernels for this CPU, s", lambda: round(elapsed(cpu.library), 2)),
    ]
    return take_each(record_of("ceilings", args), figures, args.seconds)


def imported(name: str) -> str:
    module = importlib.import_module(name)
    return str(getattr(module, "__version__", "unknown"))


def device_of(args: StageOptions) -> torch.device:
    return torch.device("cpu" if args.rehearse else "cuda")


def copy_bandwidth(args: StageOptions) -> float:
    """Bytes per second, read and written, of a copy on the device."""
    num_bytes = 1 << 20 if args.rehearse else 4 << 30
    source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device_of(args)).normal_()
    target = torch.empty_like(source)
    return 2 * num_bytes / device_seconds(lambda: target.copy_(source)).median


def gemm_rate(args: StageOptions) -> float:
    """Operations per second of a bfloat16 product."""
    n = 64 if args.rehearse else 8192
    a, b = (torch.randn(n, n, device=device_of(args)).bfloat16() for _ in range(2))
    return 2 * n**3 / device_seconds(lambda: a @ b).median


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
