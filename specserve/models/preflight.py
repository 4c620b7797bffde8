"""Checks a config and its models' files before slow imports."""

from pathlib import Path
from typing import NamedTuple

from specserve.config import Config
from specserve.errors import ConfigError
from specserve.models.decoder_config import Shape
from specserve.models.eagle_config import check_target
from specserve.models.folder import check_regular, resolve
from specserve.models.selection import (
    Drafters,
    check_drafter_name,
    context_length,
    resolve_drafters,
    resolve_model,
)
from specserve.models.source import head_inside, is_head, load_eagle_config, open_source
from specserve.models.weight_files import find_weights
from specserve.text.chat_template import read_template


class Folders(NamedTuple):
    """The folders of a config's models, or their GGUF files."""

    target: Path
    draft: Path | None  # None if the drafter does not use one
    head: Path | None
    drafters: Drafters


def check(config: Config) -> Folders:
    """Find all models, and raise ConfigError for the first mistake. Hub models are downloaded."""
    check_drafter_name(config)
    target = resolve_model(config)
    check_template(config.model.chat_template)
    shape = check_model(target, config.model.implementation)
    context_length(config, shape)
    check_quantize("model.quantize", config.model.quantize, target, shape)
    drafters = resolve_drafters(config)
    head = None if drafters.head is None else Path(drafters.head)
    if head is not None and head != target:
        check_head(head, shape)
    draft: Path | None = None
    named = drafters.draft  # None if speculation is off, even if drafter.model is set
    if named is None and config.drafter.model is not None:
        named = str(resolve(config.drafter.model))
    if named is not None and named != drafters.head:
        draft = Path(named)
        if (inner := head_inside(draft)) is not None:
            raise ConfigError(f"{draft} is not a draft model. Name the head in it: {inner}")
        check_quantize("drafter.quantize", config.drafter.quantize, draft, check_model(draft))
    if drafters.draft is None:
        draft = None
    return Folders(target, draft, head if drafters.runs_head else None, drafters)


def check_template(path: str | None) -> None:
    """Raise ConfigError for an unreadable chat template."""
    if path is not None:
        check_regular(file := Path(path).expanduser())
        read_template(file)


def check_head(folder: Path, target: Shape) -> None:
    """Raise ConfigError for an unreadable head, or a head that does not fit the target model. Reads
    no weights.
    """
    check_regular(folder)
    if folder.is_dir() and not (folder / "config.json").exists():
        inner = head_inside(folder)
        remedy = "Check the path" if inner is None else f"Name the head in it: {inner}"
        raise ConfigError(f"{folder} is not a head, because config.json is missing. {remedy}")
    check_target(folder, load_eagle_config(folder), target)
    if folder.is_dir():
        find_weights(folder)


def check_model(path: Path, implementation: str = "auto") -> Shape:
    """The model's shape. Raises ConfigError if files are missing. Reads no weights."""
    if is_head(path):
        raise ConfigError(
            f"{path} is an EAGLE-3 head, not a model. Pass it with --draft-head, and name the "
            "model that it was trained for"
        )
    source = open_source(path)
    shape = source.shape(implementation)
    source.scaled()
    source.check()
    return shape


def check_quantize(key: str, asked: str | None, path: Path, shape: Shape) -> None:
    """Raise ConfigError if the setting `key` quantizes a model that is quantized already."""
    if asked and shape.quantization is not None:
        flag = "--quantize" if key == "model.quantize" else "--draft-quantize"
        raise ConfigError(
            f"{key} = {asked!r} ({flag}): {path} is quantized already "
            f"({shape.quantization.words}). Remove the setting, or use the unquantized model"
        )
