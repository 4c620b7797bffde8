"""Values of flags: bounded numbers, lists, and files and folders that can be written; `--json`."""

import argparse
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from specserve.errors import ConfigError
from specserve.models.folder import not_written
from specserve_bench.machine import refusal

T = TypeVar("T")


def integer(low: int, high: int = 10**6) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return parse


at_least_1, natural, above_0 = integer(1), integer(0, 2**53 - 1), number(1e-6, 1e12)


def listed(
    kind: Callable[[str], T], known: Collection[str] = (), repeats: bool = False
) -> Callable[[str], tuple[T, ...]]:
    """A list with commas. A repeated value would be measured once, so it is refused by default."""

    def parse(text: str) -> tuple[T, ...]:
        parts = [part for part in text.split(",") if part]
        if not parts:
            raise argparse.ArgumentTypeError("the list is empty")
        for part in parts:
            if known and part not in known:
                raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(known)}")
        values = tuple(map(kind, parts))
        for value in () if repeats else values:
            if values.count(value) > 1:
                raise argparse.ArgumentTypeError(f"{value} is repeated; name it once")
        return values

    return parse


class Once(argparse.Action):
    """Refuses a list that is given twice: only the last one would count."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not self.default:
            raise argparse.ArgumentError(self, "is given twice; give one list, with commas")
        setattr(namespace, self.dest, values)


def add_json(p: argparse.ArgumentParser | argparse._MutuallyExclusiveGroup) -> None:
    p.add_argument(
        "--json", action="store_true", help="print the figures as a line of JSON after the tables"
    )


def check_result(flag: str, file: Path, allow_dirty: bool) -> None:
    """ConfigError unless a result can be written to the file, of code that is committed."""
    refused = refusal(f"{flag} {file}", allow_dirty)
    if refused is not None:
        raise ConfigError(refused)
    check_file(flag, file)


def check_file(flag: str, file: Path) -> None:
    """ConfigError unless the file can be written. An existing file keeps its content."""
    check_parent(flag, file)
    is_new = not file.exists()
    try:
        file.open("ab").close()
        if is_new:
            file.unlink()  # the measurement may fail
    except OSError as e:
        raise not_written(f"{flag} {file}", e) from e


def check_folder(flag: str, folder: Path) -> None:
    """Make the folder, if need be; ConfigError unless files can be written there."""
    check_parent(flag, folder)
    if folder.is_file():
        raise ConfigError(f"{flag} {folder}: is a file. Name a folder.")
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise not_written(f"{flag} {folder}", e) from e


def check_parent(flag: str, path: Path) -> None:
    """A missing folder is an error, not made: the path may be mistyped."""
    if not path.parent.is_dir():
        raise ConfigError(
            f"{flag} {path}: cannot be written. There is no folder {path.parent}: create "
            "it, or name another one."
        )


def write(flag: str, file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as e:
        raise not_written(f"{flag} {file}", e) from e
