"""Checks of a config and its models' files, before anything heavy is imported."""

from pathlib import Path
from typing import NamedTuple

from specserve.config import Config
from specserve.errors import ConfigError
from specserve.models.families import DecoderConfig, load_config
from specserve.models.folder import check_tokenizer, scaled_from
from specserve.models.weight_files import find_weights
from specserve.selection import (
    check_drafter_name,
    context_length,
    may_need_draft_model,
    resolve_draft,
    resolve_model,
)


class Folders(NamedTuple):
    """The folders of a config's models."""

    target: Path
    draft: Path | None  # None where no drafter could use one


def check(config: Config) -> Folders:
    """ConfigError for the first mistake. A model that a hub id names is downloaded."""
    check_drafter_name(config)
    target, draft = resolve_model(config), None
    shape = check_folder(target)
    context_length(config, shape)
    if may_need_draft_model(config):
        draft = resolve_draft(config)
        check_vocabulary_size(shape, draft, check_folder(draft))
    return Folders(target, draft)


def check_folder(folder: Path) -> DecoderConfig:
    """The parsed config.json; ConfigError if files are missing. No weights are read."""
    shape = load_config(folder)
    scaled_from(folder)
    find_weights(folder)
    check_tokenizer(folder)
    return shape


def check_vocabulary_size(target: DecoderConfig, folder: Path, draft: DecoderConfig) -> None:
    """ConfigError unless the vocabularies are of one size, as token ids must mean the same."""
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft model {folder}: vocab_size is {draft.vocab_size}, and the target's is "
            f"{target.vocab_size}; take a draft model of the target's own family"
        )
