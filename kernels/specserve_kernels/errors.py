"""What the ops raise for the operator to mend, and how a lack of memory is told."""

import torch


class DeviceError(RuntimeError):
    """The device cannot be used, and what to do about it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of a device or of the host: it may do for others, or later."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch's allocator for the host raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
