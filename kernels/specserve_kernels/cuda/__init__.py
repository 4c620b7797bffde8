"""The ops on an NVIDIA GPU: FlashInfer's attention, Triton kernels, cuBLAS."""

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from specserve_kernels.cuda.attention import load_flashinfer
from specserve_kernels.errors import DeviceError

if TYPE_CHECKING:
    from specserve_kernels.cuda.ops import CudaOps

log = logging.getLogger("specserve")


def build(device: torch.device, attention: str = "auto") -> "CudaOps":
    """The ops on this GPU; DeviceError says in a line what is missing. `attention` as in `load`."""
    if torch.version.cuda is None:
        raise DeviceError(
            f"this torch ({torch.__version__}) is built without CUDA: install a build with it, or "
            "take 'cpu'"
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise DeviceError(
            "torch sees no NVIDIA GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES, or take 'cpu'"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise DeviceError(f"there are {count} GPUs, counted from 0: take one of them")
    return _on(index, attention)


@cache
def _on(index: int, attention: str) -> "CudaOps":
    try:
        from specserve_kernels.cuda.ops import CudaOps
    except ImportError as e:
        raise DeviceError(f"Triton cannot be imported ({e}): pip install 'specserve[gpu]'") from e
    torch.cuda.set_device(index)
    # Else cuBLAS may round the parts of a split sum to bfloat16 before it adds them up.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return CudaOps(torch.device("cuda", index), _flashinfer(attention), attention)


def _flashinfer(attention: str) -> Any | None:
    """The FlashInfer module; None if it is not wanted, or missing and not required (logged)."""
    if attention == "triton":
        return None
    try:
        return load_flashinfer()
    except DeviceError as e:
        if attention == "flashinfer":
            raise
        log.warning("%s. Triton attends instead, more slowly", e)
        return None
