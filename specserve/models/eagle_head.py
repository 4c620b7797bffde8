"""EAGLE-3 draft heads (Li et al. 2503.01840), which read hidden states of the target model.

For tokens that are not verified yet, a head reads its own last outputs instead.
"""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.checkpoint import Checkpoint
from specserve.models.decoder import Decoder, DecoderWeights, Layer
from specserve.models.draft_head import OverDecoder
from specserve.models.eagle_config import EagleConfig, check_target
from specserve.models.layer_reader import read_layer, rows_of_qkv
from specserve.models.loader import Tables, rotary_tables, table_of
from specserve.models.quantized.maps import QuantizedMaps
from specserve.models.reader import EMBEDDING, HEAD, Reader
from specserve.models.source import load_eagle_config
from specserve.models.tensor_shapes import tensor_shapes
from specserve.models.tensor_views import ALL, Place, show
from specserve_drafters.candidates import TREE_SLOTS
from specserve_kernels import KVCache, KVLayer, Ops


class EagleWeights(NamedTuple):
    """The head's weights in addition to a decoder's; linear maps are packed, norms are float32.

    fuse            [hidden, width]       width of the concatenated auxiliary hidden states
    aux_norm        [width]               norm of all of them; None: no such norm
    aux_layer_norms [target hidden] each  norms of each of them; empty: no such norms
    feature_norm    [hidden]              before the first layer; None: the layer has a usual norm
    embedding_norm  [hidden]
    embedding_qkv   [(H + 2 Hk) D, hidden]  the embedding's part of the first layer's map
    targets         [draft V] int64       the target model's id of each token of the head
    """

    fuse: Any
    aux_norm: Tensor | None
    aux_layer_norms: Sequence[Tensor]
    feature_norm: Tensor | None
    embedding_norm: Tensor
    embedding_qkv: Any
    targets: Tensor


class EagleHead(OverDecoder):
    """A `DraftHead` with its own draft vocabulary.

    `body` is a decoder with the head's layers. The first layer's QKV map takes the concatenation of
    embedding and feature. It is stored here as two maps, whose results are added.
    """

    def __init__(self, settings: EagleConfig, body: Decoder, weights: EagleWeights) -> None:
        super().__init__(body)
        self.settings, self.weights = settings, weights

    def on(self, ops: Ops) -> "EagleHead":
        return EagleHead(self.settings, self.body.on(ops), self.weights)

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        return self.settings.aux_layer_ids

    @property
    def draft_vocab_size(self) -> int:
        return self.settings.draft_vocab_size

    @property
    def num_layer_weights(self) -> int:
        config = self.config
        qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        return config.num_layer_weights + config.hidden_size * (qkv + self.settings.width)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        ops, weights, eps = self.ops, self.weights, self.settings.layers.norm_eps
        if weights.aux_norm is not None:
            aux_hidden_states = ops.rms_norm(aux_hidden_states, weights.aux_norm, eps)
        if weights.aux_layer_norms:
            aux_hidden_states = ops.copy(aux_hidden_states)
        for i, norm in enumerate(weights.aux_layer_norms):
            aux_hidden_states = ops.rms_norm_columns(aux_hidden_states, i * len(norm), norm, eps)
        return ops.linear(aux_hidden_states, weights.fuse)

    def forward(
        self, features: Tensor, kv: KVCache, plan: Any, aux_layer_ids: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The features for the next draft step; the dict of auxiliary hidden states is empty.

        features  [R, hidden]  overwritten
        ->        [R, hidden]  for `logits`, too
        """
        assert not aux_layer_ids, "a head has no auxiliary hidden states"
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
        """The residual after `layers`, and the embedding's QKV for the next layer: None unless
        `layers` is empty.
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
        """The logits [n, draft V] of some rows of the output of `forward`: [n] int64, ascending."""
        if not self.settings.norm_output:
            return self.body.logits(residual, rows)
        return self.ops.lm_head(self.ops.take_rows(residual, rows), self.body.weights.head)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.weights.targets[draft_ids]


MODEL, FIRST, OTHER_FIRST = "model.", "layers.0", "midlayer"  # two names of the first layer
EMBEDDED, EMBEDDING_NORM = "embedded", "embedding_norm.weight"  # see `places`
FUSE, OFFSETS, KNOWN = "fc.weight", "d2t", "t2d"
INTEGERS = ("I64", "I32")


def load_eagle_head(folder: Path, target: Decoder) -> EagleHead:
    """The head of a folder or a scaled demo, with the target model's dtype and positions."""
    config, ops = load_eagle_config(folder), target.ops
    check_target(folder, config, target.config)
    checkpoint = Checkpoint(folder)
    targets = read_targets(checkpoint, config)
    shapes = shown_shapes(config)
    if EMBEDDING.removeprefix(MODEL) not in checkpoint:
        hidden, width = config.layers.hidden_size, config.target_hidden_size
        if hidden != width:
            raise ConfigError(
                f"{folder}: the tensor embed_tokens.weight is missing, and the target model's has "
                f"{width} columns instead of {hidden}. Download the head again"
            )
        del shapes[EMBEDDING]
    show(checkpoint, shapes, places(checkpoint, config, shapes))
    reader = Reader(checkpoint, shapes, QuantizedMaps(checkpoint, shapes, None), target.dtype, ops)
    tables = rotary_tables(config.layers, target.num_positions - TREE_SLOTS, ops)
    own = read_own(reader, config, ops.place(targets))
    body = read_body(reader, config, tables, target)
    if config.norm_before_residual:
        first, *others = body.layers
        own = own._replace(feature_norm=first.attention_norm)
        body = body._replace(layers=(first._replace(attention_norm=None), *others))
    return EagleHead(config, Decoder(config.layers, ops, tables.all_positions, body), own)


def read_body(
    reader: Reader, config: EagleConfig, tables: Tables, target: Decoder
) -> DecoderWeights:
    layers, has_table = config.layers, EMBEDDING in reader.shapes
    return DecoderWeights(
        head=reader.read_weight("lm_head"),
        embedding=reader.read_embedding() if has_table else target.weights.embedding,
        layers=tuple(
            read_layer(reader, layers, i, table_of(layers, i, tables))
            for i in range(layers.num_layers)
        ),
        norm=reader.read_norm(f"{MODEL}norm.weight", adds_one=False),
        dtype=reader.dtype,
        forms=reader.forms,
    )


def shown_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a head's tensors, under a decoder's names if the decoder has them."""
    layers, hidden = config.layers, config.layers.hidden_size
    shapes = tensor_shapes(layers) | {
        HEAD: (config.draft_vocab_size, hidden),
        FUSE: (hidden, config.width),
        EMBEDDING_NORM: (hidden,),
    }
    for name in layers.qkv_names(0):
        shapes[f"{EMBEDDED}.{name}.weight"] = shapes[f"{MODEL}{FIRST}.{name}.weight"]
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (config.width,)
    if config.fc_norm:
        norms = (f"fc_norm.{i}.weight" for i in range(len(config.aux_layer_ids)))
        shapes |= dict.fromkeys(norms, (config.target_hidden_size,))
    return shapes


def places(checkpoint: Checkpoint, config: EagleConfig, shapes: Iterable[str]) -> dict[str, Place]:
    """The name and the columns in the file of each tensor in `shapes`.

    The first layer's QKV map takes the concatenation of embedding and feature. It is split into a
    usual layer that reads the feature, and a map that reads the embedding.
    """
    has_other = any(name.startswith(f"{OTHER_FIRST}.") for name in checkpoint.files)
    first = OTHER_FIRST if has_other else FIRST
    hidden, shown = config.layers.hidden_size, f"{MODEL}{FIRST}"
    found = {}
    for name in shapes:
        own = name.removeprefix(MODEL)
        if own.startswith(f"{FIRST}."):
            own = first + own.removeprefix(FIRST)
        found[name] = own, ALL
    found[EMBEDDING_NORM] = f"{first}.input_layernorm.weight", ALL
    found[f"{shown}.input_layernorm.weight"] = f"{first}.hidden_norm.weight", ALL
    for name in config.layers.qkv_names(0):
        found[f"{EMBEDDED}.{name}.weight"] = f"{first}.{name}.weight", slice(hidden)
        found[f"{shown}.{name}.weight"] = f"{first}.{name}.weight", slice(hidden, None)
    return found


def read_own(reader: Reader, config: EagleConfig, targets: Tensor) -> EagleWeights:
    maps = [f"{EMBEDDED}.{name}" for name in config.layers.qkv_names(0)]

    def norm(name: str) -> Tensor:
        return reader.read_norm(name, adds_one=False)

    return EagleWeights(
        fuse=reader.read_weight("fc"),
        aux_norm=norm("input_norm.weight") if config.norm_before_fc else None,
        aux_layer_norms=[
            norm(f"fc_norm.{i}.weight") for i in range(len(config.aux_layer_ids)) if config.fc_norm
        ],
        feature_norm=None,
        embedding_norm=norm(EMBEDDING_NORM),
        embedding_qkv=reader.read_weight(*maps, rows=rows_of_qkv(config.layers)),
        targets=targets,
    )


def read_targets(checkpoint: Checkpoint, config: EagleConfig) -> Tensor:
    """The target model's id of each of the head's tokens, [draft V] int64. Removes the tensors d2t
    and t2d from the checkpoint; they contain the same mapping.
    """
    files, size = checkpoint.files, config.draft_vocab_size
    own = torch.arange(size)
    if OFFSETS in files:
        stored = checkpoint.stored(OFFSETS)
        if stored.shape != (size,) or stored.dtypes[0] not in INTEGERS:
            raise ConfigError(
                f"{checkpoint.folder}: the tensor {OFFSETS} has the shape {list(stored.shape)} and "
                f"the dtype {stored.dtypes[0]}, but config.json requires {size} integers. Correct "
                "draft_vocab_size, or download the head again"
            )
        own += files[OFFSETS].get_tensor(OFFSETS)
    elif size != config.layers.vocab_size:
        raise ConfigError(
            f"{checkpoint.folder}: the tensor {OFFSETS} is missing. It maps the head's {size} "
            f"tokens to the target model's {config.layers.vocab_size}. Download the head again"
        )
    if own.min() < 0 or own.max() >= config.layers.vocab_size:
        raise ConfigError(
            f"{checkpoint.folder}: the tensor {OFFSETS} names token ids from {own.min()} to "
            f"{own.max()}, but the target model has {config.layers.vocab_size}. Download the head "
            "again"
        )
    if len(set(own.tolist())) < size:
        raise ConfigError(
            f"{checkpoint.folder}: the tensor {OFFSETS} names a token of the target model twice. "
            "Download the head again"
        )
    checkpoint.show({name: file for name, file in files.items() if name not in (OFFSETS, KNOWN)})
    return own
