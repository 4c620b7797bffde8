"""Seconds of a call, by the host's clock or by the device's."""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch


class Timed(NamedTuple):
    """Seconds: the median of a number of runs, and their first and last deciles."""

    median: float
    p10: float
    p90: float


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
    """Seconds of a launch, by the device's clock with cold caches; on a CPU, by the host's."""
    if not torch.cuda.is_available():
        return timed(run, repeats=3, warm_up=1)
    from triton.testing import do_bench

    p10, p50, p90 = do_bench(run, warmup=5, rep=40, quantiles=[0.1, 0.5, 0.9])
    return Timed(p50 / 1e3, p10 / 1e3, p90 / 1e3)
