"""Functions from tensors to tensors, in builds of equal signatures; `load` picks one."""

import logging

import torch

from specserve_kernels.codes import Codes
from specserve_kernels.errors import DeviceError, is_out_of_memory
from specserve_kernels.ops import ModelForward, Ops, Outputs, Program
from specserve_kernels.threads import limit_threads
from specserve_kernels.types import (
    NO_TOKEN,
    NO_WINDOW,
    NOT_FINITE,
    AdapterRows,
    Edits,
    KVCache,
    KVLayer,
    Logprobs,
    Masks,
    QKNorm,
    Rotary,
    Rows,
    SampleParams,
    Threads,
)

__all__ = [
    "NOT_FINITE",
    "NO_TOKEN",
    "NO_WINDOW",
    "AdapterRows",
    "Codes",
    "DeviceError",
    "Edits",
    "KVCache",
    "KVLayer",
    "Logprobs",
    "Masks",
    "ModelForward",
    "Ops",
    "Outputs",
    "Program",
    "QKNorm",
    "Rotary",
    "Rows",
    "SampleParams",
    "Threads",
    "is_out_of_memory",
    "load",
]


log = logging.getLogger("specserve")


def load(device: str | torch.device = "auto", attention: str = "auto") -> Ops:
    """The build for a device, DeviceError if it cannot be used; auto: a GPU where there is one.

    attention  on a GPU: `flashinfer` or `triton`, without a fallback; auto: FlashInfer where it is
               installed and has kernels for the model, else Triton

    Called once, at start-up: no code above the ops depends on the device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        from specserve_kernels.cuda import build

        return build(device, attention)
    if device.type != "cpu":
        raise DeviceError(f"there are no kernels for {device.type!r}: take 'cpu' or 'cuda'")
    if attention != "auto":
        raise DeviceError(f"there is no choice of attention on a CPU: {attention!r} is for a GPU")
    from specserve_kernels import cpu, reference

    limit_threads()
    try:
        cpu.library()
    except cpu.BuildError as e:
        reason = str(e).splitlines()[0]
        log.warning("%s; the reference kernels serve instead, slowly", reason)
        return reference
    return cpu
