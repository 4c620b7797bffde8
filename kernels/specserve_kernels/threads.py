"""The CPUs that this process may use, and the most threads that fit them.

The CPUs follow from its affinity, its cgroups' quotas, and which of them share a core.
"""

import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

ROOT = Path("/")


class Topology(NamedTuple):
    cpus: int  # threads that can run at once
    cores: int  # of these, threads on a core of their own: two CPUs of one core share its units


def topology(affinity: Collection[int] | None = None, root: Path = ROOT) -> Topology:
    """The CPUs in the affinity mask, but no more than the quotas' time suffices for."""
    allowed = os.sched_getaffinity(0) if affinity is None else affinity
    # Threads that use up the quota are all stopped until the next period: so it is rounded down.
    quotas = (quota(folder) for folder in cgroups(root))
    limits = [number for number in quotas if number is not None]
    most = max(1, int(min(limits, default=len(allowed))))
    # The CPUs of a core, as the system lists them; the CPU itself if it lists none.
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {text(root / siblings.format(cpu)) or str(cpu) for cpu in allowed}
    return Topology(min(len(allowed), most), min(len(cores), most))


def cgroups(root: Path) -> Iterator[Path]:
    """The folders of the cgroups that count the process's CPU time, and of those around them.

    In a container the path may be the host's, while the mount shows only the container's own.
    """
    for line in text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
        elif "cpu" in controllers.split(","):
            mounts = ("sys/fs/cgroup/cpu", f"sys/fs/cgroup/{controllers}")
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        for mount in mounts:
            yield from (root / mount / part for part in (inner, *inner.parents))


def quota(folder: Path) -> float | None:
    """The quota of a cgroup's folder, in CPUs' worth of time; None without one. Version 2 has one
    file, 1 two.
    """
    limits = text(folder / "cpu.max").split()
    if not limits:
        limits = [text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    try:
        time, period = map(int, limits)
    except ValueError:  # "max", or no such files
        return None
    return time / period if time > 0 and period > 0 else None


def text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


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
