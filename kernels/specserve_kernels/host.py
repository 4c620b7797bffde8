"""Host memory and CPU features, for the builds that compute on the host."""

import ctypes
import mmap
import os
import platform
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from specserve_kernels.errors import DeviceError


def place(x: Tensor) -> Tensor:
    """Return a host tensor in the memory that the ops read: on the host, the tensor itself."""
    return x


HUGE_PAGE = 2 << 20  # bytes
CHUNK = 32 << 20  # bytes of memory that small allocations share


class Chunk:
    """Mapped memory, from a huge page's first byte on, of which allocations take parts."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = mapped(num_bytes + HUGE_PAGE)
        with suppress(OSError):  # the system has no huge pages
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.begin = -address % HUGE_PAGE  # of the next part
        self.end = self.begin + num_bytes

    def take(self, num_bytes: int) -> Tensor | None:
        """Return a part with a storage of its own, from a page's first byte on; None: too large."""
        begin = self.begin
        if begin + num_bytes > self.end:
            return None
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.begin += size
        part = memoryview(self.memory)[begin : begin + num_bytes]
        end = weakref.finalize(part, self.memory.madvise, mmap.MADV_DONTNEED, begin, size)
        end.atexit = False
        return torch.frombuffer(part, dtype=torch.uint8)


_shared: list[Chunk] = []  # the chunk of the next small allocations
_lock = Lock()


def allocate(num_bytes: int) -> Tensor:
    """Allocate zeroed bytes for weights and KV, [num_bytes] uint8.

    The system assigns pages at their first write. Huge pages, if available, reduce the page lookups
    of each step. Most weights are smaller than a huge page, so they share a chunk. The system gets
    the pages of a tensor back when its storage ends, and addresses with the chunk's last one.
    """
    with _lock:
        if num_bytes > CHUNK // 4:
            found = Chunk(num_bytes).take(num_bytes)
        elif not _shared or (found := _shared[0].take(num_bytes)) is None:
            _shared[:] = [Chunk(CHUNK)]
            found = _shared[0].take(num_bytes)
    assert found is not None, "a new chunk holds the bytes"
    return found


def release(memory: Iterable[Tensor]) -> None:
    """Return whole pages of host memory to the system; the contents are lost. Addresses stay valid.

    memory  whole storages, [num_bytes] uint8 each
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    size = mmap.PAGESIZE
    for x in memory:
        begin, end = -(-x.data_ptr() // size) * size, (x.data_ptr() + len(x)) // size * size
        if begin < end and madvise(begin, end - begin, mmap.MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def renew(x: Tensor) -> None:
    """Make released memory usable again. On the host, the system does this at the next access."""


def offload(x: Tensor) -> Tensor | None:
    """Return a copy of a device's memory on the host; None for memory that is on the host."""
    return None


def mapped(num_bytes: int) -> mmap.mmap:
    """Map zeroed memory of this process."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def copy_blocks(blocks: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy whole blocks of the arena, in the given order.

    blocks          [num_blocks, block_bytes]  uint8
    source, target  [c]                        int64
    """
    for s, t in zip(source.tolist(), target.tolist(), strict=True):
        blocks[t].copy_(blocks[s])


class HostBlocks:
    """Blocks in host memory, and copies between them and the arena's blocks.

    memory  [num_blocks, block_bytes]  uint8, zeroed
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        # Without huge pages: their first write takes several times as long, and copies need few
        # page lookups.
        memory = torch.frombuffer(mapped(num_blocks * block_bytes), dtype=torch.uint8)
        self.memory = memory.view(num_blocks, block_bytes)

    def store(self, blocks: Tensor, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks of the arena [num_blocks, block_bytes] to host blocks, in order.

        `pairs` are (block of the arena, host block). Forwards that are launched later may write to
        the arena's blocks at once.
        """
        for block, host_block in pairs:
            self.memory[host_block].copy_(blocks[block])

    def load(self, blocks: Tensor, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy host blocks to the arena, in order; `pairs` are (host block, block of the arena).

        Until `is_idle`, no forward may read these blocks of the arena.
        """
        for host_block, block in pairs:
            blocks[block].copy_(self.memory[host_block])

    @property
    def is_idle(self) -> bool:
        """Whether all copies are complete."""
        return True

    def wait(self) -> None:
        """Wait until all copies are complete."""


def free_memory() -> int:
    """Bytes that could be allocated now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise DeviceError("this system does not report its free memory")


def has_bf16() -> bool:
    """Whether the hardware multiplies bf16. If not, torch's ops are faster in fp32."""
    return "bf16" in instruction_set()


def instruction_set() -> str:
    """Return the CPU extensions that decide the arithmetic of the kernels."""
    known = "amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "bf16", "asimd"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return " ".join(name for name in known if name in flags.split()) or platform.machine()
