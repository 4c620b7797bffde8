"""What models' steps take, kept on disk for the next start."""

from pathlib import Path

from specserve.scheduling.cost import KnownCosts, StepCosts
from specserve.version import VERSION
from specserve_kernels.cpu.compiler import cpu_name, source_hash
from specserve_kernels.cpu.kept import keep, kept_file, read_kept
from specserve_kernels.topology import topology


def costs_file(model: str, device: str, threads: str) -> Path | None:
    """The file for a model's steps on this kind of machine. `model` has all of it that their time
    depends on, `device` the name of a GPU.
    """
    cpu = cpu_name().decode(errors="replace")
    return kept_file("costs", VERSION, model, device, threads, str(topology()), source_hash(), cpu)


def read_costs(file: Path | None) -> KnownCosts | None:
    """None, with one warning, if the file is there but not valid."""
    return read_kept(file, KnownCosts)


def keep_costs(file: Path | None, costs: StepCosts) -> None:
    """Replace the file, unless no step has been timed. It takes a moment: not in every step."""
    known = costs.known()
    if file is not None and known.stairs:
        keep(file, known)
