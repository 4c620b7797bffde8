"""The children of a level's nodes by a recorded launch: a replay in place of two launches, of what
they allocate, and, where all draws are greedy, of a copy to the device.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specserve_kernels.cuda.graphs import Capture, Replay
from specserve_kernels.cuda.top_children import launch_top_children
from specserve_kernels.types import SampleParams

USUAL_WIDTH = 4  # nodes of a level, and children of a node
MOST_ROWS = 16  # with more, the launches are a small part of what the host does for them
MOST = 64  # recordings that are kept

Key = tuple[int, torch.Size, torch.dtype, int, float]
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]]


class Columns:
    """How the draws of R rows differ, at one address on the device; greedy at first."""

    @torch.inference_mode(False)  # tensors made in that mode can be written only in it
    def __init__(self, R: int, device: torch.device) -> None:
        self.host = torch.zeros(3, R, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.device = torch.zeros(3, R, dtype=torch.int64, device=device)
        seeds, index, rest = self.device
        self.last = self.greedy = SampleParams.greedy(R)
        self.params = self.greedy._replace(
            temperature=rest.view(torch.float32)[:R], seeds=seeds, token_index=index
        )

    def write(self, params: SampleParams) -> None:
        """What was copied before has been read, as the caller has waited for the launch."""
        if params is self.last is self.greedy:
            return
        seeds, index, rest = self.host.numpy()
        seeds[:], index[:] = params.seeds.numpy(), params.token_index.numpy()
        rest.view(np.float32)[: len(seeds)] = params.temperature.numpy()
        self.device.copy_(self.host, non_blocking=True)
        self.last = params


class Recording(NamedTuple):
    columns: Columns
    out: Tensor
    replay: Replay


class ChildGraphs:
    """Launches of `launch_top_children` over the logits of recorded forwards, which are at the same
    address in every step.
    """

    def __init__(self, device: torch.device, record: Record | None = None) -> None:
        """Without a GPU nothing is recorded unless `record` is given."""
        self.device = device
        self.record = record or (Capture() if device.type == "cuda" else None)
        self.addresses: set[int] = set()  # of the logits
        self.recordings: dict[Key, Recording] = {}

    def follow(self, logits: Tensor, smaller: int) -> None:
        """Note where a recorded forward leaves its logits, and record what a draft model of the
        usual width asks of them; other launches are recorded when they are first asked for.

        smaller  rows of the next smaller forward, which takes steps of up to so many
        """
        if self.record is None:
            return
        self.addresses.add(logits.data_ptr())
        if len(logits) <= USUAL_WIDTH:
            k = min(USUAL_WIDTH, logits.shape[1])
            for n in range(smaller + 1, len(logits) + 1):
                self.launch(logits[:n], SampleParams.greedy(n), k, 1.0)

    def launch(self, logits: Tensor, params: SampleParams, k: int, tau: float) -> Tensor | None:
        """As `launch_top_children`, with params on the host; None where it is not recorded. The
        caller waits for the result before the next call, which may overwrite it.
        """
        is_followed = logits.data_ptr() in self.addresses and len(logits) <= MOST_ROWS
        if self.record is None or not is_followed:
            return None
        key = logits.data_ptr(), logits.shape, logits.dtype, k, tau
        if key not in self.recordings:
            while len(self.recordings) >= MOST:
                del self.recordings[next(iter(self.recordings))]
            self.recordings[key] = self.recorded(self.record, logits, k, tau)
        columns, out, replay = self.recordings[key]
        columns.write(params)
        replay()
        return out

    def recorded(self, record: Record, logits: Tensor, k: int, tau: float) -> Recording:
        columns = Columns(len(logits), self.device)

        def launch() -> Tensor:
            return launch_top_children(logits, columns.params, k, tau)

        launch()  # compiles kernels
        return Recording(columns, *record(launch))
