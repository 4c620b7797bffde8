"""An EAGLE-3 head (Li et al. 2503.01840): guesses tokens from what the target's layers had of the
token before, and from its own last rows where the target has none yet.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from specserve.models.decoder import Decoder, Layer
from specserve.models.draft_head import OverDecoder
from specserve.models.eagle_config import EagleConfig
from specserve_kernels import KVCache, KVLayer, Ops, Program


class EagleWeights(NamedTuple):
    """What a head has beside a decoder's weights; linear maps are packed, norms are float32.

    fuse            [hidden, width of the taps]
    taps_norm       [width of the taps]   None: they are not normalized together
    tap_norms       [target's hidden] each; none: they are not normalized one by one
    feature_norm    [hidden]              before the first layer; None: its own norm is as others'
    embedding_norm  [hidden]
    embedding_qkv   [(H + 2 Hk) D, hidden]  the embedding's part of the first layer's map
    targets         [draft V] int64       the target's id of each token that the head knows
    """

    fuse: Any
    taps_norm: Tensor | None
    tap_norms: Sequence[Tensor]
    feature_norm: Tensor | None
    embedding_norm: Tensor
    embedding_qkv: Any
    targets: Tensor


class EagleHead(OverDecoder):
    """A `DraftHead` whose logits are of a vocabulary of its own.

    `body` is a decoder of the head's layers. The first layer's map to queries, keys and values
    takes embedding and feature side by side: here it is two maps, whose results are added.
    """

    def __init__(self, settings: EagleConfig, body: Decoder, weights: EagleWeights) -> None:
        super().__init__(body)
        self.settings, self.weights = settings, weights

    def on(self, ops: Ops) -> "EagleHead":
        return EagleHead(self.settings, self.body.on(ops), self.weights)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.settings.taps

    @property
    def draft_vocab_size(self) -> int:
        return self.settings.draft_vocab_size

    @property
    def num_layer_weights(self) -> int:
        config = self.config
        qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        return config.num_layer_weights + config.hidden_size * (qkv + self.settings.width)

    def program(
        self, kv: KVCache, max_rows: int, max_read: int, taps: Collection[int] = ()
    ) -> Program:
        return self.ops.program(self, kv, max_rows, max_read, taps)

    def fuse(self, taps: Tensor) -> Tensor:
        ops, weights, eps = self.ops, self.weights, self.settings.layers.norm_eps
        if weights.taps_norm is not None:
            taps = ops.rms_norm(taps, weights.taps_norm, eps)
        if weights.tap_norms:
            taps = ops.copy(taps)
        for i, norm in enumerate(weights.tap_norms):
            taps = ops.rms_norm_columns(taps, i * len(norm), norm, eps)
        return ops.linear(taps, weights.fuse)

    def forward(
        self, features: Tensor, kv: KVCache, plan: Any, taps: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """What the next draft step takes as features, and no taps.

        features  [R, hidden]  they are written to
        ->        [R, hidden]  what `logits` takes
        """
        assert not taps, "a head's layers cannot be tapped"
        body, layers = self.body, zip(self.body.weights.layers, kv.layers, strict=True)
        residual, _ = self.through([*layers], features, plan)
        if self.settings.norm_output:
            residual = body.norm(residual, body.weights.norm)
        return residual, {}

    def write(self, features: Tensor, kv: KVCache, plan: Any) -> None:
        body = self.body
        *layers, (last, cache) = zip(body.weights.layers, kv.layers, strict=True)
        residual, qkv = self.through(layers, features, plan)
        body.write(last, body.norm(residual, last.attention_norm), cache, plan, qkv)

    def through(
        self, layers: Sequence[tuple[Layer, KVLayer]], features: Tensor, plan: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The residual after the first layers, and what the next one's queries, keys and values are
        added to.
        """
        body, weights = self.body, self.weights
        embedding = body.norm(body.embed(plan.also[0]), weights.embedding_norm)
        qkv: Tensor | None = self.ops.linear(embedding, weights.embedding_qkv)
        residual = body.norm(features, weights.feature_norm)
        for layer, cache in layers:
            residual = body.layer(layer, residual, cache, plan, qkv)
            qkv = None
        return residual, qkv

    def logits(self, residual: Tensor, rows: Tensor) -> Tensor:
        """The logits [n, draft V] after some rows of what `forward` gave, [n] int64, ascending."""
        if not self.settings.norm_output:
            return self.body.logits(residual, rows)
        return self.ops.lm_head(self.ops.take_rows(residual, rows), self.body.weights.head)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.weights.targets[draft_ids]
