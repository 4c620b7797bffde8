"""Compiling the C++ kernels for an instruction set: on first use, and when a wheel is built.

Imports nothing outside the standard library: a wheel is built where nothing else is installed.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
# No -ffast-math and no contraction: a row's bits must not depend on how a loop was vectorized,
# and a library built with -ffast-math flushes denormals in the thread that loads it.
# -Wno-psabi: the ABI of vectors matters between libraries only, and none is passed there.
FLAGS = (
    *("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-Wno-psabi", "-pthread", "-fPIC", "-ffunction-sections"),
)
# The C++ runtime becomes part of the library: the process may have loaded an older one.
STATIC = ("-static-libstdc++", "-static-libgcc", "-Wl,--gc-sections", "-Wl,--exclude-libs,ALL")


class BuildError(RuntimeError):
    """There is no compiler, it failed, or the compiled kernels cannot be stored."""


class Level(NamedTuple):
    """An instruction set that libraries are built for ahead of their use."""

    name: str  # as specserve_level() in level.cpp gives it
    machine: str
    needs: frozenset[str]  # flags in /proc/cpuinfo
    flags: tuple[str, ...]  # of the compiler


V3 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BF16 = V4 | {"avx512_bf16", "avx512_vnni"}
AMX = BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
AMX_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
LEVELS = (  # the best last
    Level("aarch64", "aarch64", frozenset(), ("-march=armv8-a",)),
    Level("x86-64-v3", "x86_64", V3, ("-march=x86-64-v3",)),
    Level("x86-64-v4", "x86_64", V4, ("-march=x86-64-v4",)),
    Level("x86-64-v4-bf16", "x86_64", BF16, BF16_FLAGS),
    Level("x86-64-v4-amx", "x86_64", AMX, (*BF16_FLAGS, *AMX_FLAGS)),
)


def usable_levels() -> list[Level]:
    """The levels whose libraries this process can run, the best last."""
    flags = usable_flags()
    return [x for x in LEVELS if x.machine == platform.machine() and x.needs <= flags]


@cache
def usable_flags() -> frozenset[str]:
    """The CPU's flags, without those of AMX where the kernel does not grant its registers."""
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
    """Ask Linux for the tile registers; once granted, all threads of the process have them."""
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0)


def native_flags() -> tuple[str, ...]:
    """The compiler's flags for the CPU that this process runs on."""
    is_refused = "amx_tile" in cpu_flags() - usable_flags()
    without = (flag.replace("-m", "-mno-", 1) for flag in AMX_FLAGS) if is_refused else ()
    return "-march=native", *without


def cpu_name() -> bytes:
    """What code for exactly this CPU depends on."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor().encode()
    lines = info.read_bytes().splitlines()
    return b"".join(line for line in lines[:40] if line.startswith((b"flags", b"model name")))


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise BuildError("no C++ compiler found (looked for $CXX, then g++)")
    return found


def source_hash() -> str:
    """Changes with every source of the kernels."""
    sources = [path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]*"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]


def build_hash(flags: Iterable[str]) -> str:
    """Changes with everything that shapes a library: sources, flags, compiler and its target."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, check=False).stdout
    parts = [source_hash().encode(), repr((FLAGS, *flags)).encode(), version]
    if "-march=native" in flags:
        parts.append(cpu_name())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def compile_to(path: Path, flags: tuple[str, ...]) -> None:
    """Compile the kernels with further flags into the shared library `path`, in one piece."""
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        folder = Path(temporary)
        sources = sorted(FOLDER.glob("*.cpp"))
        objects = [folder / f"{source.stem}.o" for source in sources]

        def compile_one(source: Path, object_file: Path) -> None:
            run_compiler(*FLAGS, *flags, "-c", str(source), "-o", str(object_file))

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, sources, objects))
        library = folder / path.name
        run_compiler("-shared", "-pthread", *flags, *map(str, objects), "-o", str(library))
        os.replace(library, path)  # another process may be doing the same


def run_compiler(*args: str) -> None:
    command = compiler(), *args
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{command[0]} could not compile the kernels:\n{done.stderr[:2000]}")
