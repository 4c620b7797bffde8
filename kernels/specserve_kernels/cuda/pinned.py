"""Blocks in pinned host memory, which a GPU copies without its caller."""

from collections.abc import Iterable

import torch
from torch import Tensor


class PinnedBlocks:
    """`specserve_kernels.host.HostBlocks` for a GPU.

    Stores run on the stream of the forwards, before the next forward. Loads run on a stream of
    their own, during forwards.
    """

    def __init__(self, num_blocks: int, block_bytes: int, device: torch.device) -> None:
        self.device = device
        self.memory = torch.zeros(
            num_blocks, block_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied = [] if self.stream is None else [torch.cuda.Event(), torch.cuda.Event()]

    def store(self, blocks: Tensor, pairs: Iterable[tuple[int, int]]) -> None:
        for block, host_block in pairs:
            self.memory[host_block].copy_(blocks[block], non_blocking=True)
        if self.stream is not None:
            self.copied[0].record(torch.cuda.current_stream(self.device))

    def load(self, blocks: Tensor, pairs: Iterable[tuple[int, int]]) -> None:
        if self.stream is None:
            copy_all(self.memory, blocks, pairs)
            return
        # Earlier stores may write to these host blocks, and earlier forwards read these blocks.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            copy_all(self.memory, blocks, pairs)
            self.copied[1].record(self.stream)

    @property
    def is_idle(self) -> bool:
        return all(event.query() for event in self.copied)

    def wait(self) -> None:
        for event in self.copied:
            event.synchronize()


def copy_all(memory: Tensor, blocks: Tensor, pairs: Iterable[tuple[int, int]]) -> None:
    for host_block, block in pairs:
        blocks[block].copy_(memory[host_block], non_blocking=True)
