"""How many threads this process may use."""

import os


def allowed_threads() -> int:
    return len(os.sched_getaffinity(0))


def check_threads(threads: int) -> int:
    """The number itself: torch takes any, and crashes on one that the system cannot start."""
    allowed = allowed_threads()
    if threads > allowed:
        raise ValueError(
            f"{threads} threads are more than the {allowed} CPUs that this process may use: set "
            f"at most {allowed}, or leave the number unset"
        )
    return threads
