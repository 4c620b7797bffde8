"""A layer for multi-token prediction that came with the target (DeepSeek-AI 2412.19437, section
2.2): guesses tokens from the target's last residual, and from its own last rows where the target
has none yet.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor

from specserve.models.decoder import Decoder
from specserve.models.draft_head import OverDecoder
from specserve_kernels import KVCache, Ops, Program


class MtpWeights(NamedTuple):
    """What there is beside a decoder's weights; linear maps are packed, norms are float32.

    target_norm     [hidden]  of what the target hands over; None: it is not normalized
    embedding_norm  [hidden]
    feature_norm    [hidden]
    embedding_map   [hidden, hidden]  the embedding's part of the map that joins it with the feature
    feature_map     [hidden, hidden]
    """

    target_norm: Tensor | None
    embedding_norm: Tensor
    feature_norm: Tensor
    embedding_map: Any
    feature_map: Any


class MtpHead(OverDecoder):
    """A `DraftHead` of one decoder layer, `body`, whose vocabulary is the target's.

    The layer's input is made of embedding and feature side by side, by one map in the checkpoint:
    here it is two maps, whose results are added. What the layer gives is normalized for the head
    and for the next draft step alike, as the target's residual is for the first one.
    """

    def __init__(self, body: Decoder, weights: MtpWeights, taps: tuple[int, ...]) -> None:
        super().__init__(body)
        self.weights, self.taps = weights, taps

    def on(self, ops: Ops) -> "MtpHead":
        return MtpHead(self.body.on(ops), self.weights, self.taps)

    @property
    def draft_vocab_size(self) -> int:
        return self.body.config.vocab_size

    @property
    def num_layer_weights(self) -> int:
        config = self.body.config
        return config.num_layer_weights + 2 * config.hidden_size**2

    def program(
        self, kv: KVCache, max_rows: int, max_read: int, taps: Collection[int] = ()
    ) -> Program:
        return self.ops.program(self, kv, max_rows, max_read, taps)

    def fuse(self, taps: Tensor) -> Tensor:
        norm = self.weights.target_norm
        return self.ops.copy(taps) if norm is None else self.body.norm(taps, norm)

    def forward(
        self, features: Tensor, kv: KVCache, plan: Any, taps: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """What the next draft step takes as features, and no taps.

        features  [R, hidden]
        ->        [R, hidden]  what `logits` takes
        """
        assert not taps, "a head's layer cannot be tapped"
        body, [layer] = self.body, self.body.weights.layers
        residual = body.layer(layer, self.joined(features, plan), kv.layers[0], plan)
        return body.norm(residual, body.weights.norm), {}

    def write(self, features: Tensor, kv: KVCache, plan: Any) -> None:
        body, [layer] = self.body, self.body.weights.layers
        read = body.norm(self.joined(features, plan), layer.attention_norm)
        body.write(layer, read, kv.layers[0], plan, None)

    def joined(self, features: Tensor, plan: Any) -> Tensor:
        """The layer's input, [R, hidden]."""
        ops, body, weights = self.ops, self.body, self.weights
        embedding = body.norm(body.embed(plan.also[0]), weights.embedding_norm)
        found = ops.linear(embedding, weights.embedding_map)
        feature = body.norm(features, weights.feature_norm)
        return ops.linear_add(feature, weights.feature_map, None, found)

    def logits(self, residual: Tensor, rows: Tensor) -> Tensor:
        """The logits [n, V] after some rows of what `forward` gave, [n] int64, ascending."""
        ops, config = self.ops, self.body.config
        hidden = ops.take_rows(residual, rows)
        if config.logit_scale != 1:
            hidden = ops.scale(hidden, config.logit_scale)
        logits = ops.lm_head(hidden, self.body.weights.head)
        return logits if config.logit_cap is None else ops.soft_cap(logits, config.logit_cap)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids
