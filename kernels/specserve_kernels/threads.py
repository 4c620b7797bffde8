"""How many threads a step gets."""

import os
from typing import NamedTuple

import torch


class Threads(NamedTuple):
    """Threads by rows: a step of a few rows can lose more to barriers than a second thread wins."""

    few: int  # for up to FEW_ROWS rows
    many: int

    def use(self, rows: int) -> None:
        torch.set_num_threads(self.few if rows <= FEW_ROWS else self.many)


FEW_ROWS = 24  # a root and its tree, rather than a chunk of a prompt


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
