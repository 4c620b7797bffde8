"""Functions from tensors to tensors, in builds of equal signatures; `load` picks one."""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from specserve_kernels.codes import Codes
from specserve_kernels.errors import DeviceError, is_out_of_memory
from specserve_kernels.program import Model, Outputs, Program
from specserve_kernels.threads import Threads, limit_threads
from specserve_kernels.types import (
    NO_TOKEN,
    NO_WINDOW,
    NOT_FINITE,
    AdapterRows,
    Edits,
    KVCache,
    KVLayer,
    Logprobs,
    Masks,
    QKNorm,
    Rotary,
    Rows,
    SampleParams,
)

__all__ = [
    "NOT_FINITE",
    "NO_TOKEN",
    "NO_WINDOW",
    "AdapterRows",
    "Codes",
    "DeviceError",
    "Edits",
    "KVCache",
    "KVLayer",
    "Logprobs",
    "Masks",
    "Model",
    "Ops",
    "Outputs",
    "Program",
    "QKNorm",
    "Rotary",
    "Rows",
    "SampleParams",
    "Threads",
    "is_out_of_memory",
    "load",
]


log = logging.getLogger("specserve")


class Ops(Protocol):
    """What a build must offer. The reference build's docstrings are the contract.

    A packed weight, a routing and a plan are a build's own objects: callers only hand them back,
    and read nothing of them but `plan.also`.
    """

    samples_ahead: bool  # fetching one token takes as long as fetching all of a step's
    rounds_rows: bool  # codes that ask for it are multiplied by rounded rows
    records_steps: bool  # a program records a step when it first sees its size

    # Held from a forward's plan until its results are read, as a device's buffers are shared.
    @property
    def lock(self) -> AbstractContextManager[None]: ...

    def place(self, x: Tensor) -> Tensor: ...

    def allocate(self, num_bytes: int) -> Tensor: ...

    def free_memory(self) -> int: ...

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

    def route(self, logits: Tensor, k: int, normalizes: bool) -> Any: ...

    def experts(
        self,
        x: Tensor,
        routing: Any,
        gate_up: Any,
        down: Any,
        residual: Tensor,
        limit: float | None = None,
    ) -> Tensor: ...

    def add_gated(self, x: Tensor, gate: Tensor, residual: Tensor) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def rms_norm_add(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor: ...

    def rms_norm_columns(self, x: Tensor, begin: int, weight: Tensor, eps: float) -> Tensor: ...

    def scale(self, x: Tensor, factor: float) -> Tensor: ...

    def soft_cap(self, x: Tensor, cap: float) -> Tensor: ...

    def plan(
        self,
        rows: Rows,
        kv: KVCache,
        num_heads: int,
        windows: Sequence[int | None] = NO_WINDOW,
        also: Sequence[Tensor] = (),
        has_plain_scores: bool = True,
    ) -> Any: ...

    def rope_write_kv(
        self, qkv: Tensor, rotary: Rotary, norm: QKNorm | None, kv: KVLayer, plan: Any
    ) -> Tensor: ...

    def attention(
        self,
        q: Tensor,
        kv: KVLayer,
        plan: Any,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...

    def program(
        self,
        model: Model,
        kv: KVCache,
        max_rows: int,
        max_read: int,
        taps: Collection[int] = (),
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


def load(device: str | torch.device = "auto", attention: str = "auto") -> Ops:
    """The build for a device, DeviceError if it cannot be used; auto: a GPU where there is one.

    attention  on a GPU: `flashinfer` or `triton`, without a fallback; auto: FlashInfer where it is
               installed and has kernels for the model, else Triton

    Called once, at start-up: no code above the ops depends on the device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        from specserve_kernels.cuda import build

        return build(device, attention)
    if device.type != "cpu":
        raise DeviceError(f"there are no kernels for {device.type!r}: take 'cpu' or 'cuda'")
    if attention != "auto":
        raise DeviceError(f"there is no choice of attention on a CPU: {attention!r} is for a GPU")
    from specserve_kernels import cpu, reference

    limit_threads()
    try:
        cpu.library()
    except cpu.BuildError as e:
        reason = str(e).splitlines()[0]
        log.warning("%s; the reference kernels serve instead, slowly", reason)
        return reference
    return cpu
