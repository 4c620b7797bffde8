"""The C++ kernels compiled for one instruction set after another."""

import ctypes
from contextlib import contextmanager
from functools import cache

import pytest

from specserve_kernels.cpu import build
from specserve_kernels.cpu.compiler import STATIC, compiled
from specserve_kernels.cpu.levels import native_flags, usable_levels

EMULATED = "emulated-amx"  # as specserve_level() names it
FLAGS = {"native": native_flags()}
FLAGS |= {level.name: (*level.flags, *STATIC) for level in usable_levels()}
FLAGS |= {EMULATED: (*native_flags(), "-DEMULATE_AMX")}

# Each takes long to compile after a change to a source: most of them wait for `make check`.
EVERY_DAY = ("native", "x86-64-v3", EMULATED)
PARAMS = [pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.slow) for name in FLAGS]

# Marks a test that shall pass on every level which this CPU runs.
EVERY_LEVEL = pytest.mark.usefixtures("every_level")


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
