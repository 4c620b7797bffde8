"""The ops on one GPU, with their shared buffers, lock and attention."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from specserve_kernels.codes import Codes, quantize
from specserve_kernels.cuda import (
    adapters,
    coded,
    experts,
    gated,
    move,
    norm,
    paged,
    ranks,
    recurrent,
    rope,
    sample,
    states,
    streams,
    top_children,
)
from specserve_kernels.cuda.attention import FlashInfer, run_parts
from specserve_kernels.cuda.coded import LinearMap, PlainMap
from specserve_kernels.cuda.graph_inputs import CudaPlan, Extras, PlacedRows
from specserve_kernels.cuda.graphs import SIZES, USUAL_WIDTH, ChildGraphs, GraphProgram
from specserve_kernels.cuda.lock import DeviceLock
from specserve_kernels.cuda.masks import sight
from specserve_kernels.cuda.pinned import PinnedBlocks
from specserve_kernels.cuda.staging import Staging
from specserve_kernels.cuda.state_work import StateWork, on_host, replay_work
from specserve_kernels.cuda.states import replay
from specserve_kernels.errors import DeviceError
from specserve_kernels.host import copy_blocks
from specserve_kernels.ops import EagerProgram, ModelForward, Program
from specserve_kernels.ranks import Gathering
from specserve_kernels.reference.ranks import put_columns, take_columns
from specserve_kernels.states import Replays, StateLayer
from specserve_kernels.threads import check_threads
from specserve_kernels.types import (
    NO_WINDOW,
    AdapterSums,
    Chunks,
    Edits,
    FixedThreads,
    KVCache,
    KVLayer,
    Logprobs,
    Masks,
    PackedExperts,
    QKNorm,
    Rotary,
    Routing,
    Rows,
    SampleParams,
    Threads,
    Window,
)

log = logging.getLogger("specserve")


class CudaOps:
    """The ops of one GPU. Each GPU has one object, because it owns device memory.

    A plan's tensors are views of the staging buffer, and FlashInfer's wrappers keep only the last
    plan. The caller therefore holds `lock` from a forward's plan until its results are safe.
    Results are safe on the host, or in tensors that no other forward writes.
    """

    samples_ahead = True
    rounds_rows = False
    records_steps = True
    gate = staticmethod(recurrent.gate)
    causal_conv = staticmethod(states.causal_conv)
    delta_rule = staticmethod(states.delta_rule)
    selective_state_update = staticmethod(states.selective_state_update)
    rms_norm = staticmethod(norm.rms_norm)
    layer_norm = staticmethod(norm.layer_norm)
    activate = staticmethod(gated.activate)
    gate_columns = staticmethod(gated.gate_columns)
    add_matched = staticmethod(streams.add_matched)
    correct_streams = staticmethod(streams.correct_streams)
    mix_streams = staticmethod(streams.mix_streams)
    sparse_gated = staticmethod(streams.sparse_gated)
    spread_streams = staticmethod(streams.spread_streams)
    weigh_columns = staticmethod(streams.weigh_columns)
    route = staticmethod(experts.route)
    rms_norm_add = staticmethod(norm.rms_norm_add)
    rms_norm_columns = staticmethod(norm.rms_norm_columns)
    copy_blocks = staticmethod(copy_blocks)
    join = staticmethod(ranks.join)
    all_gather = staticmethod(ranks.all_gather)
    take_columns = staticmethod(take_columns)
    put_columns = staticmethod(put_columns)
    send = staticmethod(ranks.send)
    receive = staticmethod(ranks.receive)

    def __init__(
        self, device: torch.device, flashinfer: Any | None, attention: str = "auto"
    ) -> None:
        """Without `flashinfer`, Triton computes attention. `attention` as in `load`."""
        self.device, self.choice = device, attention
        self.lock = DeviceLock(device)
        self.staging = Staging(device)
        self.flashinfer = None if flashinfer is None else FlashInfer(device, flashinfer)
        self.child_graphs = ChildGraphs(device)
        self.num_planned: Counter[str] = Counter()  # forwards per attention backend

    def place(self, x: Tensor) -> Tensor:
        return x.to(self.device)

    def allocate(self, num_bytes: int) -> Tensor:
        # FlashInfer multiplies hidden values by 0, so unwritten KV must be finite.
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def host_blocks(self, num_blocks: int, block_bytes: int) -> PinnedBlocks:
        return PinnedBlocks(num_blocks, block_bytes, self.device)

    def free_memory(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached

    def release(self, memory: Iterable[Tensor]) -> None:
        for x in memory:
            x.untyped_storage().resize_(0)
        torch.cuda.empty_cache()

    def renew(self, x: Tensor) -> None:
        """Give released memory a new address; zeroed, as `allocate` does."""
        x.untyped_storage().resize_(x.nbytes)
        x.zero_()

    def offload(self, x: Tensor) -> Tensor | None:
        return x.to("cpu", copy=True)

    def has_bf16(self) -> bool:
        return torch.cuda.get_device_capability(self.device) >= (8, 0)

    def prepack(self, weight: Tensor | Codes, is_gated: bool = False) -> LinearMap:
        if isinstance(weight, Codes):
            return coded.pack(weight, self.device)
        return PlainMap(self.place(weight))

    def quantize(self, weight: Tensor, bits: int) -> Codes:
        return quantize(self.place(weight), bits)

    def adapter_slots(
        self, num_slots: int, rank: int, N: int, K: int, dtype: torch.dtype
    ) -> adapters.CudaMapAdapters:
        return adapters.CudaMapAdapters(num_slots, rank, N, K, dtype, self.device)

    def adapted(
        self, x: Tensor, slots: adapters.CudaMapAdapters, plan: CudaPlan
    ) -> AdapterSums | None:
        return None if plan.adapters is None else adapters.adapted(x, slots, plan.adapters)

    def linear(
        self,
        x: Tensor,
        packed: LinearMap,
        bias: Tensor | None = None,
        added: AdapterSums | None = None,
    ) -> Tensor:
        return adapters.add(packed.linear(x, bias), added)

    def lm_head(self, x: Tensor, packed: LinearMap) -> Tensor:
        return packed.floats(x)

    def linear_add(
        self,
        x: Tensor,
        packed: LinearMap,
        bias: Tensor | None,
        residual: Tensor,
        factor: float = 1.0,
        added: AdapterSums | None = None,
    ) -> Tensor:
        # Add adapter outputs last, so that they do not change the results of rows without one.
        if factor == 1:
            packed.linear_add(x, bias, residual)
        else:
            residual.add_(packed.linear(x, bias), alpha=factor)
        return adapters.add(residual, added, factor)

    def linear_gated(
        self,
        x: Tensor,
        packed: LinearMap,
        bias: Tensor | None = None,
        gate: str = "silu",
        added: AdapterSums | None = None,
    ) -> Tensor:
        return gated.gated(self.linear(x, packed, bias, added), gate)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x.mul_(factor)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return x.copy_(cap * torch.tanh(x.float() / cap))

    def prepack_experts(
        self,
        weights: Iterable[Tensor | Codes],
        is_gated: bool = False,
        bias: Tensor | None = None,
    ) -> PackedExperts:
        return experts.packed((self.prepack(weight, is_gated) for weight in weights), bias)

    def experts(
        self,
        x: Tensor,
        routing: Routing,
        gate_up: PackedExperts,
        down: PackedExperts,
        residual: Tensor | None,
        limit: float | None = None,
        gathering: Gathering | None = None,
        holders: Gathering | None = None,
        gate: str = "silu",
    ) -> Tensor:
        curve = partial(gated.gated, gate=gate)
        if limit is not None:
            curve = partial(gated.gated, gate="clamped", limit=limit)
        return experts.add_experts(x, routing, gate_up, down, residual, curve, gathering, holders)

    def weigh_rows(self, x: Tensor, logits: Tensor) -> Tensor:
        largest = logits.float().amax(dim=1, keepdim=True)
        return (x.float() * largest.sigmoid()).to(x.dtype)

    def add_gated(self, x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        return residual.copy_(residual.float() + gate.float().sigmoid() * x.float())

    def embed(self, table: Tensor | Codes, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        if isinstance(table, Codes):
            return table.take(token_ids).widen(dtype)
        return table.index_select(0, token_ids)

    def copy(self, x: Tensor) -> Tensor:
        return x.clone()

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def plan(
        self,
        rows: Rows,
        kv: KVCache,
        num_heads: int,
        windows: Sequence[Window] = NO_WINDOW,
        also: Sequence[Tensor] = (),
        has_plain_scores: bool = True,
    ) -> CudaPlan:
        """Upload all inputs of the step's kernels in one copy."""
        flashinfer = self.flashinfer_for(kv, windows, has_plain_scores)
        self.num_planned["FlashInfer" if flashinfer else "Triton"] += 1
        if flashinfer:
            return self.plan_flashinfer(flashinfer, rows, kv, num_heads, windows, also)
        kinds = kv.kinds(windows)
        sights = {window: sight(rows, window) for window in windows}
        seen = [sights[kind.window] for kind in kinds]
        dealt = [
            paged.deal(rows, sights[kind.window], num_heads, kind.num_kv_heads) for kind in kinds
        ]
        host = (
            (*map(torch.from_numpy, (w.pieces, w.merges)), *s.tensors())
            for s, w in zip(seen, dealt, strict=True)
        )
        extras = Extras.of(rows, kv)
        shared, placed_also, rest = self.upload(rows, also, chain(extras.tensors, *host))
        work = {
            kind[:2]: (d, paged.Inputs._make((*inputs, shared.indices, shared.indptr)))
            for kind, d, inputs in zip(
                kinds, dealt, batched(rest[len(extras.tensors) :], 5), strict=True
            )
        }
        return CudaPlan(placed_also, shared, [], work, *extras.placed(rest))

    def flashinfer_for(
        self, kv: KVCache, windows: Sequence[Window], has_plain_scores: bool
    ) -> FlashInfer | None:
        """Return FlashInfer with built kernels if it supports this model; None: use Triton.

        A failed build turns FlashInfer off. Its other errors are raised in the step, because a
        fallback would hide them.
        """
        try:
            if (
                self.flashinfer is not None
                and self.flashinfer.fits(kv, windows)
                and has_plain_scores
            ):
                self.flashinfer.build(kv, windows)
                return self.flashinfer
            if self.choice == "flashinfer":
                k = kv.layers[0].k
                scores = "" if has_plain_scores else " with capped scores or sinks"
                scores += " in chunks" if any(isinstance(w, Chunks) for w in windows) else ""
                raise DeviceError(
                    f"FlashInfer has no kernels for {k.dtype} heads of size {k.shape[-1]}{scores}. "
                    "Use attention 'auto'."
                )
        except DeviceError as e:
            if self.choice == "flashinfer":
                raise
            log.warning("%s Using the slower Triton attention instead.", e)
            self.flashinfer = None
        return None

    def plan_flashinfer(
        self,
        flashinfer: FlashInfer,
        rows: Rows,
        kv: KVCache,
        num_heads: int,
        windows: Sequence[Window],
        also: Sequence[Tensor],
    ) -> CudaPlan:
        masks = flashinfer.masks(rows, kv, windows)
        extras = Extras.of(rows, kv)
        shared, placed_also, rest = self.upload(rows, also, chain(extras.tensors, *masks.values()))
        on_device = dict(zip(masks, batched(rest[len(extras.tensors) :], 2), strict=True))
        parts = flashinfer.plan(rows, shared.indices, kv, num_heads, windows, on_device)
        return CudaPlan(placed_also, shared, parts, {}, *extras.placed(rest))

    def upload(
        self, rows: Rows, also: Sequence[Tensor], others: Iterable[Tensor]
    ) -> tuple[PlacedRows, list[Tensor], list[Tensor]]:
        shared = (rows.positions, rows.slots, rows.indices, rows.indptr)
        placed = iter(self.staging.upload([*shared, *also, *others]))
        return PlacedRows(*islice(placed, 4)), list(islice(placed, len(also))), list(placed)

    def program(
        self,
        model: ModelForward,
        kv: KVCache,
        max_rows: int,
        max_read: int,
        aux_layer_ids: Collection[int] = (),
    ) -> Program:
        """Return a program that records CUDA graphs, unless every step must use FlashInfer."""
        if self.choice == "flashinfer" or self.device.type != "cuda":
            return EagerProgram(model, kv, aux_layer_ids)
        return GraphProgram(self.child_graphs, self.num_planned, model, kv, aux_layer_ids)

    def rope_write_kv(
        self, qkv: Tensor, rotary: Rotary, norm: QKNorm | None, kv: KVLayer | None, plan: CudaPlan
    ) -> Tensor:
        return rope.rope_write_kv(qkv, rotary, norm, kv, plan.shared.positions, plan.shared.slots)

    def attention(
        self,
        q: Tensor,
        kv: KVLayer,
        plan: CudaPlan,
        scale: float,
        window: Window = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if plan.work:
            scores = paged.Scores(scale, soft_cap, sinks)
            return paged.attention(q, kv, scores, *plan.work[window, kv.k.shape[2]]).flatten(1)
        assert soft_cap is None and sinks is None, "the plan supports only plain scores"
        return run_parts(q, kv, plan.parts, scale, window).flatten(1)

    def replay(self, states: tuple[StateLayer, ...], replays: Replays) -> None:
        work, runs = replay_work(replays)
        replay(states, StateWork(*self.staging.upload(on_host(work))), runs)

    def move_kv(self, kv: KVCache, source: Tensor, target: Tensor) -> None:
        move.move_kv(kv, *self.staging.upload([source, target]))

    def sample(self, logits: Tensor, rows: Tensor, params: SampleParams) -> Tensor:
        if rows.device != logits.device:
            rows, *asked = self.staging.upload([rows, *params.tensors()])
            params = params.with_tensors(asked)
        return sample.sample(logits, rows, params)

    def logprobs(self, logits: Tensor, rows: Tensor, tokens: Tensor, k: int) -> Logprobs:
        if rows.device != logits.device:
            rows, tokens = self.staging.upload([rows, tokens])
        return top_children.logprobs(logits, rows, tokens, k)

    def top_children(
        self, logits: Tensor, params: SampleParams, k: int, tau: float
    ) -> tuple[Tensor, Tensor]:
        packed = self.child_graphs.launch(logits, params, k, tau)
        if packed is not None:
            return top_children.unpacked(packed)
        placed = SampleParams.of(self.staging.upload(params.columns))
        return top_children.top_children(logits, placed, k, tau)

    def arithmetic(self) -> str:
        return f"cuda {torch.cuda.get_device_name(self.device)}"

    def tune(
        self, step: Callable[[int], Tensor], most: int, threads: int | None, key: str
    ) -> tuple[Threads, str]:
        """Run one step of `most` rows and one of each recorded size, then sample.

        The steps compile kernels, test the memory, and record graphs. The largest graph is recorded
        first, because the others reuse its memory.
        """
        count = torch.get_num_threads() if threads is None else check_threads(threads)
        before = self.num_planned.copy()
        with self.lock:
            for rows in (most, *(size for size in reversed(SIZES) if size < most)):
                logits = step(rows)
            one = SampleParams.greedy(1)
            first = torch.zeros(1, dtype=torch.int64)
            for params in (one, *changing(one, logits.shape[1])):
                self.sample(logits, first, params).tolist()
            for k in (1, min(20, logits.shape[1])):
                self.logprobs(logits, first, first, k)
            self.top_children(logits, one, min(USUAL_WIDTH, logits.shape[1]), 1.0)
        name = torch.cuda.get_device_name(self.device)
        attends = " and ".join(self.num_planned - before)
        return FixedThreads(count), f"{name}, attention by {attends}, {count} CPU threads"


def changing(plain: SampleParams, V: int) -> list[SampleParams]:
    """Return one row's parameters with a no-op edit, with a mask of all ids, and with both."""
    ranges = torch.tensor([[0, 1]], dtype=torch.int32)
    id, off, on = torch.zeros(1, dtype=torch.int32), torch.zeros(1), torch.ones(1)
    edits = Edits(ranges, ranges, id, off, on, off)
    masks = Masks(id + 1, torch.full((1, -(-V // 32)), -1, dtype=torch.int32))
    return [
        plain._replace(edits=some, masks=others)
        for some, others in ((edits, None), (None, masks), (edits, masks))
    ]


def batched(tensors: list[Tensor], n: int) -> Iterator[Any]:
    return zip(*(tensors[i::n] for i in range(n)), strict=True)
