"""Forwards recorded as CUDA graphs: a step of few rows is one launch in place of some hundred.

A graph is recorded for some numbers of rows, and takes steps of up to so many: unused rows are
written nowhere, and nobody reads what comes of them. Steps of more rows, those that have rows with
adapters, and those that begin with a residual run op by op.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from specserve_kernels.cuda.graph_inputs import GraphInputs, Heads
from specserve_kernels.cuda.plan import Plan
from specserve_kernels.cuda.staging import Staging
from specserve_kernels.program import EagerProgram, Model, Outputs
from specserve_kernels.types import KVCache, Rows

if TYPE_CHECKING:
    from specserve_kernels.cuda.ops import CudaOps

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows
STAGED_BYTES = 4 << 20  # for a step's inputs, most of which are its block numbers

Result = tuple[Tensor, dict[int, Tensor], Tensor]  # residual, taps, logits
Replay = Callable[[], None]
T = TypeVar("T")


class Recording(NamedTuple):
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


class GraphProgram:
    """Records a forward at the first step of each of SIZES, and replays it from then on."""

    def __init__(
        self,
        ops: "CudaOps",
        model: Model,
        kv: KVCache,
        taps: Collection[int] = (),
        capture: Callable[[Callable[[], Result]], tuple[Result, Replay]] | None = None,
    ) -> None:
        self.ops, self.model, self.kv, self.taps = ops, model, kv, taps
        self.eager = EagerProgram(model, kv, taps)
        self.staging = Staging(ops.device, STAGED_BYTES)
        self.capture = capture or Capture()
        self.inputs: dict[int, GraphInputs] = {}
        self.recordings: dict[int, Recording] = {}
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
        self.ops.num_planned["Triton in a graph"] += 1
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

    def record(self, plan: Plan) -> Recording:
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
        self.ops.child_graphs.follow(logits, smaller)
        return Recording(replay, residual, taps, logits)
