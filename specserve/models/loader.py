"""Loads a decoder from a folder or file, one tensor at a time."""

import logging
import math
import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import softplus

from specserve.errors import ConfigError
from specserve.models import decoder_config, rotary
from specserve.models import per_layer_names as per_layer
from specserve.models.altup import AltUp, StreamMaps
from specserve.models.checkpoint import Checkpoint
from specserve.models.decoder import (
    Decoder,
    DecoderWeights,
    DeltaWeights,
    Experts,
    ExpertsBeside,
    Layer,
    MambaWeights,
    SharedExpert,
    ShortConvWeights,
    windows_of,
)
from specserve.models.decoder_config import (
    ALPHAS,
    SCALAR,
    SCORE,
    SINKS,
    STREAM_SCALE,
    DecoderConfig,
)
from specserve.models.gguf.header import drop_headers
from specserve.models.mtp_config import without_mtp
from specserve.models.per_layer import MIX, PerLayerMaps, PerLayerTable
from specserve.models.quantized.maps import QuantizedMaps
from specserve.models.recurrent import GatedDelta, Mamba2
from specserve.models.rope import RopeParameters
from specserve.models.shard import WHOLE, Shard
from specserve.models.source import open_source
from specserve.models.tensor_views import (
    part_experts,
    show_as_causal,
    show_renamed,
    show_text_model,
)
from specserve.models.weight import (
    AS_STORED,
    Rounding,
    Weight,
    check_activations,
    form_of,
    fuse,
    num_bytes,
    rounded_group,
    with_activations,
)
from specserve.models.weight_forms import MapForm, WeightForms
from specserve_drafters.candidates import TREE_SLOTS
from specserve_kernels import Codes, DeltaParams, MambaParams, Ops, QKNorm, Rotary
from specserve_kernels.codes import GROUP

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # in addition to DTYPES
BETA = 0.5  # slope of xIELU at zero, as in `Ops.activate`
LONGEST = 1 << 21  # default maximum of positions: RoPE tables of 1 GB for a head size of 128
# Endings of the names of tensors that are kept in float32.
CONV = "conv.conv.weight", "conv.conv.bias"  # of a recurrent layer
DELTA = "linear_attn.conv1d.weight", "linear_attn.A_log", "linear_attn.dt_bias"
MAMBA = "mamba.A_log", "mamba.dt_bias", "mamba.D", "mamba.conv1d.weight", "mamba.conv1d.bias"
WIDE = (
    *("norm.weight", "norm.bias", "layernorm_1.weight", "layernorm_2.weight", SCALAR, *ALPHAS),
    *(SINKS, SCORE, "e_score_correction_bias", "router.scale", "per_expert_scale", STREAM_SCALE),
    *("expert_bias", *CONV, *DELTA, *MAMBA),
)
# Parts of `Layer` that a layer without attention or without an MLP lacks.
MIXER = "window", "rotary", "qk_norm", "qkv", "qkv_bias", "out", "out_bias", "sinks"
MLP = "gate_up", "gate_up_bias", "down", "down_bias"
EXPERT = re.compile(r"\.experts\.(\d+)\.")  # in the name of an expert's tensor
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

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
    check_activations(folder, reader.rounding, ops.rounds_rows, weights.forms)
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
    return sum(math.ceil(held * reader.expected_bytes(name)) for name, held in shares.items())


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
        has_head = shard.is_last and HEAD not in reader.shapes
        return (shard.is_first or has_head) + own * (has_head and shard.tensor > 1)
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
    # Checkpoints with recurrent layers may have MTP layers that config.json does not name.
    num_mtp = max(config.num_mtp_layers, config.recurrent is not None)
    checkpoint.show(without_mtp(checkpoint.files, config.num_layers, num_mtp))
    if config.num_shared_layers:
        checkpoint.show(without_shared_kv(checkpoint.files, config))
    if config.mixture is not None:
        part_experts(checkpoint, config.mixture)
    shapes = decoder_config.tensor_shapes(config)
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
    return Reader(checkpoint, shapes, maps, compute_dtype(dtype, checkpoint, ops), ops, rounding)


def without_shared_kv(files: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """A checkpoint's tensors without maps and norms of keys and values that no layer uses."""
    layers = [i for i in range(config.num_layers) if not config.owns_kv(i)]
    unused = tuple(f"model.layers.{i}.self_attn.{x}_" for i in layers for x in "kv")
    return {name: file for name, file in files.items() if not name.startswith(unused)}


def compute_dtype(dtype: str, checkpoint: Checkpoint, ops: Ops) -> torch.dtype:
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ConfigError(f"dtype {dtype!r} is unknown. Use auto, bf16 or fp32")
    is_fp32 = EMBEDDING in checkpoint and checkpoint.dtype(EMBEDDING) == torch.float32
    return torch.float32 if is_fp32 or not ops.has_bf16() else torch.bfloat16


def name_of_dtype(dtype: torch.dtype) -> str:
    return next(name for name, known in (DTYPES | KV_DTYPES).items() if known == dtype)


class Reader:
    """Reads a checkpoint's tensors in the model's dtype onto the ops' device.

    Linear maps and the embedding become codes if they are stored quantized, or if `rounding`
    quantizes them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        maps: QuantizedMaps,
        dtype: torch.dtype,
        ops: Ops,
        rounding: Rounding = AS_STORED,
    ) -> None:
        self.checkpoint, self.shapes, self.maps = checkpoint, dict(shapes), maps
        self.dtype, self.ops, self.rounding = dtype, ops, rounding
        self.shard = WHOLE  # the part of the model that is read
        self.report: Callable[[int, int], None] = lambda done, total: None  # bytes
        self.sources: dict[str, str] = {}  # name -> stored name, if they differ
        if HEAD not in shapes and rounding.head != rounding.embedding:
            self.shapes[HEAD], self.sources[HEAD] = shapes[EMBEDDING], EMBEDDING
        self.num_read, self.num_elements = 0, sum(map(math.prod, self.shapes.values()))
        self.maps_by_form: Counter[MapForm] = Counter()
        self.num_bytes = self.num_odd = 0  # see WeightForms
        self.embedding_bits: int | None = None  # see WeightForms

    def read(self, name: str) -> Tensor:
        memory = torch.empty(self.shapes[name], dtype=self.dtype)
        self.num_bytes += memory.nbytes
        return self.ops.place(self.read_into(memory, [name]))

    def read_norm(self, name: str, adds_one: bool, factor: float = 1.0) -> Tensor:
        """Read the weight of a norm, a layer's sinks, or a classifier's head as float32: 1 + weight
        would lose bits in bf16.
        """
        weight = torch.empty(self.shapes[name], dtype=torch.float32)
        self.num_bytes += weight.nbytes
        self.read_into(weight, [name])
        return self.ops.place((weight + 1 if adds_one else weight) * factor)

    def read_bias(self, *modules: str, rows: Tensor | None = None) -> Tensor | None:
        """Read the biases of linear maps that are fused into one; None if there are none. `rows` is
        the order of the rows.
        """
        biases = [f"{module}.bias" for module in modules]
        if biases[0] not in self.shapes:
            return None
        bias = torch.cat([self.read(bias) for bias in biases])
        return bias if rows is None else bias[rows.to(bias.device)]

    def read_weight(self, *modules: str, is_gated: bool = False, rows: Tensor | None = None) -> Any:
        """Read and pack the weights of linear maps that are fused into one. `rows` is the order of
        the rows. The unpacked weights are freed.
        """
        weight = rows_of(self.weight(*modules), rows)
        weight = self.with_activations(weight, modules[0])
        self.count(weight, is_head=modules == ("lm_head",))
        return self.ops.prepack(weight, is_gated)

    def read_experts(
        self,
        experts: Sequence[Sequence[str]],
        is_gated: bool = False,
        rows: Tensor | None = None,
    ) -> Any:
        """Read and pack one map of each expert; `experts` lists the modules fused into each map.
        `rows` is the order of each map's rows.
        """
        biases = [self.read_bias(*modules, rows=rows) for modules in experts]
        each = [bias for bias in biases if bias is not None]
        bias = torch.stack(each) if each else None
        return self.ops.prepack_experts(self.expert_weights(experts, rows), is_gated, bias)

    def expert_weights(
        self, experts: Sequence[Sequence[str]], rows: Tensor | None
    ) -> Iterator[Weight]:
        forms = set[tuple[MapForm, bool]]()
        for modules in experts:
            weight = self.with_activations(rows_of(self.weight(*modules), rows), modules[0])
            forms.add((form_of(weight), isinstance(weight, Codes) and weight.zero is not None))
            if len(forms) > 1:
                raise ConfigError(
                    f"{self.checkpoint.folder}: {modules[0]} has another quantization than other "
                    "experts of its layer, which is not supported. Use another quantization of the "
                    "model"
                )
            self.count(weight, is_head=False)
            yield weight

    def read_embedding(self, module: str = "model.embed_tokens", num_rows: int = 0) -> Weight:
        """Read an embedding table onto the ops' device; `num_rows` adds copies of row 0."""
        table = self.weight(module)
        height = self.shapes[f"{module}.weight"][0]
        if num_rows > height:
            rows = torch.arange(num_rows)
            table = rows_of(table, torch.where(rows < height, rows, 0))
        if isinstance(table, Codes):
            table = table.without_table()
        parts = (table,) if isinstance(table, Tensor) else table  # not packed: one byte per code
        self.num_bytes += sum(part.nbytes for part in parts if isinstance(part, Tensor))
        if isinstance(table, Tensor):
            return self.ops.place(table)
        self.embedding_bits = 8 * table.q.itemsize
        return table.each(self.ops.place)

    def count(self, weight: Weight, is_head: bool) -> None:
        """Count a linear map in `forms`."""
        self.num_bytes += num_bytes(weight)
        self.maps_by_form[form_of(weight, is_head)] += 1

    @property
    def forms(self) -> WeightForms:
        """The forms of all weights read so far."""
        counted = self.maps_by_form.items()
        maps = (msgspec.structs.replace(form, number=number) for form, number in counted)
        ordered = tuple(sorted(maps, key=lambda form: (form.is_head, form.bits)))
        return WeightForms(ordered, self.num_bytes, self.num_odd, self.embedding_bits)

    def weight(self, *modules: str) -> Weight:
        """Read the weights of linear maps of equal width, concatenated along the rows."""
        names = [f"{module}.weight" for module in modules]
        if any(self.source(name) in self.maps for name in names):
            return fuse([self.read_part(name) for name in names], self.dtype)
        bits = self.bits(names[0])
        if bits is None:
            return self.read_plain(names, self.dtype)
        self.num_odd += self.rounding.is_odd(modules[0], self.shapes[names[0]][1])
        dtypes = {self.checkpoint.dtype(self.source(name)) for name in names}
        # A dtype that represents the stored values exactly.
        dtype = torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
        codes = self.ops.quantize(self.read_plain(names, dtype), bits)
        width = self.shapes[names[0]][1]
        rounds_rows = self.ops.rounds_rows and self.rounding.rounds_rows(modules[0], width)
        return codes._replace(rounds_rows=rounds_rows)

    def with_activations(self, weight: Weight, module: str) -> Weight:
        """The weight of a map whose activations are as `rounding` asks."""
        asked = self.rounding.activations if self.ops.rounds_rows else "auto"
        return with_activations(weight, module, asked)

    def bits(self, name: str) -> int | None:
        """The number of bits to which a tensor is quantized; None: it is not quantized."""
        module, _, suffix = name.rpartition(".")
        shape = self.shapes[name]
        is_map = suffix == "weight" and len(shape) == 2 and name != SCORE
        if not is_map or self.source(name) in self.maps:
            return None
        return self.rounding.bits(module, shape[1])

    def expected_bytes(self, name: str) -> int:
        num_elements, bits = math.prod(self.shapes[name]), self.bits(name)
        if self.source(name) in self.maps:
            stored = self.maps.num_bytes(self.source(name), self.dtype)
            is_table = name in (EMBEDDING, f"{per_layer.TABLE}.weight")
            return max(stored, num_elements) if is_table else stored
        if bits is None:
            is_wide = name.endswith(WIDE)
            dtype = torch.float32 if is_wide else self.dtype
            return num_elements * dtype.itemsize
        group = GROUP if bits == 4 else self.shapes[name][1]
        if self.rounding.activations == "int8" and name != EMBEDDING:
            group = rounded_group(group) or group
        return num_elements * bits // 8 + num_elements // group * torch.float32.itemsize

    def source(self, name: str) -> str:
        return self.sources.get(name, name)

    def read_part(self, name: str) -> Weight:
        """Read one of several weights, some of which are stored as codes."""
        if self.source(name) not in self.maps:
            return self.read_plain([name], self.dtype)
        weight = self.maps.read(self.source(name))
        self.advance(math.prod(self.shapes[name]))
        if isinstance(weight, Codes) and not self.ops.rounds_rows:
            return weight._replace(rounds_rows=False)
        return weight

    def read_plain(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Read matrices of equal width into new memory, concatenated along the rows."""
        height, width = sum(self.shapes[name][0] for name in names), self.shapes[names[0]][1]
        size = height * width * dtype.itemsize
        # Not from malloc: freed memory would leave holes in the heap between packed weights.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return self.read_into(torch.frombuffer(memory, dtype=dtype).view(-1, width), names)

    def read_into(self, out: Tensor, names: Sequence[str]) -> Tensor:
        """Fill `out` with tensors, concatenated along the rows."""
        heights = [self.shapes[name][0] for name in names]
        for name, part in zip(names, torch.split(out, heights), strict=True):
            self.checkpoint.read(self.source(name), part)
            self.advance(part.numel())
        return out

    def advance(self, num_elements: int) -> None:
        self.num_read += num_elements
        size = self.dtype.itemsize
        self.report(self.num_read * size, self.num_elements * size)


def rows_of(weight: Weight, rows: Tensor | None) -> Weight:
    """Select rows [n] int64 of a weight, in the given order; None: all."""
    if rows is None:
        return weight
    if isinstance(weight, Tensor):
        return weight[rows.to(weight.device)]
    return weight.take(rows.to(weight.q.device))


def is_same(head: Any, embedding: Weight) -> bool:
    """Whether a head needs no memory of its own."""
    if isinstance(head, Codes) and isinstance(embedding, Codes):
        return head.q is embedding.q
    return head is embedding


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
        [f"{name}.{i}" for i in range(config.num_streams - 1)] for name in decoder_config.STREAMS
    )
    return StreamMaps(reader.read_weight(*spread), tuple(map(reader.read_weight, merge)))


def read_altup(reader: Reader, config: DecoderConfig, layer: str) -> AltUp:
    names = (f"{layer}.{name}" for name in decoder_config.altup_maps(config))
    router, predict, correct, left, right = map(reader.read_weight, names)
    scale = reader.read_norm(f"{layer}.{STREAM_SCALE}", False)  # stored in any case
    norms = decoder_config.ROUTER_NORM, decoder_config.LAUREL_NORM
    norm, laurel = (f"{layer}.{name}.weight" for name in norms)
    return AltUp(
        router_norm=reader.read_norm(norm, config.family.adds_one, 1 / config.hidden_size),
        router=router,
        predict=predict,
        correct=correct,
        output_scale=scale if config.scales_streams else None,
        left=left,
        right=right,
        laurel_norm=reader.read_norm(laurel, config.family.adds_one),
    )


def read_per_layer_maps(reader: Reader, config: DecoderConfig, index: int) -> PerLayerMaps:
    layer = f"model.layers.{index}"
    norm = f"{layer}.{per_layer.OUT_NORM}.weight"
    return PerLayerMaps(
        begin=index * config.per_layer_size,
        gate=reader.read_weight(f"{layer}.{per_layer.GATE}"),
        out=reader.read_weight(f"{layer}.{per_layer.OUT}"),
        norm=reader.read_norm(norm, config.family.adds_one),
    )


def read_layer(reader: Reader, config: DecoderConfig, index: int, table: Rotary | None) -> Layer:
    layer = f"model.layers.{index}"
    mixer: dict[str, Any] = dict.fromkeys(MIXER)
    if config.is_recurrent(index):
        mixer |= read_recurrent(reader, config, layer)
    if config.attends(index):
        mixer |= read_attention(reader, config, layer, index, table)
    norms = config.family.norms
    mlp = read_mixture if config.has_experts(index) else read_mlp
    has_mixer = config.is_recurrent(index) or config.attends(index)

    def norm(name: str | None, factor: float = 1.0) -> Tensor | None:
        if name is None:
            return None
        return reader.read_norm(f"{layer}.{name}.weight", config.family.adds_one, factor)

    def norm_bias(name: str | None) -> Tensor | None:
        has_bias = name is not None and config.family.norm_bias
        return reader.read_norm(f"{layer}.{name}.bias", False) if has_bias else None

    return Layer(
        attention_norm=norm(norms.before_attention) if has_mixer else None,
        after_attention=norm(norms.after_attention),
        # A factor of the gate multiplies the input of gate and up, and `down_factor` divides by it.
        mlp_norm=norm(norms.before_mlp, config.mlp_factors[0]) if config.has_mlp(index) else None,
        down_factor=config.mlp_factors[1] / config.mlp_factors[0],
        out_factor=config.attention_factor,
        after_mlp=norm(norms.after_mlp),
        attention_norm_bias=norm_bias(norms.before_attention),
        mlp_norm_bias=norm_bias(norms.before_mlp),
        has_kv=config.owns_kv(index),
        scalar=reader.read_norm(f"{layer}.{SCALAR}", False).item()
        if config.family.has_layer_scalars
        else 1.0,
        per_layer=read_per_layer_maps(reader, config, index) if config.per_layer_size else None,
        beside=read_beside(reader, config, layer)
        if config.mixture is not None and config.mixture.style.beside is not None
        else None,
        altup=read_altup(reader, config, layer) if config.num_streams > 1 else None,
        deviations=config.deviations[index] if config.deviations else None,
        **mixer,
        **(mlp(reader, config, index) if config.has_mlp(index) else dict.fromkeys(MLP)),
    )


def read_attention(
    reader: Reader, config: DecoderConfig, layer: str, index: int, table: Rotary | None
) -> dict[str, Any]:
    qkv = [f"{layer}.{name}" for name in config.qkv_names(index)]
    shard, rows = reader.shard, reader.shard.qkv_rows(config, rows_of_qkv(config, index))
    out, gate = f"{layer}.self_attn.o_proj", dict[str, Any]()
    if config.family.gates_attention:
        of_gate = rows_of_gate(config)
        gate["gate"] = reader.read_weight(qkv[0], rows=of_gate)
        gate["gate_bias"] = reader.read_bias(qkv[0], rows=of_gate)
    return gate | {
        "window": windows_of(config)[index],
        "rotary": table,
        "qk_norm": read_qk_norm(reader, config, index),
        "qkv": reader.read_weight(*qkv, rows=rows),
        "qkv_bias": reader.read_bias(*qkv, rows=rows),
        "out": reader.read_weight(out, rows=shard.rows(config.hidden_size)),
        "out_bias": reader.read_bias(out, rows=shard.rows(config.hidden_size)),
        "sinks": read_sinks(reader, config, layer) if config.family.has_sinks else None,
    }


def read_recurrent(reader: Reader, config: DecoderConfig, layer: str) -> dict[str, Any]:
    if isinstance(config.recurrent, Mamba2):
        return {"mamba": read_mamba(reader, config.recurrent, layer, config.norm_eps)}
    if isinstance(config.recurrent, GatedDelta):
        return read_delta(reader, config.recurrent, layer, config.norm_eps)
    return read_short_conv(reader, layer)


def read_mamba(reader: Reader, mamba: Mamba2, layer: str, eps: float) -> MambaWeights:
    rate, dt_bias, D, weight, bias = (f"{layer}.{name}" for name in MAMBA)
    inputs, out, norm = (f"{layer}.mamba.{name}" for name in ("in_proj", "out_proj", "norm.weight"))
    z, *of_conv, dt = mamba.factors
    group = mamba.num_groups * mamba.state_dim
    # The convolution is linear in its inputs, so that scaling its weight scales them.
    widths = torch.tensor([mamba.width, group, group])
    channels = reader.ops.place(torch.tensor(of_conv).repeat_interleave(widths))
    rows = torch.tensor(mamba.input_rows())
    return MambaWeights(
        inputs=reader.read_weight(inputs, rows=rows),
        inputs_bias=reader.read_bias(inputs, rows=rows),
        weight=reader.read_norm(weight, False).squeeze(1) * channels[:, None],
        bias=reader.read_norm(bias, False) if mamba.conv_bias else None,
        params=MambaParams(
            rate=-reader.read_norm(rate, False).exp(),
            dt_bias=reader.read_norm(dt_bias, False),
            D=reader.read_norm(D, False),
            norm=reader.read_norm(norm, False) if mamba.has_norm else None,
            eps=eps,
            num_groups=mamba.num_groups,
            gates_first=mamba.gates_first,
            z_factor=z,
            dt_factor=dt,
        ),
        out=reader.read_weight(out),
        out_bias=reader.read_bias(out),
        factor=mamba.out_factor,
    )


def read_delta(reader: Reader, delta: GatedDelta, layer: str, eps: float) -> dict[str, Any]:
    rows, (weight, rate, dt_bias) = delta.input_rows(), (f"{layer}.{name}" for name in DELTA)
    params = DeltaParams(
        rate=-reader.read_norm(rate, False).exp(),
        dt_bias=reader.read_norm(dt_bias, False),
        norm=reader.read_norm(f"{layer}.linear_attn.norm.weight", False),
        eps=eps,
        num_k_heads=delta.num_k_heads,
    )
    inputs = reader.read_weight(
        *(f"{layer}.{name}" for name in delta.input_names),
        rows=None if rows is None else torch.tensor(rows),
    )
    weights = DeltaWeights(inputs, reader.read_norm(weight, False).squeeze(1), params)
    out = reader.read_weight(f"{layer}.linear_attn.out_proj")
    return {"out": out, "out_bias": None, "delta": weights}


def read_short_conv(reader: Reader, layer: str) -> dict[str, Any]:
    inputs, out = f"{layer}.conv.in_proj", f"{layer}.conv.out_proj"
    weight, bias = (f"{layer}.{name}" for name in CONV)
    conv = ShortConvWeights(
        inputs=reader.read_weight(inputs),
        inputs_bias=reader.read_bias(inputs),
        weight=reader.read_norm(weight, False).squeeze(1),
        bias=reader.read_norm(bias, False) if bias in reader.shapes else None,
    )
    return {"out": reader.read_weight(out), "out_bias": reader.read_bias(out), "conv": conv}


def read_mlp(reader: Reader, config: DecoderConfig, index: int) -> dict[str, Any]:
    layer = f"model.layers.{index}"
    gate_up = [f"{layer}.{name}" for name in config.gate_up_names]
    is_sparse = bool(config.deviations) and config.deviations[index] is not None
    is_gated = config.family.ungated is None and not is_sparse
    down = f"{layer}.{config.down_name}"
    alphas = read_alphas(reader, layer) if config.activation == "xielu" else (0.0, 0.0)
    inner, hidden = reader.shard.gate_up_rows(config), reader.shard.rows(config.hidden_size)
    return {
        "alphas": alphas,
        "gate_up": reader.read_weight(*gate_up, is_gated=is_gated, rows=inner),
        "gate_up_bias": reader.read_bias(*gate_up, rows=inner),
        "down": reader.read_weight(down, rows=hidden),
        "down_bias": reader.read_bias(down, rows=hidden),
    }


def read_alphas(reader: Reader, layer: str) -> tuple[float, float]:
    """The factors of xIELU, which a checkpoint has as inverse softplus."""
    p, n = (softplus(reader.read_norm(f"{layer}.{name}", False)).item() for name in ALPHAS)
    return p, BETA + n


def read_sinks(reader: Reader, config: DecoderConfig, layer: str) -> Tensor:
    """Read the sinks of this shard's heads."""
    own = reader.shard.heads(config).query
    return reader.read_norm(f"{layer}.{SINKS}", False)[own.start : own.stop]


def read_mixture(reader: Reader, config: DecoderConfig, index: int) -> dict[str, Any]:
    layer = f"model.layers.{index}"
    return dict.fromkeys(MLP) | {"experts": read_experts(reader, config, layer)}


def read_beside(reader: Reader, config: DecoderConfig, layer: str) -> ExpertsBeside:
    assert config.mixture is not None, "the layer has no experts"
    names = config.mixture.style.beside
    assert names is not None, "experts replace the MLP"
    adds_one = config.family.adds_one
    before, after, after_mlp = (
        reader.read_norm(f"{layer}.{name}.weight", adds_one) for name in names.norms
    )
    factors = reader.read_norm(f"{layer}.{names.factors}", False)
    scale = reader.read_norm(f"{layer}.{names.router_scale}", False, config.hidden_size**-0.5)
    experts = read_experts(reader, config, layer)._replace(factor=factors)
    return ExpertsBeside(experts, scale, before, after, after_mlp)


def read_experts(reader: Reader, config: DecoderConfig, layer: str) -> Experts:
    mixture = config.mixture
    assert mixture is not None, "the layer has no experts"
    shard, hidden = reader.shard, reader.shard.rows(config.hidden_size)
    each = shard.experts(mixture.num_experts)
    num_parts = 2 if mixture.style.is_gated else 1
    inner, outer = shard.rows(mixture.width, num_parts), hidden
    if shard.has_whole_experts:
        inner = outer = None
    gate_up = [[f"{layer}.{name}" for name in mixture.gate_up_names(e)] for e in each]
    router, shared = f"{layer}.{mixture.router}", f"{layer}.{mixture.shared}"
    return Experts(
        router=reader.read_weight(router),
        gate_up=reader.read_experts(gate_up, is_gated=mixture.style.is_gated, rows=inner),
        down=reader.read_experts([[f"{layer}.{mixture.down_name(e)}"] for e in each], rows=outer),
        num_active=mixture.num_active,
        normalizes=mixture.normalizes,
        is_sigmoid=mixture.style.is_sigmoid,
        weighs_input=mixture.style.weighs_input,
        correction=reader.read_norm(f"{layer}.{mixture.correction}", False).flatten()
        if mixture.correction
        else None,
        factor=mixture.factor,
        router_bias=reader.read_bias(router),
        limit=mixture.limit,
        gate="silu" if mixture.style.is_gated else "relu2",
        shared=SharedExpert(
            gate=reader.read_weight(f"{layer}.{mixture.shared_gate}")
            if mixture.style.has_shared_gate
            else None,
            gate_up=reader.read_weight(
                *(f"{layer}.{name}" for name in mixture.shared_gate_up_names),
                is_gated=mixture.style.is_gated,
                rows=shard.rows(mixture.shared_width, num_parts),
            ),
            down=reader.read_weight(f"{shared}.down_proj", rows=hidden),
        )
        if mixture.shared_width
        else None,
    )


def rows_of_qkv(config: DecoderConfig, layer: int = 0) -> Tensor | None:
    """The order of the rows of queries, keys and values in kernels; None: as in the checkpoint."""
    if config.repeats_keys(layer):
        heads = config.kv_heads(layer)
        first = config.num_heads * heads.size
        repeated = torch.arange(first, first + heads.number * heads.size)
        return torch.cat([torch.arange(first), repeated, repeated])
    D, order, H = config.head_dim, order_of_head(config), config.num_heads
    is_gated = config.family.gates_attention
    if order is None and not is_gated:
        return None
    order = torch.arange(D) if order is None else order
    keys = (2 if is_gated else 1) * H * D  # rows before the keys
    queries = torch.arange(0, keys, keys // H)[:, None] + order
    turned = keys + torch.arange(config.num_kv_heads)[:, None] * D + order
    values = keys + (config.num_kv_heads + torch.arange(config.num_kv_heads)[:, None]) * D
    return torch.cat([x.flatten() for x in (queries, turned, values + torch.arange(D))])


def rows_of_gate(config: DecoderConfig) -> Tensor:
    """The rows of attention's gate in the map of queries: behind each head's query."""
    D = config.head_dim
    return (torch.arange(config.num_heads)[:, None] * 2 * D + D + torch.arange(D)).flatten()


def order_of_head(config: DecoderConfig) -> Tensor | None:
    """The order of a head's dimensions in kernels; None: as in the checkpoint."""
    rope, D = config.rope_parameters, config.head_dim
    has_neighbors = config.family.rotates_neighbors
    if not has_neighbors and rope.rotating(D) == D:
        return None
    return rotary.order(rope, D, has_neighbors)


def read_qk_norm(reader: Reader, config: DecoderConfig, index: int) -> QKNorm | None:
    family, order = config.family, order_of_head(config)
    if config.qk_norm == "bare" and config.rope[index]:
        ones = reader.ops.place(torch.ones(config.head_dim))
        return QKNorm(ones, ones, config.norm_eps, is_last=family.norms_after_rope)
    if not config.has_qk_norm:
        return None
    names = [f"model.layers.{index}.self_attn.{name}.weight" for name in family.qk_norm_names]
    own = names if config.owns_kv(index) else names[:1]
    q, *others = (reader.read_norm(name, family.adds_one) for name in own)
    k = others[0] if others else q  # not read without keys
    if order is not None:
        q, k = (in_order(weight, order.to(weight.device)) for weight in (q, k))
    is_each, heads = config.qk_norm == "each", reader.shard.heads(config)
    if is_each:
        q, k = q[heads.query.start : heads.query.stop], k[heads.kv.start : heads.kv.stop]
    last, has_values = family.norms_after_rope, family.norms_values
    return QKNorm(q, k, config.norm_eps, is_each, last, has_values)


def in_order(weight: Tensor, order: Tensor) -> Tensor:
    """The weight of a norm of heads, with each head's dimensions in another order."""
    return weight.view(-1, len(order))[:, order].view(weight.shape)
