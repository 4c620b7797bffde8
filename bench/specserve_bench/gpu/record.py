"""A stage's figures: a line of JSON each, written when it is known, continued by the next run."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

UNFINISHED = 3  # the exit status of a stage that ran out of time and can be continued
ROOT = Path(__file__).parents[3]


def is_error(figure: Any) -> bool:
    return isinstance(figure, dict) and "error" in figure


class RecordContent(NamedTuple):
    """Content of a file: figures by name, and whether its stage is done."""

    figures: dict[str, Any]
    done: bool


def source_digest() -> str:
    """A hash of all source that a figure could depend on, whether or not it is committed."""
    digest = hashlib.sha256()
    for folder in ("kernels", "drafters", "specserve", "bench/specserve_bench", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def load(file: Path) -> RecordContent | None:
    """The file's content if it was measured with this source, else None. A last line that was cut
    is left out.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]
        head, *others = map(json.loads, lines)
    except (OSError, ValueError):
        return None
    if head.get("source") != source_digest():
        return None
    figures = {line["name"]: line["figure"] for line in others if "name" in line}
    return RecordContent(figures, any(line.get("done", False) for line in others))


class Record:
    """Figures by name, after a line about the machine that they are of. A name that is put again
    has its last figure.
    """

    def __init__(self, file: Path, machine: Mapping[str, Any]) -> None:
        self.file = file
        known = load(file)
        figures = {} if known is None else known.figures
        self.figures = {n: f for n, f in figures.items() if not is_error(f)}  # tried again
        if known is None:
            file.unlink(missing_ok=True)
            self.write({"machine": machine, "source": source_digest()})
        else:  # without a last line that was cut
            text = file.read_text(encoding="utf-8")
            file.write_text(text[: text.rindex("\n") + 1], encoding="utf-8")

    def __contains__(self, name: str) -> bool:
        return name in self.figures

    def put(self, name: str, figure: Any) -> None:
        self.figures[name] = figure
        self.write({"name": name, "figure": figure})
        print(f"{name}: {json.dumps(figure)[:300]}", flush=True)

    def finish(self, done: bool) -> None:
        self.write({"done": done})

    def write(self, line: Mapping[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as file:  # closing flushes it
            file.write(json.dumps(line) + "\n")
