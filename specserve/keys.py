"""API keys in a file: one a line; empty lines and lines that begin with # are skipped."""

from pathlib import Path

from specserve.errors import ConfigError


def read_keys(path: Path) -> list[str]:
    """At least one key; ConfigError for none, or one that a header cannot carry."""
    try:
        lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: the API keys cannot be read ({e}): check the path") from e
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path}: holds no API key: write one on each line")
    for number, key in enumerate(keys, 1):
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(
                f"{path}: key number {number} has a space or a character beyond ASCII: write one "
                "key a line, and nothing beside it"
            )
    return keys
