"""Measurements stored on disk between starts, in the folder of the compiled kernels."""

import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from specserve_kernels.cpu.compiler import BuildError, cache_folder, mark_used

T = TypeVar("T")

log = logging.getLogger("specserve")


def kept_file(what: str, *key: str) -> Path | None:
    """Return the file for measurements under a key; None if nothing can be stored."""
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
    try:
        return cache_folder() / f"{what}-{digest}.json"
    except (BuildError, OSError):
        return None


def read_kept(file: Path | None, kind: type[T]) -> T | None:
    """Read a value that an earlier process stored, as this type; None if there is none."""
    if file is None:
        return None
    mark_used(file)
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as e:
        log.warning("Ignoring %s, which cannot be read: %s", file, e)
        return None


def keep(file: Path, value: object) -> None:
    """Replace the file atomically, because other processes may read it at any time."""
    prefix, _, _ = file.name.partition("-")
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f"{prefix}-", suffix=".json", dir=file.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(msgspec.json.encode(value))
        os.replace(temporary, file)
    except OSError as e:
        log.debug("Cannot store %s: %s", file, e)
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
