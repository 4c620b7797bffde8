"""Forwards recorded as CUDA graphs: a step of few rows is one launch in place of some hundred.

A graph is recorded for some numbers of rows, and takes steps of up to so many: unused rows are
written nowhere, and nobody reads what comes of them. Steps of more rows, those that have rows with
adapters, and those that begin with a residual run op by op.

The children of a level's nodes are recorded as well: a replay replaces two launches, what they
allocate, and, if all draws are greedy, a copy to the device.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from specserve_kernels.cuda.graph_inputs import CudaPlan, GraphInputs, Heads
from specserve_kernels.cuda.staging import Staging
from specserve_kernels.cuda.top_children import launch_top_children
from specserve_kernels.ops import EagerProgram, ModelForward, Outputs
from specserve_kernels.types import KVCache, Rows, SampleParams

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows
STAGED_BYTES = 4 << 20  # for a step's inputs, most of which are its block numbers
USUAL_WIDTH = 4  # nodes of a level, and children of a node
MOST_ROWS = 16  # with more, the launches are a small part of what the host does for them
MOST = 64  # recordings of children that are kept

Result = tuple[Tensor, dict[int, Tensor], Tensor]  # residual, taps, logits
Replay = Callable[[], None]
T = TypeVar("T")


class ForwardGraph(NamedTuple):
    """A graph of a forward, and where it leaves its results."""

    replay: Replay
    residual: Tensor
    taps: dict[int, Tensor]
    logits: Tensor


class Capture:
    """Records launches instead of doing them. All graphs share a pool of memory, as one is replayed
    after the other.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Callable[[], T]) -> tuple[T, Replay]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            result = forward()
        return result, graph.replay


class DrawParams:
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


class ChildGraph(NamedTuple):
    draws: DrawParams
    out: Tensor
    replay: Replay


class ChildGraphs:
    """Launches of `launch_top_children` over the logits of recorded forwards, which are at the same
    address in every step.
    """

    def __init__(
        self, device: torch.device, record: Callable[..., tuple[Tensor, Replay]] | None = None
    ) -> None:
        """Without a GPU nothing is recorded unless `record`, as `Capture`, is given."""
        self.device = device
        self.record = record or (Capture() if device.type == "cuda" else None)
        self.addresses: set[int] = set()  # of the logits
        self.recordings: dict[Any, ChildGraph] = {}

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
        draws, out, replay = self.recordings[key]
        draws.write(params)
        replay()
        return out

    def recorded(self, record: Any, logits: Tensor, k: int, tau: float) -> ChildGraph:
        draws = DrawParams(len(logits), self.device)

        def launch() -> Tensor:
            return launch_top_children(logits, draws.params, k, tau)

        launch()  # compiles kernels
        return ChildGraph(draws, *record(launch))


class GraphProgram:
    """Records a forward at the first step of each of SIZES, and replays it from then on."""

    def __init__(
        self,
        child_graphs: ChildGraphs,
        num_planned: Counter[str],
        model: ModelForward,
        kv: KVCache,
        taps: Collection[int] = (),
        capture: Callable[[Callable[[], Result]], tuple[Result, Replay]] | None = None,
    ) -> None:
        """`num_planned` counts forwards by attention backend."""
        self.child_graphs, self.num_planned = child_graphs, num_planned
        self.model, self.kv, self.taps = model, kv, taps
        self.eager = EagerProgram(model, kv, taps)
        self.staging = Staging(child_graphs.device, STAGED_BYTES)
        self.capture = capture or Capture()
        self.inputs: dict[int, GraphInputs] = {}
        self.recordings: dict[int, ForwardGraph] = {}
        self.residual: Tensor | None = None

    @property
    def words(self) -> str:
        return f"CUDA graphs for up to {SIZES[-1]} rows, else op by op"

    def run(
        self,
        rows: Rows,
        token_ids: Tensor | None,
        read: Tensor,
        also: Sequence[Tensor] = (),
        residual: Tensor | None = None,
    ) -> Outputs:
        R = len(rows.positions)
        is_recorded = rows.adapters is None and residual is None
        size = next((size for size in SIZES if size >= R and is_recorded), None)
        if size is None or token_ids is None or not self.inputs_of(size).fits(rows, also):
            outputs = self.eager.run(rows, token_ids, read, also, residual)
            self.residual = outputs.residual
            return outputs
        self.num_planned["Triton in a graph"] += 1
        plan = self.inputs_of(size).upload(rows, token_ids, read, also)
        if size not in self.recordings:
            self.recordings[size] = self.record(plan)
        recording = self.recordings[size]
        recording.replay()
        self.residual = recording.residual[:R]
        taps = {i: tapped[:R] for i, tapped in recording.taps.items()}
        logits = recording.logits[: len(read)] if len(read) else None
        return Outputs(self.residual, logits, taps, plan.also[2:])

    def logits(self, read: Tensor) -> Tensor:
        assert self.residual is not None, "no step has been run"
        return self.model.logits(self.residual, read.to(self.residual.device))

    def inputs_of(self, size: int) -> GraphInputs:
        if size not in self.inputs:
            heads = Heads(self.model.num_heads, self.kv.layers[0].k.shape[2])
            self.inputs[size] = GraphInputs(self.staging, size, heads, self.model.windows)
        return self.inputs[size]

    def record(self, plan: CudaPlan) -> ForwardGraph:
        """Run the forward once, as that compiles kernels, and record it. That it runs again changes
        nothing: it writes the same KV.
        """
        token_ids, read, *_ = plan.also

        def forward() -> Result:
            entry = self.model.embed(token_ids)
            residual, taps = self.model.forward(entry, self.kv, plan, self.taps)
            return residual, dict(taps), self.model.logits(residual, read)

        forward()
        (residual, taps, logits), replay = self.capture(forward)
        smaller = max((size for size in SIZES if size < len(read)), default=0)
        self.child_graphs.follow(logits, smaller)
        return ForwardGraph(replay, residual, taps, logits)
