"""Reads a checkpoint's tensors from mapped files, one tensor at a time."""

import ctypes
import mmap
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.folder import is_made
from specserve.models.gguf.tensors import GgufTensors
from specserve.models.quantized.stored import Stored, is_finite
from specserve.models.source import open_made
from specserve.models.weight_files import INDEX, SINGLE, Slice, find_weights, unreadable

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READ_BYTES = 4 << 20  # maximum resident bytes of a file
IGNORED = re.compile(  # buffers from old versions, which are computed from config.json
    r"(.*\.)?(rotary_emb\..+|(cos|sin)_cached|inv_freq|masked_bias|position_ids"
    r"|act_fn\.(beta|eps))"  # constants of xIELU
)


def unquantized(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Stored]:
    """The expected tensors of an unquantized checkpoint."""
    return {name: Stored(shape, tuple(DTYPES)) for name, shape in shapes.items()}


class TensorView(NamedTuple):
    """A part of a file's tensor, with the interface of a safetensors file with one tensor."""

    file: Any
    name: str  # of the whole tensor
    header: Slice  # shape and dtype of the part
    part: Callable[[Tensor], Tensor]  # returns the part as a view of the whole tensor

    def get_slice(self, name: str) -> Slice:
        return self.header

    def get_tensor(self, name: str) -> Tensor:
        return self.part(self.file.get_tensor(self.name))


class Checkpoint:
    """The tensors of a folder, a GGUF file or a generated model, by name.

    The files stay mapped during the lifetime of this object.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}  # tensor name -> the open file with the tensor
        self.paths: dict[int, Path] = {}  # id() of an open file -> its path
        self.other_parts: list[str] = []  # parts of a multimodal checkpoint that are not read
        shards = None if folder.is_file() else find_weights(folder)
        if shards is None:
            file = self.open(folder if folder.is_file() else folder / SINGLE)
            self.files = dict.fromkeys(file.keys(), file)
        else:
            self.open_shards(shards)
        self.show(self.files)

    def open(self, path: Path) -> Any:
        if path == self.folder:  # one file is the whole model
            return open_made(path).tensors() if is_made(path) else GgufTensors(path)
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as e:
            raise unreadable(path, e) from e
        self.paths[id(file)] = path
        return file

    def show(self, files: dict[str, Any]) -> None:
        """Replace the visible tensors: tensor name -> the open file with the tensor."""
        self.files = files
        self.suffixes: dict[str, list[str]] = {}  # module -> suffixes of its tensors
        for name in files:
            module, _, suffix = name.rpartition(".")
            self.suffixes.setdefault(module, []).append(suffix)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def open_shards(self, shards: Mapping[str, str]) -> None:
        opened = {shard: self.open(self.folder / shard) for shard in set(shards.values())}
        held = {shard: set(file.keys()) for shard, file in opened.items()}
        for name, shard in shards.items():
            if name not in held[shard]:
                raise ConfigError(
                    f"{self.folder / INDEX}: {name} is missing from {shard}. Download the model "
                    "again"
                )
            self.files[name] = opened[shard]

    def view(self, name: str, part: Callable[[Tensor], Tensor]) -> TensorView:
        stored = self.stored(name)
        shape = part(torch.empty(stored.shape, device="meta")).shape
        return TensorView(self.files[name], name, Slice(tuple(shape), stored.dtypes[0]), part)

    def check(self, expected: Mapping[str, Stored]) -> None:
        """Raise ConfigError if a tensor is missing, has a wrong shape or dtype, or is unused.

        An unused tensor means that config.json describes another model than the weights.
        """
        for name, wanted in expected.items():
            if name not in self.files:
                raise ConfigError(
                    f"{self.folder}: the tensor {name} is missing, but config.json requires it. "
                    "Download the model again, or correct config.json"
                )
            self.check_tensor(name, wanted)
        for name in self.files:
            if name not in expected and not IGNORED.fullmatch(name):
                raise ConfigError(
                    f"{self.folder}: the tensor {name} is not part of the model that config.json "
                    "describes. Correct config.json, or use a checkpoint of a supported "
                    "architecture"
                )

    def check_tensor(self, name: str, wanted: Stored) -> None:
        found = self.stored(name)
        if found.shape != wanted.shape:
            raise ConfigError(
                f"{self.folder}: the tensor {name} has the shape {list(found.shape)}, but "
                f"config.json requires {list(wanted.shape)}. Correct config.json, or download the "
                "model again"
            )
        if found.dtypes[0] not in wanted.dtypes:
            raise ConfigError(
                f"{self.folder}: the tensor {name} has the dtype {found.dtypes[0]}, and supported "
                f"are {', '.join(wanted.dtypes)}. Use an unquantized checkpoint"
            )

    def stored(self, name: str) -> Stored:
        header = self.files[name].get_slice(name)
        return Stored(tuple(header.get_shape()), (header.get_dtype(),))

    def parts(self, module: str) -> dict[str, Stored]:
        """The tensors `module.suffix`, by suffix."""
        suffixes = self.suffixes.get(module, [])
        return {suffix: self.stored(f"{module}.{suffix}") for suffix in suffixes}

    def tensors(self, module: str, suffixes: Iterable[str]) -> dict[str, Tensor]:
        """The tensors `module.suffix`, by suffix; mapped, not copied."""
        names = {suffix: f"{module}.{suffix}" for suffix in suffixes}
        return {suffix: self.files[name].get_tensor(name) for suffix, name in names.items()}

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor; None if it is quantized or missing."""
        return DTYPES.get(self.stored(name).dtypes[0]) if name in self.files else None

    def read(self, name: str, out: Tensor) -> None:
        """Copy a tensor into `out`, of the same shape and any dtype, and drop its mapped pages.
        Raises ConfigError for values that are not finite in `out`.
        """
        source = self.files[name].get_tensor(name)
        height = max(1, READ_BYTES * len(source) // source.nbytes)
        done = 0
        for part, rows in zip(torch.split(source, height), torch.split(out, height), strict=True):
            rows.copy_(part)
            if not is_finite(rows):  # while the rows are in the CPU cache
                raise self.not_finite(name)
            done += len(part)
            drop_tensor(source[:done])

    def not_finite(self, name: str) -> ConfigError:
        path, stored_name = self.origin(name)
        return ConfigError(
            f"{path}: the tensor {stored_name} has values that are not finite (NaN or infinity). "
            "Download the model again, or use another checkpoint"
        )

    def origin(self, name: str) -> tuple[Path, str]:
        """The file with a tensor, and the tensor's name in it."""
        file: Any = self.files.get(name)  # None: `name` is only transformers' name for it
        while isinstance(file, TensorView):
            file, name = file.file, file.name
        if isinstance(file, GgufTensors):
            place, entry, _ = file.parts[name]
            return entry.file, place.name
        return self.paths.get(id(file), self.folder), name


def _find_madvise() -> Any:
    if not hasattr(mmap, "MADV_DONTNEED"):
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


_madvise = _find_madvise()


def drop_tensor(mapped: Tensor) -> None:
    """Drop the mapped pages of a tensor, which may be a strided view."""
    steps = zip(mapped.shape, mapped.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    drop_pages(mapped.data_ptr(), span * mapped.itemsize)


def drop_pages(start: int, size: int) -> None:
    """Advise the kernel to drop the mapped pages that are entirely in [start, start + size).

    If this fails or is unsupported, closing the file drops them.
    """
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0 and _madvise is not None:
        _madvise(first, length, mmap.MADV_DONTNEED)
