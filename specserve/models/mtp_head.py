"""MTP layers of the target model as draft heads (DeepSeek-AI 2412.19437, section 2.2).

The layer reads the last hidden state of the target model. For tokens that are not verified yet, it
reads its own last outputs instead.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.checkpoint import DTYPES, Checkpoint
from specserve.models.decoder import Decoder, DecoderWeights
from specserve.models.decoder_config import DecoderConfig
from specserve.models.draft_head import OverDecoder
from specserve.models.layer_reader import read_layer
from specserve.models.mtp_config import LOST, MtpStyle, find_style
from specserve.models.parse_config import MTP_LAYERS
from specserve.models.quantized.maps import QuantizedMaps
from specserve.models.reader import EMBEDDING, HEAD, Reader
from specserve.models.tensor_shapes import tensor_shapes
from specserve.models.tensor_views import ALL, Place, part_experts, show, show_text_model
from specserve_kernels import KVCache, Ops


class MtpWeights(NamedTuple):
    """The layer's weights in addition to a decoder's; linear maps are packed, norms are float32.

    target_norm     [hidden]  norm of the target model's hidden state; None: no norm
    embedding_norm  [hidden]
    feature_norm    [hidden]
    embedding_map   [hidden, hidden]  the embedding's part of the map that joins both inputs
    feature_map     [hidden, hidden]  the feature's part of this map
    """

    target_norm: Tensor | None
    embedding_norm: Tensor
    feature_norm: Tensor
    embedding_map: Any
    feature_map: Any


class MtpHead(OverDecoder):
    """A `DraftHead` of one decoder layer, `body`, with the target model's vocabulary.

    The layer's input is a linear map of the concatenated embedding and feature. It is stored here
    as two maps, whose results are added. The layer's output is normalized for the head and for the
    next draft step. The same holds for the target model's hidden state in the first draft step.
    """

    def __init__(self, body: Decoder, weights: MtpWeights, aux_layer_ids: tuple[int, ...]) -> None:
        super().__init__(body)
        self.weights, self.aux_layer_ids = weights, aux_layer_ids

    def on(self, ops: Ops) -> "MtpHead":
        return MtpHead(self.body.on(ops), self.weights, self.aux_layer_ids)

    @property
    def draft_vocab_size(self) -> int:
        return self.body.config.vocab_size

    @property
    def num_layer_weights(self) -> int:
        config = self.body.config
        return config.num_layer_weights + 2 * config.hidden_size**2

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        norm = self.weights.target_norm
        if norm is None:
            return self.ops.copy(aux_hidden_states)
        return self.body.norm(aux_hidden_states, norm)

    def forward(
        self, features: Tensor, kv: KVCache, plan: Any, aux_layer_ids: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The features for the next draft step; the dict of auxiliary hidden states is empty.

        features  [R, hidden]
        ->        [R, hidden]  for `logits`, too
        """
        assert not aux_layer_ids, "a head has no auxiliary hidden states"
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
        """The logits [n, V] of some rows of the output of `forward`: [n] int64, ascending."""
        ops, config = self.ops, self.body.config
        hidden = ops.take_rows(residual, rows)
        if config.logit_scale != 1:
            hidden = ops.scale(hidden, config.logit_scale)
        logits = ops.lm_head(hidden, self.body.weights.head)
        return logits if config.logit_cap is None else ops.soft_cap(logits, config.logit_cap)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids


LAYER, NORM = "model.layers.0", "model.norm.weight"
# Names of tensors and maps that a decoder does not have.
EMBEDDING_NORM, FEATURE_NORM = "embedding_norm.weight", "feature_norm.weight"
EMBEDDING_MAP, FEATURE_MAP = "embedding_map", "feature_map"


def load_mtp_head(folder: Path, target: Decoder) -> MtpHead:
    """Load the MTP layer from the target model's folder, with its dtype and positions. Raises
    ConfigError if there is none, or if the target is only a part of the model.
    """
    if target.shard.size > 1:
        raise ConfigError(
            f"{folder}: MTP layers need the model's LM head and last hidden state in one process, "
            "and [parallel] divides them. Use another drafter, or remove [parallel]"
        )
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
    """The checkpoint of a target model with only the tensors of its first MTP layer."""
    if target.num_mtp_layers == 0:
        raise ConfigError(
            f"{folder}: config.json describes no MTP layers ({' or '.join(MTP_LAYERS)}). Use a "
            "model with MTP layers, or another drafter"
        )
    checkpoint = Checkpoint(folder)
    if target.is_multimodal:
        show_text_model(checkpoint)
    style = find_style(checkpoint.files, target.num_layers)
    if style is None:
        raise ConfigError(f"{folder}: {LOST}")
    checkpoint.show({name: file for name, file in checkpoint.files.items() if style.owns(name)})
    for name in checkpoint.files:
        if (dtype := checkpoint.stored(name).dtypes[0]) not in DTYPES:
            raise ConfigError(
                f"{folder}: the tensor {name} has the dtype {dtype}, but MTP layers must be "
                "unquantized. Use a checkpoint with an unquantized layer, or another drafter"
            )
    if target.mixture is not None:
        part_experts(checkpoint, target.mixture)
    return checkpoint, style


def config_of_layer(
    folder: Path, target: DecoderConfig, style: MtpStyle, checkpoint: Checkpoint
) -> DecoderConfig:
    """The decoder config of the layer. Raises ConfigError if the model does not determine it."""
    if len({*zip(target.windows, target.rope, strict=True)}) > 1:
        raise ConfigError(
            f"{folder}: layers differ in sliding windows or rotary embedding, and config.json does "
            f"not describe {style.layer}. Use another drafter"
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
    """The name and the columns in the checkpoint of each tensor of the decoder and the head."""
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
    """The shapes of the tensors to read, without embedding and head if the layer lacks them."""
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
