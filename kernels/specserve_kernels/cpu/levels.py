"""Instruction sets of prebuilt libraries, and which of them this process can run.

This module imports only the standard library, because wheels are built without other packages.
"""

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Level(NamedTuple):
    """An instruction set of a prebuilt library."""

    name: str  # result of specserve_level() in level.cpp
    machine: str
    needs: frozenset[str]  # flags in /proc/cpuinfo
    flags: tuple[str, ...]  # compiler flags


V3 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BF16 = V4 | {"avx512_bf16", "avx512_vnni"}
AMX = BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
DOTPROD = frozenset({"asimddp", "asimdrdm", "atomics", "crc32"})
BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
AMX_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
LEVELS = (  # the best last
    Level("aarch64", "aarch64", frozenset(), ("-march=armv8-a",)),
    Level("aarch64-dotprod", "aarch64", DOTPROD, ("-march=armv8.2-a+dotprod",)),
    Level("aarch64-i8mm", "aarch64", DOTPROD | {"i8mm"}, ("-march=armv8.2-a+dotprod+i8mm",)),
    Level("x86-64-v3", "x86_64", V3, ("-march=x86-64-v3",)),
    Level("x86-64-v3-vnni", "x86_64", V3 | {"avx_vnni"}, ("-march=x86-64-v3", "-mavxvnni")),
    Level("x86-64-v4", "x86_64", V4, ("-march=x86-64-v4",)),
    Level("x86-64-v4-bf16", "x86_64", BF16, BF16_FLAGS),
    Level("x86-64-v4-amx", "x86_64", AMX, (*BF16_FLAGS, *AMX_FLAGS)),
)


def usable_levels() -> list[Level]:
    """Return the levels whose libraries this process can run, the best last."""
    flags = usable_flags()
    return [x for x in LEVELS if x.machine == platform.machine() and x.needs <= flags]


@cache
def usable_flags() -> frozenset[str]:
    """Return the CPU's flags, without AMX flags if the system does not grant its registers."""
    flags = cpu_flags()
    if "amx_tile" in flags and not may_use_tiles():
        return frozenset(flag for flag in flags if not flag.startswith("amx_"))
    return flags


def cpu_flags(info: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        lines = info.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, "").partition(":")[2].split())


def may_use_tiles() -> bool:
    """Request the tile registers from Linux. A grant applies to all threads of the process."""
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0)


def native_flags() -> tuple[str, ...]:
    """Return the compiler flags for the CPU of this process."""
    is_refused = "amx_tile" in cpu_flags() - usable_flags()
    without = (flag.replace("-m", "-mno-", 1) for flag in AMX_FLAGS) if is_refused else ()
    return "-march=native", *without
