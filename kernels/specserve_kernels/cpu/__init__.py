"""The ops on the CPU, in C++."""

from contextlib import nullcontext

from specserve_kernels.cpu.build import level, library
from specserve_kernels.cpu.compiler import BuildError
from specserve_kernels.cpu.experts import (
    add_gated,
    experts,
    prepack_experts,
    route,
    weigh_rows,
)
from specserve_kernels.cpu.ops import CpuMapAdapters as adapter_slots
from specserve_kernels.cpu.ops import (
    activate,
    adapted,
    add_matched,
    all_gather,
    attention,
    causal_conv,
    copy,
    correct_streams,
    delta_rule,
    embed,
    gate,
    gate_columns,
    layer_norm,
    linear,
    linear_add,
    linear_gated,
    lm_head,
    logprobs,
    mix_streams,
    move_kv,
    plan,
    prepack,
    quantize,
    receive,
    replay,
    rms_norm,
    rms_norm_add,
    rms_norm_columns,
    rope_write_kv,
    sample,
    scale,
    selective_state_update,
    send,
    soft_cap,
    sparse_gated,
    spread_streams,
    take_columns,
    take_rows,
    top_children,
    weigh_columns,
)
from specserve_kernels.cpu.program import NativeProgram as program
from specserve_kernels.cpu.threads import tune
from specserve_kernels.host import HostBlocks as host_blocks
from specserve_kernels.host import (
    allocate,
    copy_blocks,
    free_memory,
    offload,
    place,
    release,
    renew,
)
from specserve_kernels.reference.ranks import join, put_columns

__all__ = [
    "BuildError",
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
    "library",
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


def has_bf16() -> bool:
    """True on any CPU. Without bf16 instructions, the kernels convert weights while reading them.
    Steps of few rows then take about half of fp32's time, and steps of many rows the same time.
    """
    return True


def arithmetic() -> str:
    return f"cpu {level()}"
