"""How many threads a step is given: timed, as small steps lose more to barriers than they win."""

import time
from collections.abc import Callable

import torch

from specserve_kernels.threads import allowed_threads, check_threads

_REPEATS = 12


def tune(step: Callable[[], object], threads: int | None) -> str:
    """Time the step with 1 thread and with all, keep the better; what was chosen, in words."""
    if threads is not None:
        torch.set_num_threads(check_threads(threads))
        return f"{threads} threads, as configured"
    counts = sorted({1, allowed_threads()})
    seconds = dict.fromkeys(counts, float("inf"))
    for _ in range(_REPEATS):  # interleaved: a busy neighbour hits all counts alike
        for count in counts:
            torch.set_num_threads(count)
            start = time.perf_counter()
            step()
            seconds[count] = min(seconds[count], time.perf_counter() - start)
    best = min(counts, key=seconds.__getitem__)
    torch.set_num_threads(best)
    timed = ", ".join(f"{n}: {s * 1e3:.2f} ms" for n, s in seconds.items())
    return f"{best} threads ({timed})"
