"""What a head that drafts from its target's layers offers to whoever runs it."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specserve.memory import KVLayout
from specserve.models.eagle_head import EagleHead
from specserve.models.mtp_head import MtpHead
from specserve_kernels import KVCache, Model, Ops, Program


class DraftHead(Model, Protocol):
    """Features and token ids in, logits out; the KV of every row is written on the way.

    The row at position i has the feature of token i and the id of token i + 1, and its logits are
    of token i + 2. A feature is made of the target's taps by `fuse`, or it is the row that an
    earlier draft step gave: the residual of the program's outputs. A program's run takes features
    as its residual, and token ids beside them.
    """

    @property
    def ops(self) -> Ops: ...

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

    def kv_layouts(self, dtype: torch.dtype | None = None) -> Sequence[KVLayout]: ...

    def program(self, kv: KVCache, max_rows: int, max_read: int) -> Program: ...

    def fuse(self, taps: Tensor) -> Tensor:
        """Features [R, hidden] of the target's taps side by side, [R, n * its hidden], in memory of
        their own.
        """
        ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of tokens as the logits count them, both int64."""
        ...


# mypy checks here that these are such heads.
KINDS: tuple[type[DraftHead], ...] = EagleHead, MtpHead
