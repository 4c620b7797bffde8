"""Errors of the ops: an unusable device, and running out of memory."""

import torch


class DeviceError(RuntimeError):
    """The device cannot be used. The message states the remedy."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host ran out of memory. Smaller steps may still fit."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # Torch's host allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
