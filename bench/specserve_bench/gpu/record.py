"""A stage's JSON: written after every figure, and continued by the next run."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNFINISHED = 3  # the exit status of a stage that ran out of time and can be continued
ROOT = Path(__file__).parents[3]
SOURCES = ("kernels", "drafters", "specserve", "bench/specserve_bench")


def source_digest() -> str:
    """A hash of all source that a figure could depend on, whether or not it is committed."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def load(file: Path) -> dict[str, Any] | None:
    """The file's content if it was measured with this source, else None."""
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if data.get("source") == source_digest() else None


class Record:
    """Figures by name, with the machine that they are of."""

    def __init__(self, file: Path, machine: Mapping[str, Any]) -> None:
        self.file = file
        known = load(file) or {}
        self.figures: dict[str, Any] = known.get("figures", {})
        self.head = {"machine": machine, "source": source_digest()}

    def __contains__(self, name: str) -> bool:
        return name in self.figures

    def put(self, name: str, figure: Any) -> None:
        self.figures[name] = figure
        self.save(done=False)

    def save(self, done: bool) -> None:
        data = {**self.head, "done": done, "figures": self.figures}
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.file)
