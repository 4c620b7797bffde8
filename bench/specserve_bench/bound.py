"""The least time of a step on this machine: its bytes and operations, and the rates of both."""

import ctypes
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import numpy as np

from specserve.models.decoder_config import DecoderConfig, Shape
from specserve.models.recurrent import GatedDelta, Mamba2, ShortConv
from specserve_kernels.cpu.compiler import BuildError, compiler

SOURCE = Path(__file__).parent / "native" / "bound.cpp"
READ_BYTES = 1 << 29  # far beyond any cache
MULTIPLY_SECONDS = 0.05


class StepSize(NamedTuple):
    """A step: `rows` rows for each context of a request, all of them read."""

    label: str
    contexts: tuple[int, ...]
    rows: int


class Cost(NamedTuple):
    """Work of a step: bytes of weights and KV to read, and floating-point operations."""

    num_bytes: float
    flops: float


def cost(c: Shape, size: StepSize, quantize: str | None = None) -> Cost:
    """`quantize` is that of the weights: w8a8, w8, w4, or None for bfloat16."""
    # Bytes of a weight in the layers and in the head. w4: a float32 is shared by 64 weights.
    layer_bytes, head_bytes = {None: (2, 2), "w4": (0.5 + 4 / 64, 1)}.get(quantize, (1, 1))
    query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    in_layers = c.num_layers * c.hidden_size * (2 * query + 2 * kv + 3 * c.intermediate_size)
    in_head = c.vocab_size * c.hidden_size  # of the embedding a step reads a few rows
    seen = sum(size.rows * context for context in size.contexts)  # (row, earlier token) pairs
    return Cost(
        num_bytes=in_layers * layer_bytes
        + in_head * head_bytes
        + sum(size.contexts) * kv_token_bytes(c),
        flops=2 * (in_layers + in_head) * size.rows * len(size.contexts)
        + 4 * c.num_layers * query * seen,
    )


def kv_token_bytes(c: Shape) -> int:
    """Bytes of a token's KV in bfloat16, in all layers with attention."""
    layers = range(c.num_layers)
    number = sum(map(c.attends, layers)) if isinstance(c, DecoderConfig) else len(layers)
    return 2 * number * c.num_kv_heads * c.head_dim * 2


def state_bytes(c: Shape) -> int:
    """Bytes of a request's states in all recurrent layers: convolutions in bfloat16, the rest in
    float32.
    """
    if not isinstance(c, DecoderConfig) or c.recurrent is None:
        return 0
    own = c.recurrent
    width = own.width if isinstance(own, ShortConv) else own.inner
    size = 2 * (own.taps - 1) * width
    if isinstance(own, GatedDelta):
        size += 4 * own.num_v_heads * own.k_dim * own.v_dim
    if isinstance(own, Mamba2):
        size += 4 * own.num_heads * own.head_dim * own.state_dim
    return size * sum(c.recurrent_layers)


class Rates(NamedTuple):
    """Rates of this CPU at one moment: bytes read and FLOPs, per second."""

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
        cores = len(os.sched_getaffinity(0))
        # Half of the logical cores may be all that memory or the units take.
        self.threads = sorted({max(1, cores // 2), cores})
        self.unit: str = self.library.bound_unit().decode()
        self.code_unit: str = self.library.bound_code_unit().decode()
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

    def code_rate(self) -> float:
        """Operations on 8-bit codes per second, with the best number of threads."""
        rates = list[float]()
        for threads in self.threads:
            start = perf_counter()
            done = self.library.bound_multiply_codes(self.turns, threads)
            rates.append(done / (perf_counter() - start))
        return max(rates)


def compiled() -> ctypes.CDLL:
    with TemporaryDirectory(prefix="specserve-bound-") as folder:
        file = Path(folder, "bound.so")
        flags = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp"]
        command = [*compiler(), *flags, "-shared", "-fPIC", str(SOURCE), "-o", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"{command[0]} could not compile {SOURCE.name}:\n{done.stderr[:2000]}")
        library = ctypes.CDLL(str(file))  # stays mapped after the file is gone
    library.bound_read.argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.bound_read.restype = ctypes.c_uint64
    library.bound_multiply.argtypes = ctypes.c_int64, ctypes.c_int
    library.bound_multiply.restype = ctypes.c_int64
    library.bound_multiply_codes.argtypes = ctypes.c_int64, ctypes.c_int
    library.bound_multiply_codes.restype = ctypes.c_int64
    library.bound_unit.restype = library.bound_code_unit.restype = ctypes.c_char_p
    return library
