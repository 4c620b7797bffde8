"""Reads key files: one key per line, without empty lines and lines that begin with #."""

from pathlib import Path

from specserve.errors import ConfigError

SCOPES = "speculation", "cache", "adapters", "sleep"  # of admin keys


def read_keys(path: Path) -> list[str]:
    """Return the keys of a file. ConfigError for no key, or for an invalid key."""
    keys = read_lines(path, "API")
    for number, key in enumerate(keys, 1):
        check_key(path, number, key)
    return keys


def read_admin_keys(path: Path) -> dict[str, frozenset[str]]:
    """Return admin keys and their scopes. ConfigError as `read_keys`, or for an unknown scope.

    A line is a key, a space and scopes separated by commas. A key without scopes has all.
    """
    keys = dict[str, frozenset[str]]()
    for number, line in enumerate(read_lines(path, "admin"), 1):
        key, _, rest = line.partition(" ")
        check_key(path, number, key)
        scopes = [scope.strip() for scope in rest.split(",")] if rest else [*SCOPES]
        for scope in scopes:
            if scope not in SCOPES:
                raise ConfigError(
                    f"{path}: admin key {number} has the unknown scope {scope!r}. The scopes are "
                    f"{', '.join(SCOPES)}"
                )
        keys[key] = keys.get(key, frozenset()) | frozenset(scopes)
    return keys


def read_lines(path: Path, kind: str) -> list[str]:
    try:
        lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: the {kind} keys cannot be read ({e}). Check the path") from e
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ConfigError(f"{path} contains no {kind} key. Write one per line")
    return found


def check_key(path: Path, number: int, key: str) -> None:
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"{path}: key {number} has a space or a character that is not printable ASCII. Write "
            "one key per line, without other text"
        )
