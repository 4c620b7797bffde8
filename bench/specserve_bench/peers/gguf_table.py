"""The kept results on GGUF files as one table, and when each of them was measured."""

from collections.abc import Mapping
from textwrap import fill
from typing import Any

from specserve_bench.machine import measured
from specserve_bench.peers.table import MEANINGS, limit, names_of, shown_ratio, split
from specserve_bench.report import markdown_table

TOKENS = "tokens per step"


def gguf_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each figure of each result: medians, and the ratio to the best peer. `results` are
    by the names of their files.
    """
    columns = [(told["model"], column) for told in results.values() for column in split(told)]
    systems = names_of(column for _, column in columns)
    rows = []
    for model, column in columns:
        cells, kind = column["systems"], column["drafter"]
        name = MEANINGS[column["figure"]]
        row = [model, f"{name} with lookup" if kind else name]
        row += [median_words(cells.get(system), kind) for system in systems]
        has_ratio = column["figure"] != TOKENS
        row += [
            median_words(column["bound"], kind),
            shown_ratio(column, "ratio") if has_ratio else "-",
        ]
        rows.append(row)
    return markdown_table(["file", "figure", *systems, "bytes", "specserve / best peer"], rows)


def median_words(cell: Mapping[str, Any] | None, kind: str | None) -> str:
    """With the limit of draft tokens, if the engine drafted."""
    if cell is None:
        return "-"
    return "none" if "error" in cell else f"{cell['median']:.4g}{limit(cell, kind)}"


def gguf_caption(results: Mapping[str, Mapping[str, Any]]) -> str:
    """An item for each result: its machine, commit, rounds and engines."""
    lines = []
    for file, told in results.items():
        engines = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
        rounds = f"{told['rounds']} rounds" if told["rounds"] > 1 else "1 round"
        how = measured(told["machine"])
        lines.append(f"- {told['model']} was {how}, in {rounds} (`{file}`). Engines: {engines}.")
    return "\n".join(
        fill(line, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in lines
    )
