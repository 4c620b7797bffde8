"""A layer for multi-token prediction that came with the target (DeepSeek-AI 2412.19437, section
2.2): guesses tokens from the target's last residual, and from its own last rows where the target
has none yet.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.checkpoint import DTYPES, Checkpoint
from specserve.models.decoder import Decoder, DecoderWeights
from specserve.models.decoder_config import MTP_LAYERS, DecoderConfig, tensor_shapes
from specserve.models.draft_head import OverDecoder
from specserve.models.loader import EMBEDDING, HEAD, Reader, read_layer
from specserve.models.mtp_config import LOST, MtpStyle, find_style
from specserve.models.quantized.maps import QuantizedMaps
from specserve.models.tensor_views import ALL, Place, part_experts, show
from specserve_kernels import KVCache, Ops


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


LAYER, NORM = "model.layers.0", "model.norm.weight"
# Names of what a decoder does not have.
EMBEDDING_NORM, FEATURE_NORM = "embedding_norm.weight", "feature_norm.weight"
EMBEDDING_MAP, FEATURE_MAP = "embedding_map", "feature_map"


def load_mtp_head(folder: Path, target: Decoder) -> MtpHead:
    """The head that came with a target, which was loaded from the same folder; in its dtype, for as
    many positions. ConfigError says why there is none.
    """
    checkpoint, style = open_layer(folder, target.config)
    config = config_of_layer(folder, target.config, style, checkpoint)
    places = places_of(config, style)
    shapes = shapes_of(config, checkpoint, places)
    show(checkpoint, shapes, places)
    maps = QuantizedMaps(checkpoint, shapes, None)
    reader = Reader(checkpoint, shapes, maps, target.dtype, target.ops)
    body = Decoder(config, target.ops, target.rotary, read_body(reader, config, target))
    given = target.weights.norm / target.config.logit_scale if style.reads_normed else None
    return MtpHead(body, read_own(reader, config, given), (target.config.num_layers,))


def open_layer(folder: Path, target: DecoderConfig) -> tuple[Checkpoint, MtpStyle]:
    """The checkpoint of a target with the tensors of its first such layer alone."""
    if target.num_mtp_layers == 0:
        raise ConfigError(
            f"{folder}: config.json tells of no layers for multi-token prediction ("
            f"{' or '.join(MTP_LAYERS)}); take a model that has them, or another drafter"
        )
    checkpoint = Checkpoint(folder)
    style = find_style(checkpoint.files, target.num_layers)
    if style is None:
        raise ConfigError(f"{folder}: {LOST}")
    checkpoint.show({name: file for name, file in checkpoint.files.items() if style.owns(name)})
    for name in checkpoint.files:
        if (dtype := checkpoint.stored(name).dtypes[0]) not in DTYPES:
            raise ConfigError(
                f"{folder}: the tensor {name} has the type {dtype}, and a layer for multi-token "
                "prediction is read where it is not quantized alone; take a checkpoint that has it "
                "so, or another drafter"
            )
    if target.mixture is not None and target.mixture.style.is_stacked:
        part_experts(checkpoint, target.mixture.num_experts)
    return checkpoint, style


def config_of_layer(
    folder: Path, target: DecoderConfig, style: MtpStyle, checkpoint: Checkpoint
) -> DecoderConfig:
    """A decoder of that layer. ConfigError where nothing says which of the target's it is like."""
    if len({*zip(target.windows, target.rope, strict=True)}) > 1:
        raise ConfigError(
            f"{folder}: its layers differ in sliding windows or rotary embedding, and nothing says "
            f"which of them {style.layer} is like; take another drafter"
        )
    mixture = target.mixture
    if mixture is not None:
        experts = f"{style.layer}.{mixture.style.module}.experts."
        has_experts = any(name.startswith(experts) for name in checkpoint.files)
        mixture = msgspec.structs.replace(mixture, layers=(has_experts,))
    return msgspec.structs.replace(
        target,
        num_layers=1,
        windows=target.windows[:1],
        rope=target.rope[:1],
        mixture=mixture,
        quantization=None,
        num_mtp_layers=0,
    )


def places_of(config: DecoderConfig, style: MtpStyle) -> dict[str, Place]:
    """Where a checkpoint has what is shown under a decoder's names, and what is read beside it."""
    module, hidden = style.module, config.hidden_size
    halves = [slice(hidden), slice(hidden, None)]
    embedding, feature = reversed(halves) if style.has_feature_first else halves
    join = f"{module}.{style.join}.weight"
    places = {
        name: (name.replace(LAYER, style.layer, 1), ALL)
        for name in tensor_shapes(config)
        if name.startswith(f"{LAYER}.")
    } | {
        NORM: (f"{module}.{style.norm}.weight", ALL),
        EMBEDDING_NORM: (f"{module}.{style.embedding_norm}.weight", ALL),
        FEATURE_NORM: (f"{module}.{style.feature_norm}.weight", ALL),
        f"{EMBEDDING_MAP}.weight": (join, embedding),
        f"{FEATURE_MAP}.weight": (join, feature),
    }
    for name, own in {EMBEDDING: style.embedding, HEAD: style.head}.items():
        if own is not None:
            places[name] = f"{module}.{own}.weight", ALL
    return places


def shapes_of(
    config: DecoderConfig, checkpoint: Checkpoint, places: dict[str, Place]
) -> dict[str, tuple[int, ...]]:
    """Of what is read; table and head are the target's where the layer has none of its own."""
    hidden = config.hidden_size
    maps = (f"{name}.weight" for name in (EMBEDDING_MAP, FEATURE_MAP))
    shapes = tensor_shapes(config) | dict.fromkeys((EMBEDDING_NORM, FEATURE_NORM), (hidden,))
    shapes |= dict.fromkeys(maps, (hidden, hidden))
    shapes[HEAD] = shapes[EMBEDDING]
    for name in (EMBEDDING, HEAD):
        if name not in places or places[name][0] not in checkpoint:
            del shapes[name]
    return shapes


def read_body(reader: Reader, config: DecoderConfig, target: Decoder) -> DecoderWeights:
    shapes, given = reader.shapes, target.weights
    return DecoderWeights(
        head=reader.read_weight("lm_head") if HEAD in shapes else given.head,
        embedding=reader.read_embedding() if EMBEDDING in shapes else given.embedding,
        layers=(read_layer(reader, config, 0, given.layers[0].rotary),),
        norm=reader.read_norm(NORM, config.family.adds_one),
        dtype=reader.dtype,
        forms=reader.forms,
    )


def read_own(reader: Reader, config: DecoderConfig, target_norm: Tensor | None) -> MtpWeights:
    adds_one = config.family.adds_one
    return MtpWeights(
        target_norm=target_norm,
        embedding_norm=reader.read_norm(EMBEDDING_NORM, adds_one),
        feature_norm=reader.read_norm(FEATURE_NORM, adds_one),
        embedding_map=reader.read_weight(EMBEDDING_MAP),
        feature_map=reader.read_weight(FEATURE_MAP),
    )
