"""Held-out data: twelve files of the standard library, and questions in other wording.

Committed in `evaluation/`, as standard libraries differ between Python versions; theirs is the PSF
licence (`specserve/demo/weights/LICENSE.txt`). A wheel does not carry them: there they are made of
the library of the Python that runs it.
"""

from collections.abc import Iterable, Iterator
from itertools import cycle
from pathlib import Path

import msgspec

from specserve_bench.demo.corpus import EVALUATION_FILES, PURPOSE, Symbol, library, symbols

COMMITTED = Path(__file__).parent / "evaluation"


class Question(msgspec.Struct, frozen=True):
    """About a function or class that training has seen, in words that it has not."""

    symbol: str
    question: str
    first_sentence: str  # of a right answer


def questions() -> list[Question]:
    file = COMMITTED / "questions.jsonl"
    if not file.exists():
        return list(questions_about(symbols(library())))
    return [msgspec.json.decode(line, type=Question) for line in file.read_bytes().splitlines()]


def questions_about(known: Iterable[Symbol]) -> Iterator[Question]:
    """Questions about the purpose of each symbol, in held-out wording."""
    for symbol, phrasing in zip(known, cycle(PURPOSE.held_out), strict=False):
        yield Question(symbol.name, phrasing.format(symbol.name), symbol.summary)


def source_files() -> dict[str, str]:
    """Dotted name -> text, in order."""
    files = ((name.replace("/", "."), name) for name in EVALUATION_FILES)
    texts = {}
    for dotted, name in sorted(files):
        committed = COMMITTED / "files" / f"{dotted}.txt"
        file = committed if committed.exists() else library() / name
        texts[dotted] = file.read_text(encoding="utf-8")
    return texts
