"""Durations of the phases of a start-up, as text."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Phases:
    """A table: name of a phase -> its seconds and a note, as text."""

    def __init__(self) -> None:
        self.table: dict[str, str] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        note = self.table.get(name, "")
        self.table[name] = f"{perf_counter() - start:.2f} s{note and ': '}{note}"

    def note(self, name: str, text: str) -> None:
        self.table[name] = text
