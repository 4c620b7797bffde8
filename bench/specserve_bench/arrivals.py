"""When requests arrive."""

import math
from itertools import accumulate

import numpy as np

from specserve_bench.results import Load


def due_times(load: Load, size: int) -> list[float]:
    """Seconds from the start at which `size` requests are due; all at once under a concurrency.

    Open loop: gaps are drawn from a gamma distribution with mean 1 / rate and coefficient of
    variation `burstiness`, exponential at 1, so that a slow server is not asked more slowly.
    """
    if load.rate is None:
        return [0.0] * size
    shape = 1 / load.burstiness**2
    gaps = np.random.default_rng(load.seed).gamma(shape, 1 / (load.rate * shape), size - 1)
    return list(accumulate(gaps.tolist(), initial=0.0))


def limit(load: Load) -> float:
    """How many requests may run at a time."""
    return math.inf if load.concurrency is None else load.concurrency
