"""What a step can cost at least on this machine, by native loops: reading, and multiply-adds."""

import ctypes
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import numpy as np

from specserve_kernels.cpu.compiler import BuildError, compiler

SOURCE = Path(__file__).parent / "native" / "bound.cpp"
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast"),
    *("-fopenmp", "-shared", "-fPIC"),
)
READ_BYTES = 1 << 29  # far beyond any cache
MULTIPLY_SECONDS = 0.05


class Rates(NamedTuple):
    """What this CPU did at one moment: bytes a second read, FLOPs a second multiplied."""

    read: float
    multiply: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        """At least: whatever overlaps, neither takes less."""
        return max(num_bytes / self.read, flops / self.multiply)


class Bound:
    """The compiled loops, with memory to read. Import torch first: they share OpenMP threads."""

    def __init__(self) -> None:
        self.library = compiled()
        self.memory = np.ones(READ_BYTES, np.uint8)  # written: pages of zeros would be one page
        self.threads = thread_counts(len(os.sched_getaffinity(0)))
        self.unit: str = self.library.bound_unit().decode()
        self.turns = 1 << 12
        while self.multiply(self.threads[-1])[1] < MULTIPLY_SECONDS:
            self.turns *= 2

    def rates(self) -> Rates:
        """The best number of threads' for each."""
        read = max(READ_BYTES / self.read(n) for n in self.threads)
        multiplied = [self.multiply(n) for n in self.threads]
        return Rates(read, max(flops / seconds for flops, seconds in multiplied))

    def read(self, threads: int) -> float:
        """Seconds of reading the memory once."""
        start = perf_counter()
        self.library.bound_read(self.memory.ctypes.data, READ_BYTES, threads)
        return perf_counter() - start

    def multiply(self, threads: int) -> tuple[int, float]:
        """FLOPs, and the seconds that they took."""
        start = perf_counter()
        flops: int = self.library.bound_multiply(self.turns, threads)
        return flops, perf_counter() - start


def thread_counts(cores: int) -> list[int]:
    """Half of the logical cores may be all that memory or the units take."""
    return sorted({max(1, cores // 2), cores})


def compiled() -> ctypes.CDLL:
    with TemporaryDirectory(prefix="specserve-bound-") as folder:
        file = Path(folder, "bound.so")
        command = [*compiler(), *FLAGS, str(SOURCE), "-o", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"{command[0]} could not compile {SOURCE.name}:\n{done.stderr[:2000]}")
        library = ctypes.CDLL(str(file))  # stays mapped after the file is gone
    library.bound_read.argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.bound_read.restype = ctypes.c_uint64
    library.bound_multiply.argtypes = ctypes.c_int64, ctypes.c_int
    library.bound_multiply.restype = ctypes.c_int64
    library.bound_unit.restype = ctypes.c_char_p
    return library
