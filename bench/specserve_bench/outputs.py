"""The files and folders that a command writes: what cannot be written is refused beforehand."""

import tempfile
from pathlib import Path

from specserve.errors import ConfigError
from specserve.models.folder import not_written


def check_file(flag: str, file: Path) -> None:
    """ConfigError unless the file can be written. A file that is there is left as it is."""
    check_parent(flag, file)
    is_new = not file.exists()
    try:
        file.open("ab").close()
        if is_new:
            file.unlink()  # what is measured may yet fail
    except OSError as e:
        raise refusal(flag, file, e) from e


def check_folder(flag: str, folder: Path) -> None:
    """Make the folder, if need be; ConfigError unless files can be written there."""
    check_parent(flag, folder)
    if folder.is_file():
        raise ConfigError(f"{flag} {folder}: is a file; name a folder")
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise refusal(flag, folder, e) from e


def check_parent(flag: str, path: Path) -> None:
    """A missing folder is an error, not made: the path may be mistyped."""
    if not path.parent.is_dir():
        raise ConfigError(
            f"{flag} {path}: cannot be written, as there is no folder {path.parent}; make it, or "
            "name another"
        )


def write(flag: str, file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as e:
        raise refusal(flag, file, e) from e


def refusal(flag: str, path: Path, e: OSError) -> ConfigError:
    return not_written(f"{flag} {path}", e)
