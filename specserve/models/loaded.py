"""A model with its weights, as the engine knows it: whose code it is makes no difference."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specserve.memory.arena import KVLayout
from specserve.models.decoder_config import Shape
from specserve.models.weight_forms import WeightForms
from specserve_kernels import KVCache, Ops, Program, Rows


class LoadedModel(Protocol):
    """Token ids or a residual in, logits out; the KV of every row is written on the way.

    The methods that are not described here are those of `Decoder`.
    """

    @property
    def ops(self) -> Ops: ...

    @property
    def config(self) -> Shape: ...

    @property
    def forms(self) -> WeightForms:
        """What of its weights is codes, and how many bytes it has."""
        ...

    @property
    def num_positions(self) -> int:
        """Positions [0, num_positions) may have rows, those of a tree's nodes included."""
        ...

    @property
    def num_heads(self) -> int: ...

    @property
    def windows(self) -> Sequence[int | None]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def on(self, ops: Ops) -> "LoadedModel": ...

    def kv_layouts(self, dtype: torch.dtype | None = None) -> tuple[KVLayout, ...]: ...

    def program(
        self, kv: KVCache, max_rows: int, max_read: int, taps: Collection[int] = ()
    ) -> Program:
        """Its forward, prepared for steps of up to so many rows, and rows that are read."""
        ...

    def plan(self, rows: Rows, kv: KVCache, also: Sequence[Tensor] = ()) -> Any: ...

    def embed(self, token_ids: Tensor) -> Tensor: ...

    def forward(
        self, residual: Tensor, kv: KVCache, plan: Any, taps: Collection[int] = ()
    ) -> tuple[Tensor, Mapping[int, Tensor]]: ...

    def logits(self, residual: Tensor, rows: Tensor) -> Tensor: ...
