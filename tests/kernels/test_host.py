"""The memory of weights and KV."""

import itertools
import mmap
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from specserve_kernels import cpu
from specserve_kernels.cuda.pinned import PinnedBlocks
from specserve_kernels.host import CHUNK, HUGE_PAGE, HostBlocks, allocate, release
from tests.kernels.maps import random_codes
from tests.kernels.random_steps import random_tensor

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MEMORY = {
    "KV": lambda: allocate(1 << 22),
    "weights": lambda: cpu.prepack(random_tensor(1024, 2048, dtype=torch.bfloat16)).words,
    "codes": lambda: cpu.prepack(random_codes(1024, 2048, 8, 128, False)).words,
}


def resident_bytes():
    """Memory of this process, without a package that machines with GPUs may lack."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def flags(tensor):
    """Of the mapping that a tensor lies in, as the kernel names them."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            begin, end = (int(number, 16) for number in first.split("-"))
            is_inside = begin <= tensor.data_ptr() < end
        elif is_inside and first == "VmFlags:":
            return rest
    raise AssertionError("no mapping has the tensor")


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this system has no huge pages")
@pytest.mark.parametrize("make", MEMORY.values(), ids=MEMORY)
def test_what_steps_read_asks_for_huge_pages(make):
    tensor = make()
    assert "hg" in flags(tensor)


def test_memory_is_zeroed():
    assert not allocate(12345).any()


def test_weights_that_share_huge_pages_have_memory_of_their_own():
    parts = [allocate(n) for n in (1, 4097, 4096, CHUNK // 4, CHUNK // 4 + 1)]
    for i, part in enumerate(parts):
        assert part.data_ptr() % mmap.PAGESIZE == 0 and not part.any()
        assert part.untyped_storage().nbytes() == len(part)
        part.fill_(i + 1)
    assert all((part == i + 1).all() for i, part in enumerate(parts))
    release([parts[2]])
    assert not parts[2].any() and (parts[1] == 2).all() and (parts[3] == 4).all()


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this system has no huge pages")
def test_small_weights_lie_side_by_side():
    begins = [allocate(1 << 20).data_ptr() for _ in range(40)]
    assert sum(b - a == 1 << 20 for a, b in itertools.pairwise(begins)) >= 37
    assert sum(b // HUGE_PAGE == a // HUGE_PAGE for a, b in itertools.pairwise(begins)) >= 18


def test_the_system_gets_pages_back_from_a_chunk_that_is_still_used():
    parts = [allocate(5 << 20).fill_(1) for _ in range(9)]
    views, full = parts[-1][1:], resident_bytes()
    del parts[1:]
    assert full - resident_bytes() > 30 << 20
    assert parts[0].all() and views.all()


@pytest.mark.parametrize("make", [HostBlocks, partial(PinnedBlocks, device=torch.device("cpu"))])
def test_blocks_are_stored_in_host_memory_and_loaded_whole_and_in_order(make):
    blocks = torch.randint(0, 256, (5, 48), dtype=torch.uint8)
    before, host = blocks.clone(), make(3, 48)
    assert host.memory.shape == (3, 48) and not host.memory.any()
    host.store(blocks, [(4, 0), (1, 2), (3, 0)])
    host.load(blocks, [(0, 1), (2, 4), (0, 2)])
    host.wait()
    assert host.is_idle
    assert torch.equal(host.memory[[0, 2]], before[[3, 1]]) and not host.memory[1].any()
    assert torch.equal(blocks, before[[0, 3, 3, 3, 1]])
