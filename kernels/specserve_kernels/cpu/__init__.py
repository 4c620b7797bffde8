"""The ops on the CPU: oneDNN's prepacked GEMMs, and C++ for everything between them."""

from specserve_kernels.cpu.build import BuildError, library
from specserve_kernels.cpu.ops import (
    add_rms_norm,
    attention,
    linear,
    move_kv,
    plan,
    prepack,
    rms_norm,
    rope_write_kv,
    sample,
    silu_mul,
    top_children,
)
from specserve_kernels.cpu.threads import tune
from specserve_kernels.host import allocate, free_memory, has_bf16, place

__all__ = [
    "BuildError",
    "add_rms_norm",
    "allocate",
    "attention",
    "free_memory",
    "has_bf16",
    "library",
    "linear",
    "move_kv",
    "place",
    "plan",
    "prepack",
    "rms_norm",
    "rope_write_kv",
    "sample",
    "samples_ahead",
    "silu_mul",
    "top_children",
    "tune",
]

samples_ahead = False
