"""The ops in plain torch, float32 inside, each row on its own: the definition and the oracle."""

from contextlib import nullcontext

from specserve_kernels.host import (
    allocate,
    copy_blocks,
    free_memory,
    has_bf16,
    instruction_set,
    place,
)
from specserve_kernels.reference.attention import attention, move_kv, plan, rope_write_kv
from specserve_kernels.reference.layers import (
    add,
    add_rms_norm,
    embed,
    linear,
    prepack,
    rms_norm,
    silu_mul,
    take_rows,
    tune,
)
from specserve_kernels.reference.sampling import sample, top_children

__all__ = [
    "add",
    "add_rms_norm",
    "allocate",
    "arithmetic",
    "attention",
    "copy_blocks",
    "embed",
    "free_memory",
    "has_bf16",
    "linear",
    "lock",
    "move_kv",
    "place",
    "plan",
    "prepack",
    "rms_norm",
    "rope_write_kv",
    "sample",
    "samples_ahead",
    "silu_mul",
    "take_rows",
    "top_children",
    "tune",
]

samples_ahead = False
lock = nullcontext()  # forwards share no buffers


def arithmetic() -> str:
    """The build and the CPU's extensions; with others the same row may have other bits."""
    return f"reference {instruction_set()}"
