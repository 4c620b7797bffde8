"""Finds or downloads a model's folder, reads its JSON files, and reports disk errors.

Does not import torch.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec

from specserve.config import DEMO_COST
from specserve.errors import ConfigError
from specserve.models import ollama
from specserve.models.hub import FIRST_PART, GGUF, LATER_PART, fetch

FULL = errno.ENOSPC, errno.EDQUOT


def is_full(error: BaseException) -> bool:
    """Whether a disk or a disk quota is full. Some libraries give only the message, not errno."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return any(os.strerror(number) in str(error) for number in FULL)


def not_written(path: object, error: Exception) -> ConfigError:
    """The error for a file or a folder that cannot be written."""
    why = error.strerror if isinstance(error, OSError) else error
    remedy = "Free some space, or use another disk" if is_full(error) else "Name another path"
    return ConfigError(f"{path}: cannot be written ({why}). {remedy}")


SCALED = "specserve_scaled"  # key in config.json of a demo model padded to a larger model's compute
# Without code: no *.py, and no *.bin and *.pth, which are pickles.
WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
# Second copies of the weights in repositories of Mistral and Llama models.
UNWANTED = ["consolidated*", "*/*"]
MAGIC = b"GGUF"  # first bytes of GGUF files
LFS = b"version https://git-lfs.github.com/spec/"  # first bytes of a Git LFS pointer
# Bytes that identify a file of weights: at its beginning, and at SAMPLES places. Reading the whole
# file would take minutes.
BEGINNING = 1 << 20
SAMPLES, SAMPLE = 512, 1 << 12
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them is required


class Scaled(msgspec.Struct, frozen=True):
    """A small model that is padded to the compute of a larger one."""

    source: str  # the model that makes the text
    like: str  # the model whose compute it has
    note: str = ""


def resolve(path: str) -> Path:
    """A model's folder or GGUF file: `path`, or a hub repository, downloaded if necessary."""
    try:
        return found(path, expanded(path))
    except OSError as e:  # the system may refuse to look up a path
        raise ConfigError(f"{path}: cannot be read ({e.strerror}). Check the path") from e


def expanded(path: str) -> Path:
    """The path with `~` or `~user` replaced by the user's home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as e:
        raise ConfigError(f"{path}: unknown user, or no home folder. Check the path") from e


def found(path: str, folder: Path) -> Path:
    if path.startswith(ollama.PREFIX):
        return ollama.find(path)
    if folder.is_symlink() and not folder.exists():
        raise ConfigError(f"{path} is a broken link. Check the link")
    if folder.is_dir():
        return only_gguf(folder) or folder
    if folder.exists() and (is_gguf(folder) or is_made(folder)):
        return folder
    if folder.exists():
        check_pointer(folder)
        raise ConfigError(
            f"{path} is not a GGUF file. Name a GGUF file, or the folder with config.json"
        )
    if folder.suffix == GGUF and ":" not in path:
        raise ConfigError(f"{path}: no such file. Check the path")
    if path.startswith(("/", ".", "~")) or path.partition(":")[0].count("/") > 1:
        raise ConfigError(f"{path}: no such folder. Check the path, or name a hub id like org/name")
    return download(path)


def is_made(path: Path) -> bool:
    """Whether a path is a file of this package that names code which generates the model."""
    return path.parent == DEMO_COST


def download(path: str) -> Path:
    """The folder or the GGUF file of a hub repository, downloaded if necessary. `path` is a hub id,
    or `id:type` for a GGUF file.
    """
    from huggingface_hub import snapshot_download  # slow to import, and only downloads need it

    repo, _, type = path.partition(":")
    try:
        if type and (file := fetch(repo, type)) is not None:
            return file
        folder = Path(snapshot_download(repo, allow_patterns=WANTED, ignore_patterns=UNWANTED))
        return folder if any(folder.glob("*.safetensors")) else fetch(repo, "") or folder
    except ConfigError:
        raise
    except Exception as e:  # the hub's client does not wrap errors of its transport
        reason = str(e).partition("\n")[0]
        if is_full(e):
            raise ConfigError(
                f"{path}: cannot be downloaded ({reason}). Free some space on the disk of the hub "
                "cache, or set HF_HOME to a folder on another disk"
            ) from e
        raise ConfigError(
            f"{path} is neither a local folder nor an accessible hub model ({reason}). Check the "
            "name, the network and, for a gated model, `hf auth login`"
        ) from e


def only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder without safetensors; for a split model, the first part. Files with
    other names count if no file is named *.gguf.

    Raises ConfigError if there are several models.
    """
    if any(folder.glob("*.safetensors")):
        return None
    named = sorted(f for f in folder.glob(f"*{GGUF}") if not LATER_PART.search(f.name))
    files = named or sorted(filter(is_gguf, folder.glob("*")))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{folder} has {len(files)} models ({names}). Name one of the files")
    return files[0] if files else None


def is_gguf(file: Path) -> bool:
    """Whether a file is named *.gguf, or begins with GGUF's magic bytes."""
    return file.suffix == GGUF or beginning(file, len(MAGIC)) == MAGIC


def beginning(file: Path, size: int) -> bytes:
    """The first bytes of a regular file; empty if it cannot be read."""
    try:
        with file.open("rb") if file.is_file() else BytesIO() as opened:
            return opened.read(size)
    except OSError:
        return b""


def check_pointer(file: Path) -> None:
    """Raise ConfigError for a Git LFS pointer, i.e. a file that was not fetched."""
    if beginning(file, len(LFS)) == LFS:
        raise ConfigError(
            f"{file} is a Git LFS pointer, not the file itself. Run `git lfs pull` in its "
            "repository, or download the file"
        )


def name_of(path: str) -> str:
    """A model's name: the name of its folder, of its GGUF file without suffix, or its hub id."""
    if path.startswith(ollama.PREFIX):
        return path.removeprefix(ollama.PREFIX)
    file = expanded(path)
    if is_made(file):
        return file.name.removesuffix(".json")
    if file.suffix == GGUF or is_gguf(file):
        return FIRST_PART.sub("", file.name.removesuffix(GGUF))
    return file.resolve().name if file.is_dir() else path


def check_regular(path: Path) -> None:
    """Raise ConfigError for a pipe, a socket or a device at `path`, or in the folder `path`:
    opening or reading it could block for ever.
    """
    for file in (path, *path.glob("*"), *path.glob("*/*.jinja")):
        try:
            mode = file.stat().st_mode
        except OSError:  # opening the file will raise the error
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ConfigError(
                f"{file} is a pipe, a socket or a device, not a regular file. Replace it with the "
                "model's file, or remove it"
            )


def check_tokenizer(folder: Path) -> None:
    if not any((folder / name).exists() for name in TOKENIZERS):
        raise ConfigError(
            f"{folder} has no tokenizer ({', '.join(TOKENIZERS)}). Copy the tokenizer's files of "
            "the original model into the folder"
        )
    for name in (*TOKENIZERS, "merges.txt"):
        check_pointer(folder / name)


def samples(file: Path, beginning: int) -> Iterator[bytes]:
    """Yield a file's size, its first `beginning` bytes, and SAMPLES samples of the whole file."""
    size = file.stat().st_size
    with file.open("rb") as data:
        yield str(size).encode()
        yield data.read(beginning)
        for i in range(1, SAMPLES + 1):
            data.seek(max(0, size * i // SAMPLES - SAMPLE))
            yield data.read(SAMPLE)


def refuse_transformers(path: Path, implementation: str) -> None:
    """Raise ConfigError if transformers shall run a model that it cannot read."""
    if implementation == "transformers":
        raise ConfigError(
            f"{path}: model.implementation = 'transformers' needs a folder in the Hugging Face "
            "layout. Remove the setting, or use the model in this layout"
        )


def scaled_from(folder: Path) -> Scaled | None:
    """The description of a scaled model; None for other models."""
    file = folder / "config.json"
    try:
        return msgspec.convert(read_json(file).get(SCALED), Scaled | None)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{file}: {SCALED}: {e}. Scale the model again") from e


def text_part(written: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a config.json's text model: in `text_config`, or next to other fields."""
    part = written.get("text_config") or written
    if not isinstance(part, Mapping):
        raise ValueError(f"text_config = {part!r} is not an object")
    return part


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises ConfigError if the file is missing or invalid."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise ConfigError(
            f"{path} is missing. Name a folder in the Hugging Face layout, with config.json, "
            "*.safetensors and a tokenizer, or a .gguf file"
        ) from e
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({e.strerror}). Check its permissions") from e
    except (ValueError, RecursionError) as e:
        check_pointer(path)
        raise ConfigError(f"{path} is not valid JSON ({e}). Download the file again") from e
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} is not a JSON object. Download the file again")
    return fields
