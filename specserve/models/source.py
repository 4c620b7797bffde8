"""Model sources: a folder in the Hugging Face layout, a GGUF file, or code that generates a model.

Does not import torch: `Checkpoint` reads the weights.
"""

import os
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from specserve.errors import ConfigError
from specserve.models.decoder_config import DecoderConfig, Shape
from specserve.models.eagle_config import EagleConfig, names_head
from specserve.models.eagle_config import parse as parse_eagle
from specserve.models.folder import (
    BEGINNING,
    Scaled,
    check_pointer,
    check_regular,
    check_tokenizer,
    is_made,
    read_json,
    samples,
    scaled_from,
)
from specserve.models.parse_config import load_config, read_config
from specserve.models.transformers_config import parse_any
from specserve.models.weight_files import check_is_at_home, find_weights
from specserve.text.defaults import GenerationDefaults, load_defaults, load_ends
from specserve.text.tokenizer import Tokenizer, load_tokenizer

# The files of a folder, in addition to its weights, that affect the text.
WORDS = ("*.json", "*.jinja", "*/*.jinja", "*.model", "merges.txt", "vocab.txt")


class ModelDescription(Protocol):
    """Everything of a model except its weights. Methods raise ConfigError for invalid files."""

    def config(self) -> DecoderConfig:
        """The model's config for the native implementation."""
        ...

    def shape(self, implementation: str) -> Shape:
        """The model's shape for an implementation: auto, native or transformers."""
        ...

    def defaults(self) -> GenerationDefaults: ...

    def ends(self) -> dict[str, list[int]]:
        """End tokens, by the file or key that names them."""
        ...

    def tokenizer(self) -> Tokenizer: ...

    def scaled(self) -> Scaled | None: ...

    def check(self) -> None:
        """Raise ConfigError if weights or tokenizer are missing. Reads no weights."""
        ...

    def identity(self) -> Iterator[bytes]:
        """Yield bytes that identify the model: texts, and samples of the weights."""
        ...


class MadeModel(ModelDescription, Protocol):
    """A model whose weights are generated on reading; an EAGLE-3 head has `head_config`."""

    @property
    def is_head(self) -> bool: ...

    def head_config(self) -> EagleConfig: ...

    def tensors(self) -> Any:
        """Tensors by name, with the interface of a safetensors file."""
        ...


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> DecoderConfig:
        return load_config(self.path)

    def shape(self, implementation: str) -> Shape:
        return read_config(self.path, partial(parse_any, implementation=implementation))

    def defaults(self) -> GenerationDefaults:
        return load_defaults(self.path)

    def ends(self) -> dict[str, list[int]]:
        return load_ends(self.path)

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)

    def scaled(self) -> Scaled | None:
        return scaled_from(self.path)

    def check(self) -> None:
        find_weights(self.path)
        check_tokenizer(self.path)
        home = self.path.resolve()
        for file in self.files(*WORDS):
            if file.resolve() != home / file.relative_to(self.path):
                check_is_at_home(home, file)
            if file.suffix == ".jinja":  # a pointer would be a valid template
                check_pointer(file)

    def identity(self) -> Iterator[bytes]:
        try:
            for file in self.files(*WORDS):
                text = file.read_bytes()
                yield from (self.label(file), str(len(text)).encode(), text)
            for file in self.files("*.safetensors"):
                yield self.label(file)
                yield from samples(file, BEGINNING)
        except OSError as e:
            raise ConfigError(f"{e.filename}: cannot be read ({e.strerror})") from e

    def files(self, *patterns: str) -> list[Path]:
        """The sorted regular files, or links to regular files, that match the patterns."""
        found = (file for pattern in patterns for file in self.path.glob(pattern))
        return sorted(file for file in found if file.is_file())

    def label(self, file: Path) -> bytes:
        return os.fsencode(file.relative_to(self.path)) + b"\0"


def open_made(path: Path) -> MadeModel:
    """The model that a file of this package describes; its field `made_by` names the class."""
    assert is_made(path), f"{path} is not a file of the package"
    module, _, name = read_json(path)["made_by"].partition(":")
    made: MadeModel = getattr(import_module(module), name)(path)
    return made


def open_source(path: Path) -> ModelDescription:
    check_regular(path)
    if not path.is_file():
        return Folder(path)
    if is_made(path):
        return open_made(path)
    from specserve.models.gguf.source import GgufFile  # slow to import, and rarely needed

    return GgufFile(path)


def is_head(path: Path) -> bool:
    """Whether a model is an EAGLE-3 head, according to its config.json."""
    if is_made(path):
        return open_made(path).is_head
    file = path / "config.json"
    return file.is_file() and names_head(read_json(file))


def head_inside(folder: Path) -> Path | None:
    """A head in a subfolder, which `specserve demo train-head` writes; None if there is none."""
    if (folder / "config.json").exists():
        return None
    return next((inner for inner in sorted(folder.glob("*")) if is_head(inner)), None)


def load_eagle_config(path: Path) -> EagleConfig:
    """The config of a head from a folder, or from a file of the package."""
    return open_made(path).head_config() if is_made(path) else read_config(path, parse_eagle)
