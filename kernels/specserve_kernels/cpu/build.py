"""Compiling the C++ kernels on first use, into a cache keyed by everything that shapes the code."""

import ctypes
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("team.cpp", "run.cpp", "layers.cpp", "attention.cpp", "sampling.cpp")
# No -ffast-math and no contraction: a row's bits must not depend on how a loop was vectorized,
# and a library built with -ffast-math flushes denormals in the thread that loads it.
FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-ffp-contract=off", "-pthread", "-shared", "-fPIC"),
)


class BuildError(RuntimeError):
    """There is no compiler, it failed, or the compiled kernels cannot be stored."""


@cache
def library() -> ctypes.CDLL:
    """The compiled kernels."""
    try:
        path = cache_folder() / f"kernels-{fingerprint()}.so"
        return cached(path) or compiled(path)
    except OSError as e:
        raise BuildError(f"the compiled kernels cannot be kept ({e}): set XDG_CACHE_HOME") from e


def cached(path: Path) -> ctypes.CDLL | None:
    """The kernels that an earlier process compiled; None if they are missing or do not load."""
    if not is_whole(path):
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def is_whole(path: Path) -> bool:
    """Whether it is a complete ELF file, which ends with its section headers. Loading a truncated
    one would kill the process with SIGBUS.
    """
    if not path.exists():
        return False
    data = path.read_bytes()
    if len(data) < 64:
        return False
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    return bool(start + size * count <= len(data))


def compiled(path: Path) -> ctypes.CDLL:
    compile_to(path)
    return ctypes.CDLL(str(path))


def cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "specserve"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def home() -> Path:
    try:
        return Path.home()
    except RuntimeError as e:
        raise BuildError("no home folder to keep the kernels in: set XDG_CACHE_HOME") from e


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise BuildError("no C++ compiler found (looked for $CXX, then g++)")
    return found


def fingerprint() -> str:
    """A hash of sources, flags, compiler and CPU: -march=native code must not run on another."""
    sources = [path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]*"))]
    version = subprocess.run([compiler(), "--version"], capture_output=True, check=False).stdout
    parts = [*sources, repr(FLAGS).encode(), version, cpu()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def cpu() -> bytes:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor().encode()
    lines = info.read_bytes().splitlines()
    return b"".join(line for line in lines[:40] if line.startswith((b"flags", b"model name")))


def compile_to(path: Path) -> None:
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    sources = [str(FOLDER / name) for name in SOURCES]
    command = [compiler(), *FLAGS, *sources, "-o", temporary]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        os.unlink(temporary)
        raise BuildError(f"{command[0]} could not compile the kernels:\n{done.stderr[:2000]}")
    os.replace(temporary, path)  # another process may be doing the same


def main() -> int:
    try:
        library()
    except BuildError as e:
        print(f"kernels: {e}; the reference kernels will serve, slowly", file=sys.stderr)
        return 0
    print(f"kernels: compiled for this CPU in {cache_folder()}")
    return 0
