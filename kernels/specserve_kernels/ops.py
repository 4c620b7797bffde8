"""The interface of a build: the ops, and programs that run a model's forward."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specserve_kernels.codes import Codes
from specserve_kernels.ranks import Gathering, Ranks
from specserve_kernels.states import DeltaParams, MambaParams, Replays, StateLayer, StateRows
from specserve_kernels.types import (
    NO_WINDOW,
    AdapterRows,
    KVCache,
    KVLayer,
    Logprobs,
    QKNorm,
    Rotary,
    Rows,
    SampleParams,
    StepColumns,
    Threads,
    Window,
    tensor_of,
)


class ModelForward(Protocol):
    """A model's forward, which calls only ops. A recorder's ops pass handles instead of tensors."""

    @property
    def num_heads(self) -> int: ...

    @property
    def windows(self) -> Sequence[Window]:
        """The distinct attention windows of its layers; None is full attention."""
        ...

    def on(self, ops: "Ops") -> "ModelForward": ...

    def embed(self, token_ids: Tensor) -> Tensor: ...

    def plan(self, rows: Rows, kv: KVCache, also: Sequence[Tensor] = ()) -> Any: ...

    def forward(
        self, residual: Tensor, kv: KVCache, plan: Any, aux_layer_ids: Collection[int] = ()
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Run all layers; return the final residual and the auxiliary hidden states.

        If a run has token ids, `plan.also` begins with them, so that the forward can read them.
        """
        ...

    def logits(self, residual: Tensor, rows: Tensor) -> Tensor: ...


class Outputs(NamedTuple):
    """Results of a forward. The program's next run may overwrite the tensors.

    residual           [R, hidden]  after the last layer
    logits             [n, V]       of the rows in `read`; None if `read` is empty
    aux_hidden_states  [R, hidden]  by layer id: the residual before each requested layer
    also               the run's `also` tensors, on the ops' device
    """

    residual: Tensor
    logits: Tensor | None
    aux_hidden_states: Mapping[int, Tensor]
    also: Sequence[Tensor]


class Program(Protocol):
    """Computes the KV, the residual stream and the logits of a step's rows."""

    @property
    def words(self) -> str:
        """A description of how it runs, for the start-up table."""
        ...

    def run(
        self,
        rows: Rows,
        token_ids: Tensor | None,
        read: Tensor,
        also: Sequence[Tensor] = (),
        residual: Tensor | None = None,
    ) -> Outputs:
        """Run one forward, from token ids or from a residual.

        token_ids  [R]          int64            host tensor; with a residual, only models whose
                                                 forward reads token ids use them
        read       [n]          int64            host tensor: the rows whose logits are returned
        also       host tensors that later ops of the step take
        residual   [R, hidden]  the model's dtype  on the ops' device; replaces the embeddings
        """
        ...

    def run_columns(
        self,
        columns: StepColumns,
        adapters: AdapterRows | None,
        states: StateRows | None,
        also: Sequence[Tensor] = (),
    ) -> Outputs:
        """Do the same as `run` for a step from token ids; by default, on tensors of its columns."""
        token_ids, read = tensor_of(columns.token_ids), tensor_of(columns.read)
        return self.run(columns.rows(adapters, states), token_ids, read, also)

    def logits(self, read: Tensor) -> Tensor:
        """Return logits of other rows of the last run, [n, V]; `read` as for `run`."""
        ...

    def forget(self) -> None:
        """Drop recordings that depend on the addresses of weights and KV on a device."""
        ...


class HostMemory(Protocol):
    """Blocks in host memory. `specserve_kernels.host.HostBlocks` defines the methods."""

    memory: Tensor

    def store(self, blocks: Tensor, pairs: Iterable[tuple[int, int]]) -> None: ...

    def load(self, blocks: Tensor, pairs: Iterable[tuple[int, int]]) -> None: ...

    @property
    def is_idle(self) -> bool: ...

    def wait(self) -> None: ...


class Ops(Protocol):
    """The ops of a build. The docstrings of the reference build are the contract.

    Packed weights, routings and plans are opaque: callers only pass them back to the same build.
    Callers may read `plan.also`.
    """

    samples_ahead: bool  # fetching one token takes as long as fetching all tokens of a step
    rounds_rows: bool  # honors `Codes.rounds_rows`
    records_steps: bool  # a program records the first step of each size

    # Callers hold it from a forward's plan until they have read the results: buffers are shared.
    @property
    def lock(self) -> AbstractContextManager[None]: ...

    def place(self, x: Tensor) -> Tensor: ...

    def allocate(self, num_bytes: int) -> Tensor: ...

    def host_blocks(self, num_blocks: int, block_bytes: int) -> HostMemory: ...

    def free_memory(self) -> int: ...

    def release(self, memory: Iterable[Tensor]) -> None: ...

    def renew(self, x: Tensor) -> None: ...

    def offload(self, x: Tensor) -> Tensor | None: ...

    def has_bf16(self) -> bool: ...

    def arithmetic(self) -> str: ...

    def prepack(self, weight: Tensor | Codes, is_gated: bool = False) -> Any: ...

    def quantize(self, weight: Tensor, bits: int) -> Codes: ...

    def embed(self, table: Tensor | Codes, token_ids: Tensor, dtype: torch.dtype) -> Tensor: ...

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor: ...

    def copy(self, x: Tensor) -> Tensor: ...

    def adapter_slots(
        self, num_slots: int, rank: int, N: int, K: int, dtype: torch.dtype
    ) -> Any: ...

    def adapted(self, x: Tensor, adapters: Any, plan: Any) -> Any: ...

    def linear(
        self, x: Tensor, packed: Any, bias: Tensor | None = None, added: Any = None
    ) -> Tensor: ...

    def lm_head(self, x: Tensor, packed: Any) -> Tensor: ...

    def linear_add(
        self,
        x: Tensor,
        packed: Any,
        bias: Tensor | None,
        residual: Tensor,
        factor: float = 1.0,
        added: Any = None,
    ) -> Tensor: ...

    def linear_gated(
        self,
        x: Tensor,
        packed: Any,
        bias: Tensor | None = None,
        gate: str = "silu",
        added: Any = None,
    ) -> Tensor: ...

    def prepack_experts(
        self,
        weights: Iterable[Tensor | Codes],
        is_gated: bool = False,
        bias: Tensor | None = None,
    ) -> Any: ...

    def route(
        self,
        logits: Tensor,
        k: int,
        normalizes: bool,
        is_sigmoid: bool = False,
        correction: Tensor | None = None,
        factor: float | Tensor = 1.0,
    ) -> Any: ...

    def experts(
        self,
        x: Tensor,
        routing: Any,
        gate_up: Any,
        down: Any,
        residual: Tensor | None,
        limit: float | None = None,
        gathering: Gathering | None = None,
        holders: Gathering | None = None,
        gate: str = "silu",
    ) -> Tensor: ...

    def join(self, ranks: Ranks, folder: Path, name: str) -> None: ...

    def all_gather(self, x: Tensor, gathering: Gathering, reader: int | None = None) -> Tensor: ...

    def take_columns(self, x: Tensor, begin: int, end: int) -> Tensor: ...

    def put_columns(self, x: Tensor, begin: int, columns: Tensor) -> Tensor: ...

    def send(self, x: Tensor, ranks: Ranks, other: int) -> Tensor: ...

    def receive(
        self, rows: Tensor, width: int, dtype: torch.dtype, ranks: Ranks, other: int
    ) -> Tensor: ...

    def add_gated(self, x: Tensor, gate: Tensor, residual: Tensor) -> Tensor: ...

    def weigh_rows(self, x: Tensor, logits: Tensor) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def layer_norm(
        self, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
    ) -> Tensor: ...

    def rms_norm_add(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor, begin: int = 0
    ) -> Tensor: ...

    def rms_norm_columns(self, x: Tensor, begin: int, weight: Tensor, eps: float) -> Tensor: ...

    def scale(self, x: Tensor, factor: float) -> Tensor: ...

    def soft_cap(self, x: Tensor, cap: float) -> Tensor: ...

    def activate(
        self, x: Tensor, curve: str, alphas: tuple[float, float] = (0.0, 0.0)
    ) -> Tensor: ...

    def spread_streams(self, x: Tensor, first: Tensor) -> Tensor: ...

    def add_matched(self, x: Tensor, first: Tensor, total: Tensor) -> Tensor: ...

    def mix_streams(self, streams: Tensor, coefficients: Tensor) -> Tensor: ...

    def correct_streams(self, streams: Tensor, x: Tensor, coefficients: Tensor) -> Tensor: ...

    def weigh_columns(self, x: Tensor, begin: int, weight: Tensor) -> Tensor: ...

    def sparse_gated(self, x: Tensor, curve: str, deviations: float) -> Tensor: ...

    def gate_columns(self, x: Tensor, curve: str, other: Tensor, begin: int) -> Tensor: ...

    def plan(
        self,
        rows: Rows,
        kv: KVCache,
        num_heads: int,
        windows: Sequence[Window] = NO_WINDOW,
        also: Sequence[Tensor] = (),
        has_plain_scores: bool = True,
    ) -> Any: ...

    def rope_write_kv(
        self, qkv: Tensor, rotary: Rotary, norm: QKNorm | None, kv: KVLayer | None, plan: Any
    ) -> Tensor: ...

    def attention(
        self,
        q: Tensor,
        kv: KVLayer,
        plan: Any,
        scale: float,
        window: Window = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...

    def gate(self, x: Tensor, gate: Tensor) -> Tensor: ...

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: StateLayer,
        plan: Any,
        form: str,
    ) -> Tensor: ...

    def delta_rule(
        self, qkv: Tensor, x: Tensor, params: DeltaParams, state: StateLayer, plan: Any
    ) -> Tensor: ...

    def selective_state_update(
        self, xbc: Tensor, x: Tensor, params: MambaParams, state: StateLayer, plan: Any
    ) -> Tensor: ...

    def replay(self, states: tuple[StateLayer, ...], replays: Replays) -> None: ...

    def program(
        self,
        model: ModelForward,
        kv: KVCache,
        max_rows: int,
        max_read: int,
        aux_layer_ids: Collection[int] = (),
    ) -> Program: ...

    def move_kv(self, kv: KVCache, source: Tensor, target: Tensor) -> None: ...

    def copy_blocks(self, blocks: Tensor, source: Tensor, target: Tensor) -> None: ...

    def sample(self, logits: Tensor, rows: Tensor, params: SampleParams) -> Tensor: ...

    def logprobs(self, logits: Tensor, rows: Tensor, tokens: Tensor, k: int) -> Logprobs: ...

    def top_children(
        self, logits: Tensor, params: SampleParams, k: int, tau: float
    ) -> tuple[Tensor, Tensor]: ...

    def tune(
        self, step: Callable[[int], Tensor], most: int, threads: int | None, key: str
    ) -> tuple[Threads, str]: ...


class EagerProgram(Program):
    """Calls the forward in every run. It serves builds without recordings, and tests of other
    programs.
    """

    words: str = "op by op"

    def __init__(
        self,
        model: ModelForward,
        kv: KVCache,
        aux_layer_ids: Collection[int] = (),
        words: str = words,
    ) -> None:
        self.model, self.kv, self.aux_layer_ids, self.words = model, kv, aux_layer_ids, words
        self.residual: Tensor | None = None

    def run(
        self,
        rows: Rows,
        token_ids: Tensor | None,
        read: Tensor,
        also: Sequence[Tensor] = (),
        residual: Tensor | None = None,
    ) -> Outputs:
        ids = [] if token_ids is None else [token_ids]
        plan = self.model.plan(rows, self.kv, [*ids, read, *also])
        ids, (read, *also) = plan.also[: len(ids)], plan.also[len(ids) :]
        # The layers modify it in place.
        entry = self.model.embed(*ids) if residual is None else residual.clone()
        self.residual, aux_hidden_states = self.model.forward(
            entry, self.kv, plan, self.aux_layer_ids
        )
        logits = self.model.logits(self.residual, read) if len(read) else None
        return Outputs(self.residual, logits, aux_hidden_states, also)

    def logits(self, read: Tensor) -> Tensor:
        assert self.residual is not None, "No step has run. Call run first."
        return self.model.logits(self.residual, read.to(self.residual.device))

    def forget(self) -> None:
        self.residual = None
