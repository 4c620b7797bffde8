"""What the demo pair has not been shown: twelve files, and questions phrased anew.

Committed, because standard libraries differ between Python versions. Theirs is the PSF licence.
"""

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec

HERE = files(__name__)


class Question(msgspec.Struct, frozen=True):
    """About a function or class that training has seen, in words that it has not."""

    symbol: str
    question: str
    first_sentence: str  # of a right answer


def questions() -> list[Question]:
    lines = (HERE / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [msgspec.json.decode(line, type=Question) for line in lines]


def source_files() -> dict[str, str]:
    """Name -> text, in order."""
    return {entry.name.removesuffix(".txt"): entry.read_text("utf-8") for entry in listed()}


def listed() -> Iterator[Traversable]:
    yield from sorted((HERE / "files").iterdir(), key=lambda entry: entry.name)
