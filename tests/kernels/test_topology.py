"""How many CPUs and cores a process has, on simulated machines and in simulated containers."""

import pytest
import torch

from specserve_kernels import load
from specserve_kernels.threads import Topology, numa_nodes, topology


def machine(root, siblings):
    """A /sys whose CPUs 0, 1, ... share cores as their lists of siblings say."""
    for cpu, name in enumerate(siblings):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{name}\n")
    return root


def put(root, files):
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


FOUR_PAIRS = ["0,4", "1,5", "2,6", "3,7"] * 2  # eight CPUs, as Linux numbers them

AFFINITIES = {  # CPUs that the process may use -> how many, and their cores
    "all": (range(8), (8, 4)),
    "one of each core": (range(4), (4, 4)),
    "both of one core": ([1, 5], (2, 1)),
    "some": ([0, 1, 4], (3, 2)),
}


@pytest.mark.parametrize(("affinity", "want"), AFFINITIES.values(), ids=AFFINITIES)
def test_cpus_of_one_core_count_as_one_core(affinity, want, tmp_path):
    assert topology(affinity, machine(tmp_path, FOUR_PAIRS)) == want


def test_a_system_that_lists_no_siblings_has_a_core_for_each_cpu(tmp_path):
    assert topology(range(6), tmp_path) == Topology(6, 6)


V1 = "12:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n"
PODS = "sys/fs/cgroup/kubepods.slice"
QUOTAS = {  # files of the container -> the CPUs that eight are limited to
    "none": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
    "two CPUs": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
    "of two and a half, two": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"},
        2,
    ),
    "half a CPU is still one thread": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
        1,
    ),
    "more than there are": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"},
        8,
    ),
    "of a cgroup around it": (
        {
            "proc/self/cgroup": "0::/kubepods.slice/pod\n",
            f"{PODS}/cpu.max": "300000 100000\n",
            f"{PODS}/pod/cpu.max": "max 100000\n",
        },
        3,
    ),
    "the smallest of several": (
        {
            "proc/self/cgroup": "0::/kubepods.slice/pod\n",
            f"{PODS}/cpu.max": "300000 100000\n",
            f"{PODS}/pod/cpu.max": "200000 100000\n",
        },
        2,
    ),
    "version 1": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000\n",
        },
        4,
    ),
    "version 1 whose path is the host's": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000\n",
        },
        3,
    ),
    "version 1 without a limit": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        8,
    ),
    "a quota of nothing": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 0\n"},
        8,
    ),
    "a path with colons, and one beyond the mount": (
        {"proc/self/cgroup": "0::/../a:b\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"},
        2,
    ),
    "nonsense": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "much\n"}, 8),
}


@pytest.mark.parametrize(("files", "want"), QUOTAS.values(), ids=QUOTAS)
def test_a_quota_limits_the_threads(files, want, tmp_path):
    put(machine(tmp_path, FOUR_PAIRS), files)
    assert topology(range(8), tmp_path) == (want, min(want, 4))


def test_torch_takes_no_more_threads_than_the_quota_allows(monkeypatch):
    torch.set_num_threads(2)
    monkeypatch.setattr("specserve_kernels.threads.topology", lambda: Topology(1, 1))
    load("cpu")
    assert torch.get_num_threads() == 1


def test_this_machine_has_a_core():
    cpus, cores = topology()
    assert 1 <= cores <= cpus


def test_nodes_have_the_cpus_that_the_process_may_use(tmp_path):
    nodes = {"node0": "0-1,4", "node1": "2-3,5\n", "node2": "\n"}  # the last has only memory
    put(tmp_path, {f"sys/devices/system/node/{n}/cpulist": cpus for n, cpus in nodes.items()})
    assert numa_nodes(range(6), tmp_path) == [{0, 1, 4}, {2, 3, 5}]
    assert numa_nodes([1, 4], tmp_path) == [{1, 4}]
