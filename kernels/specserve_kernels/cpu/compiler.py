"""Compiling the C++ kernels, into a cache keyed by everything that shapes the code.

Imports nothing outside the standard library: a wheel is built where nothing else is installed.
"""

import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import struct
import subprocess
import tempfile
import time
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
FULL = errno.ENOSPC, errno.EDQUOT  # of a disk, or of a user's share of one
REMEDY = "set CXX to g++ 11 or later"
UNUSED_SECONDS = 30 * 24 * 3600  # what no process has used for so long is removed from the cache
KEPT = "kernels", "threads", "costs"  # how the names of what is kept there begin

log = logging.getLogger("specserve")


class BuildError(RuntimeError):
    """There is no compiler, it failed, or the compiled kernels cannot be stored."""


def compiled(flags: tuple[str, ...]) -> Path:
    """The library compiled with further flags, or found in the cache folder, where it is kept.

    The name has a hash of all that shapes it: -march=native code must not run on another CPU.
    """
    try:
        usual, folder = usual_folder(), cache_folder()
        if usual not in (None, folder) and loads(path := usual / library_name(flags)):
            return path
        return compiled_in(folder, flags, loads)
    except OSError as e:
        remedy = "free space on its disk, or set" if e.errno in FULL else "set"
        raise BuildError(
            f"the compiled kernels cannot be kept ({e}): {remedy} XDG_CACHE_HOME"
        ) from e


def compiled_in(folder: Path, flags: tuple[str, ...], is_good: Callable[[Path], bool]) -> Path:
    path = folder / library_name(flags)
    mark_used(path)
    if is_good(path):
        return path
    with locked(folder):
        if not is_good(path):  # it is, if this process has waited for one that compiled it
            note = f"; they are kept in {folder}: set XDG_CACHE_HOME to keep them elsewhere"
            where = "" if folder == usual_folder() else note
            log.warning("compiling the C++ kernels for this CPU, once: about 15 s%s", where)
            keep(path, flags, is_good)
            remove_unused(folder)
    return path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Processes that need the same library compile it once. Without locks each compiles it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network's file system may have none
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.warning("waiting for another process that is compiling C++ kernels")
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def mark_used(path: Path) -> None:
    """Set the time that `remove_unused` goes by."""
    with suppress(OSError):  # there is no such file yet, or it is another user's
        os.utime(path)


def remove_unused(folder: Path) -> None:
    """Remove libraries, measurements and what a killed process left of either, if old.

    A process that has loaded such a library keeps it; one that looks for it compiles it again.
    """
    oldest = time.time() - UNUSED_SECONDS
    for path in (path for kind in KEPT for path in folder.glob(f"{kind}-*")):
        with suppress(OSError):  # another process removed it, or it is another user's
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


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
    try:
        data = path.read_bytes()
    except OSError:
        return False
    if len(data) < 64:
        return False
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    return bool(start + size * count <= len(data))


def cache_folder() -> Path:
    """The user's, or one of the user's own among temporary files if that cannot be written."""
    usual = usual_folder()
    if usual is not None:
        with suppress(OSError):
            usual.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(usual, os.W_OK | os.X_OK):
                return usual
    return private_folder(usual)


def usual_folder() -> Path | None:
    """None for a user without a home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specserve"
    except RuntimeError:
        return None


def private_folder(instead_of: Path | None) -> Path:
    """A folder among temporary files that nobody else can write to. BuildError if another user has
    made it, or can change it: its libraries would run in this process.
    """
    folder = Path(tempfile.gettempdir()) / f"specserve-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(found.st_mode) & 0o077:
        raise BuildError(
            f"no folder to keep the kernels in: {instead_of or 'a home folder'} cannot be written, "
            f"and {folder} is not private to this user: set XDG_CACHE_HOME"
        )
    return folder


def cpu_name() -> bytes:
    """What code for exactly this CPU depends on."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor().encode()
    lines = info.read_bytes().splitlines()
    return b"".join(line for line in lines[:40] if line.startswith((b"flags", b"model name")))


def compiler() -> tuple[str, ...]:
    """The command that compiles: $CXX, split as a shell does, else g++."""
    value = os.environ.get("CXX", "").strip()
    try:
        program, *args = shlex.split(value) or ["g++"]
    except ValueError as e:
        raise BuildError(f"CXX={value!r} is not a command ({e}): {REMEDY}") from e
    found = shutil.which(program)
    if found is None and value:
        raise BuildError(f"no C++ compiler found at CXX={value!r}: {REMEDY}, or unset it")
    if found is None:
        raise BuildError(f"no C++ compiler found: install g++, or {REMEDY}")
    return found, *args


def source_hash() -> str:
    """Changes with every source of the kernels."""
    sources = [path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]*"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]


def library_name(flags: Iterable[str]) -> str:
    return f"kernels-{build_hash(flags)}.so"


def build_hash(flags: Iterable[str]) -> str:
    """Changes with everything that shapes a library: sources, flags, compiler and its target."""
    _, *args = compiler()
    version = call_compiler("--version").stdout
    parts = [source_hash().encode(), repr((FLAGS, *flags, *args)).encode(), version.encode()]
    if "-march=native" in flags:
        parts.append(cpu_name())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def keep(path: Path, flags: tuple[str, ...], is_good: Callable[[Path], bool]) -> None:
    """Compile the library `path` elsewhere, and put it there in one piece."""
    with tempfile.TemporaryDirectory(prefix="kernels-", dir=path.parent) as folder:
        library = Path(folder, path.name)
        compile_to(library, flags)
        if not is_good(library):
            command = shlex.join(compiler())
            raise BuildError(f"{command} made no library that can be used: {REMEDY}")
        with library.open("rb+") as file:
            os.fsync(file)  # else a power loss could leave a file of zeros under the final name
        os.replace(library, path)  # another process may be doing the same


def compile_to(path: Path, flags: tuple[str, ...]) -> None:
    """Compile the kernels with further flags into the shared library `path`."""
    sources = sorted(FOLDER.glob("*.cpp"))
    objects = [path.with_name(f"{source.stem}.o") for source in sources]

    def compile_one(source: Path, object_file: Path) -> None:
        run_compiler(*FLAGS, *flags, "-c", str(source), "-o", str(object_file))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources, objects))
    run_compiler("-shared", "-pthread", *flags, *map(str, objects), "-o", str(path))


def run_compiler(*args: str) -> None:
    done = call_compiler(*args)
    if done.returncode != 0:
        failed = f"{shlex.join(compiler())} could not compile the kernels"
        if any(os.strerror(number) in done.stderr for number in FULL):
            where = {args[-1].rpartition("/")[0], tempfile.gettempdir()}
            raise BuildError(
                f"{failed}, as a disk is full: free space in {' or '.join(sorted(where))}, or set "
                "XDG_CACHE_HOME and TMPDIR to folders on other disks"
            )
        said = next((f"; {line}" for line in done.stderr.splitlines() if "error" in line), "")
        details = f"(exit code {done.returncode}{said}): {REMEDY}\n{done.stderr[:2000]}"
        raise BuildError(f"{failed} {details}")


def call_compiler(*args: str) -> subprocess.CompletedProcess[str]:
    command = *compiler(), *args
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as e:
        raise BuildError(f"{command[0]} cannot be run ({e}): {REMEDY}") from e
