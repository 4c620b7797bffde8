"""Seconds of a call, by the host's clock or by the device's."""

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch

from specserve_bench.figures.steps import elapsed


class Deciles(NamedTuple):
    """Seconds: the median of a number of runs, and their first and last deciles."""

    median: float
    p10: float
    p90: float

    @property
    def ms(self) -> list[float]:
        return [round(1e3 * seconds, 4) for seconds in self]


def timed(run: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> Deciles:
    """Seconds by the host's clock of something that waits for the device."""
    for _ in range(warm_up):
        run()
    return deciles([elapsed(run) for _ in range(repeats)])


def step_seconds(run: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> Deciles:
    """Seconds by CUDA events around something that waits for the device; without a GPU by the
    host's clock.
    """
    if not torch.cuda.is_available():
        return timed(run, min(repeats, 3), 1)
    for _ in range(warm_up):
        run()
    return deciles([seconds_by_events(run) for _ in range(repeats)])


def seconds_by_events(run: Callable[[], object]) -> float:
    event: Any = torch.cuda.Event
    start, end = (event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def deciles(seconds: list[float]) -> Deciles:
    seconds = sorted(seconds)
    return Deciles(median(seconds), seconds[len(seconds) // 10], seconds[-1 - len(seconds) // 10])


def device_seconds(run: Callable[[], object]) -> Deciles:
    """Seconds of a launch, by the device's clock with cold caches; on a CPU, by the host's."""
    if not torch.cuda.is_available():
        return timed(run, repeats=3, warm_up=1)
    from triton.testing import do_bench

    p10, p50, p90 = do_bench(run, warmup=5, rep=40, quantiles=[0.1, 0.5, 0.9])
    return Deciles(p50 / 1e3, p10 / 1e3, p90 / 1e3)
