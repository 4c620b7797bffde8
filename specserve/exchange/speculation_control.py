"""Changes of speculation while requests run: computes the resulting config."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from specserve.config import Config, DrafterConfig, Natural, SpeculationConfig
from specserve.errors import ConfigError
from specserve.models.folder import resolve
from specserve.models.selection import (
    check_drafter,
    names_head,
    resolve_drafters,
    runs_draft_model,
)
from specserve.models.source import is_head
from specserve_drafters.base import AUTO_SOURCES, BUILT_IN, EAGLE, HEADS, USUAL, DrafterError
from specserve_drafters.candidates import MAX_NODES

MODEL = "model"  # the source that is a draft model
AT_START = (
    "The KV of a head is part of the target model's blocks, so load it at start-up (--draft-head)"
)
NO_HEAD = f"no draft head was loaded at start-up. {AT_START}"
WITHOUT_MODEL = "none", "ngram", EAGLE  # drafters


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change of speculation; null fields stay unchanged.

    drafter         auto, none, ngram, model, eagle, or the package.module:Class of the start; a
                    new drafter starts with its default options
    sources         draft sources of auto
    options         other options of the drafter, by name; null: the default
    max_nodes       maximum draft tokens per request and step; 0 turns speculation off
    max_step_nodes  maximum draft tokens per step
    """

    drafter: str | None = None
    sources: list[str] | None = None
    options: dict[str, Any] | None = None
    max_nodes: Annotated[int, Meta(ge=0, le=MAX_NODES)] | None = None
    max_step_nodes: Natural | None = None


def change_of(
    drafter: str | None,
    sources: Sequence[str] | None,
    options: Mapping[str, Any] | None,
    max_nodes: int | None,
    max_step_nodes: int | None,
) -> Change:
    """Return the change that Python arguments describe. ConfigError for a wrong type."""
    named = [*sources] if isinstance(sources, list | tuple) else sources
    knobs = {**options} if isinstance(options, Mapping) else options
    given = dict(
        zip(
            Change.__struct_fields__,
            (drafter, named, knobs, max_nodes, max_step_nodes),
            strict=True,
        )
    )
    try:
        return msgspec.convert(given, Change)
    except msgspec.ValidationError as e:
        raise ConfigError(str(e)) from e


class SpeculationControl:
    """The speculation config of an engine, and its changes. The methods may read files.

    A draft model that no drafter uses stays configured until it is removed.
    """

    def __init__(self, config: Config) -> None:
        self.config = self.first = config
        named = [config.drafter.name, *config.drafter.options.get("sources", ())]
        self.foreign = frozenset(named) - {*BUILT_IN, *AUTO_SOURCES, "none"}  # users' own code
        self.draft = config.drafter.model, config.drafter.quantize
        self.head = config.drafter.head  # loaded at start-up
        if names_head(config):
            self.head, self.draft = config.drafter.model, (None, None)

    def settle(self, config: Config) -> None:
        """Store the config that the engine uses now."""
        self.config = config
        if config.drafter.model not in (None, self.head):
            self.draft = config.drafter.model, config.drafter.quantize

    def changed(self, change: Change) -> Config:
        """Return the config after a change. ConfigError if its parts do not fit together.

        The caller checks files and drafters.
        """
        drafter, speculation = self.config.drafter, self.config.speculation
        options = dict(drafter.options)
        if change.drafter is not None and change.drafter != drafter.name:
            drafter, options = msgspec.structs.replace(drafter, name=change.drafter), {}
        if "sources" in (change.options or {}):
            raise ConfigError("options: sources is a separate field. Move it out of options")
        options = merged(options, change.options or {})
        if change.sources is not None:
            if drafter.name != "auto":
                raise ConfigError(
                    f"sources: only drafter auto has sources, not {drafter.name}. Also set drafter "
                    "= auto"
                )
            options["sources"] = change.sources
        self.refuse_code([drafter.name, *(change.sources or ())])
        limits = {"max_nodes": change.max_nodes, "max_step_nodes": change.max_step_nodes}
        limits = {name: value for name, value in limits.items() if value is not None}
        config = self.with_parts(plain(drafter, options=options), plain(speculation, **limits))
        if MODEL in (change.sources or ()) and config.draft is None:
            raise ConfigError(
                f"sources: {MODEL!r} needs a draft model. Load one first "
                "(POST /v1/speculation/draft-model)"
            )
        is_run = drafter.name == EAGLE or EAGLE in (change.sources or ())
        if is_run and not resolve_drafters(self.first).runs_head:
            raise ConfigError(NO_HEAD)
        check_options(config)
        return config

    def refuse_code(self, names: list[str]) -> None:
        """ConfigError for names of code that was not loaded at start-up."""
        for name in names:
            if name in HEADS:
                raise ConfigError(f"unknown drafter or source {name!r}: {HEADS[name]}")
            if name not in {*BUILT_IN, *AUTO_SOURCES, "none", *self.foreign}:
                raise ConfigError(
                    f"unknown drafter or source {name!r:.100}. At run time, choose a built-in one "
                    "or one that was loaded at start-up"
                )

    def with_draft_model(self, model: str, quantize: str | None) -> Config:
        """Return the config with another draft model."""
        drafter = self.config.drafter
        self.check_takes_model()
        if is_head(resolve(model)):
            raise ConfigError(f"model: {model!r} is a draft head, not a draft model. {AT_START}")
        options = dict(drafter.options)
        if drafter.name == "auto" and MODEL not in options.get("sources", USUAL):
            options["sources"] = [*options["sources"], MODEL]
        asked = plain(drafter, options=options, model=model, quantize=quantize)
        return self.with_parts(asked, plain(self.config.speculation))

    def check_takes_model(self) -> None:
        name = self.config.drafter.name
        if name in WITHOUT_MODEL:
            raise ConfigError(
                f"drafter {name!r} uses no draft model. Change to auto first "
                "(PATCH /v1/speculation)"
            )

    def without_draft_model(self) -> Config:
        drafter = self.config.drafter
        if drafter.name in WITHOUT_MODEL:
            self.draft = None, None
            return self.config
        sources = [name for name in drafter.options.get("sources", USUAL) if name != MODEL]
        if drafter.name != "auto" or not sources or runs_draft_model(sources):
            raise ConfigError(
                f"drafter {drafter.name!r} needs its draft model. Change the drafter or its "
                "sources first (PATCH /v1/speculation)"
            )
        options = {**drafter.options, "sources": sources}
        asked = plain(drafter, options=options, model=None, quantize=None)
        self.draft = None, None
        return self.with_parts(asked, plain(self.config.speculation))

    def with_parts(self, drafter: dict[str, Any], speculation: dict[str, Any]) -> Config:
        """Return the config with these sections, and with a draft model if the drafter runs one."""
        name, sources = drafter["name"], drafter["options"].get("sources", USUAL)
        try:
            runs = runs_draft_model(sources) if name == "auto" else name not in WITHOUT_MODEL
        except DrafterError as e:
            raise ConfigError(str(e)) from e
        is_head_run = name == EAGLE or (name == "auto" and EAGLE in sources)
        drafter["head"] = self.head if is_head_run else None
        if drafter["model"] == self.head or not runs:
            drafter |= {"model": None, "quantize": None}
        if runs and drafter["model"] is None:
            drafter["model"], drafter["quantize"] = self.draft
        try:
            sections = {
                "drafter": msgspec.convert(drafter, DrafterConfig),
                "speculation": msgspec.convert(speculation, SpeculationConfig),
            }
            return msgspec.structs.replace(self.config, **sections)
        except (msgspec.ValidationError, ValueError) as e:
            raise ConfigError(str(e)) from e


class SpeculationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of speculation, in the order of a log line."""

    drafter: str
    draft_model: str | None
    quantize: str | None  # of the draft model
    sources: tuple[str, ...]
    options: dict[str, Any]  # without sources
    max_nodes: int
    max_step_nodes: int


def settings_of(
    config: Config, sources: tuple[str, ...], has_draft_model: bool
) -> SpeculationSettings:
    return SpeculationSettings(
        drafter=config.drafter.name,
        draft_model=config.draft if has_draft_model else None,
        quantize=config.drafter.quantize,
        sources=sources,
        options={k: v for k, v in config.drafter.options.items() if k != "sources"},
        max_nodes=config.max_nodes,
        max_step_nodes=config.max_step_nodes,
    )


def differences(before: SpeculationSettings, after: SpeculationSettings) -> str:
    """Return the differences on one line, like "max_nodes 63 -> 8"."""
    pairs = zip(plain(before).items(), plain(after).values(), strict=True)
    changes = [f"{name} {worded(a)} -> {worded(b)}" for (name, a), b in pairs if a != b]
    return "; ".join(changes) or "nothing differs"


def worded(value: Any) -> str:
    """Return a value as JSON on one line, with control characters escaped."""
    return json.dumps(value, default=repr)


def check_options(config: Config) -> None:
    """ConfigError for options that the drafter lacks, also if the limits are 0."""
    if config.drafter.name == "none" and config.drafter.options:
        raise ConfigError("options: drafter none has no options")
    check_drafter(msgspec.structs.replace(config, speculation=SpeculationConfig()))


def plain(section: msgspec.Struct, **other: Any) -> dict[str, Any]:
    return {**msgspec.structs.asdict(section), **other}


def merged(options: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with other values; None removes an option."""
    every = {**options, **other}
    return {name: value for name, value in every.items() if value is not None}
