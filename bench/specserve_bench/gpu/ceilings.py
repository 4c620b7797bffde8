"""What the machine does at best: a copy and a matrix product; and that all can be imported."""

import importlib
import sys
from functools import partial
from time import perf_counter

import torch

from specserve_bench.gpu.record import UNFINISHED
from specserve_bench.gpu.stage import Options, failed, options, record_of, take
from specserve_bench.gpu.timing import device_seconds
from specserve_kernels import cpu

MODULES = (
    *("triton", "transformers", "msgspec", "httptools", "starlette", "uvicorn", "llguidance"),
    *("peft", "pytest", "xdist", "hypothesis"),
)
OF_GPUS = ("flashinfer",)
COPIED, WIDTH = 4 << 30, 8192  # bytes of a copy; rows and columns of a product
SMALL_COPIED, SMALL_WIDTH = 1 << 20, 64


def main(argv: list[str]) -> int:
    args = options(argv)
    record = record_of("ceilings", args)
    for name in MODULES if args.rehearse else MODULES + OF_GPUS:
        if take(record, f"import {name}", partial(imported, name)):
            return UNFINISHED
    take(record, "copy GB/s", lambda: copy_bandwidth(args) / 1e9)
    take(record, "GEMM TFLOP/s", lambda: gemm_rate(args) / 1e12)
    take(record, "kernels for this CPU, s", compiled)
    is_done = not failed(record)
    record.finish(is_done)
    return 0 if is_done else 1


def imported(name: str) -> str:
    module = importlib.import_module(name)
    return str(getattr(module, "__version__", "unknown"))


def device_of(args: Options) -> torch.device:
    return torch.device("cpu" if args.rehearse else "cuda")


def copy_bandwidth(args: Options) -> float:
    """Bytes per second, read and written, of a copy on the device."""
    num_bytes = SMALL_COPIED if args.rehearse else COPIED
    source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device_of(args)).normal_()
    target = torch.empty_like(source)
    return 2 * num_bytes / device_seconds(lambda: target.copy_(source)).median


def gemm_rate(args: Options) -> float:
    """Operations per second of a bfloat16 product."""
    n = SMALL_WIDTH if args.rehearse else WIDTH
    a, b = (torch.randn(n, n, device=device_of(args)).bfloat16() for _ in range(2))
    return 2 * n**3 / device_seconds(lambda: a @ b).median


def compiled() -> float:
    """Seconds until the kernels for this CPU are there, which texts are compared with."""
    start = perf_counter()
    cpu.library()
    return round(perf_counter() - start, 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
