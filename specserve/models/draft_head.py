"""What a head that drafts from its target's layers offers to whoever runs it."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from specserve.models.loaded import LoadedModel


@runtime_checkable
class DraftHead(LoadedModel, Protocol):
    """Features and token ids in, logits out; the KV of every row is written on the way."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def draft_vocab_size(self) -> int: ...

    def fuse(self, taps: Tensor) -> Tensor: ...

    def target_ids(self, draft_ids: Tensor) -> Tensor: ...
