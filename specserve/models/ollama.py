"""Finds models in the local store of Ollama. Does not import torch."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from specserve.errors import ConfigError

PREFIX = "ollama:"
WEIGHTS, ADAPTER = (f"application/vnd.ollama.image.{kind}" for kind in ("model", "adapter"))
REGISTRY, LIBRARY, LATEST = "registry.ollama.ai", "library", "latest"


def stores() -> list[Path]:
    """The folders where Ollama keeps models: of the user, and of the system's service."""
    named = os.environ.get("OLLAMA_MODELS")
    homes = Path.home() / ".ollama", Path("/usr/share/ollama/.ollama"), Path("/var/lib/ollama")
    return [Path(named)] if named else [home / "models" for home in homes]


def find(path: str) -> Path:
    """The GGUF file of `ollama:name:tag`. Raises ConfigError if Ollama does not have it."""
    asked = path.removeprefix(PREFIX)
    name, _, tag = asked.rpartition(":")
    if not name or "/" in tag:  # the only colon is before a port, or there is none
        name, tag = asked, ""
    parts = name.split("/")
    host = parts[:-2] or [REGISTRY]
    inner = Path(*host, *([LIBRARY, *parts] if len(parts) == 1 else parts[-2:]), tag or LATEST)
    for store in stores():
        manifest = store / "manifests" / inner
        if ".." not in inner.parts and manifest.is_file():
            return blob(path, store, read(manifest))
    there = ", ".join(sorted({known for store in stores() for known in names(store)}))
    places = ", ".join(map(str, stores()))
    has = f"It has {there}" if there else f"There are no models in {places}"
    if not name:
        raise ConfigError(f"{path} names no model. {has}. Write e.g. {PREFIX}llama3.2:1b")
    raise ConfigError(f"{path}: Ollama does not have this model. {has}. Run `ollama pull {asked}`")


def read(manifest: Path) -> dict[str, str]:
    """The digests of a model's files, by type."""
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        return {layer["mediaType"]: layer["digest"] for layer in layers}
    except OSError as e:
        raise ConfigError(
            f"{manifest}: cannot be read ({e.strerror}). Check its permissions"
        ) from e
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ConfigError(f"{manifest} is not a manifest of Ollama. Run `ollama pull` again") from e


def blob(path: str, store: Path, digests: Mapping[str, str]) -> Path:
    if ADAPTER in digests:
        raise ConfigError(f"{path} has an adapter, which is not supported. Use another model")
    digest = digests.get(WEIGHTS)
    if not isinstance(digest, str):
        raise ConfigError(f"{path} has no weights. Use another model")
    file = store / "blobs" / Path(digest.replace(":", "-")).name
    if not file.is_file():
        raise ConfigError(f"{file} is missing, but {path} needs it. Run `ollama pull` again")
    return file


def names(store: Path) -> list[str]:
    """The names of a store's models, as Ollama lists them."""
    manifests = store / "manifests"
    found = [file.relative_to(manifests).parts for file in manifests.glob("*/*/*/*")]
    short = {(REGISTRY, LIBRARY): 2, (REGISTRY,): 1}
    skipped = [short.get(parts[:2], short.get(parts[:1], 0)) for parts in found]
    return [
        f"{'/'.join(parts[skip:-1])}:{parts[-1]}"
        for parts, skip in zip(found, skipped, strict=True)
    ]
