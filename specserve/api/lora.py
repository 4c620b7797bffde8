"""The adapters that requests choose by name. Does not import torch."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from specserve.config import Config
from specserve.errors import ConfigError, RequestError
from specserve.exchange.messages import AdapterRef
from specserve.models.folder import resolve

MAX_NAME = 256  # characters
NO_SLOTS = (
    "there can be no adapters here: start with lora.max_loras (--max-loras, or max_loras of LLM), "
    "the number of those whose requests run at once"
)


class LoRARequest(msgspec.Struct, frozen=True):
    """vLLM's way to choose an adapter: what is at the path is loaded when the name first comes.
    The number is vLLM's own; here the content alone tells adapters apart.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


class NamedAdapter(NamedTuple):
    name: str
    ref: AdapterRef


class AdapterNames:
    """Names of adapters, and what each stands for at present."""

    def __init__(self, config: Config, model: str) -> None:
        """`model` is the name of the model without an adapter."""
        self.lora, self.model = config.lora, model
        self.known: dict[str, AdapterRef] = {}
        self.paths: dict[str, str] = {}  # as they were given

    def find(self, name: str) -> AdapterRef:
        """RequestError for a name that is not known."""
        if self.lora.num_slots == 0:
            raise RequestError(f"there is no adapter {name!r:.100}: {NO_SLOTS}", "lora")
        if name not in self.known:
            known = f"there are {', '.join(self.known)}" if self.known else "there is none"
            raise RequestError(f"there is no adapter {name!r:.100}: {known}; load it first", "lora")
        return self.known[name]

    def check_new(self, name: str, in_place: bool = False) -> None:
        """ConfigError unless an adapter may have the name; `in_place` of one that has it."""
        if self.lora.num_slots == 0:
            raise ConfigError(NO_SLOTS)
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
            raise ConfigError(
                f"the name {name!r:.100}: it has 1 to {MAX_NAME} characters that can be shown"
            )
        if "," in name:
            raise ConfigError(f"the name {name!r:.100}: leave out commas, as metrics list names")
        if name == self.model:
            raise ConfigError(f"the name {name!r}: the model itself has it; take another one")
        if name in self.known and not in_place:
            raise ConfigError(
                f"the name {name!r}: an adapter has it; unload that first, or replace it "
                "(load_inplace)"
            )

    def put(self, name: str, ref: AdapterRef, path: str = "") -> str | None:
        """Name an adapter; returns the digest that no name has any more."""
        before = self.known.get(name)
        self.known[name], self.paths[name] = ref, path
        return self.unnamed(before)

    def remove(self, name: str) -> str | None:
        """Drop a name; the digest that no name has any more. Errors: as of `find`."""
        before = self.find(name)
        del self.known[name]
        return self.unnamed(before)

    def unnamed(self, ref: AdapterRef | None) -> str | None:
        is_named = ref is None or any(r.digest == ref.digest for r in self.known.values())
        return None if ref is None or is_named else ref.digest

    def is_to_be_loaded(self, asked: LoRARequest) -> bool:
        """Whether its name stands for nothing yet, or for what was read at another path."""
        known = self.paths.get(asked.lora_name) if asked.lora_name in self.known else None
        return asked.lora_path not in ("", known)


def modules_of(config: Config, model: str) -> dict[str, Path]:
    """The folders of adapters that are there from the start; those that hub ids name are
    downloaded. ConfigError for a name or a folder that cannot be.
    """
    names, home = AdapterNames(config, model), config.lora.folder
    if home is not None and not Path(home).is_dir():
        raise ConfigError(f"lora.folder = {home!r}: no such folder; check the path")
    found = dict[str, Path]()
    for name, path in config.lora.modules.items():
        names.check_new(name)
        found[name] = resolve(path)
    return found


def asked_adapters(lora: Any, lora_request: Any, number: int) -> list[LoRARequest | None]:
    """What chooses the adapter of each of so many prompts."""
    if lora is not None and lora_request is not None:
        raise RequestError("lora and lora_request: they choose the same; give one", "lora")
    field, given = ("lora", lora) if lora_request is None else ("lora_request", lora_request)
    if not isinstance(given, list | tuple):
        given = [given] * number
    if len(given) != number:
        raise RequestError(f"{field}: {number} prompts and {len(given)}: give one each", field)
    for name in given:
        if name is not None and not isinstance(name, str | LoRARequest):
            raise RequestError(
                f"{field}: {name!r:.100} is no name of an adapter: load one, and give its name",
                field,
            )
    return [LoRARequest(asked) if isinstance(asked, str) else asked for asked in given]
