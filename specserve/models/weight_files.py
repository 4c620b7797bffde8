"""Which files of a folder hold a model's weights, and their tensors' names; no tensor is read."""

import json
import os
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from specserve.errors import ConfigError
from specserve.models.folder import check_pointer, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth")
LONGEST_HEADER = 100_000_000  # bytes that safetensors allows


class Slice(NamedTuple):
    """A tensor's shape and type, without its values."""

    shape: tuple[int, ...]
    dtype: str

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


def find_weights(folder: Path) -> dict[str, str] | None:
    """Which shard holds each tensor; None where SINGLE holds all. ConfigError for no weights."""
    if (folder / SINGLE).exists():
        check_pointer(folder / SINGLE)
        return None
    if (folder / INDEX).exists():
        return weight_map(folder)
    if any(path.suffix in PICKLES for path in folder.iterdir()):
        reason = (
            "the weights are pickles (*.bin, *.pt, *.pth), which can run code when they are read "
            "and are refused; convert them to safetensors"
        )
    else:
        reason = f"no weights; there must be {SINGLE}, or {INDEX} and the files that it names"
    raise ConfigError(f"{folder}: {reason}")


def tensor_names(folder: Path) -> Collection[str]:
    """Of all weights. safetensors itself would import numpy for that."""
    shards = find_weights(folder)
    return read_header(folder / SINGLE) if shards is None else shards


def read_header(path: Path) -> Collection[str]:
    """What the JSON object at the beginning of a safetensors file describes; 8 bytes before it have
    its length.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, LONGEST_HEADER)))
    except (OSError, ValueError, RecursionError) as e:
        raise unreadable(path, e) from e
    if not isinstance(header, dict):
        raise unreadable(path, "its header is no object")
    return header.keys()


def unreadable(path: Path, reason: object) -> ConfigError:
    return ConfigError(
        f"{path}: no readable safetensors file, cut short or damaged ({reason}); download it again"
    )


def weight_map(folder: Path) -> dict[str, str]:
    """Which shard holds each tensor, every shard being a file of this folder."""
    shards = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise ConfigError(f"{folder / INDEX}: no weight_map from names to files; download it again")
    for shard in set(shards.values()):
        check_shard(folder, shard)
    return shards


def check_shard(folder: Path, shard: str) -> None:
    """ConfigError unless the shard is in the folder: a weight_map must not open other files."""
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
    check_is_at_home(folder.resolve(), folder / shard)
    check_pointer(folder / shard)


def check_is_at_home(home: Path, file: Path) -> None:
    """ConfigError for a link out of a folder: not the operator but the model names its files. The
    operator's own cache of the hub may hold them.
    """
    target = Path(os.path.realpath(file))
    if not is_at_home(home, target) and not links_into_cache(home, target):
        raise ConfigError(
            f"{file}: a link that leaves the folder, to {target}, which is not in the hub's cache. "
            "Put the file itself into the folder"
        )


def is_at_home(home: Path, target: Path) -> bool:
    """Whether a file lies below a folder, or where the hub's cache keeps the files of this one.

    There snapshots/<revision>/* are links into blobs/ of the repository, which may be links
    in their turn, into a blobs/ that all repositories share.
    """
    repository = home.parent.parent
    stores = repository / "blobs", repository.parent / "blobs"
    is_cached = home.parent.name == "snapshots" and repository.name.startswith("models--")
    below = [home, *(store.resolve() for store in stores if is_cached)]
    return any(folder in target.parents for folder in below)


def links_into_cache(home: Path, target: Path) -> bool:
    """Whether a folder outside of the hub's cache has a link to a file there, as older clients of
    the hub wrote them into a local folder.
    """
    from huggingface_hub.constants import HF_HUB_CACHE  # few folders need it

    cache = Path(HF_HUB_CACHE).resolve()
    is_blob = target.parent.name == "blobs" and cache in target.parents
    return is_blob and cache not in home.parents
