"""The memory of weights and KV."""

from pathlib import Path

import pytest
import torch

from specserve_kernels import cpu
from specserve_kernels.host import allocate
from tests.kernels.maps import random_codes
from tests.kernels.random_steps import random_tensor

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MEMORY = {
    "KV": lambda: allocate(1 << 22),
    "weights": lambda: cpu.prepack(random_tensor(1024, 2048, dtype=torch.bfloat16)).words,
    "codes": lambda: cpu.prepack(random_codes(1024, 2048, 8, 128, False)).words,
}


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
