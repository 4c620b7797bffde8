"""The number of CPUs that this process may use, which limits its threads.

It depends on the CPU affinity, the quotas of cgroups, and which CPUs share a core.
"""

import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

ROOT = Path("/")


class Topology(NamedTuple):
    cpus: int  # maximum number of threads that run at once
    cores: int  # maximum number of these with a core each; CPUs of one core share its units


def topology(affinity: Collection[int] | None = None, root: Path = ROOT) -> Topology:
    """Count the CPUs in the affinity mask, up to the limit of the quotas."""
    allowed = os.sched_getaffinity(0) if affinity is None else affinity
    # Rounded down: if the threads use up the quota, they stop until the next period.
    quotas = (quota(folder) for folder in cgroups(root))
    limits = [number for number in quotas if number is not None]
    most = max(1, int(min(limits, default=len(allowed))))
    # CPUs of one core have the same list of siblings. A CPU without a list counts as a core.
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {text(root / siblings.format(cpu)) or str(cpu) for cpu in allowed}
    return Topology(min(len(allowed), most), min(len(cores), most))


def numa_nodes(affinity: Collection[int] | None = None, root: Path = ROOT) -> list[set[int]]:
    """Return the CPUs of each NUMA node, a socket with its own memory; without CPUs that this
    process may not use, and without nodes that have none.
    """
    allowed = set(os.sched_getaffinity(0) if affinity is None else affinity)
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    nodes = [cpus_in(text(folder / "cpulist")) & allowed for folder in folders]
    return [node for node in nodes if node]


def cpus_in(ranges: str) -> set[int]:
    """Parse a list of CPUs like 0-3,8."""
    found = set[int]()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders of the cgroups that limit the process's CPU time, and their parents.

    In a container, the path may be the host's, but the mount shows only the container's cgroups.
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
    """The quota of a cgroup's folder, in CPUs; None without a quota. cgroup v2 stores it in one
    file, v1 in two.
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
    """Limit torch's threads to the allowed CPUs. By default, torch ignores quotas of containers."""
    torch.set_num_threads(min(torch.get_num_threads(), allowed_threads()))


def check_threads(threads: int) -> int:
    """Return `threads`. ValueError if they exceed the CPUs: torch accepts this, but may crash."""
    allowed = allowed_threads()
    if threads > allowed:
        raise ValueError(
            f"{threads} threads exceed the {allowed} CPUs that this process may use. Set at most "
            f"{allowed}, or leave the number unset"
        )
    return threads
