"""Common code of all stages: options, ops, and errors of figures."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from specserve_bench.gpu.record import UNFINISHED, Record, is_error
from specserve_bench.machine import add_allow_dirty, exit_if_dirty
from specserve_bench.suite import machine
from specserve_kernels import Ops, load

REHEARSED = 1, 4  # rows of recorded steps: each of them takes seconds in the interpreter


class StageOptions(argparse.Namespace):
    """Options of every stage.

    rehearse  small shapes on a CPU, Triton's kernels in its interpreter: figures mean nothing
    """

    out: Path
    seconds: int
    rehearse: bool
    allow_dirty: bool


def options(argv: list[str]) -> StageOptions:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=int, default=540)
    p.add_argument("--rehearse", action="store_true")
    add_allow_dirty(p)
    args = p.parse_args(argv, StageOptions())
    exit_if_dirty(f"--out {args.out}", args.allow_dirty or args.rehearse)
    return args


def record_of(stage: str, args: StageOptions) -> Record:
    return Record(args.out, machine(f"python -m specserve_bench.gpu {stage}"))


def ops_of(args: StageOptions) -> Ops:
    return interpreted() if args.rehearse else load("cuda")


def interpreted() -> Ops:
    """The build for GPUs on the CPU, for a process that has TRITON_INTERPRET=1."""
    from specserve_kernels.cuda import graphs, ops

    torch.cuda.get_device_name = lambda device=None: "no GPU"
    for module in (graphs, ops):
        module.SIZES = REHEARSED  # type: ignore[attr-defined]
    built: Ops = ops.CudaOps(torch.device("cpu"), None)
    return built


def take_each(
    record: Record,
    figures: Iterable[tuple[str, Callable[[], Any]]],
    seconds: float,
    summary: Callable[[dict[str, Any]], Any] | None = None,
) -> int:
    """Record the figures that are not known yet; the stage's exit status.

    It is UNFINISHED at the deadline or after a fault of the device, and 1 if a figure failed.
    """
    deadline, code = perf_counter() + seconds, 0
    for name, figure in figures:
        if name in record:
            continue
        if perf_counter() > deadline or take(record, name, figure):
            code = UNFINISHED
            break
    if summary is not None:
        record.put("summary", summary(record.figures))
    code = code or int(bool(failed(record)))
    if code != UNFINISHED:
        record.finish(code == 0)
    return code


def take(record: Record, name: str, figure: Callable[[], Any]) -> bool:
    """Record one figure, or its error; whether that error left the device unusable."""
    try:
        record.put(name, figure())
    except Exception as e:  # a failed figure must not prevent the others
        record.put(name, {"error": f"{type(e).__name__}: {e}"[:500]})
        return isinstance(e, torch.AcceleratorError)
    return False


def failed(record: Record) -> list[str]:
    """Names of figures that are errors."""
    return [name for name, figure in record.figures.items() if is_error(figure)]
