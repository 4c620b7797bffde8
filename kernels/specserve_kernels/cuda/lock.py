"""A lock for the buffers that the engines on one device share."""

from threading import RLock

import torch


class DeviceLock:
    """A reentrant lock. While a thread holds it, the device is the thread's current device.

    Torch keeps the current device per thread, and Triton launches on the current device.
    """

    def __init__(self, device: torch.device) -> None:
        self.index = device.index if device.type == "cuda" else None
        self.lock = RLock()
        self.outside: list[int] = []  # the previous current devices

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.index is not None:
            self.outside.append(torch.cuda.current_device())
            torch.cuda.set_device(self.index)

    def __exit__(self, *exception: object) -> None:
        if self.index is not None:
            torch.cuda.set_device(self.outside.pop())
        self.lock.release()
