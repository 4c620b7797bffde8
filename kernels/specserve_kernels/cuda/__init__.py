"""The ops on an NVIDIA GPU: FlashInfer's attention, Triton kernels, cuBLAS."""

from functools import cache
from typing import TYPE_CHECKING

import torch

from specserve_kernels.cuda.attention import load_flashinfer
from specserve_kernels.errors import DeviceError

if TYPE_CHECKING:
    from specserve_kernels.cuda.ops import CudaOps


def build(device: torch.device) -> "CudaOps":
    """The ops on this GPU; DeviceError says in a line what is missing."""
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
    return _on(index)


@cache
def _on(index: int) -> "CudaOps":
    try:
        from specserve_kernels.cuda.ops import CudaOps
    except ImportError as e:
        raise DeviceError(f"Triton cannot be imported ({e}): pip install 'specserve[gpu]'") from e
    torch.cuda.set_device(index)
    return CudaOps(torch.device("cuda", index), load_flashinfer())
