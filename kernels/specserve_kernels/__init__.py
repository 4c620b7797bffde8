"""Tensor ops in several builds with equal signatures. `load` returns one build."""

import logging

import torch

from specserve_kernels.codes import Codes
from specserve_kernels.errors import DeviceError, is_out_of_memory
from specserve_kernels.ops import HostMemory, ModelForward, Ops, Outputs, Program
from specserve_kernels.ranks import Gathering, RankLost, Ranks
from specserve_kernels.states import (
    DeltaParams,
    MambaParams,
    Replays,
    StateLayer,
    StateRows,
    reserve,
)
from specserve_kernels.threads import limit_threads
from specserve_kernels.types import (
    NO_TOKEN,
    NO_WINDOW,
    NOT_FINITE,
    AdapterRows,
    Chunks,
    Edits,
    KVCache,
    KVLayer,
    Logprobs,
    Masks,
    QKNorm,
    Rotary,
    Rows,
    SampleParams,
    StepColumns,
    Threads,
    Window,
    all_rows,
    tensor_of,
)

__all__ = [
    "NOT_FINITE",
    "NO_TOKEN",
    "NO_WINDOW",
    "AdapterRows",
    "Chunks",
    "Codes",
    "DeltaParams",
    "DeviceError",
    "Edits",
    "Gathering",
    "HostMemory",
    "KVCache",
    "KVLayer",
    "Logprobs",
    "MambaParams",
    "Masks",
    "ModelForward",
    "Ops",
    "Outputs",
    "Program",
    "QKNorm",
    "RankLost",
    "Ranks",
    "Replays",
    "Rotary",
    "Rows",
    "SampleParams",
    "StateLayer",
    "StateRows",
    "StepColumns",
    "Threads",
    "Window",
    "all_rows",
    "is_out_of_memory",
    "load",
    "reserve",
    "tensor_of",
]


log = logging.getLogger("specserve")


def load(
    device: str | torch.device = "auto", attention: str = "auto", rank: int | None = None
) -> Ops:
    """Return the build for a device. DeviceError if the device cannot be used.

    device     `cpu`, `cuda` or `cuda:N`; auto: a GPU if there is one, else the CPU
    attention  on a GPU: `flashinfer` or `triton`, without a fallback; auto: FlashInfer if it is
               installed and has kernels for the model, else Triton
    rank       the number of the GPU if the device is `cuda`; None: torch's current GPU

    Callers call it once, at start-up. No code outside this package depends on the device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and rank is not None:
        device = torch.device("cuda", rank)
    if device.type == "cuda":
        from specserve_kernels.cuda import build

        return build(device, attention)
    if device.type != "cpu":
        raise DeviceError(f"Device {device.type!r} has no kernels. Use 'cpu' or 'cuda'.")
    if attention != "auto":
        raise DeviceError(f"Attention backend {attention!r} needs a GPU. On a CPU, use 'auto'.")
    from specserve_kernels import cpu, reference

    limit_threads()
    try:
        cpu.library()
    except cpu.BuildError as e:
        reason = str(e).splitlines()[0]
        log.warning("%s Using the slow reference kernels instead.", reason)
        return reference
    return cpu
