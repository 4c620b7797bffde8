"""Writes a model's folder, completely or not at all, with at most one shard in memory."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.folder import not_written
from specserve.models.weight_files import INDEX, PICKLES, SINGLE

SHARD_BYTES = 1 << 30
WEIGHTS = (".safetensors", ".gguf", *PICKLES)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `target` at the end, or removed after an error."""
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists. Remove it, or name another folder")
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: the folder {target.parent} does not exist. Create it first")
    try:
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True
        ) as temporary:
            folder = Path(temporary) / target.name
            folder.mkdir()
            yield folder
            # Some libraries write files that only the owner can read.
            for file in filter(Path.is_file, folder.rglob("*")):
                file.chmod(folder.stat().st_mode & 0o666)
            os.rename(folder, target)
    except (OSError, SafetensorError) as e:
        raise not_written(target, e) from e


def write_json(file: Path, fields: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, target: Path) -> None:
    """Copy all files except weights, their index and config.json; of subfolders, the configs of
    sentence-transformers' modules, and templates.
    """
    for path in (*source.glob("*/*.json"), *source.glob("*/*.jinja")):
        if path.is_file():
            (inner := target / path.parent.name).mkdir(exist_ok=True)
            shutil.copyfile(path, inner / path.name)
    for path in source.iterdir():
        is_weights = path.suffix in WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and path.name != "config.json":
            shutil.copyfile(path, target / path.name)


def write_weights(
    folder: Path, sizes: Mapping[str, int], make: Callable[[str], Mapping[str, Tensor]]
) -> None:
    """Write the tensors that `make` returns for each name; `sizes` are their approximate bytes."""
    shards, total = split(sizes, SHARD_BYTES), 0
    weight_map: dict[str, str] = {}
    for file, names in shards.items():
        tensors = {key: tensor for name in names for key, tensor in make(name).items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
        del tensors  # before the next shard
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX, index)


def split(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Divide names into files of at most `limit` bytes each; a larger tensor gets its own file."""
    groups: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if groups[-1] and size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {
        f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)
    }
