"""The ops in plain torch: float32 arithmetic, row by row. These are the definitions of the ops."""

from collections.abc import Collection
from contextlib import nullcontext

from specserve_kernels.codes import quantize
from specserve_kernels.host import HostBlocks as host_blocks
from specserve_kernels.host import (
    allocate,
    copy_blocks,
    free_memory,
    has_bf16,
    instruction_set,
    offload,
    place,
    release,
    renew,
)
from specserve_kernels.ops import EagerProgram, ModelForward
from specserve_kernels.reference.adapters import adapted, adapter_slots
from specserve_kernels.reference.attention import attention, move_kv, plan, rope_write_kv
from specserve_kernels.reference.experts import (
    add_gated,
    experts,
    prepack_experts,
    route,
    weigh_rows,
)
from specserve_kernels.reference.layers import (
    activate,
    copy,
    embed,
    gate_columns,
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
from specserve_kernels.reference.ranks import (
    all_gather,
    join,
    put_columns,
    receive,
    send,
    take_columns,
)
from specserve_kernels.reference.recurrent import (
    causal_conv,
    delta_rule,
    gate,
    replay,
    selective_state_update,
)
from specserve_kernels.reference.sampling import logprobs, sample, top_children
from specserve_kernels.reference.streams import (
    add_matched,
    correct_streams,
    mix_streams,
    sparse_gated,
    spread_streams,
    weigh_columns,
)
from specserve_kernels.types import KVCache

__all__ = [
    "activate",
    "adapted",
    "adapter_slots",
    "add_gated",
    "add_matched",
    "all_gather",
    "allocate",
    "arithmetic",
    "attention",
    "causal_conv",
    "copy",
    "copy_blocks",
    "correct_streams",
    "delta_rule",
    "embed",
    "experts",
    "free_memory",
    "gate",
    "gate_columns",
    "has_bf16",
    "host_blocks",
    "join",
    "layer_norm",
    "linear",
    "linear_add",
    "linear_gated",
    "lm_head",
    "lock",
    "logprobs",
    "mix_streams",
    "move_kv",
    "offload",
    "place",
    "plan",
    "prepack",
    "prepack_experts",
    "program",
    "put_columns",
    "quantize",
    "receive",
    "records_steps",
    "release",
    "renew",
    "replay",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_columns",
    "rope_write_kv",
    "rounds_rows",
    "route",
    "sample",
    "samples_ahead",
    "scale",
    "selective_state_update",
    "send",
    "soft_cap",
    "sparse_gated",
    "spread_streams",
    "take_columns",
    "take_rows",
    "top_children",
    "tune",
    "weigh_columns",
    "weigh_rows",
]

samples_ahead = False
rounds_rows = True
records_steps = False
lock = nullcontext()  # forwards share no buffers


def program(
    model: ModelForward,
    kv: KVCache,
    max_rows: int,
    max_read: int,
    aux_layer_ids: Collection[int] = (),
) -> EagerProgram:
    """Prepare a model's forward for running steps.

    model          calls only ops; a program computes its `plan`, `forward` and `logits`
    kv             the model's view of the arena
    max_rows       usual maximum rows of a step; a build may reserve memory for them
    max_read       usual maximum rows whose logits are read
    aux_layer_ids  the layers whose input residual is returned as auxiliary hidden states
    """
    return EagerProgram(model, kv, aux_layer_ids)


def arithmetic() -> str:
    """Name the build and the CPU's extensions. Results may differ if they differ."""
    return f"reference {instruction_set()}"
