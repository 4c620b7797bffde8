"""Settings of the process that only count before torch is imported: memory and OpenMP."""

import ctypes
import os
import sys
from contextlib import suppress

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


def ensure_streams() -> None:
    """Open what the caller has closed of stdin, stdout and stderr, onto nothing.

    Else the next file that is opened, maybe a socket, would get the number of one of them, and
    whatever is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, open for good


def tell(text: str, number: int = 2) -> None:
    """A line for whoever watches the process; nobody has to."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stdout if number == 1 else sys.stderr, flush=True)
