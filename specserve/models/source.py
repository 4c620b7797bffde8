"""What a model is read from: a folder in the Hugging Face layout, a GGUF file, or a scaled demo.

Does not import torch: `Checkpoint` reads the weights of all.
"""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

from specserve.config import DEMO_COST
from specserve.errors import ConfigError
from specserve.models.decoder_config import DecoderConfig, load_config, read_config
from specserve.models.folder import (
    Scaled,
    check_pointer,
    check_regular,
    check_tokenizer,
    scaled_from,
)
from specserve.models.shape import Shape
from specserve.models.transformers_config import parse_any
from specserve.models.weight_files import check_is_at_home, find_weights
from specserve.text.defaults import GenerationDefaults, load_defaults, load_ends
from specserve.text.tokenizer import Tokenizer, load_tokenizer

# The files of a folder that decide the text, beside its weights.
WORDS = ("*.json", "*.jinja", "*/*.jinja", "*.model", "merges.txt", "vocab.txt")
# Bytes that tell a file of weights from others: at its beginning, and from all over it. Reading
# all of it would take minutes.
BEGINNING = 1 << 20
SAMPLES, SAMPLE = 512, 1 << 12


class Source(Protocol):
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


def open_source(path: Path) -> Source:
    check_regular(path)
    if not path.is_file():
        return Folder(path)
    if path.parent == DEMO_COST:
        from specserve.models.scaled_demo import ScaledDemo

        return ScaledDemo(path)
    from specserve.models.gguf.source import GgufFile  # few models need it

    return GgufFile(path)
