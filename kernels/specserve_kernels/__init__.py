"""Functions from tensors to tensors, in builds of equal signatures; `load` picks one."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from specserve_kernels.threads import Threads
from specserve_kernels.types import (
    KVCache,
    KVLayer,
    QKNorm,
    Rotary,
    Rows,
    SampleParams,
)

__all__ = [
    "KVCache",
    "KVLayer",
    "Ops",
    "QKNorm",
    "Rotary",
    "Rows",
    "SampleParams",
    "Threads",
    "load",
]


log = logging.getLogger("specserve")


class Ops(Protocol):
    """What a build must offer. The reference build's docstrings are the contract.

    A packed weight and a plan are the build's own objects: made once, handed back unread.
    """

    def prepack(self, weight: Tensor) -> Any: ...

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None = None) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def plan(self, rows: Rows, kv: KVCache, num_heads: int) -> Any: ...

    def rope_write_kv(
        self, qkv: Tensor, rotary: Rotary, norm: QKNorm | None, kv: KVLayer, plan: Any
    ) -> Tensor: ...

    def attention(
        self, q: Tensor, kv: KVLayer, plan: Any, scale: float, window: int | None = None
    ) -> Tensor: ...

    def move_kv(self, kv: KVCache, source: Tensor, target: Tensor) -> None: ...

    def sample(self, logits: Tensor, rows: Tensor, params: SampleParams) -> Tensor: ...

    def top_children(
        self, logits: Tensor, params: SampleParams, k: int, tau: float
    ) -> tuple[Tensor, Tensor]: ...

    def tune(self, step: Callable[[int], object], threads: int | None) -> tuple[Threads, str]: ...


def load(device: torch.device) -> Ops:
    """The build for a device. Called once, at start-up: no other line asks what device this is."""
    if device.type != "cpu":
        raise ValueError(f"no kernels for device {device.type!r}; there are kernels for 'cpu'")
    from specserve_kernels import cpu, reference

    try:
        cpu.library()
    except cpu.BuildError as e:
        reason = str(e).splitlines()[0]
        log.warning("%s; the reference kernels serve instead, slowly", reason)
        return reference
    return cpu
