"""The ops in plain torch, float32 inside, each row on its own: the definition and the oracle."""

from specserve_kernels.host import allocate, free_memory, has_bf16, place
from specserve_kernels.reference.attention import attention, move_kv, plan, rope_write_kv
from specserve_kernels.reference.layers import (
    add_rms_norm,
    linear,
    prepack,
    rms_norm,
    silu_mul,
    tune,
)
from specserve_kernels.reference.sampling import sample, top_children

__all__ = [
    "add_rms_norm",
    "allocate",
    "attention",
    "free_memory",
    "has_bf16",
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
