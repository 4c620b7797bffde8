"""A model's folder: finding or downloading it, reading its JSON files, and errors of its disk.

Does not import torch.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec

from specserve.config import DEMO_COST
from specserve.errors import ConfigError

FULL = errno.ENOSPC, errno.EDQUOT


def is_full(error: BaseException) -> bool:
    """Whether a disk, or a user's share of one, is full. Some libraries tell only the reason."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return any(os.strerror(number) in str(error) for number in FULL)


def not_written(path: object, error: Exception) -> ConfigError:
    """The error of a file or a folder that cannot be written, with what to do about it."""
    why = error.strerror if isinstance(error, OSError) else error
    remedy = "free space there, or name one on another disk" if is_full(error) else "name another"
    return ConfigError(f"{path}: cannot be written ({why}); {remedy}")


SCALED = "specserve_scaled"  # key in config.json of a demo that costs as much as a larger model
# Nothing that executes: no *.py, and neither *.bin nor *.pth, which are pickles.
WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
# Mistral's hub repositories hold their weights twice, Llama's keep another copy in a folder.
UNWANTED = ["consolidated*", "*/*"]
GGUF, MAGIC = ".gguf", b"GGUF"  # how names of such files may end, and how the files begin
LFS = b"version https://git-lfs.github.com/spec/"  # how a Git LFS pointer begins
FIRST_PART, LATER_PART = (
    re.compile(r"-00001-of-\d{5}$"),
    re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$"),
)
# Bytes that tell a file of weights from others: at its beginning, and from all over it. Reading
# all of it would take minutes.
BEGINNING = 1 << 20
SAMPLES, SAMPLE = 512, 1 << 12
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # any one of them is enough


class Scaled(msgspec.Struct, frozen=True):
    """How a small model was given the cost of a larger one."""

    source: str  # the model whose text it gives
    like: str  # the model whose cost it has
    note: str = ""


def resolve(path: str) -> Path:
    """A model's folder or GGUF file: `path`, or a hub repository, downloaded if need be."""
    try:
        return found(path, expanded(path))
    except OSError as e:  # the system may refuse to look for a path
        raise ConfigError(f"{path}: cannot be read ({e.strerror}); check the path") from e


def expanded(path: str) -> Path:
    """With the home folder of its user in place of `~` or `~user`."""
    try:
        return Path(path).expanduser()
    except RuntimeError as e:
        raise ConfigError(f"{path}: no such user, or no home folder; check the path") from e


def found(path: str, folder: Path) -> Path:
    if folder.is_symlink() and not folder.exists():
        raise ConfigError(f"{path}: a link that leads nowhere, or to itself; check the link")
    if folder.is_dir():
        return only_gguf(folder) or folder
    if folder.exists() and (is_gguf(folder) or is_made(folder)):
        return folder
    if folder.exists():
        check_pointer(folder)
        raise ConfigError(
            f"{path}: a file that does not begin with GGUF; name the folder that holds "
            "config.json, or a GGUF file"
        )
    if folder.suffix == GGUF:
        raise ConfigError(f"{path}: no such file; check the path")
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ConfigError(f"{path}: no such folder; check the path, or give a hub id like org/name")
    return download(path)


def is_made(path: Path) -> bool:
    """Whether it is a file of this package that names the code that makes the model."""
    return path.parent == DEMO_COST


def download(path: str) -> Path:
    """The folder of a hub repository, downloaded if need be."""
    from huggingface_hub import snapshot_download  # slow to import, and only needed to download

    try:
        return Path(snapshot_download(path, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except Exception as e:  # the hub's client lets through whatever its transport raises
        reason = str(e).partition("\n")[0]
        if is_full(e):
            raise ConfigError(
                f"{path}: cannot be downloaded ({reason}); free space on the disk of the hub's "
                "cache, or set HF_HOME to a folder on another one"
            ) from e
        raise ConfigError(
            f"{path}: neither a local folder nor a model that the hub gives out ({reason}); check "
            "the name, the network and, for a gated model, `hf auth login`"
        ) from e


def only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder without safetensors; of a split one the first part. Files of
    another name count if none is named *.gguf.

    ConfigError if there are several.
    """
    if any(folder.glob("*.safetensors")):
        return None
    named = sorted(f for f in folder.glob(f"*{GGUF}") if not LATER_PART.search(f.name))
    files = named or sorted(filter(is_gguf, folder.glob("*")))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{folder}: {len(files)} models, {names}; name one of the files")
    return files[0] if files else None


def is_gguf(file: Path) -> bool:
    """By the file's first bytes. A file named *.gguf is meant to be one, whatever it holds."""
    return file.suffix == GGUF or beginning(file, len(MAGIC)) == MAGIC


def beginning(file: Path, size: int) -> bytes:
    """The first bytes of a regular file; none if it cannot be read: whoever opens it says why."""
    try:
        with file.open("rb") if file.is_file() else BytesIO() as opened:
            return opened.read(size)
    except OSError:
        return b""


def check_pointer(file: Path) -> None:
    """ConfigError for a Git LFS pointer, which stands for a file that was not fetched."""
    if beginning(file, len(LFS)) == LFS:
        raise ConfigError(
            f"{file}: a Git LFS pointer, not the file itself. Run `git lfs pull` in its "
            "repository, or download the file"
        )


def name_of(path: str) -> str:
    """A model's name: that of its folder, that of its GGUF file without ending, or its hub id."""
    file = expanded(path)
    if is_made(file):
        return file.name.removesuffix(".json")
    if file.suffix == GGUF or is_gguf(file):
        return FIRST_PART.sub("", file.name.removesuffix(GGUF))
    return file.resolve().name if file.is_dir() else path


def check_regular(path: Path) -> None:
    """ConfigError for a pipe, a socket or a device among the files of a folder, or in the place of
    a model's one file: to open it, or to read all of it, may take for ever.
    """
    for file in (path, *path.glob("*"), *path.glob("*/*.jinja")):
        try:
            mode = file.stat().st_mode
        except OSError:  # whoever opens it says why it cannot be read
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ConfigError(
                f"{file}: no regular file but a pipe, a socket or a device; put the model's own "
                "file there, or remove it"
            )


def check_tokenizer(folder: Path) -> None:
    if not any((folder / name).exists() for name in TOKENIZERS):
        raise ConfigError(
            f"{folder}: no tokenizer ({', '.join(TOKENIZERS)}); copy the tokenizer's files of the "
            "original model into the folder"
        )
    for name in (*TOKENIZERS, "merges.txt"):
        check_pointer(folder / name)


def samples(file: Path, beginning: int) -> Iterator[bytes]:
    """Its size, so many bytes at its beginning, and some at places all over it."""
    size = file.stat().st_size
    with file.open("rb") as data:
        yield str(size).encode()
        yield data.read(beginning)
        for i in range(1, SAMPLES + 1):
            data.seek(max(0, size * i // SAMPLES - SAMPLE))
            yield data.read(SAMPLE)


def refuse_transformers(path: Path, implementation: str) -> None:
    """ConfigError where transformers is to compute a model that it cannot read."""
    if implementation == "transformers":
        raise ConfigError(
            f"{path}: model.implementation = 'transformers' reads folders in the Hugging Face "
            "layout alone; leave it out, or take the model in that form"
        )


def scaled_from(folder: Path) -> Scaled | None:
    """How a scaled model was made; None for any other model."""
    file = folder / "config.json"
    try:
        return msgspec.convert(read_json(file).get(SCALED), Scaled | None)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{file}: {SCALED}: {e}; scale the model again") from e


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file that has to be there."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise ConfigError(
            f"{path}: missing; a model is a folder in the Hugging Face layout, with config.json, "
            "*.safetensors and a tokenizer, or a .gguf file"
        ) from e
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({e.strerror}); check its permissions") from e
    except (ValueError, RecursionError) as e:
        check_pointer(path)
        raise ConfigError(f"{path}: no valid JSON ({e}); download the file again") from e
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: holds no JSON object; download the file again")
    return fields
