"""Choosing the library of C++ kernels: prebuilt in the wheel, or compiled on this machine."""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from specserve_kernels.cpu.compiler import FOLDER, BuildError, compiled, loads, source_hash
from specserve_kernels.cpu.levels import Level, native_flags, usable_levels

PREBUILT = FOLDER / "prebuilt"  # only in wheels


class Kernels(NamedTuple):
    library: ctypes.CDLL
    origin: str  # source of the library, and the reason


def library() -> ctypes.CDLL:
    """Return the library of C++ kernels."""
    return kernels().library


def level() -> str:
    """Return the instruction set of the library. Results may differ between levels."""
    name = library().specserve_level
    name.restype = ctypes.c_char_p
    return str(name().decode())


CHOSEN: list[Level] = []  # by `use_level`


def use_level(name: str) -> None:
    """Let this process use the library for an instruction set, compiled if needed. Must be called
    before the library is used. ValueError if this CPU cannot run it.
    """
    usable = {level.name: level for level in usable_levels()}
    if name not in usable:
        raise ValueError(f"this CPU cannot run {name!r}. Choose one of {', '.join(usable)}")
    assert not kernels.cache_info().currsize, "another library is in use"
    CHOSEN[:] = [usable[name]]


@cache
def kernels() -> Kernels:
    """Load the prebuilt library for the best level of this CPU, or compile one for this CPU.

    Without a compiler, load a prebuilt library for a lower level.
    """
    if CHOSEN:
        chosen = prebuilt(CHOSEN) or ctypes.CDLL(str(compiled(CHOSEN[0].flags)))
        return Kernels(chosen, "for the chosen level")
    levels = usable_levels()
    if (found := prebuilt(levels[-1:])) is not None:
        return Kernels(found, "prebuilt for the best level that this CPU runs")
    try:
        path = compiled(native_flags())
        return Kernels(ctypes.CDLL(str(path)), "compiled for this CPU")
    except BuildError as e:
        if (found := prebuilt(levels[:-1])) is not None:
            return Kernels(
                found, f"prebuilt for a lower level than this CPU's: {str(e).splitlines()[0]}"
            )
        raise


def prebuilt(levels: Sequence[Level]) -> ctypes.CDLL | None:
    """Load the library of the best of these levels that has one for the current sources."""
    for level in reversed(levels):
        path = PREBUILT / prebuilt_name(level)
        if loads(path):
            return ctypes.CDLL(str(path))
    return None


def prebuilt_name(level: Level) -> str:
    return f"{level.name}-{source_hash()}.so"


def main() -> int:
    """Print which library is used, and why. Compile it if needed. Return 1 if there is none."""
    try:
        found, origin = kernels()
    except BuildError as e:
        reason, *details = str(e).splitlines()
        words = f"kernels: {reason} Using the slow reference kernels instead."
        print(words, *details, sep="\n", file=sys.stderr)
        return 1
    print(f"kernels: {level()}, {origin}: {found._name}")
    return 0
