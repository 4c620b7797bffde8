"""Compiling the C++ kernels, into a cache keyed by everything that shapes the code.

Imports nothing outside the standard library: a wheel is built where nothing else is installed.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = Path(__file__).parent
# No -ffast-math and no contraction: a row's bits must not depend on how a loop was vectorized,
# and a library built with -ffast-math flushes denormals in the thread that loads it.
# -Wno-psabi: the ABI of vectors matters between libraries only, and none is passed there.
# -fno-gnu-unique: two of these libraries in one process must not share their tables.
FLAGS = (
    *("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-Wno-psabi", "-pthread", "-fPIC", "-ffunction-sections", "-fno-gnu-unique"),
)
# The C++ runtime becomes part of the library: the process may have loaded an older one.
STATIC = ("-static-libstdc++", "-static-libgcc", "-Wl,--gc-sections", "-Wl,--exclude-libs,ALL")


class BuildError(RuntimeError):
    """There is no compiler, it failed, or the compiled kernels cannot be stored."""


def compiled(flags: tuple[str, ...]) -> Path:
    """The library compiled with further flags, or found in the cache folder, where it is kept.

    The name has a hash of all that shapes it: -march=native code must not run on another CPU.
    """
    try:
        return compiled_in(cache_folder(), flags, loads)
    except OSError as e:
        raise BuildError(f"the compiled kernels cannot be kept ({e}): set XDG_CACHE_HOME") from e


def compiled_in(folder: Path, flags: tuple[str, ...], is_good: Callable[[Path], bool]) -> Path:
    path = folder / f"kernels-{build_hash(flags)}.so"
    with locked(folder):
        if not is_good(path):
            compile_to(path, flags)
    return path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Processes that need the same library compile it once. Without locks each compiles it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network's file system may have none
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def loads(path: Path) -> bool:
    """Whether it can be loaded: it is there, whole, and not for a newer C library."""
    if not is_whole(path):
        return False
    try:
        return hasattr(ctypes.CDLL(str(path)), "specserve_run")
    except OSError:
        return False


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


def cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "specserve"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def home() -> Path:
    try:
        return Path.home()
    except RuntimeError as e:
        raise BuildError("no home folder to keep the kernels in: set XDG_CACHE_HOME") from e


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
        with library.open("rb+") as file:
            os.fsync(file)  # else a power loss could leave a file of zeros under the final name
        os.replace(library, path)  # another process may be doing the same


def run_compiler(*args: str) -> None:
    command = compiler(), *args
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{command[0]} could not compile the kernels:\n{done.stderr[:2000]}")
