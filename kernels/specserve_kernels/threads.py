"""How many threads run a step."""

from typing import NamedTuple, Protocol

import torch

from specserve_kernels.topology import topology


class Threads(Protocol):
    """Called around every forward. A row's result does not depend on the number of threads."""

    def use(self, rows: int) -> None:
        """Set the number for a forward of so many rows."""
        ...

    def observe(self, rows: int, seconds: float) -> None:
        """Record how long the forward took that `use` was last called for."""
        ...

    def is_settled(self, rows: int) -> bool:
        """Whether the number for so many rows will not change."""
        ...


class FixedThreads(NamedTuple):
    """The same number for every step."""

    number: int

    def use(self, rows: int) -> None:
        torch.set_num_threads(self.number)

    def observe(self, rows: int, seconds: float) -> None:
        pass

    def is_settled(self, rows: int) -> bool:
        return True


def allowed_threads() -> int:
    return topology().cpus


def limit_threads() -> None:
    """Torch starts with a thread for each core of the machine, whatever a container's quota is."""
    torch.set_num_threads(min(torch.get_num_threads(), allowed_threads()))


def check_threads(threads: int) -> int:
    """The number; ValueError if it exceeds the CPUs. Torch would take it, and might crash later."""
    allowed = allowed_threads()
    if threads > allowed:
        raise ValueError(
            f"{threads} threads are more than the {allowed} CPUs that this process may use: set "
            f"at most {allowed}, or leave the number unset"
        )
    return threads
