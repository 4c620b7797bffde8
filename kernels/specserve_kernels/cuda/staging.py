"""Uploading host tensors to the device, several in one copy."""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: vector loads
NUM_BUFFERS = 4  # uploads that may be under way


class Staging:
    """Pinned buffers on the host that are used in turn, and one buffer on the device.

    An upload's tensors are valid until the next upload. The stream runs in order, so kernels that
    are launched in between have read them by then. Tensors of the same sizes have the same
    addresses, as long as no upload needs a larger buffer than there is.
    """

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        # That of all work: to look it up for every event would take longer than the copy.
        self.stream = torch.cuda.current_stream(device) if self.is_cuda else None
        self.hosts = [self.empty(num_bytes) for _ in range(NUM_BUFFERS)]
        self.copied = [torch.cuda.Event() if self.is_cuda else None for _ in range(NUM_BUFFERS)]
        self.buffer = self.empty(num_bytes, device)
        self.num_uploads = 0

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors on the device, of the same shapes and dtypes."""
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
        """The pinned buffer whose turn it is, once its last copy is done."""
        turn = self.num_uploads % NUM_BUFFERS
        event = self.copied[turn]
        if event is not None:
            event.synchronize()
        if len(self.hosts[turn]) < num_bytes:
            self.hosts[turn] = self.empty(2 * num_bytes)
        return self.hosts[turn]

    def send(self, num_bytes: int) -> None:
        """Copy what the pinned buffer, whose turn it is, has to the device."""
        turn = self.num_uploads % NUM_BUFFERS
        self.buffer[:num_bytes].copy_(self.hosts[turn][:num_bytes], non_blocking=True)
        event = self.copied[turn]
        if event is not None:
            event.record(self.stream)
        self.num_uploads += 1

    @torch.inference_mode(False)  # tensors made in that mode can be written only in it
    def empty(self, num_bytes: int, device: torch.device | None = None) -> Tensor:
        """Bytes on the device, or pinned ones on the host."""
        pin = self.is_cuda and device is None
        return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
