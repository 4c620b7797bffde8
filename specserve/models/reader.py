"""Reads a checkpoint's tensors in the model's dtype, and packs linear maps."""

import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models import per_layer_names as per_layer
from specserve.models.checkpoint import Checkpoint
from specserve.models.quantized.maps import QuantizedMaps
from specserve.models.shard import WHOLE
from specserve.models.tensor_shapes import ALPHAS, SCALAR, SCORE, SINKS, STREAM_SCALE
from specserve.models.weight import (
    AS_STORED,
    Rounding,
    Weight,
    form_of,
    fuse,
    num_bytes,
    rounded_group,
    with_activations,
)
from specserve.models.weight_forms import MapForm, WeightForms
from specserve_kernels import Codes, Ops
from specserve_kernels.codes import GROUP

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # in addition to DTYPES
# Endings of the names of tensors that are kept in float32.
CONV = "conv.conv.weight", "conv.conv.bias"  # of a recurrent layer
DELTA = "linear_attn.conv1d.weight", "linear_attn.A_log", "linear_attn.dt_bias"
MAMBA = "mamba.A_log", "mamba.dt_bias", "mamba.D", "mamba.conv1d.weight", "mamba.conv1d.bias"
WIDE = (
    *("norm.weight", "norm.bias", "layernorm_1.weight", "layernorm_2.weight", SCALAR, *ALPHAS),
    *(SINKS, SCORE, "e_score_correction_bias", "router.scale", "per_expert_scale", STREAM_SCALE),
    *("expert_bias", *CONV, *DELTA, *MAMBA),
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


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

    @property
    def hidden_size(self) -> int:
        return self.shapes[EMBEDDING][1]

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
        return self.ops.prepack_experts(ExpertWeights(self, experts, rows), is_gated, bias)

    def expert_weights(
        self, experts: Sequence[Sequence[str]], rows: Tensor | None, counts: bool
    ) -> Iterator[Weight]:
        """The maps of experts, which `counts` adds to `forms`."""
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
            if counts:
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

    def expected_bytes(self, name: str, is_head: bool = False) -> int:
        """The bytes of a tensor in memory; `is_head`: of an embedding's copy for the head."""
        num_elements, bits = math.prod(self.shapes[name]), self.bits(name)
        if self.source(name) in self.maps:
            stored = self.maps.num_bytes(self.source(name), self.dtype)
            is_table = not is_head and name in (EMBEDDING, f"{per_layer.TABLE}.weight")
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
        self.num_read = min(self.num_read + num_elements, self.num_elements)
        size = self.dtype.itemsize
        self.report(self.num_read * size, self.num_elements * size)


class ExpertWeights:
    """The maps of experts, which may be read twice, if their packed forms differ."""

    def __init__(
        self, reader: Reader, experts: Sequence[Sequence[str]], rows: Tensor | None
    ) -> None:
        self.reader, self.experts, self.rows, self.is_counted = reader, experts, rows, False

    def __iter__(self) -> Iterator[Weight]:
        counts, self.is_counted = not self.is_counted, True
        return self.reader.expert_weights(self.experts, self.rows, counts)


def rows_of(weight: Weight, rows: Tensor | None) -> Weight:
    """Select rows [n] int64 of a weight, in the given order; None: all."""
    if rows is None:
        return weight
    if isinstance(weight, Tensor):
        return weight[rows.to(weight.device)]
    return weight.take(rows.to(weight.q.device))
