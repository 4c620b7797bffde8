"""The memory of the machine itself, for the builds that compute there."""

import mmap
import platform
from pathlib import Path

import torch
from torch import Tensor

from specserve_kernels.errors import DeviceError


def place(x: Tensor) -> Tensor:
    """A host tensor where the ops read it; the tensor itself, if that is where it is."""
    return x


def allocate(num_bytes: int) -> Tensor:
    """Zeroed bytes for KV, [num_bytes] uint8, which the system hands over as they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


def copy_blocks(blocks: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy whole blocks of the arena, in the order given.

    blocks          [num_blocks, block_bytes]  uint8
    source, target  [c]                        int64
    """
    for s, t in zip(source.tolist(), target.tolist(), strict=True):
        blocks[t].copy_(blocks[s])


def free_memory() -> int:
    """Bytes that could be allocated now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise DeviceError("this system does not tell its free memory")


def has_bf16() -> bool:
    """Whether bf16 is multiplied in hardware; without, fp32 is the faster as well as the better."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def instruction_set() -> str:
    """The extensions of this CPU that kernels choose their arithmetic by."""
    known = "amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "bf16", "asimd"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return " ".join(name for name in known if name in flags.split()) or platform.machine()
