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
    """Return the ops on this GPU. DeviceError if a requirement is missing. `attention` as in
    `load`.
    """
    if torch.version.cuda is None:
        raise DeviceError(
            f"This torch ({torch.__version__}) is built without CUDA. Install a CUDA build, or use "
            "'cpu'."
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise DeviceError(
            "torch finds no NVIDIA GPU. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or use 'cpu'."
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise DeviceError(f"GPU {index} does not exist. Use a GPU number from 0 to {count - 1}.")
    return _on(index, attention)


@cache
def _on(index: int, attention: str) -> "CudaOps":
    try:
        from specserve_kernels.cuda.ops import CudaOps
    except ImportError as e:
        raise DeviceError(
            f"Triton cannot be imported ({e}). Install it with pip install 'specserve[gpu]'."
        ) from e
    torch.cuda.set_device(index)
    # Otherwise, cuBLAS may round the parts of a split sum to bfloat16 before it adds them.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return CudaOps(torch.device("cuda", index), _flashinfer(attention), attention)


def _flashinfer(attention: str) -> Any | None:
    """Return the FlashInfer module; None if unused, or if missing and not required (logged)."""
    if attention == "triton":
        return None
    try:
        return load_flashinfer()
    except DeviceError as e:
        if attention == "flashinfer":
            raise
        log.warning("%s Using the slower Triton attention instead.", e)
        return None
