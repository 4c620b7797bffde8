"""A checkpoint's tensors: safetensors files mapped into memory, read one tensor at a time."""

import ctypes
import mmap
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.folder import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PICKLES = (".bin", ".pt", ".pth")
READ_BYTES = 4 << 20  # of a file that are resident at a time
IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")  # a buffer that old versions saved


class Checkpoint:
    """The tensors of a folder by name. The files stay mapped for as long as this object lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}  # tensor name -> the open file that holds it
        if (folder / SINGLE).exists():
            file = open_file(folder / SINGLE)
            self.files = dict.fromkeys(file.keys(), file)
        elif (folder / INDEX).exists():
            self.open_shards(weight_map(folder))
        else:
            raise ConfigError(f"{folder}: {missing_weights(folder)}")

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def open_shards(self, shards: Mapping[str, str]) -> None:
        opened = {shard: open_file(self.folder / shard) for shard in set(shards.values())}
        held = {shard: set(file.keys()) for shard, file in opened.items()}
        for name, shard in shards.items():
            if name not in held[shard]:
                raise ConfigError(
                    f"{self.folder / INDEX}: {name} is said to be in {shard} and is not; download "
                    "the model again"
                )
            self.files[name] = opened[shard]

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a checkpoint that lacks a tensor, has a misshapen one, or one nobody would read.

        A tensor too many means that the config describes another model than the weights are of.
        """
        for name, shape in shapes.items():
            if name not in self.files:
                raise ConfigError(
                    f"{self.folder}: the tensor {name} is missing, and config.json asks for it; "
                    "download the model again, or correct config.json"
                )
            self.check_tensor(name, shape)
        for name in self.files:
            if name not in shapes and not IGNORED.fullmatch(name):
                raise ConfigError(
                    f"{self.folder}: the tensor {name} has no place in the model that config.json "
                    "describes; correct config.json, or take a checkpoint of a supported "
                    "architecture"
                )

    def check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        header = self.files[name].get_slice(name)
        found = tuple(header.get_shape())
        if found != shape:
            raise ConfigError(
                f"{self.folder}: the tensor {name} has the shape {list(found)}, and config.json "
                f"asks for {list(shape)}; correct config.json, or download the model again"
            )
        if header.get_dtype() not in DTYPES:
            raise ConfigError(
                f"{self.folder}: the tensor {name} has the type {header.get_dtype()}; supported "
                f"are {', '.join(DTYPES)}, so take an unquantized checkpoint"
            )

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.files[name].get_slice(name).get_dtype()]

    def read(self, name: str, out: Tensor) -> None:
        """Copy a tensor into `out`, of the same shape and any dtype, and let go of its pages."""
        source = self.files[name].get_tensor(name)
        height = max(1, READ_BYTES * len(source) // source.nbytes)
        done = 0
        for part, rows in zip(torch.split(source, height), torch.split(out, height), strict=True):
            rows.copy_(part)
            done += part.nbytes
            drop_pages(source.data_ptr(), done)


def weight_map(folder: Path) -> dict[str, str]:
    """Which shard holds each tensor, every shard being a file of this folder."""
    shards = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise ConfigError(f"{folder / INDEX}: no weight_map from names to files; download it again")
    for shard in set(shards.values()):
        check_shard(folder, shard)
    return shards


def check_shard(folder: Path, shard: str) -> None:
    """A weight_map comes with the model: it must not make us open other files."""
    if PurePosixPath(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
        raise ConfigError(
            f"{folder / INDEX}: weight_map names {shard!r}, which is no *.safetensors file of "
            "this folder; do not use this checkpoint unless you trust its source, and then put "
            "the file into the folder"
        )
    if not (folder / shard).exists():
        raise ConfigError(
            f"{folder / shard}: missing, and {INDEX} asks for it; download the model again"
        )
    target = (folder / shard).resolve()
    if not is_at_home(folder.resolve(), target):
        raise ConfigError(
            f"{folder / shard}: a link that leaves the folder, to {target}; put the file itself "
            "into the folder"
        )


def is_at_home(home: Path, target: Path) -> bool:
    """Whether a file lies in a folder, or where the hub's cache keeps the files of this one.

    There snapshots/<revision>/* are links into blobs/ of the repository, which may be links
    in their turn, into a blobs/ that all repositories share.
    """
    repository = home.parent.parent
    stores = repository / "blobs", repository.parent / "blobs"
    is_cached = home.parent.name == "snapshots" and repository.name.startswith("models--")
    return target.parent == home or (is_cached and any(s in target.parents for s in stores))


def missing_weights(folder: Path) -> str:
    if any(path.suffix in PICKLES for path in folder.iterdir()):
        return (
            "the weights are pickles (*.bin, *.pt, *.pth), which can run code when they are read "
            "and are refused; convert them to safetensors"
        )
    return f"no weights; there must be {SINGLE}, or {INDEX} and the files that it names"


def open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as e:
        raise ConfigError(
            f"{path}: no readable safetensors file, cut short or damaged ({e}); download it again"
        ) from e


def drop_pages(start: int, size: int) -> None:
    """Let the kernel take back the mapped pages that lie wholly inside [start, start + size).

    Only advice: where it is refused or unknown, the pages go when the file is closed.
    """
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0 and _madvise is not None:
        _madvise(first, length, mmap.MADV_DONTNEED)


def _find_madvise() -> Any:
    if not hasattr(mmap, "MADV_DONTNEED"):
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


_madvise = _find_madvise()
