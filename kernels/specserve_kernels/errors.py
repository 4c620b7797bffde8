"""Errors of the ops: a device that cannot be used, and memory that ran out."""

import torch


class DeviceError(RuntimeError):
    """The device cannot be used; the message says what to do about it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of a device or of the host; other steps may still fit."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch's allocator for the host raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
