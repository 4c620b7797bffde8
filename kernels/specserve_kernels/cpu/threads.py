"""Settling the number of threads by timing the model's own step."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from specserve_kernels.threads import Threads, allowed_threads, check_threads

FEW, MANY = 4, 64  # rows of the steps that are timed: a small tree, a piece of a prompt
_REPEATS = 10


def tune(step: Callable[[int], Tensor], most: int, threads: int | None) -> tuple[Threads, str]:
    """Time steps of few and of many rows with 1 thread and with all; keep the better for each."""
    if threads is not None:
        count = check_threads(threads)
        return Threads(count, count), f"{count}, as configured"
    few, few_words = fastest(step, FEW)
    many, many_words = fastest(step, MANY)
    return Threads(few, many), f"{few_words}; {many_words}"


def fastest(step: Callable[[int], Tensor], rows: int) -> tuple[int, str]:
    counts = sorted({1, allowed_threads()})
    seconds = dict.fromkeys(counts, float("inf"))
    for _ in range(_REPEATS):  # interleaved: a busy neighbour hits all counts alike
        for count in counts:
            torch.set_num_threads(count)
            start = time.perf_counter()
            step(rows)
            seconds[count] = min(seconds[count], time.perf_counter() - start)
    best = min(counts, key=seconds.__getitem__)
    timed = ", ".join(f"{n}: {s * 1e3:.2f} ms" for n, s in seconds.items())
    return best, f"{best} for {rows} rows (of {timed})"
