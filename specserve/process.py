"""Settings of the process that only count before torch is imported: memory and OpenMP."""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def prepare() -> None:
    """Keep freed memory in the process, and let idle OpenMP threads sleep.

    A page fault is expensive on virtual machines: temporaries that glibc maps and unmaps in
    every step cost more than the arithmetic on them. Threads that spin at a barrier burn the
    time of the thread they wait for as soon as another process wants a core. What the user has
    set in the environment wins.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent from musl
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
