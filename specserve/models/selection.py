"""Resolves the models and the drafter of a config. Does not import torch."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from specserve.config import Config
from specserve.errors import ConfigError
from specserve.models.decoder_config import Shape
from specserve.models.folder import Scaled, name_of, resolve
from specserve.models.mtp_config import LOST, has_lost_mtp, has_mtp
from specserve.models.source import is_head, open_source
from specserve_drafters import DrafterError
from specserve_drafters.base import (
    AUTO_SOURCES,
    BUILT_IN,
    EAGLE,
    drafter_options,
    find_drafter,
    find_proposer,
    find_source,
)


def served_name(config: Config) -> str:
    """The target model's name for clients."""
    return config.server.served_model_name or name_of(config.target)


def resolve_model(config: Config) -> Path:
    return resolve(config.target)


class Drafters(msgspec.Struct, frozen=True):
    """The draft sources and draft models of a config.

    sources     names of the draft sources: the sources of auto, else the drafter
    draft       the draft model's folder, if the drafter may run one
    head        the folder of the EAGLE-3 head, or the target model's folder for its MTP layers
    needs_head  whether the config names the head, or the head is the only draft source
    lost_head   an error if config.json of the target model describes a head that is missing; or ""
    """

    sources: tuple[str, ...]
    draft: str | None = None
    head: str | None = None
    needs_head: bool = False
    lost_head: str = ""

    @property
    def runs_head(self) -> bool:
        """Whether the head is a draft source, and must be loaded at start-up."""
        return self.head is not None and EAGLE in self.sources


def resolve_drafters(config: Config) -> Drafters:
    """Resolve draft models. Raises ConfigError for models that do not fit the drafter. Does not
    import a user's drafter.

    If drafter.model names a head, the result has it in `head`.
    """
    name, head, is_model_head = config.drafter_name, config.head, names_head(config)
    if is_model_head:
        check_head_as_model(config)
        head = config.drafter.model
    elif name == EAGLE and config.drafter.model is not None:
        remedy = "name the head there" if head is None else "remove drafter.model"
        raise ConfigError(
            f"drafter {EAGLE!r} does not use drafter.model = {config.drafter.model!r}, which is "
            f"not a head. Use drafter.name = 'auto', which runs both, or {remedy} (--draft-model)"
        )
    sources = tuple(auto_options(config).sources) if name == "auto" else (name,)
    target, lost = resolve_model(config), ""
    folder = None if head is None else resolve(head)
    if folder is None and has_mtp(target):
        folder = target
    if folder is None and EAGLE in sources and has_lost_mtp(target):
        lost = f"{target}: {LOST}"
    if folder is None and sources == (EAGLE,):
        raise ConfigError(
            f"drafter {EAGLE!r}, or auto with only this source, needs a head for the target model. "
            f"Set drafter.head (--draft-head){lost and '. '}{lost}"
        )
    draft = None
    if not is_model_head and config.draft is not None and may_run_draft_model(config):
        draft = str(resolve(config.draft))
    needs_head = head is not None or sources == (EAGLE,)
    return Drafters(sources, draft, None if folder is None else str(folder), needs_head, lost)


def names_head(config: Config) -> bool:
    """Whether drafter.model names a draft head."""
    named = config.drafter.model
    return named is not None and is_head(resolve(named))


def check_head_as_model(config: Config) -> None:
    """Raise ConfigError if drafter.model names a head, but the drafter needs something else."""
    model, name = config.drafter.model, config.drafter_name
    if config.drafter.head is not None:
        raise ConfigError(
            f"drafter.model = {model!r} and drafter.head = {config.drafter.head!r} are both heads. "
            "Name only one"
        )
    if name not in ("none", "auto", EAGLE):
        raise ConfigError(
            f"drafter {name!r} needs a draft model, but drafter.model = {model!r} is a head. Use "
            f"drafter.name = {EAGLE!r}, or name the head in drafter.head (--draft-head) next to a "
            "draft model"
        )
    if config.drafter.quantize is not None:
        raise ConfigError(
            f"drafter.quantize = {config.drafter.quantize!r} does not apply to heads. Remove it"
        )


def may_run_draft_model(config: Config) -> bool:
    """Whether the drafter may run a draft model. Does not import a user's drafter."""
    name = config.drafter_name
    if name != "auto":
        return name not in ("none", "ngram", EAGLE)
    try:
        return runs_draft_model(auto_options(config).sources)
    except DrafterError as e:
        raise ConfigError(f"drafter.name: {e}") from e


def needs_draft_model(config: Config, drafters: Drafters) -> bool:
    """Whether the drafter runs the draft model. Imports the drafter's module."""
    name = config.drafter_name
    if name in ("none", *BUILT_IN):
        return name != "none" and drafters.draft is not None
    try:
        needs = bool(getattr(find_drafter(name), "needs_executor", False))
    except DrafterError as e:
        raise ConfigError(f"drafter.name: {e}") from e
    if needs and drafters.draft is None:
        raise ConfigError(
            f"drafter {name!r} needs a draft model. Set drafter.model (--draft-model)"
        )
    return needs


def auto_options(config: Config) -> Any:
    return drafter_options("auto", config.drafter.options)


def runs_draft_model(sources: Iterable[str]) -> bool:
    """Whether one of the sources of `auto` runs the draft model. Imports sources of users."""
    foreign = [name for name in sources if name not in AUTO_SOURCES]
    return "model" in sources or any(
        getattr(find_source(name), "needs_executor", False) for name in foreign
    )


def check_drafter(config: Config) -> None:
    """Raise ConfigError unless the drafter exists and accepts the options. Imports its module."""
    if config.drafter_name == "none":
        return
    try:
        options = drafter_options(config.drafter_name, config.drafter.options)
        if config.drafter_name == "auto":
            check_sources(config, options.sources, options.source_options)
        else:
            find_proposer(config.drafter_name)
    except DrafterError as e:
        raise ConfigError(str(e)) from e


def check_sources(
    config: Config, names: Sequence[str], options: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise DrafterError for unknown sources of `auto`, and for draft models without a source."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise DrafterError(f"drafter.options.sources names {twice[0]!r} twice. Name it once")
    foreign = [name for name in names if name not in AUTO_SOURCES]
    for name in foreign:
        find_source(name)
        drafter_options(name, options.get(name, {}))
    if idle := [name for name in options if name not in foreign]:
        known = f"Sources with options: {', '.join(foreign)}" if foreign else "Remove the options"
        raise DrafterError(
            f"drafter.options.source_options: {idle[0]!r} is not a package.module:Class in "
            f"drafter.options.sources. {known}"
        )
    if [*names] == ["model"] and config.draft is None:
        raise DrafterError("drafter.options.sources has only model. Set drafter.model, too")
    is_run = {"model": runs_draft_model(names), EAGLE: EAGLE in names}
    # The model's files are read only if a source could run it.
    is_head = any(is_run.values()) and names_head(config)
    runner = {"model": EAGLE if is_head else "model", "head": EAGLE}
    for key, source in runner.items():
        if (named := getattr(config.drafter, key)) is not None and not is_run[source]:
            raise DrafterError(
                f"drafter.{key} = {named!r} has no effect: no source in drafter.options.sources "
                f"runs it. Add the source {source!r}, or remove drafter.{key}"
            )


def check_drafter_name(config: Config) -> None:
    """The same as `check_drafter` for built-in drafters. For others, check only the package."""
    if config.drafter_name not in ("none", *BUILT_IN):
        package = config.drafter_name.partition(":")[0].partition(".")[0]
        with suppress(ValueError):  # an empty name
            if find_spec(package) is not None:
                return
    check_drafter(config)


def scaled_models(folders: Iterable[Path | None]) -> list[Scaled]:
    """The models that are padded to the compute of larger ones."""
    found = (open_source(folder).scaled() for folder in folders if folder is not None)
    return [scaled for scaled in found if scaled is not None]


def context_length(config: Config, target: Shape) -> int:
    """The maximum number of prompt and output tokens of a request."""
    longest, asked = target.max_positions, config.scheduler.max_model_len
    if asked is not None and asked > longest:
        raise ConfigError(
            f"scheduler.max_model_len = {asked} exceeds the model's {longest} positions. Lower it, "
            "or remove it"
        )
    return asked or longest
