"""Forwards recorded as CUDA graphs: a step of few rows is one launch in place of some hundred.

Each graph has a fixed number of rows, and runs steps of up to as many. Unused rows write no KV, and
their results are not read. Steps of more rows run op by op.

The draft children of a tree level are recorded, too. A replay replaces two launches, their
allocations, and, if all draws are greedy, a copy to the device.
"""

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from specserve_kernels.cuda.graph_inputs import CudaPlan, GraphInputs
from specserve_kernels.cuda.staging import Staging
from specserve_kernels.cuda.top_children import launch_top_children
from specserve_kernels.ops import EagerProgram, ModelForward, Outputs, Program
from specserve_kernels.types import KVCache, Rows, SampleParams

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows of each graph
STAGED_BYTES = 4 << 20  # bytes for a step's inputs, mostly block numbers
USUAL_WIDTH = 4  # nodes per tree level, and children per node
MOST_ROWS = 16  # maximum recorded rows; for more rows, launches are a small part of the host's work
MOST = 64  # maximum recordings of children

Result = tuple[Tensor, dict[int, Tensor], Tensor]  # residual, aux hidden states, logits
Replay = Callable[[], None]
T = TypeVar("T")


class GraphKind(NamedTuple):
    """Steps that one graph can run: up to `size` rows, and `num_slots` adapter slots or 0."""

    size: int
    num_slots: int
    has_residual: bool


class ForwardGraph(NamedTuple):
    """A graph of a forward, and the tensors of its inputs and results.

    entry  [size, hidden]  the residual before the first layer; None: the embedding of token ids
    """

    replay: Replay
    entry: Tensor | None
    residual: Tensor
    aux_hidden_states: dict[int, Tensor]
    logits: Tensor


class Capture:
    """Records launches instead of running them. Graphs share one memory pool, because they are
    replayed one after the other.
    """

    def __init__(self) -> None:
        self.graphs = WeakSet[Any]()

    def __call__(self, forward: Callable[[], T]) -> tuple[T, Replay]:
        if not self.graphs:  # a pool ends with its last graph
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self.graphs.add(graph)
        recording = torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local")
        with without_collection(), recording:
            result = forward()
        return result, graph.replay


@contextmanager
def without_collection() -> Iterator[None]:
    """Without cyclic garbage collection, which may free another engine's graphs: CUDA ends a
    capture with an error if its thread does what is not allowed meanwhile.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DrawParams:
    """Sampling parameters of R rows at a fixed device address; greedy at first."""

    @torch.inference_mode(False)  # inference tensors are writable only in that mode
    def __init__(self, R: int, device: torch.device) -> None:
        self.host = torch.zeros(3, R, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.device = torch.zeros(3, R, dtype=torch.int64, device=device)
        seeds, index, rest = self.device
        self.last = self.greedy = SampleParams.greedy(R)
        self.params = self.greedy._replace(
            temperature=rest.view(torch.float32)[:R], seeds=seeds, token_index=index
        )

    def write(self, params: SampleParams) -> None:
        """Copy new parameters. The last launch has read the previous ones, because callers wait for
        it.
        """
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
    """Recorded launches of `launch_top_children`, over the logits of recorded forwards: their
    address is fixed.
    """

    def __init__(
        self, device: torch.device, record: Callable[..., tuple[Tensor, Replay]] | None = None
    ) -> None:
        """Without a GPU, launches are recorded only if `record` (like `Capture`) is given."""
        self.device = device
        self.record = record or (Capture() if device.type == "cuda" else None)
        self.addresses: set[int] = set()  # of logits
        self.recordings: dict[Any, ChildGraph] = {}

    def follow(self, logits: Tensor, smaller: int) -> None:
        """Register the logits of a recorded forward, and record the usual launches over them.

        Usual launches have up to USUAL_WIDTH rows and children. Others are recorded at first use.

        smaller  rows of the next smaller graph, which runs steps of up to as many rows
        """
        if self.record is None:
            return
        self.addresses.add(logits.data_ptr())
        if len(logits) <= USUAL_WIDTH:
            k = min(USUAL_WIDTH, logits.shape[1])
            for n in range(smaller + 1, len(logits) + 1):
                self.launch(logits[:n], SampleParams.greedy(n), k, 1.0)

    def unfollow(self, logits: Tensor) -> None:
        """Drop the recordings over these logits."""
        self.addresses.discard(logits.data_ptr())
        for key in [key for key in self.recordings if key[0] == logits.data_ptr()]:
            del self.recordings[key]

    def launch(self, logits: Tensor, params: SampleParams, k: int, tau: float) -> Tensor | None:
        """Same as `launch_top_children`, with params on the host; None if it is not recordable.

        The caller waits for the result before the next call, which may overwrite it.
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


class GraphProgram(Program):
    """Records a forward at the first step of each size in SIZES, then replays it."""

    def __init__(
        self,
        child_graphs: ChildGraphs,
        num_planned: Counter[str],
        model: ModelForward,
        kv: KVCache,
        aux_layer_ids: Collection[int] = (),
        capture: Callable[[Callable[[], Result]], tuple[Result, Replay]] | None = None,
    ) -> None:
        """`num_planned` counts forwards per attention backend."""
        self.child_graphs, self.num_planned = child_graphs, num_planned
        self.model, self.kv, self.aux_layer_ids = model, kv, aux_layer_ids
        self.eager = EagerProgram(model, kv, aux_layer_ids)
        self.staging = Staging(child_graphs.device, STAGED_BYTES)
        self.capture = capture or Capture()
        self.inputs: dict[tuple[int, int], GraphInputs] = {}  # by size and number of slots
        self.recordings: dict[GraphKind, ForwardGraph] = {}
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
        size = next((size for size in SIZES if size >= R), None)
        num_slots = 0 if rows.adapters is None else len(rows.adapters.begins) - 1
        if (
            size is None
            or token_ids is None
            or not self.inputs_of(size, num_slots).fits(rows, also)
        ):
            outputs = self.eager.run(rows, token_ids, read, also, residual)
            self.residual = outputs.residual
            return outputs
        self.num_planned["Triton in a graph"] += 1
        inputs = self.inputs_of(size, num_slots)
        kind = GraphKind(size, num_slots, residual is not None)
        if kind not in self.recordings:
            # A forward that is run twice must not advance states twice.
            plan = inputs.upload(rows._replace(states=None), token_ids, read, also)
            self.recordings[kind] = self.record(plan, residual)
        plan = inputs.upload(rows, token_ids, read, also)
        recording = self.recordings[kind]
        if recording.entry is not None and residual is not None:
            recording.entry[:R].copy_(residual)
        recording.replay()
        self.residual = recording.residual[:R]
        aux_hidden_states = {i: aux[:R] for i, aux in recording.aux_hidden_states.items()}
        logits = recording.logits[: len(read)] if len(read) else None
        return Outputs(self.residual, logits, aux_hidden_states, plan.also[2:])

    def logits(self, read: Tensor) -> Tensor:
        assert self.residual is not None, "No step has run. Call run first."
        return self.model.logits(self.residual, read.to(self.residual.device))

    def forget(self) -> None:
        for recording in self.recordings.values():
            self.child_graphs.unfollow(recording.logits)
        self.recordings.clear()
        self.residual = self.eager.residual = None

    def inputs_of(self, size: int, num_slots: int) -> GraphInputs:
        if (size, num_slots) not in self.inputs:
            kinds = self.kv.kinds(self.model.windows)
            self.inputs[size, num_slots] = GraphInputs(
                self.staging, size, self.model.num_heads, kinds, num_slots, bool(self.kv.states)
            )
        return self.inputs[size, num_slots]

    def record(self, plan: CudaPlan, residual: Tensor | None) -> ForwardGraph:
        """Run the forward once to compile kernels, then record it. The replay writes the same KV
        again.
        """
        token_ids, read, *_ = plan.also
        entry = None if residual is None else residual.new_zeros(len(token_ids), residual.shape[1])

        def forward() -> Result:
            # The layers modify it in place.
            first = self.model.embed(token_ids) if entry is None else entry.clone()
            last, aux_hidden_states = self.model.forward(first, self.kv, plan, self.aux_layer_ids)
            return last, dict(aux_hidden_states), self.model.logits(last, read)

        forward()
        (last, aux_hidden_states, logits), replay = self.capture(forward)
        smaller = max((size for size in SIZES if size < len(read)), default=0)
        self.child_graphs.follow(logits, smaller)
        return ForwardGraph(replay, entry, last, aux_hidden_states, logits)
