"""Finds the weight files of a folder, and the names of their tensors. Reads no tensors."""

import json
import os
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from specserve.errors import ConfigError
from specserve.models.folder import check_pointer, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth")
LONGEST_HEADER = 100_000_000  # bytes, the limit of safetensors


class Slice(NamedTuple):
    """A tensor's shape and dtype, without its values."""

    shape: tuple[int, ...]
    dtype: str

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


def find_weights(folder: Path) -> dict[str, str] | None:
    """The shard of each tensor; None if SINGLE has all. Raises ConfigError without weights."""
    if (folder / SINGLE).exists():
        check_pointer(folder / SINGLE)
        return None
    if (folder / INDEX).exists():
        return weight_map(folder)
    if any(path.suffix in PICKLES for path in folder.iterdir()):
        reason = (
            "the weights are pickles (*.bin, *.pt, *.pth), which can run code when they are read. "
            "Convert them to safetensors"
        )
    else:
        reason = f"no weights. Add {SINGLE}, or {INDEX} and the files that it names"
    raise ConfigError(f"{folder}: {reason}")


def tensor_names(folder: Path) -> Collection[str]:
    """The names of all tensors, without safetensors, which would import numpy."""
    shards = find_weights(folder)
    return read_header(folder / SINGLE) if shards is None else shards


def read_header(path: Path) -> Collection[str]:
    """The keys of a safetensors file's header: a JSON object after 8 bytes with its length."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, LONGEST_HEADER)))
    except (OSError, ValueError, RecursionError) as e:
        raise unreadable(path, e) from e
    if not isinstance(header, dict):
        raise unreadable(path, "the header is not an object")
    return header.keys()


def unreadable(path: Path, reason: object) -> ConfigError:
    return ConfigError(f"{path} is not a valid safetensors file ({reason}). Download it again")


def weight_map(folder: Path) -> dict[str, str]:
    """The shard of each tensor; all shards must be files of the folder."""
    shards = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise ConfigError(f"{folder / INDEX}: weight_map is missing or invalid. Download it again")
    for shard in set(shards.values()):
        check_shard(folder, shard)
    return shards


def check_shard(folder: Path, shard: str) -> None:
    """Raise ConfigError unless the shard is in the folder, because a weight_map is not trusted."""
    if PurePosixPath(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
        raise ConfigError(
            f"{folder / INDEX}: weight_map names {shard!r}, which is not a *.safetensors file of "
            "this folder. If you trust the source of the checkpoint, copy the file into the folder"
        )
    if not (folder / shard).exists():
        raise ConfigError(
            f"{folder / shard} is missing, but {INDEX} needs it. Download the model again"
        )
    check_is_at_home(folder.resolve(), folder / shard)
    check_pointer(folder / shard)


def check_is_at_home(home: Path, file: Path) -> None:
    """Raise ConfigError for a link out of the folder `home`, because a model's files are not
    trusted. Links into the operator's hub cache are allowed.
    """
    target = Path(os.path.realpath(file))
    if not is_at_home(home, target) and not links_into_cache(home, target):
        raise ConfigError(
            f"{file} is a link to {target}, outside of the folder and the hub cache. Copy the file "
            "into the folder"
        )


def is_at_home(home: Path, target: Path) -> bool:
    """Whether a file is in the folder `home`, or in the hub cache's storage of this folder.

    In the hub cache, files below snapshots/<revision> are links into blobs/ of the repository.
    These may be links, too, into a blobs/ folder that all repositories share.
    """
    below = [home]
    for folder in (home, *home.parents):
        repository = folder.parent.parent
        if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
            below += [(place / "blobs").resolve() for place in (repository, repository.parent)]
    return any(folder in target.parents for folder in below)


def links_into_cache(home: Path, target: Path) -> bool:
    """Whether `home` is outside of the hub cache, and `target` in it. Older hub clients wrote links
    into the cache to local folders.
    """
    from huggingface_hub.constants import HF_HUB_CACHE  # slow to import, and rarely needed

    cache = Path(HF_HUB_CACHE).resolve()
    is_blob = target.parent.name == "blobs" and cache in target.parents
    return is_blob and cache not in home.parents
