"""Which library of C++ kernels a process uses: one that came in the wheel, or one compiled here."""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from specserve_kernels.cpu.compiler import FOLDER, BuildError, compiled, loads, source_hash
from specserve_kernels.cpu.levels import Level, native_flags, usable_levels

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
            return Kernels(
                found, f"prebuilt for a lower level than this CPU's: {str(e).splitlines()[0]}"
            )
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


def main() -> int:
    """Say which library is used, and why; compile it if it has to be. 1 if there is none."""
    try:
        found, origin = kernels()
    except BuildError as e:
        reason, *details = str(e).splitlines()
        words = f"kernels: {reason}; the reference kernels will serve, slowly"
        print(words, *details, sep="\n", file=sys.stderr)
        return 1
    print(f"kernels: {level()}, {origin}: {found._name}")
    return 0
