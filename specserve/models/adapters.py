"""Reads LoRA adapters in peft's format, and applies them to the decoder's fused linear maps."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.adapter_config import NAME, REMEDY, AdapterConfig, load_adapter_config
from specserve.models.checkpoint import DTYPES
from specserve.models.decoder import Decoder, LayerAdapters
from specserve.models.decoder_config import DecoderConfig
from specserve.models.folder import check_pointer, check_regular
from specserve.models.layer_reader import rows_of_gate, rows_of_qkv
from specserve.models.recurrent import GatedDelta, Mamba2
from specserve.models.recurrent_shard import recurrent_part
from specserve.models.shard import Shard
from specserve.models.tensor_shapes import layer_shapes
from specserve.models.weight_files import check_is_at_home

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")
BACKBONE = "backbone."  # the name of the decoder in code of Nemotron H outside of transformers
HEADER_BYTES = 4 << 20  # maximum size of a file's header
OTHERS = ("model.embed_tokens", "lm_head")  # modules that peft can adapt, but the kernels cannot
WHOLE = re.compile(r"embed_tokens|lm_head|modules_to_save")  # in names of unsupported tensors
ONLY_LAYERS = (
    "specserve adapts only the linear maps of layers. Merge the adapter into its model (peft's "
    "merge_and_unload), or train it without embed_tokens, lm_head and modules_to_save"
)


class AdapterMap(NamedTuple):
    """The change of one fused linear map [N, K]: `up @ down`.

    The map has P parts, which are separate modules in the checkpoint. A part has `max_rank` rows of
    `down` and columns of `up`; they are zero beyond the part's rank.
    """

    down: Tensor  # [P * max_rank, K]
    up: Tensor  # [N, P * max_rank], scaled; a part's columns are zero in the rows of other parts


class Adapter(NamedTuple):
    digest: bytes  # SHA-256 of tensors and scalings: equal for equal changes of the model
    rank: int  # maximum over its modules
    layers: tuple[Mapping[str, AdapterMap], ...]  # by layer; keys: fields of LayerAdapters


class PackedAdapter(NamedTuple):
    """An adapter for `AdapterSlots.put`, with its maps in the kernels' format."""

    digest: str  # in hexadecimal
    rank: int
    layers: tuple[Mapping[str, Any], ...]


class AdaptedModule(NamedTuple):
    """A module of the checkpoint that is a fused map, or a part of one, under its own name."""

    module: str
    height: int
    width: int


FusedMaps = Mapping[str, Sequence[AdaptedModule]]  # a layer's fused maps and their parts, by name


def read_adapter(folder: Path, config: DecoderConfig, max_rank: int, dtype: torch.dtype) -> Adapter:
    """Read an adapter's folder. Raises ConfigError if a part of it is not supported."""
    check_regular(folder)
    check_files(folder)
    told = load_adapter_config(folder)
    layers = [fused_maps(config, layer) for layer in range(config.num_layers)]
    most = adapter_bytes(config, max_rank, torch.float32) + HEADER_BYTES
    try:
        reader = AdapterReader(folder / WEIGHTS, told, max_rank, dtype, most)
        reader.check([part for maps in layers for parts in maps.values() for part in parts])
        read = tuple(
            reader.read_layer(maps, {name: rows_of_map(config, i, name) for name in maps})
            for i, maps in enumerate(layers)
        )
        return Adapter(reader.content.digest(), max(map(told.rank_of, reader.modules)), read)
    except TimeoutError as e:  # from a regular expression
        raise ConfigError(f"{folder / NAME}: {e}. {REMEDY}") from e


def adapter_bytes(config: DecoderConfig, max_rank: int, dtype: torch.dtype) -> int:
    """Bytes of an adapter that changes every map: the maximum for this rank."""
    layers = (fused_maps(config, layer).values() for layer in range(config.num_layers))
    sizes = (
        len(parts) * max_rank * (parts[0].width + sum(part.height for part in parts))
        for maps in layers
        for parts in maps
    )
    return sum(sizes) * dtype.itemsize


def fused_maps(config: DecoderConfig, layer: int) -> FusedMaps:
    """A layer's maps that an adapter may change; maps of experts are not supported."""
    maps = dict[str, Sequence[str]]()
    if config.attends(layer):
        maps |= {"qkv": config.qkv_names(layer), "out": ["self_attn.o_proj"]}
        if config.family.gates_attention:
            maps["gate"] = config.qkv_names(layer)[:1]
    if config.is_recurrent(layer):
        maps |= recurrent_maps(config)
    if config.has_mlp(layer) and not config.has_experts(layer):
        maps |= {"gate_up": config.gate_up_names, "down": [config.down_name]}
    shapes, renamed = layer_shapes(config, layer), config.family.renamed
    return {
        name: [
            AdaptedModule(stored_name(f"model.layers.{layer}.{m}", renamed), *shapes[f"{m}.weight"])
            for m in modules
        ]
        for name, modules in maps.items()
    }


def recurrent_maps(config: DecoderConfig) -> Mapping[str, Sequence[str]]:
    """The fused maps of a recurrent layer."""
    if isinstance(config.recurrent, Mamba2):
        return {"inputs": ["mamba.in_proj"], "mamba_out": ["mamba.out_proj"]}
    if isinstance(config.recurrent, GatedDelta):
        return {"inputs": config.recurrent.input_names, "out": ["linear_attn.out_proj"]}
    return {"inputs": ["conv.in_proj"], "out": ["conv.out_proj"]}


def stored_name(module: str, renamed: Mapping[str, str]) -> str:
    """The name in the checkpoint of a module that has `module` in other families. Checkpoints may
    begin it with backbone, but transformers does not.
    """
    name = f"{module}."
    for own, other in reversed([*renamed.items()]):
        if own != BACKBONE:
            name = name.replace(other, own)
    return name.removesuffix(".")


def rows_of_map(config: DecoderConfig, layer: int, name: str) -> Tensor | None:
    """The rows of a fused map's parts in the order of kernels; None: all, as in the checkpoint."""
    if name == "qkv":
        return rows_of_qkv(config, layer)
    if name == "gate":
        return rows_of_gate(config, range(config.num_heads))
    if name == "inputs" and config.recurrent is not None:
        return recurrent_part(config.recurrent, Shard()).inputs
    return None


class AdapterReader:
    """Reads and checks an adapter's tensors."""

    def __init__(
        self, path: Path, told: AdapterConfig, max_rank: int, dtype: torch.dtype, most: int
    ) -> None:
        """Raises ConfigError for a file of more than `most` bytes."""
        self.path, self.told, self.max_rank, self.dtype = path, told, max_rank, dtype
        begin = "base_model.model."
        self.tensors = {
            name.replace(f"{begin}{BACKBONE}", f"{begin}model."): tensor
            for name, tensor in load_tensors(path, most).items()
        }
        found = (TENSOR.fullmatch(name) for name in self.tensors)
        self.modules = {match[1] for match in found if match is not None}
        self.content = hashlib.sha256()  # over the tensors in the model's order

    def check(self, parts: Iterable[AdaptedModule]) -> None:
        """Raise ConfigError for a tensor that is missing, wrong or unused."""
        by_module = {part.module: part for part in parts}
        self.check_names(by_module)
        for module, part in by_module.items():
            has_tensors = module in self.modules
            if self.told.is_target(module) != has_tensors:
                mistake = "tensors, but is not" if has_tensors else "no tensors, but is"
                raise ConfigError(
                    f"{self.path}: {module} has {mistake} in target_modules of {NAME}. "
                    f"Download the adapter again, or correct {NAME}"
                )
            if has_tensors:
                self.check_part(part)
        if not self.modules:
            raise ConfigError(f"{self.path} has no tensors. Download the adapter again")

    def check_names(self, parts: Mapping[str, AdaptedModule]) -> None:
        for name in sorted(self.tensors):
            match = TENSOR.fullmatch(name)
            refuse_whole(self.path, name)
            if match is None or match[1] not in parts:
                ends = sorted({".".join(part.split(".")[3:]) for part in parts})
                raise ConfigError(
                    f"{self.path}: the tensor {name} changes an unsupported module. Supported are "
                    f"{', '.join(ends)} of the model's layers. Use an adapter for this model that "
                    "changes only these, or merge this one into its model (peft's "
                    "merge_and_unload)"
                )
        for module in OTHERS:
            if self.told.is_target(module):
                raise ConfigError(
                    f"{self.path.with_name(NAME)}: target_modules includes {module}. {ONLY_LAYERS}"
                )

    def check_part(self, part: AdaptedModule) -> None:
        rank = self.told.rank_of(part.module)
        if rank > self.max_rank:
            raise ConfigError(
                f"{self.path}: {part.module} has rank {rank}, and the maximum is {self.max_rank}. "
                f"Raise lora.max_rank to {rank}"
            )
        self.check_tensor(tensor_name(part.module, "A"), [rank, part.width])
        self.check_tensor(tensor_name(part.module, "B"), [part.height, rank])

    def check_tensor(self, name: str, shape: list[int]) -> None:
        if name not in self.tensors:
            raise ConfigError(
                f"{self.path}: the tensor {name} is missing, but its module has the other one. "
                "Download the adapter again"
            )
        tensor = self.tensors[name]
        if (found := list(tensor.shape)) != shape:
            raise ConfigError(
                f"{self.path}: the tensor {name} has the shape {found}, but the model and {NAME} "
                f"require {shape}. Use an adapter for this model, or correct r and rank_pattern"
            )
        if tensor.dtype not in DTYPES.values():
            raise ConfigError(
                f"{self.path}: the tensor {name} has the dtype {name_of(tensor.dtype)}. Save the "
                f"adapter in a supported dtype: {', '.join(map(name_of, DTYPES.values()))}"
            )

    def read_layer(
        self, maps: FusedMaps, rows: Mapping[str, Tensor | None]
    ) -> dict[str, AdapterMap]:
        """Read a layer's maps; `rows` are their orders, by map."""
        return {
            name: self.read_map(parts, rows[name])
            for name, parts in maps.items()
            if any(part.module in self.modules for part in parts)
        }

    def read_map(self, parts: Sequence[AdaptedModule], rows: Tensor | None) -> AdapterMap:
        """Read the parts of a fused map; `rows` is the order of the rows of `up`."""
        heights, R = [part.height for part in parts], self.max_rank
        down = torch.zeros(len(parts) * R, parts[0].width, dtype=self.dtype)
        up = torch.zeros(sum(heights), len(parts) * R, dtype=self.dtype)
        for i, (part, band) in enumerate(zip(parts, torch.split(up, heights), strict=True)):
            if part.module in self.modules:
                ranks = slice(i * R, i * R + self.told.rank_of(part.module))
                self.read(tensor_name(part.module, "A"), down[ranks])
                scaling = self.told.scaling_of(part.module)
                self.read(tensor_name(part.module, "B"), band[:, ranks], scaling)
        return AdapterMap(down, up if rows is None else up[rows])

    def read(self, name: str, out: Tensor, scaling: float = 1.0) -> None:
        """Fill `out` with a tensor, scaled in float32 and rounded once."""
        stored = self.tensors[name]
        out.copy_(stored.float() * scaling)
        if not out.isfinite().all():
            raise ConfigError(
                f"{self.path}: the tensor {name} has values that are not finite, or not after "
                "scaling. Download the adapter again, or use another one"
            )
        self.content.update(f"{name} {stored.dtype} {list(stored.shape)} {scaling!r}\n".encode())
        self.content.update(stored.view(torch.uint8).numpy().data)


def load_tensors(path: Path, most: int) -> dict[str, Tensor]:
    """Read all tensors of a file. The file is not mapped, because it may change during use."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({e.strerror}). Check the file") from e
    size = int.from_bytes(data[:8], "little")
    if size > HEADER_BYTES:
        raise ConfigError(f"{path}: the header is too large. Download the adapter again")
    if len(data) > most:
        with suppress(ValueError, RecursionError, TypeError):  # a damaged header
            for name in sorted(json.loads(data[8 : 8 + size])):
                refuse_whole(path, name)
        raise ConfigError(
            f"{path} exceeds {most} bytes, the maximum for lora.max_rank. Use a smaller adapter, "
            "or raise lora.max_rank"
        )
    try:
        return tensors_of(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as e:
        raise ConfigError(f"{path} is not a valid safetensors file ({e}). Download it again") from e


def refuse_whole(path: Path, name: str) -> None:
    """Raise ConfigError for a tensor of the embedding or the head."""
    if WHOLE.search(name):
        raise ConfigError(
            f"{path}: the tensor {name} changes the embedding or the head. {ONLY_LAYERS}"
        )


def tensors_of(data: bytes) -> dict[str, Tensor]:
    """The same as safetensors' `load`, but without holding the GIL while all tensors are copied."""
    if not hasattr(os, "memfd_create"):
        return load(data)
    with open(os.memfd_create("adapter"), "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        with safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_name(module: str, matrix: str) -> str:
    return f"base_model.model.{module}.lora_{matrix}.weight"


def check_files(folder: Path) -> None:
    """Raise ConfigError unless the folder has the tensors in safetensors format."""
    if not (folder / WEIGHTS).exists():
        pickled = (folder / PICKLE).exists()
        raise ConfigError(
            f"{folder / PICKLE} is a pickle, which can run code when it is read. Save the adapter "
            f"as {WEIGHTS} with peft's safe_serialization=True"
            if pickled
            else f"{folder / WEIGHTS} is missing. Download the adapter again"
        )
    for file in (folder / WEIGHTS, folder / NAME):
        check_is_at_home(folder.resolve(), file)
        check_pointer(file)


class AdapterSlots:
    """The adapter slots of a decoder; rows with a slot's number use the adapter in it."""

    def __init__(self, decoder: Decoder, num_slots: int, max_rank: int) -> None:
        """Add slots to a decoder: `self.decoder` has them, and shares everything else."""
        ops, config, dtype = decoder.ops, decoder.config, decoder.dtype
        self.own = decoder.shard.layers(config.num_layers)
        self.rows = rows_of_maps(decoder)
        self.layers: list[LayerAdapters] = []
        for i in self.own:
            slots: dict[str, Any] = {}
            for name, parts in fused_maps(config, i).items():
                rank, rows = len(parts) * max_rank, self.rows.get(name)
                if rows is None:
                    rows = rows_of_map(config, i, name)
                height = sum(part.height for part in parts) if rows is None else len(rows)
                slots[name] = ops.adapter_slots(num_slots, rank, height, parts[0].width, dtype)
            self.layers.append(LayerAdapters(**slots))
        weights = decoder.weights
        layers = zip(weights.layers, self.layers, strict=True)
        with_slots = tuple(layer._replace(adapters=slots) for layer, slots in layers)
        self.decoder = decoder.replaced(weights=weights._replace(layers=with_slots))

    def packed(self, adapter: Adapter) -> PackedAdapter:
        """Convert an adapter to the kernels' format. May run concurrently with steps."""
        each = zip(self.layers, adapter.layers[self.own.start : self.own.stop], strict=True)
        layers = (
            {name: getattr(slots, name).packed(*self.cut(name, map)) for name, map in maps.items()}
            for slots, maps in each
        )
        return PackedAdapter(adapter.digest.hex(), adapter.rank, tuple(layers))

    def cut(self, name: str, map: AdapterMap) -> AdapterMap:
        """The change of this shard's columns of a linear map."""
        rows = self.rows.get(name)
        return map if rows is None else map._replace(up=map.up[rows])

    def put(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Set the adapter of a slot; None clears the slot. Must run between two steps."""
        nothing = dict[str, Any]()
        for i, slots in enumerate(self.layers):
            maps = nothing if adapter is None else adapter.layers[i]
            for name, own in slots._asdict().items():
                if own is not None:
                    own.put(slot, maps.get(name))


def rows_of_maps(decoder: Decoder) -> dict[str, Tensor | None]:
    """The rows of each fused map of a layer that a shard holds; None: all."""
    config, shard = decoder.config, decoder.shard
    hidden, D, heads = shard.rows(config.hidden_size), config.head_dim, shard.heads(config).query
    own = None if config.recurrent is None else recurrent_part(config.recurrent, shard)
    return {
        "qkv": shard.qkv_rows(config, None),
        "gate": None if shard.tensor == 1 else torch.arange(heads.start * D, heads.stop * D),
        "inputs": None if own is None else own.columns,
        "mamba_out": hidden,
        "out": hidden,
        "gate_up": shard.gate_up_rows(config),
        "down": hidden,
    }
