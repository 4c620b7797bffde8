"""Which library of C++ kernels a process uses: one that came in the wheel, or one compiled here."""

import ctypes
import fcntl
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from specserve_kernels.cpu.compiler import (
    FOLDER,
    BuildError,
    Level,
    build_hash,
    compile_to,
    native_flags,
    source_hash,
    usable_levels,
)

PREBUILT = FOLDER / "prebuilt"  # in a wheel; a checkout has none


class Kernels(NamedTuple):
    library: ctypes.CDLL
    origin: str  # where the library is from, and why it is this one


def library() -> ctypes.CDLL:
    """The compiled kernels."""
    return kernels().library


def level() -> str:
    """The instruction set that they were compiled for. Two levels may give a row other bits."""
    name = library().specserve_level
    name.restype = ctypes.c_char_p
    return str(name().decode())


@cache
def kernels() -> Kernels:
    """The prebuilt library for the best level of this CPU; else one compiled for exactly this CPU;
    else, without a compiler, a prebuilt one for a lower level.
    """
    levels = usable_levels()
    if (found := prebuilt(levels[-1:])) is not None:
        return Kernels(found, "prebuilt for the best level that this CPU runs")
    try:
        path = compiled(native_flags())
        return Kernels(ctypes.CDLL(str(path)), "compiled for this CPU")
    except BuildError as e:
        if (found := prebuilt(levels[:-1])) is not None:
            return Kernels(found, f"prebuilt for a lower level than this CPU's: {first_line(e)}")
        raise


def prebuilt(levels: Sequence[Level]) -> ctypes.CDLL | None:
    """The library for the best of the levels for which there is one, of these sources."""
    for level in reversed(levels):
        path = PREBUILT / prebuilt_name(level)
        if loads(path):
            return ctypes.CDLL(str(path))
    return None


def prebuilt_name(level: Level) -> str:
    return f"{level.name}-{source_hash()}.so"


def compiled(flags: tuple[str, ...]) -> Path:
    """The library compiled with further flags; kept in the cache folder, for other processes too.

    The name has a hash of all that shapes it: -march=native code must not run on another CPU.
    """
    try:
        folder = cache_folder()
        path = folder / f"kernels-{build_hash(flags)}.so"
        with locked(folder):
            if not loads(path):
                compile_to(path, flags)
    except OSError as e:
        raise BuildError(f"the compiled kernels cannot be kept ({e}): set XDG_CACHE_HOME") from e
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
        ctypes.CDLL(str(path))
    except OSError:
        return False
    return True


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


def first_line(error: BuildError) -> str:
    return str(error).splitlines()[0]


def main() -> int:
    """Say which library is used, and why; compile it if it has to be."""
    try:
        found, origin = kernels()
    except BuildError as e:
        print(f"kernels: {e}; the reference kernels will serve, slowly", file=sys.stderr)
        return 0
    print(f"kernels: {level()}, {origin}: {found._name}")
    return 0
