"""What models' steps take, kept on disk for the next start."""

from pathlib import Path
from time import monotonic

from specserve.scheduling.cost import KnownCosts, StepCosts
from specserve.version import VERSION
from specserve_kernels.cpu.compiler import cpu_name, source_hash
from specserve_kernels.cpu.kept import keep, kept_file, read_kept
from specserve_kernels.threads import topology

EVERY = 60.0  # seconds: while the engine runs, the file is written no more often
FORMAT = "3"  # of the file: change it with what its numbers mean


class KeptCosts:
    """The costs of a model's steps, and their file."""

    def __init__(self, costs: StepCosts, file: Path | None) -> None:
        """Begin with what the file holds."""
        self.costs, self.file, self.written_at = costs, file, float("-inf")
        known = read_costs(file)
        if known is not None:
            costs.begin_with(known)

    def keep(self) -> None:
        """Write the file, unless that was done a moment ago. Not in a step: it takes a moment."""
        if monotonic() - self.written_at > EVERY:
            self.write()

    def write(self) -> None:
        keep_costs(self.file, self.costs)
        self.written_at = monotonic()


def costs_file(model: str, device: str, threads: str) -> Path | None:
    """The file for a model's steps on this kind of machine. `model` has all of it that their time
    depends on, `device` the name of a GPU.
    """
    cpu = cpu_name().decode(errors="replace")
    build = VERSION, FORMAT, source_hash()
    return kept_file("costs", *build, model, device, threads, str(topology()), cpu)


def read_costs(file: Path | None) -> KnownCosts | None:
    """None, with one warning, if the file is there but not valid."""
    return read_kept(file, KnownCosts)


def keep_costs(file: Path | None, costs: StepCosts) -> None:
    """Replace the file, unless no step has been timed. It takes a moment: not in every step."""
    known = costs.known()
    if file is not None and known.stairs:
        keep(file, known)
