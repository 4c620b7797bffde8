"""Compiling the C++ kernels into a cache, keyed by everything that affects the code.

This module imports only the standard library, because wheels are built without other packages.
"""

import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import platform
import re
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
# No -ffast-math and no contraction: results must not depend on how a loop is vectorized. A library
# built with -ffast-math also flushes denormals in the thread that loads it.
# The flag -Wno-psabi is safe, because vectors are not passed between libraries.
# Without -fno-gnu-unique, two versions of the library in one process would share tables.
FLAGS = (
    *("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-Wno-psabi", "-pthread", "-fPIC", "-ffunction-sections", "-fno-gnu-unique"),
)
# Link the C++ runtime statically, because the process may have loaded an older one.
STATIC = ("-static-libstdc++", "-static-libgcc", "-Wl,--gc-sections", "-Wl,--exclude-libs,ALL")
# Sources without vectors, whose work is too short for special instructions. All levels share their
# objects, which any CPU runs.
PORTABLE = (
    *("attention_plan", "costs", "depth", "move_kv", "ngrams"),
    *("plans", "run", "suffixes", "team", "tries"),
)
INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
FULL = errno.ENOSPC, errno.EDQUOT  # errors of a full disk or quota
REMEDY = "Set CXX to g++ 11 or later"
UNUSED_SECONDS = 30 * 24 * 3600  # age of unused cache files that are removed
KEPT = "kernels", "threads", "costs"  # prefixes of cache files

log = logging.getLogger("specserve")


class BuildError(RuntimeError):
    """The compiler is missing or failed, or the compiled kernels cannot be stored."""


def compiled(flags: tuple[str, ...]) -> Path:
    """Return the library for additional flags: from the cache folder, or compiled into it.

    Its name contains a hash of its inputs, because -march=native code must not run on other CPUs.
    """
    try:
        usual, folder = usual_folder(), cache_folder()
        if usual not in (None, folder) and loads(path := usual / library_name(flags)):
            return path
        return compiled_in(folder, flags, loads)
    except OSError as e:
        remedy = "Free space on its disk, or set" if e.errno in FULL else "Set"
        raise BuildError(
            f"the compiled kernels cannot be stored ({e}). {remedy} XDG_CACHE_HOME."
        ) from e


def compiled_in(folder: Path, flags: tuple[str, ...], is_good: Callable[[Path], bool]) -> Path:
    path = folder / library_name(flags)
    mark_used(path)
    if is_good(path):
        return path
    with locked(folder):
        if not is_good(path):  # another process may have compiled it meanwhile
            note = f". They are stored in {folder}; set XDG_CACHE_HOME to change that"
            where = "" if folder == usual_folder() else note
            log.warning("Compiling the C++ kernels for this CPU once, in about 15 s%s", where)
            keep(path, flags, is_good)
            remove_unused(folder)
    return path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder, so that several processes compile a library only once, if locks are
    available.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network file system may lack locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.warning("Waiting for another process that is compiling the C++ kernels")
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def mark_used(path: Path) -> None:
    """Update the time that `remove_unused` checks."""
    with suppress(OSError):  # the file does not exist, or belongs to another user
        os.utime(path)


def remove_unused(folder: Path) -> None:
    """Remove old libraries and measurements, and old remains of killed processes.

    Processes that have loaded a removed library keep it; other processes compile it again.
    """
    oldest = time.time() - UNUSED_SECONDS
    for path in (path for kind in KEPT for path in folder.glob(f"{kind}-*")):
        with suppress(OSError):  # another process removed it, or it belongs to another user
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def loads(path: Path) -> bool:
    """Whether the library can be loaded: it exists, is complete, and fits the C library."""
    if not is_whole(path):
        return False
    try:
        return hasattr(ctypes.CDLL(str(path)), "specserve_run")
    except OSError:
        return False


def is_whole(path: Path) -> bool:
    """Whether the file is a complete ELF file, which ends with its section headers.

    Loading a truncated file would kill the process with SIGBUS.
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
    """Return the user's cache folder, or a private temporary folder if it is not writable."""
    usual = usual_folder()
    if usual is not None:
        with suppress(OSError):
            usual.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(usual, os.W_OK | os.X_OK):
                return usual
    return private_folder(usual)


def usual_folder() -> Path | None:
    """Return the user's cache folder; None for a user without a home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specserve"
    except RuntimeError:
        return None


def private_folder(instead_of: Path | None) -> Path:
    """Return a temporary folder that only this user can access.

    BuildError if another user created it or can change it: its libraries would run in this process.
    """
    folder = Path(tempfile.gettempdir()) / f"specserve-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(found.st_mode) & 0o077:
        raise BuildError(
            f"no folder can store the kernels: {instead_of or 'a home folder'} is not writable, "
            f"and {folder} is not private to this user. Set XDG_CACHE_HOME."
        )
    return folder


def cpu_name() -> bytes:
    """Return the CPU properties that -march=native code depends on."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor().encode()
    lines = info.read_bytes().splitlines()
    return b"".join(line for line in lines[:40] if line.startswith((b"flags", b"model name")))


def compiler() -> tuple[str, ...]:
    """Return the compiler command: $CXX, split like in a shell, else g++."""
    value = os.environ.get("CXX", "").strip()
    try:
        program, *args = shlex.split(value) or ["g++"]
    except ValueError as e:
        raise BuildError(f"CXX={value!r} is not a command ({e}). {REMEDY}.") from e
    found = shutil.which(program)
    if found is None and value:
        raise BuildError(f"no C++ compiler found at CXX={value!r}. {REMEDY}, or unset it.")
    if found is None:
        raise BuildError("no C++ compiler found. Install g++, or set CXX to g++ 11 or later.")
    return found, *args


def source_hash() -> str:
    """Return a hash of all kernel sources."""
    sources = [path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]*"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]


def library_name(flags: Iterable[str]) -> str:
    return f"kernels-{build_hash(flags)}.so"


def build_hash(flags: Iterable[str]) -> str:
    """Return a hash of everything that affects a library: sources, flags, compiler and target."""
    return input_hash(source_hash(), (*FLAGS, *flags, *PORTABLE))


def input_hash(code: str, flags: tuple[str, ...]) -> str:
    _, *args = compiler()
    version = call_compiler("--version").stdout
    parts = [code.encode(), repr((flags, *args)).encode(), version.encode()]
    if "-march=native" in flags:
        parts.append(cpu_name())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def keep(path: Path, flags: tuple[str, ...], is_good: Callable[[Path], bool]) -> None:
    """Compile a library in a temporary folder, then move it to `path` atomically."""
    with tempfile.TemporaryDirectory(prefix="kernels-", dir=path.parent) as folder:
        library = Path(folder, path.name)
        compile_to(library, flags, path.parent)
        if not is_good(library):
            command = shlex.join(compiler())
            raise BuildError(f"{command} produced no usable library. {REMEDY}.")
        move(library, path)


def move(file: Path, to: Path) -> None:
    """Move a file atomically, because another process may do the same."""
    with file.open("rb+") as opened:
        os.fsync(opened)  # otherwise a power loss could leave a file of zeros
    os.replace(file, to)


def compile_to(path: Path, flags: tuple[str, ...], folder: Path) -> None:
    """Compile the kernels with additional flags into the shared library `path`.

    The folder keeps the objects, so other levels and later versions compile only what differs.
    """
    # The longest begin first, so that all cores are busy until the end.
    sources = sorted(FOLDER.glob("*.cpp"), key=lambda source: -len(with_headers(source)))

    def object_of(source: Path) -> Path:
        return kept_object(source, flags, folder, path.parent)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = sorted(pool.map(object_of, sources))
    run_compiler("-shared", "-pthread", *flags, *map(str, objects), "-o", str(path))


def kept_object(source: Path, flags: tuple[str, ...], folder: Path, temporary: Path) -> Path:
    """Return the object of a source, from the folder or compiled into it."""
    path = folder / object_name(source, flags)
    mark_used(path)
    if is_whole(path):
        return path
    new = temporary / path.name
    run_compiler(*object_flags(source, flags), "-c", str(source), "-o", str(new))
    # An object stays out of the folder if somebody has changed the source meanwhile.
    if object_name(source, flags) != path.name or not is_whole(new):
        return new
    move(new, path)
    return path


def object_name(source: Path, flags: tuple[str, ...]) -> str:
    code = hashlib.sha256(with_headers(source)).hexdigest()
    return f"kernels-{source.stem}-{input_hash(code, object_flags(source, flags))}.o"


def object_flags(source: Path, flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the flags that affect an object: no linker flags, no macros that it does not read."""
    code, is_portable = with_headers(source), source.stem in PORTABLE

    def has_effect(flag: str) -> bool:
        if flag.startswith("-D"):
            return flag[2:].partition("=")[0].encode() in code
        return flag not in STATIC and not (is_portable and flag.startswith("-m"))

    return (*FLAGS, *filter(has_effect, flags))


def with_headers(source: Path) -> bytes:
    """Return the code of a source and of all kernel headers that it includes."""
    found: dict[str, bytes] = {}

    def add(path: Path) -> None:
        if path.name not in found:
            found[path.name] = path.read_bytes()
            for name in INCLUDE.findall(found[path.name]):
                add(path.parent / name.decode())

    add(source)
    return b"\0".join(found[name] for name in sorted(found))


def run_compiler(*args: str) -> None:
    done = call_compiler(*args)
    if done.returncode != 0:
        failed = f"{shlex.join(compiler())} could not compile the kernels"
        if any(os.strerror(number) in done.stderr for number in FULL):
            where = {args[-1].rpartition("/")[0], tempfile.gettempdir()}
            raise BuildError(
                f"{failed} because a disk is full. Free space in {' or '.join(sorted(where))}, or "
                "set XDG_CACHE_HOME and TMPDIR to folders on other disks."
            )
        said = next((f"; {line}" for line in done.stderr.splitlines() if "error" in line), "")
        details = f"(exit code {done.returncode}{said}). {REMEDY}.\n{done.stderr[:2000]}"
        raise BuildError(f"{failed} {details}")


def call_compiler(*args: str) -> subprocess.CompletedProcess[str]:
    command = *compiler(), *args
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as e:
        raise BuildError(f"{command[0]} cannot be run ({e}). {REMEDY}.") from e
