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
    "adapters are off. Set lora.max_loras, the number of adapters that run at once (--max-loras, "
    "or max_loras of LLM). To load adapters over HTTP, also set lora.folder"
)


class LoRARequest(msgspec.Struct, frozen=True):
    """vLLM's class to choose an adapter. The first request with a name loads the path.

    `lora_int_id` is ignored: specserve identifies adapters by their content.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


class NamedAdapter(NamedTuple):
    name: str
    ref: AdapterRef


class AdapterNames:
    """Names of adapters, and the adapter of each name."""

    def __init__(self, config: Config, model: str) -> None:
        """Start without adapters. `model` is the name of the model without an adapter."""
        self.lora, self.model = config.lora, model
        self.known: dict[str, AdapterRef] = {}
        self.paths: dict[str, str] = {}  # as the caller wrote them

    def find(self, name: str) -> AdapterRef:
        """Return the adapter of a name. RequestError for an unknown name."""
        if self.lora.num_slots == 0:
            raise RequestError(f"unknown adapter {name!r:.100}: {NO_SLOTS}", "lora")
        if name not in self.known:
            known = ", ".join(self.known) or "none"
            message = f"unknown adapter {name!r:.100} (loaded: {known}). Load it first"
            raise RequestError(message, "lora")
        return self.known[name]

    def check_new(self, name: str, in_place: bool = False) -> None:
        """ConfigError if a new adapter cannot have the name. `in_place` allows a name in use."""
        if self.lora.num_slots == 0:
            raise ConfigError(NO_SLOTS)
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
            raise ConfigError(
                f"the name {name!r:.100} is invalid. Use 1 to {MAX_NAME} printable characters"
            )
        if "," in name:
            raise ConfigError(f"the name {name!r:.100} has a comma. Metrics use it as a separator")
        if name == self.model:
            raise ConfigError(f"the name {name!r} belongs to the model. Choose another one")
        if name in self.known and not in_place:
            raise ConfigError(
                f"the name {name!r} belongs to another adapter. Unload that first, or replace it "
                "(load_inplace)"
            )

    def put(self, name: str, ref: AdapterRef, path: str = "") -> str | None:
        """Name an adapter. Return the digest of the previous one if it has no name left."""
        before = self.known.get(name)
        self.known[name], self.paths[name] = ref, path
        return self.unnamed(before)

    def remove(self, name: str) -> str | None:
        """Remove a name. Return its digest if that has no name left. Errors: as `find`."""
        before = self.find(name)
        del self.known[name]
        return self.unnamed(before)

    def unnamed(self, ref: AdapterRef | None) -> str | None:
        is_named = ref is None or any(r.digest == ref.digest for r in self.known.values())
        return None if ref is None or is_named else ref.digest

    def is_to_be_loaded(self, asked: LoRARequest) -> bool:
        """Whether the path still has to be loaded under its name."""
        known = self.paths.get(asked.lora_name) if asked.lora_name in self.known else None
        return asked.lora_path not in ("", known)


def modules_of(config: Config, model: str) -> dict[str, Path]:
    """Return the folders of the adapters to load at start-up, and download hub ids.

    ConfigError for an invalid name or folder.
    """
    names, home = AdapterNames(config, model), config.lora.folder
    if home is not None and not Path(home).is_dir():
        raise ConfigError(f"lora.folder = {home!r}: no such folder. Check the path")
    found = dict[str, Path]()
    for name, path in config.lora.modules.items():
        names.check_new(name)
        found[name] = resolve(path)
    return found


def asked_adapters(lora: Any, lora_request: Any, number: int) -> list[LoRARequest | None]:
    """Return the choice of an adapter for each of `number` prompts."""
    if lora is not None and lora_request is not None:
        raise RequestError("lora and lora_request have the same meaning. Pass one", "lora")
    field, given = ("lora", lora) if lora_request is None else ("lora_request", lora_request)
    if not isinstance(given, list | tuple):
        given = [given] * number
    if len(given) != number:
        message = f"{field}: {number} prompts and {len(given)} adapters. Pass one per prompt"
        raise RequestError(message, field)
    for name in given:
        if name is not None and not isinstance(name, str | LoRARequest):
            raise RequestError(
                f"{field}: {name!r:.100} is not the name of an adapter. Pass the name of a loaded "
                "one",
                field,
            )
    return [LoRARequest(asked) if isinstance(asked, str) else asked for asked in given]
