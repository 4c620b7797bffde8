"""The C++ kernels compiled for one instruction set after another."""

import ctypes
import platform
import shutil
from contextlib import contextmanager
from functools import cache

import pytest

from specserve_kernels.cpu import build
from specserve_kernels.cpu.compiler import FOLDER, STATIC, compiled
from specserve_kernels.cpu.levels import LEVELS, native_flags, usable_levels
from tests.kernels.programs import compile_program
from tests.kernels.remote import Server

EMULATED = "emulated-amx"  # as specserve_level() names it
EMULATED_VNNI = "emulated-avx-vnni"
FLAGS = {"native": native_flags()}
FLAGS |= {level.name: (*level.flags, *STATIC) for level in usable_levels()}
FLAGS |= {EMULATED: (*native_flags(), "-DEMULATE_AMX")}
if platform.machine() == "x86_64":
    FLAGS |= {EMULATED_VNNI: ("-march=x86-64-v3", "-DEMULATE_AVX_VNNI")}

# ARM is emulated as a whole, on any machine that has a compiler for it and the emulator.
ARM_LEVELS = {level.name: level for level in LEVELS if level.machine == "aarch64"}
ARM = "aarch64 in an emulator"
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# The sources of integer products. To compile all takes two minutes.
INTEGER_SOURCES = (
    *("adapters.cpp", "gemm.cpp", "gemm_integers.cpp", "gemm_integers_vectors.cpp"),
    *("gemm_rounded.cpp", "level.cpp", "run.cpp", "team.cpp"),
)

# Each takes long to compile after a change to a source: most of them wait for `make check`. On a
# CPU without AVX-512 the native code is that of x86-64-v3.
EVERY_DAY = ["native", EMULATED]
if [level.name for level in usable_levels()] != ["x86-64-v3"]:
    EVERY_DAY.append("x86-64-v3")
LEVEL_PARAMS = [
    pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.slow) for name in FLAGS
]
ARM_PARAM = pytest.param(ARM, marks=pytest.mark.slow)

# Mark a test that shall pass on every level which this CPU runs; the second, on ARM as well, where
# each op takes a tenth of a second.
EVERY_LEVEL = pytest.mark.usefixtures("every_level")
EVERY_LEVEL_AND_ARM = pytest.mark.usefixtures("every_level_and_arm")


@cache
def kernels(name):
    return build.Kernels(ctypes.CDLL(str(compiled(FLAGS[name]))), "compiled for a test")


@contextmanager
def running_on(name):
    """The ops of `specserve_kernels.cpu` run on the library for a level. Weights that were packed
    outside cannot be used within: levels may pack them in different ways.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "kernels", lambda: kernels(name))
        yield


def arm_server(folder, name="aarch64", sources=None):
    """A process in which the ops run on ARM; its program is compiled in a folder, of some sources
    or all.
    """
    if not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)):
        tools = f"{ARM_COMPILER} and {ARM_EMULATOR} (Debian: g++-aarch64-linux-gnu, qemu-user)"
        pytest.skip(f"needs {tools}: NOT checked here")
    flags = *ARM_LEVELS[name].flags, "-rdynamic"
    if sources:
        flags += "-O1", "-Wl,--unresolved-symbols=ignore-all"
    sources = sources or [path.name for path in FOLDER.glob("*.cpp")]
    program = compile_program("server", folder, sources, flags, lambda: (ARM_COMPILER,))
    return Server([ARM_EMULATOR, "-L", "/usr/aarch64-linux-gnu", program])


if __name__ == "__main__":
    for each in EVERY_DAY:
        print(compiled(FLAGS[each]))
