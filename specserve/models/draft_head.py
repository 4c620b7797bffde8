"""The interface of draft heads, which draft from hidden states of the target model."""

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from specserve.models.decoder import Decoder, LoadedModel
from specserve_kernels import KVCache, Program


@runtime_checkable
class DraftHead(LoadedModel, Protocol):
    """Maps features and token ids to logits, and writes the KV of every row.

    The row at position i has the feature of token i and the id of token i + 1, and its logits
    predict token i + 2. A feature comes from `fuse`, which reads auxiliary hidden states of the
    target model, or it is the residual output of an earlier draft step. A program's run takes
    features as its residual, and token ids next to them.
    """

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The auxiliary layers, ascending: layers of the target model whose inputs the head reads.
        The number of layers stands for the output of the last one.
        """
        ...

    @property
    def draft_vocab_size(self) -> int:
        """The width of the logits."""
        ...

    @property
    def num_layer_weights(self) -> int:
        """Number of weights in the linear maps that multiply a row, including the map of `fuse`
        but without the LM head.
        """
        ...

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """Features [R, hidden], in new memory, from concatenated auxiliary hidden states of the
        target model: [R, n * target hidden].
        """
        ...

    def write(self, features: Tensor, kv: KVCache, plan: Any) -> None:
        """Write only the KV of rows: the same as `forward` without the rest of the last layer."""
        ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Convert token ids of the draft vocabulary to the target model's token ids, both int64."""
        ...


class OverDecoder:
    """The methods of a draft head that its decoder `body` implements."""

    def __init__(self, body: Decoder) -> None:
        self.body, self.config, self.ops, self.dtype = body, body.config, body.ops, body.dtype
        self.forms, self.num_heads, self.windows = body.forms, body.num_heads, body.windows
        self.num_positions = body.num_positions
        self.kv_layouts, self.state_layouts = body.kv_layouts, body.state_layouts
        self.embed, self.plan = body.embed, body.plan  # the first tensor of `also`: token ids

    def program(
        self: DraftHead,
        kv: KVCache,
        max_rows: int,
        max_read: int,
        aux_layer_ids: Collection[int] = (),
    ) -> Program:
        return self.ops.program(self, kv, max_rows, max_read, aux_layer_ids)
