"""Tables and captions of the documents, written from the kept results.

`python -m specserve_bench.documents`, at the top of the repository, writes each block of README.md
and docs/ again. A block begins with `<!-- result: NAME -->` and ends with `<!-- end -->`; `BLOCKS`
has the names.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import specserve  # noqa: F401, first: it configures the process before torch loads
from specserve_bench import agent
from specserve_bench.figures import __main__ as figures
from specserve_bench.figures import open_loop, speculation
from specserve_bench.machine import NO_GIT, commit_words, measured
from specserve_bench.peers import table as peers_table
from specserve_bench.peers.gguf_table import gguf_caption, gguf_table
from specserve_bench.report import markdown, markdown_table
from specserve_bench.results import Result, read

TYPED = ("speculation", "open-loop")  # results with types of their own
GPU = "gpu"
PLAIN = tuple(name for name in (*figures.FIGURES, *figures.LONG) if name not in ("demo", *TYPED))
WIDTH = 100
BLOCK = re.compile(r"(<!-- result: ([\w -]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main() -> int:
    for page in pages():
        page.write_text(written(page.read_text()))
    return 0


def pages() -> list[Path]:
    return [Path("README.md"), *sorted(Path("docs").glob("*.md"))]


def written(page: str) -> str:
    """The page with all of its blocks written again."""

    def block(found: re.Match[str]) -> str:
        begin, name, _, end = found.groups()
        return f"{begin}\n{BLOCKS[name]()}\n\n{end}"

    return BLOCK.sub(block, page)


def file_of(name: str) -> Path:
    return figures.RESULTS / f"{name}-cpu.json"


def plain(name: str) -> Any:
    return json.loads(file_of(name).read_bytes())


def wrapped(text: str) -> str:
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def figure_table(name: str, source: str | None = None) -> str:
    """The table; notes below it become a list."""
    kept = plain(source or name)
    kept.pop("machine", None)
    lines = figures.module(name).table(kept).splitlines()
    table = "\n".join(lines)
    notes = [line for line in lines if line and not line.startswith("|")]
    if not notes:
        return str(table)
    blocks = re.findall(r"(?:^\|.*\n?)+", table, re.MULTILINE)
    return "\n\n".join([*(b.rstrip() for b in blocks), "\n".join(f"- {note}" for note in notes)])


def figure_caption(name: str) -> str:
    kept = plain(name)
    machines = [kept["machine"]] if "machine" in kept else machines_in(kept)
    words = "; ".join(dict.fromkeys(map(measured, machines)))
    return wrapped(f"M{words[1:]} (`{file_of(name)}`).")


def machines_in(kept: Any) -> list[dict[str, Any]]:
    """The machines of a result in parts, such as `heads`."""
    if isinstance(kept, Mapping):
        own = [kept["machine"]] if "machine" in kept else []
        return own + [m for part in kept.values() for m in machines_in(part)]
    if isinstance(kept, list):
        return [m for part in kept for m in machines_in(part)]
    return []


def cells() -> speculation.Cells:
    return speculation.read(file_of("speculation"))


def speculation_table() -> str:
    """All cells, and the losses."""
    return speculation.table(cells()).rpartition("\n\n")[0]


def speculation_caption() -> str:
    return wrapped(f"{speculation.caption(cells())} (`{file_of('speculation')}`)")


def open_loop_table() -> str:
    return open_loop.table(read(file_of("open-loop"))).rpartition("\n\n")[2]


def drafters() -> str:
    return markdown([read(file_of(name)) for name in ("demo", "demo-0.6b")])


def drafters_caption() -> str:
    parts = (
        f"`{file_of(name)}` was {measured(read(file_of(name)).machine)}."
        for name in ("demo", "demo-0.6b")
    )
    return wrapped(" ".join(parts))


def summary() -> str:
    """specserve and other engines: one request and a batch, then open loop against vLLM."""
    return peers_table.summary(plain("peers"), open_loop.summary_rows(read(file_of("open-loop"))))


def summary_caption() -> str:
    loop = measured(read(file_of("open-loop")).machine)
    told = wrapped(
        f"Open loop was {loop}. Requests arrive at random, at 50 % and 80 % of the rate that vLLM "
        "completes. specserve drafts with `auto`, and vLLM drafts nothing."
    )
    lost = wrapped(
        f"**Losses.** {lost_rows(summary())} {speculation.losses(cells())} "
        "[Benchmarks](docs/bench.md#auto-against-fixed-settings) has these cells."
    )
    return f"{peers_table.caption(plain('peers'))}\n\n{told}\n\n{lost}"


def lost_rows(table: str) -> str:
    """Return a sentence about the rows in which another engine's cell is bold, the best."""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if "**" in line]
    lost = [label.partition(", ms")[0] for label, own, *_ in rows if not own.startswith("**")]
    if not lost:
        return "No row has a better engine."
    return f"Another engine is better in {len(lost)} of {len(rows)} rows: {'; '.join(lost)}."


def gpu_caption() -> str:
    """Each file's date and commit: some were measured on uncommitted trees."""
    rows: list[Sequence[str]] = []
    for file in sorted(figures.RESULTS.glob("gpu-*.json*")):
        text = file.read_text(encoding="utf-8")  # of the check: a line each, first the machine
        head = text.partition("\n")[0] if file.suffix == ".jsonl" else text
        machine = json.loads(head)["machine"]
        known = commit_words(str(machine.get("commit", NO_GIT)))
        rows.append([f"`{file.name}`", str(machine["gpu"]), str(machine["date"]), known])
    return markdown_table(["result", "GPU", "date", "measured"], rows)


def gguf_results() -> dict[str, Any]:
    files = sorted(figures.RESULTS.glob("peers-gguf-*.json"))
    return {str(file): json.loads(file.read_bytes()) for file in files}


def agent_results() -> dict[str, Result]:
    return {str(file): read(file) for file in sorted(figures.RESULTS.glob("agent-*.json"))}


BLOCKS: dict[str, Callable[[], str]] = {
    "peers summary": summary,
    "peers summary caption": summary_caption,
    "drafters": drafters,
    "drafters caption": drafters_caption,
    "speculation": speculation_table,
    "speculation caption": speculation_caption,
    "open-loop": open_loop_table,
    "open-loop caption": partial(figure_caption, "open-loop"),
    "versions-structure": partial(figure_table, "versions", "versions-structure"),
    "versions-structure caption": partial(figure_caption, "versions-structure"),
    "recurrent-x86-64-v3": partial(figure_table, "recurrent", "recurrent-x86-64-v3"),
    "recurrent-x86-64-v3 caption": partial(figure_caption, "recurrent-x86-64-v3"),
    "peers-gguf": lambda: gguf_table(gguf_results()),
    "peers-gguf caption": lambda: gguf_caption(gguf_results()),
    "agent": lambda: agent.tables(agent_results()),
    "agent caption": lambda: agent.caption(agent_results()),
    f"{GPU} caption": gpu_caption,
}
for _name in ("peers", "peers-w4", "peers-w8"):
    BLOCKS |= {
        _name: lambda name=_name: peers_table.table(plain(name)),  # type: ignore[misc]
        f"{_name} caption": lambda name=_name: peers_table.caption(plain(name)),  # type: ignore[misc]
        f"{_name} sweep": lambda name=_name: peers_table.sweep_summary(plain(name)),  # type: ignore[misc]
    }
for _name in PLAIN:
    BLOCKS |= {
        _name: partial(figure_table, _name),
        f"{_name} caption": partial(figure_caption, _name),
    }


if __name__ == "__main__":
    sys.exit(main())
