"""What a model is read from: a folder in the Hugging Face layout, a GGUF file, or code.

Does not import torch: `Checkpoint` reads the weights of all.
"""

import os
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from specserve.errors import ConfigError
from specserve.models.decoder_config import DecoderConfig, Shape, load_config, read_config
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
from specserve.models.transformers_config import parse_any
from specserve.models.weight_files import check_is_at_home, find_weights
from specserve.text.defaults import GenerationDefaults, load_defaults, load_ends
from specserve.text.tokenizer import Tokenizer, load_tokenizer

# The files of a folder that decide the text, beside its weights.
WORDS = ("*.json", "*.jinja", "*/*.jinja", "*.model", "merges.txt", "vocab.txt")


class ModelDescription(Protocol):
    """All of a model but its weights. ConfigError says what is wrong with them."""

    def config(self) -> DecoderConfig:
        """As native code reads it."""
        ...

    def shape(self, implementation: str) -> Shape:
        """As the implementation reads it: auto, native or transformers."""
        ...

    def defaults(self) -> GenerationDefaults: ...

    def ends(self) -> dict[str, list[int]]:
        """End tokens, by the file or key that names them."""
        ...

    def tokenizer(self) -> Tokenizer: ...

    def scaled(self) -> Scaled | None: ...

    def check(self) -> None:
        """ConfigError if weights or tokenizer are missing. No weights are read."""
        ...

    def identity(self) -> Iterator[bytes]:
        """Bytes that differ between models, as far as that can be told without reading all."""
        ...


class MadeModel(ModelDescription, Protocol):
    """A model whose weights are made as they are read; an EAGLE-3 head has `head_config`."""

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
            if file.suffix == ".jinja":  # any text is a template
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
        """Regular ones, or links to such, in order: nothing else is a part of a model."""
        found = (file for pattern in patterns for file in self.path.glob(pattern))
        return sorted(file for file in found if file.is_file())

    def label(self, file: Path) -> bytes:
        return os.fsencode(file.relative_to(self.path)) + b"\0"


def open_made(path: Path) -> MadeModel:
    """The model that a file of this package names, as the class in its field `made_by` reads it."""
    assert is_made(path), f"{path} is no file of the package"
    module, _, name = read_json(path)["made_by"].partition(":")
    made: MadeModel = getattr(import_module(module), name)(path)
    return made


def open_source(path: Path) -> ModelDescription:
    check_regular(path)
    if not path.is_file():
        return Folder(path)
    if is_made(path):
        return open_made(path)
    from specserve.models.gguf.source import GgufFile  # few models need it

    return GgufFile(path)


def is_head(path: Path) -> bool:
    """Whether a model is an EAGLE-3 head, according to its config.json."""
    if is_made(path):
        return open_made(path).is_head
    file = path / "config.json"
    return file.is_file() and names_head(read_json(file))


def head_inside(folder: Path) -> Path | None:
    """A head in a folder that is none itself, as `specserve demo train-head` leaves one there."""
    if (folder / "config.json").exists():
        return None
    return next((inner for inner in sorted(folder.glob("*")) if is_head(inner)), None)


def load_eagle_config(path: Path) -> EagleConfig:
    """The head that a folder's config.json describes, or a file of the package."""
    return open_made(path).head_config() if is_made(path) else read_config(path, parse_eagle)
