"""Keys in a file: one a line; empty lines and lines that begin with # are skipped."""

from pathlib import Path

from specserve.errors import ConfigError

SCOPES = "speculation", "cache", "adapters"  # of admin keys: what they may change


def read_keys(path: Path) -> list[str]:
    """At least one key; ConfigError for none, or one that a header cannot carry."""
    keys = read_lines(path, "API")
    for number, key in enumerate(keys, 1):
        check_key(path, number, key)
    return keys


def read_admin_keys(path: Path) -> dict[str, frozenset[str]]:
    """Admin keys and their scopes, from lines that are a key, which may do all, or a key, a space
    and scopes with commas between them. ConfigError as for `read_keys`.
    """
    keys = dict[str, frozenset[str]]()
    for number, line in enumerate(read_lines(path, "admin"), 1):
        key, _, rest = line.partition(" ")
        check_key(path, number, key)
        scopes = [scope.strip() for scope in rest.split(",")] if rest else [*SCOPES]
        for scope in scopes:
            if scope not in SCOPES:
                raise ConfigError(
                    f"{path}: admin key number {number} has the scope {scope!r}: scopes are "
                    f"{', '.join(SCOPES)}"
                )
        keys[key] = keys.get(key, frozenset()) | frozenset(scopes)
    return keys


def read_lines(path: Path, kind: str) -> list[str]:
    try:
        lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: the {kind} keys cannot be read ({e}): check the path") from e
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ConfigError(f"{path}: holds no {kind} key: write one on each line")
    return found


def check_key(path: Path, number: int, key: str) -> None:
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"{path}: key number {number} has a space or a character beyond ASCII: write one "
            "key a line, and nothing beside it"
        )
