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

__all__ = [
    "BuildError",
    "add_rms_norm",
    "attention",
    "library",
    "linear",
    "move_kv",
    "plan",
    "prepack",
    "rms_norm",
    "rope_write_kv",
    "sample",
    "silu_mul",
    "top_children",
    "tune",
]
