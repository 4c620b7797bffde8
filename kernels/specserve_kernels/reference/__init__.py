"""The ops in plain torch, float32 inside, each row on its own: the definition and the oracle."""

from collections.abc import Collection
from contextlib import nullcontext

from specserve_kernels.codes import quantize
from specserve_kernels.host import (
    allocate,
    copy_blocks,
    free_memory,
    has_bf16,
    instruction_set,
    place,
)
from specserve_kernels.ops import EagerProgram, ModelForward
from specserve_kernels.reference.adapters import adapted, adapter_slots
from specserve_kernels.reference.attention import attention, move_kv, plan, rope_write_kv
from specserve_kernels.reference.experts import add_gated, experts, prepack_experts, route
from specserve_kernels.reference.layers import (
    copy,
    embed,
    layer_norm,
    linear,
    linear_add,
    linear_gated,
    lm_head,
    prepack,
    rms_norm,
    rms_norm_add,
    rms_norm_columns,
    scale,
    soft_cap,
    take_rows,
    tune,
)
from specserve_kernels.reference.sampling import logprobs, sample, top_children
from specserve_kernels.types import KVCache

__all__ = [
    "adapted",
    "adapter_slots",
    "add_gated",
    "allocate",
    "arithmetic",
    "attention",
    "copy",
    "copy_blocks",
    "embed",
    "experts",
    "free_memory",
    "has_bf16",
    "layer_norm",
    "linear",
    "linear_add",
    "linear_gated",
    "lm_head",
    "lock",
    "logprobs",
    "move_kv",
    "place",
    "plan",
    "prepack",
    "prepack_experts",
    "program",
    "quantize",
    "records_steps",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_columns",
    "rope_write_kv",
    "rounds_rows",
    "route",
    "sample",
    "samples_ahead",
    "scale",
    "soft_cap",
    "take_rows",
    "top_children",
    "tune",
]

samples_ahead = False
rounds_rows = True
records_steps = False
lock = nullcontext()  # forwards share no buffers


def program(
    model: ModelForward, kv: KVCache, max_rows: int, max_read: int, taps: Collection[int] = ()
) -> EagerProgram:
    """A model's forward, prepared for its steps.

    model     written against the ops; its `plan`, `forward` and `logits` are the definition
    kv        the model's view of the arena
    max_rows  rows that a step usually has at most; memory for them may be reserved here
    max_read  rows whose logits are usually read at most
    taps      the layers whose incoming residual is an output too
    """
    return EagerProgram(model, kv, taps)


def arithmetic() -> str:
    """The build and the CPU's extensions; with others the same row may have other bits."""
    return f"reference {instruction_set()}"
