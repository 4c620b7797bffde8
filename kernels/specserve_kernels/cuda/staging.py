"""Uploads of host tensors to the device, several tensors per copy."""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; for vector loads
NUM_BUFFERS = 4  # maximum concurrent uploads


class Staging:
    """Pinned host buffers, used in rotation, and one device buffer.

    An upload's tensors are valid until the next upload. The stream runs in order, so kernels
    launched in between read them before. Tensors of equal sizes keep their addresses until an
    upload needs a larger buffer.
    """

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        # The stream of all work. A lookup per event would take longer than the copy.
        self.stream = torch.cuda.current_stream(device) if self.is_cuda else None
        self.hosts = [self.empty(num_bytes) for _ in range(NUM_BUFFERS)]
        self.copied = [torch.cuda.Event() if self.is_cuda else None for _ in range(NUM_BUFFERS)]
        self.buffer = self.empty(num_bytes, device)
        self.num_uploads = 0

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy host tensors to the device; return device tensors of equal shapes and dtypes."""
        begin, total = [], 0
        for x in tensors:
            begin.append(total)
            total += aligned(x.nbytes)
        host = self.host(total)
        parts = [(x, slice(b, b + x.nbytes)) for x, b in zip(tensors, begin, strict=True)]
        for x, at in parts:
            host[at].view(x.dtype).view(x.shape).copy_(x)
        if len(self.buffer) < total:
            self.buffer = self.empty(2 * total, self.device)
        self.send(total)
        return [self.buffer[at].view(x.dtype).view(x.shape) for x, at in parts]

    def host(self, num_bytes: int) -> Tensor:
        """Return the next pinned buffer, after its last copy has finished."""
        turn = self.num_uploads % NUM_BUFFERS
        event = self.copied[turn]
        if event is not None:
            event.synchronize()
        if len(self.hosts[turn]) < num_bytes:
            self.hosts[turn] = self.empty(2 * num_bytes)
        return self.hosts[turn]

    def send(self, num_bytes: int) -> None:
        """Copy the next pinned buffer's first bytes to the device."""
        turn = self.num_uploads % NUM_BUFFERS
        self.buffer[:num_bytes].copy_(self.hosts[turn][:num_bytes], non_blocking=True)
        event = self.copied[turn]
        if event is not None:
            event.record(self.stream)
        self.num_uploads += 1

    @torch.inference_mode(False)  # inference tensors are writable only in that mode
    def empty(self, num_bytes: int, device: torch.device | None = None) -> Tensor:
        """Allocate bytes on the device, or pinned bytes on the host."""
        pin = self.is_cuda and device is None
        return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
