"""The models and the drafter that a config selects. Does not import torch."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specserve.config import Config
from specserve.errors import ConfigError
from specserve.models.decoder_config import Shape
from specserve.models.folder import Scaled, name_of, resolve
from specserve.models.mtp_config import LOST, has_lost_mtp, has_mtp
from specserve.models.source import is_head, open_source
from specserve_drafters import DrafterError
from specserve_drafters.base import (
    BUILT_IN,
    BUILTIN,
    EAGLE,
    drafter_options,
    find_drafter,
    find_proposer,
    find_source,
)


def served_name(config: Config) -> str:
    """What clients call the target."""
    return config.server.served_model_name or name_of(config.target)


def resolve_model(config: Config) -> Path:
    return resolve(config.target)


def resolve_draft(config: Config) -> Path:
    if config.draft is None:
        raise ConfigError(
            f"drafter {config.drafter_name!r} needs a draft model: set drafter.model, or say "
            "--draft-model"
        )
    if names_head(config):
        raise ConfigError(
            f"drafter {config.drafter_name!r} needs a draft model, and drafter.model = "
            f"{config.draft!r} is a head: take drafter.name = {EAGLE!r}, or name the head as "
            "drafter.head (--draft-head) beside a draft model"
        )
    return resolve(config.draft)


def names_head(config: Config) -> bool:
    """Whether drafter.model names a head of the target."""
    named = config.drafter.model
    return named is not None and is_head(resolve(named))


def resolve_head(config: Config) -> Path | None:
    """The folder of the head that a drafter may run, which may be the target's own; None if there
    is none.
    """
    if config.drafter.head is not None and names_head(config):
        raise ConfigError(
            f"drafter.model = {config.drafter.model!r} is a head, and so is drafter.head = "
            f"{config.drafter.head!r}: name one of them"
        )
    named = config.drafter.model if names_head(config) else config.head
    if named is not None:
        return resolve(named)
    target = resolve_model(config)
    return target if has_mtp(target) else None


def needs_head(config: Config) -> bool:
    """Whether the drafter runs a head of the target. ConfigError where it has to, and none is
    there.
    """
    sources, named = head_sources(config), config.drafter.model
    if config.drafter_name == EAGLE and named is not None and not names_head(config):
        remedy = "name the head there" if config.head is None else "drop drafter.model"
        raise ConfigError(
            f"drafter {EAGLE!r} has no use for drafter.model = {named!r}, which is no head: take "
            f"drafter.name = 'auto', which runs both, or {remedy} (--draft-model)"
        )
    is_there = resolve_head(config) is not None
    if sources == [EAGLE] and not is_there:
        raise ConfigError(
            f"drafter {EAGLE!r}, or auto with that source alone, needs a head of the target: set "
            "drafter.head (--draft-head)" + (f". {lost}" if (lost := lost_head(config)) else "")
        )
    return is_there and EAGLE in sources


def check_lost_head(config: Config) -> None:
    """ConfigError where the target has lost a head of its own that the drafter would run."""
    if EAGLE in head_sources(config) and (lost := lost_head(config)):
        raise ConfigError(lost)


def lost_head(config: Config) -> str:
    """Why there is no head of the target's own that its config.json tells of; "" if it does not."""
    target = resolve_model(config)
    return f"{target}: {LOST}" if has_lost_mtp(target) else ""


def has_to_run_head(config: Config) -> bool:
    """Whether a head was named, or is all that may guess, so that it is no use without one."""
    is_named = config.head is not None or names_head(config)
    return is_named or head_sources(config) == [EAGLE]


def head_sources(config: Config) -> list[str]:
    """The names of those that guess, as far as heads matter."""
    name = config.drafter_name
    return [*auto_options(config).sources] if name == "auto" else [name]


def needs_draft_model(config: Config) -> bool:
    """Whether the drafter uses a draft model; imports the drafter's module."""
    if config.drafter_name in ("none", EAGLE):
        return False
    try:
        if config.drafter_name == "auto":
            is_there = config.draft is not None and not names_head(config)
            return is_there and runs_draft_model(auto_options(config).sources)
        return bool(getattr(find_drafter(config.drafter_name), "needs_executor", False))
    except DrafterError as e:
        raise ConfigError(f"drafter.name: {e}") from e


def auto_options(config: Config) -> Any:
    return drafter_options("auto", config.drafter.options)


def runs_draft_model(sources: Iterable[str]) -> bool:
    """Whether one of these sources of `auto` runs the draft model; imports those of users."""
    foreign = [name for name in sources if name not in BUILT_IN]
    return "model" in sources or any(
        getattr(find_source(name), "needs_executor", False) for name in foreign
    )


def may_need_draft_model(config: Config) -> bool:
    """Whether the drafter may use a draft model; one that is not built in is not imported."""
    if config.drafter_name == "none" or config.drafter_name in BUILTIN:
        return needs_draft_model(config)
    return config.draft is not None


def check_drafter(config: Config) -> None:
    """ConfigError unless the drafter exists and takes the options; imports its module."""
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
    """Refuse sources of `auto` that are not there, and a draft model that none of them runs."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise DrafterError(f"drafter.options.sources: {twice[0]!r} is named twice: name it once")
    foreign = [name for name in names if name not in BUILT_IN]
    for name in foreign:
        find_source(name)
        drafter_options(name, options.get(name, {}))
    if idle := [name for name in options if name not in foreign]:
        known = f"it has {', '.join(foreign)}" if foreign else "it has none"
        raise DrafterError(
            f"drafter.options.source_options: {idle[0]!r} is no package.module:Class in "
            f"drafter.options.sources; {known}"
        )
    if [*names] == ["model"] and config.draft is None:
        raise DrafterError("drafter.options.sources has model alone: set drafter.model, too")
    is_run = {"model": runs_draft_model(names), EAGLE: EAGLE in names}
    # What nothing could run need not be looked at.
    is_head = any(is_run.values()) and names_head(config)
    runner = {"model": EAGLE if is_head else "model", "head": EAGLE}
    for key, source in runner.items():
        if (named := getattr(config.drafter, key)) is not None and not is_run[source]:
            raise DrafterError(
                f"drafter.{key} = {named!r} is of no use: drafter.options.sources has no source "
                f"that runs it, as {source} does"
            )


def check_drafter_name(config: Config) -> None:
    """As `check_drafter`, but without importing a drafter that is not built in."""
    if config.drafter_name not in ("none", *BUILTIN):
        package = config.drafter_name.partition(":")[0].partition(".")[0]
        with suppress(ValueError):  # an empty name
            if find_spec(package) is not None:
                return
    check_drafter(config)


def scaled_models(folders: Iterable[Path | None]) -> list[Scaled]:
    """The small models among them that have the cost of larger ones."""
    found = (open_source(folder).scaled() for folder in folders if folder is not None)
    return [scaled for scaled in found if scaled is not None]


def context_length(config: Config, target: Shape) -> int:
    """The most tokens, of prompt and output, that a request may have."""
    longest, asked = target.max_positions, config.scheduler.max_model_len
    if asked is not None and asked > longest:
        raise ConfigError(
            f"scheduler.max_model_len = {asked} is more than the model's {longest} positions: "
            "lower it, or leave it out"
        )
    return asked or longest
