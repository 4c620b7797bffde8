"""Loads a decoder from a folder or file, one tensor at a time."""

import logging
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specserve.errors import ConfigError
from specserve.models import per_layer_names as per_layer
from specserve.models import rotary, tensor_shapes
from specserve.models.altup import StreamMaps
from specserve.models.checkpoint import Checkpoint
from specserve.models.decoder import (
    Decoder,
    DecoderWeights,
)
from specserve.models.decoder_config import DecoderConfig
from specserve.models.gguf.header import drop_headers
from specserve.models.layer_reader import read_layer
from specserve.models.mtp_config import without_mtp
from specserve.models.per_layer import MIX, PerLayerTable
from specserve.models.quantized.maps import QuantizedMaps
from specserve.models.reader import EMBEDDING, HEAD, Reader, compute_dtype, rows_of
from specserve.models.recurrent_shard import check_recurrent
from specserve.models.rope import RopeParameters
from specserve.models.shard import WHOLE, Shard
from specserve.models.source import open_source
from specserve.models.tensor_shapes import SCORE
from specserve.models.tensor_views import (
    part_experts,
    show_as_causal,
    show_joined_convs,
    show_renamed,
    show_text_model,
)
from specserve.models.weight import (
    AS_STORED,
    Rounding,
    Weight,
    check_activations,
)
from specserve_drafters.candidates import TREE_SLOTS
from specserve_kernels import Codes, Ops, Rotary

LONGEST = 1 << 21  # default maximum of positions: RoPE tables of 1 GB for a head size of 128
EXPERT = re.compile(r"\.experts\.(\d+)\.")  # in the name of an expert's tensor
log = logging.getLogger("specserve")


def load_decoder(
    folder: Path,
    dtype: str,
    ops: Ops,
    max_len: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    rounding: Rounding = AS_STORED,
    shard: Shard = WHOLE,
) -> Decoder:
    """Load a model in `dtype` (auto, bf16, fp32), for requests of up to `max_len` tokens, or the
    part of it that a rank holds.

    Files are mapped, and the pages of a tensor are dropped after it is packed, so that weights are
    never in memory twice.
    """
    config = open_source(folder).config()
    shard.check(config)
    check_recurrent(config, shard)
    reader = open_reader(folder, config, dtype, ops, rounding)
    reader.shard = shard
    if progress is not None:
        reader.report = progress
    if max_len is None and config.max_positions > LONGEST:
        raise ConfigError(
            f"{folder}: RoPE tables for the context of {config.max_positions} tokens would need "
            "gigabytes. Set scheduler.max_model_len"
        )
    # The nodes of a draft tree have positions after the last verified token.
    context = max_len or config.max_positions
    tables = rotary_tables(config, context, ops)
    try:
        weights = read_weights(reader, config, tables)
    except ConfigError:
        drop_headers()
        raise
    if reader.checkpoint.other_parts:
        parts = ", ".join(reader.checkpoint.other_parts)
        log.warning("%s: only the text model is loaded, without %s", folder, parts)
    check_activations(folder, rounding, ops.rounds_rows, weights.forms)
    asked = config.quantization and config.quantization.activations
    if unmet := asked.unmet_by(weights.forms.num_rounding) if asked else ():
        asks = " and for ".join(unmet)
        words = weights.forms.activation_words
        log.warning("%s/config.json asks for %s, but %s", folder, asks, words)
    return Decoder(config, ops, tables.all_positions, weights, shard)


class Tables(NamedTuple):
    """The RoPE tables of layers with full attention, with a sliding window, and without RoPE."""

    all_positions: Rotary
    windowed: Rotary
    still: Rotary


def rotary_tables(config: DecoderConfig, context: int, ops: Ops) -> Tables:
    def table(told: RopeParameters, size: int) -> Rotary:
        cos, sin, scale = rotary.tables(told.of_context(context), size, context + TREE_SLOTS)
        return Rotary(ops.place(cos), ops.place(sin), None if scale is None else ops.place(scale))

    told, local = config.rope_parameters, config.local_rope_parameters
    size = config.head_dim if config.global_heads is None else config.global_heads.size
    everywhere = table(told, size)
    is_same = (local, config.head_dim) == (told, size)
    windowed = everywhere if is_same else table(local, config.head_dim)
    has_still = not all(config.rope)
    still = rotary.still(everywhere, config.query_growth) if has_still else everywhere
    return Tables(everywhere, windowed, still)


def table_of(config: DecoderConfig, index: int, tables: Tables) -> Rotary:
    if not config.rope[index]:
        return tables.still
    return tables.all_positions if config.windows[index] is None else tables.windowed


def weight_bytes(
    folder: Path, dtype: str, ops: Ops, rounding: Rounding = AS_STORED, shard: Shard = WHOLE
) -> int:
    """The bytes of a model's weights after `load_decoder`; about these bytes for a shard."""
    config = open_source(folder).config()
    reader = open_reader(folder, config, dtype, ops, rounding)
    shares = {name: share(name, reader, config, shard) for name in reader.shapes}
    total = sum(math.ceil(held * reader.expected_bytes(name)) for name, held in shares.items())
    is_tied = HEAD not in reader.shapes
    if shard.is_last and is_tied and (shard.tensor > 1 or copies_head(reader)):
        total += math.ceil(reader.expected_bytes(EMBEDDING, is_head=True) / shard.tensor)
    return total


def copies_head(reader: "Reader") -> bool:
    """Whether the ops copy an embedding that is the head, too. A small matrix shows it."""
    ops = reader.ops
    plain = ops.place(torch.ones(64, 64, dtype=reader.dtype))
    has_codes = reader.source(EMBEDDING) in reader.maps or reader.bits(EMBEDDING) is not None
    probe = ops.quantize(plain, 8) if has_codes else plain
    return not is_same(ops.prepack(probe), probe)


def share(name: str, reader: "Reader", config: DecoderConfig, shard: Shard) -> float:
    """About which part of a tensor a shard holds."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    own = 1.0 if len(reader.shapes[name]) == 1 else 1 / shard.tensor
    if shard.has_whole_experts and config.mixture and (found := EXPERT.search(name)):
        own = float(int(found[1]) in shard.experts(config.mixture.num_experts))
    if layer.isdecimal():
        if name.endswith("k_proj.weight") and config.repeats_keys(int(layer)):
            own *= 2  # values have a copy
        return own if int(layer) in shard.layers(config.num_layers) else 0.0
    if name.startswith(per_layer.TABLE):
        return max(1.0, config.vocab_size / config.per_layer_vocab)
    if name == EMBEDDING:
        return float(shard.is_first or (shard.is_last and HEAD not in reader.shapes))
    return own if shard.is_last or name != HEAD else 0.0


def open_reader(
    folder: Path, config: DecoderConfig, dtype: str, ops: Ops, rounding: Rounding
) -> "Reader":
    """Open a checkpoint. Raises ConfigError unless its tensors match config.json."""
    checkpoint = Checkpoint(folder)
    if config.is_multimodal:
        show_text_model(checkpoint)
    is_bare = show_as_causal(checkpoint)
    show_renamed(checkpoint, config.family.renamed)
    if config.family.has_split_inputs:
        show_joined_convs(checkpoint)
    # Checkpoints with recurrent layers may have MTP layers that config.json does not name.
    numbers = config.num_layers, config.num_mtp_layers
    checkpoint.show(without_mtp(checkpoint.files, *numbers, config.recurrent is not None))
    if config.num_shared_layers:
        checkpoint.show(without_shared_kv(checkpoint.files, config))
    if config.mixture is not None:
        part_experts(checkpoint, config.mixture)
    shapes = tensor_shapes.tensor_shapes(config)
    if "lm_head" in checkpoint.suffixes:  # used even if config.json has tie_word_embeddings
        shapes[HEAD] = shapes[EMBEDDING]
    elif is_bare:  # saved without the head that config.json describes
        shapes.pop(HEAD, None)
    maps = QuantizedMaps(checkpoint, shapes, config.quantization)
    checkpoint.check(maps.expected)
    if rounding.rounds_weights and maps.shapes:
        raise ConfigError(
            f"{folder}: the weights are quantized already. Remove model.quantize or "
            "drafter.quantize for this model, or use the unquantized model"
        )
    if rounding.activations == "auto" and ops.rounds_rows and is_of_gguf(config):
        rounding = rounding._replace(activations="int8")  # as llama.cpp computes these files
    return Reader(checkpoint, shapes, maps, compute_dtype(dtype, checkpoint, ops), ops, rounding)


def is_of_gguf(config: DecoderConfig) -> bool:
    """Whether a GGUF file has quantized weights."""
    return config.quantization is not None and config.quantization.method == "gguf"


def without_shared_kv(files: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """A checkpoint's tensors without maps and norms of keys and values that no layer uses."""
    layers = [i for i in range(config.num_layers) if not config.owns_kv(i)]
    unused = tuple(f"model.layers.{i}.self_attn.{x}_" for i in layers for x in "kv")
    return {name: file for name, file in files.items() if not name.startswith(unused)}


def is_same(head: Any, embedding: Weight) -> bool:
    """Whether a head needs no memory of its own."""
    if isinstance(head, Codes) and isinstance(embedding, Codes):
        return head.q is embedding.q
    return getattr(head, "weight", head) is embedding  # a GPU's PlainMap keeps the tensor


def read_weights(reader: Reader, config: DecoderConfig, tables: Tables) -> DecoderWeights:
    # The largest weight is read first: its unpacked form is freed before the others are loaded.
    shard, rows = reader.shard, reader.shard.rows(config.vocab_size)
    is_tied = HEAD not in reader.shapes
    head: Any = None
    embedding: Weight = torch.empty(0, config.hidden_size, dtype=reader.dtype)
    if shard.is_last and not is_tied:
        head = reader.read_weight("lm_head", rows=rows)
    if shard.is_first or (shard.is_last and is_tied):
        embedding = reader.read_embedding()
    if shard.is_last and is_tied:
        table = reader.with_activations(rows_of(embedding, rows), "lm_head")
        head = reader.ops.prepack(table)
        if not is_same(head, embedding):
            reader.count(table, is_head=True)
    return DecoderWeights(
        embedding=embedding,
        head=head,
        layers=tuple(
            read_layer(reader, config, i, table_of(config, i, tables))
            for i in shard.layers(config.num_layers)
        ),
        # The head is linear, so that scaling the norm scales the logits without extra time.
        norm=reader.read_norm("model.norm.weight", config.family.adds_one, config.logit_scale),
        norm_bias=reader.read_norm("model.norm.bias", False, config.logit_scale)
        if config.family.norm_bias
        else None,
        score=reader.read_norm(SCORE, False) if config.num_labels else None,
        per_layer=read_per_layer_table(reader, config) if config.per_layer_size else None,
        streams=read_streams(reader, config) if config.num_streams > 1 else None,
        has_head=config.has_head and (config.tied or "lm_head" in reader.checkpoint.suffixes),
        dtype=reader.dtype,
        forms=reader.forms,  # of all weights read before
    )


def read_per_layer_table(reader: Reader, config: DecoderConfig) -> PerLayerTable:
    hidden, size = config.hidden_size, config.per_layer_size
    return PerLayerTable(
        embedding=reader.read_embedding(
            per_layer.TABLE, max(config.vocab_size, config.per_layer_vocab)
        ),
        projection=reader.read_weight(per_layer.PROJECTION),
        norm=reader.read_norm(f"{per_layer.NORM}.weight", config.family.adds_one, MIX),
        factor=MIX * math.sqrt(size),
        # The projection is not divided by sqrt(hidden), but its norm removes this factor.
        eps=config.norm_eps * hidden,
    )


def read_streams(reader: Reader, config: DecoderConfig) -> StreamMaps:
    spread, merge = (
        [f"{name}.{i}" for i in range(config.num_streams - 1)] for name in tensor_shapes.STREAMS
    )
    return StreamMaps(reader.read_weight(*spread), tuple(map(reader.read_weight, merge)))
