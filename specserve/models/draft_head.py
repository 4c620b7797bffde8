"""What a head that drafts from its target's layers offers to whoever runs it."""

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from specserve.models.decoder import Decoder, LoadedModel
from specserve_kernels import KVCache, Program


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
        self.body, self.config, self.ops, self.dtype = body, body.config, body.ops, body.dtype
        self.forms, self.num_heads, self.windows = body.forms, body.num_heads, body.windows
        self.num_positions, self.kv_layouts = body.num_positions, body.kv_layouts
        self.embed, self.plan = body.embed, body.plan  # `also` begins with the token ids

    def program(
        self: DraftHead, kv: KVCache, max_rows: int, max_read: int, taps: Collection[int] = ()
    ) -> Program:
        return self.ops.program(self, kv, max_rows, max_read, taps)
