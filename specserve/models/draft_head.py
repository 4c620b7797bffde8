"""What a head that drafts from its target's layers offers to whoever runs it."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specserve.memory.arena import KVLayout
from specserve.models.decoder import Decoder, LoadedModel
from specserve.models.decoder_config import DecoderConfig
from specserve.models.weight_forms import WeightForms
from specserve_kernels import KVCache, Ops, Rows


@runtime_checkable
class DraftHead(LoadedModel, Protocol):
    """Features and token ids in, logits out; the KV of every row is written on the way.

    The row at position i has the feature of token i and the id of token i + 1, and its logits are
    of token i + 2. A feature is made of the target's taps by `fuse`, or it is the row that an
    earlier draft step gave: the residual of the program's outputs. A program's run takes features
    as its residual, and token ids beside them.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers of which it reads the residual that comes in, ascending; their number
        stands for the residual after the last one.
        """
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Of the logits."""
        ...

    @property
    def num_layer_weights(self) -> int:
        """Weights in the linear maps, but for the head, that a row is multiplied by, as of
        `DecoderConfig`; those of `fuse` are among them.
        """
        ...

    def fuse(self, taps: Tensor) -> Tensor:
        """Features [R, hidden] of the target's taps side by side, [R, n * its hidden], in memory of
        their own.
        """
        ...

    def write(self, features: Tensor, kv: KVCache, plan: Any) -> None:
        """As `forward`, for rows of which nobody reads more than the KV: in the last layer there is
        nothing to be done but write it.
        """
        ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of tokens as the logits count them, both int64."""
        ...


class OverDecoder:
    """The part of a head that is that of the decoder of its layers, `body`."""

    def __init__(self, body: Decoder) -> None:
        self.body = body

    @property
    def config(self) -> DecoderConfig:
        return self.body.config

    @property
    def ops(self) -> Ops:
        return self.body.ops

    @property
    def dtype(self) -> torch.dtype:
        return self.body.dtype

    @property
    def forms(self) -> WeightForms:
        return self.body.forms

    @property
    def num_heads(self) -> int:
        return self.body.num_heads

    @property
    def num_positions(self) -> int:
        return self.body.num_positions

    @property
    def windows(self) -> Sequence[int | None]:
        return self.body.windows

    def kv_layouts(self, dtype: torch.dtype | None = None) -> tuple[KVLayout, ...]:
        return self.body.kv_layouts(dtype)

    def plan(self, rows: Rows, kv: KVCache, also: Sequence[Tensor] = ()) -> Any:
        """`also` begins with the token ids."""
        return self.body.plan(rows, kv, also)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.body.embed(token_ids)
