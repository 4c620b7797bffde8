"""How long streams wait for a step while another draft model takes the place of theirs."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

from specserve.config import load_config
from specserve_bench.figures.load_gaps import load_draft
from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes
from specserve_bench.served import Served, Streams, settings

STREAMS = 8
# Tokens of a stream, seconds before another model is loaded, and seconds after that.
PAIRS = {"demo": (6000, 1.0, 0.3), "qwen3-0.6b": (1500, 4.0, 2.0)}
KEY = "swap"
COLUMNS = {
    "step_ms": "step, ms",
    "load_s": "load, s",
    "longest_wait_steps": "longest wait, steps",
    "longest_wait_before_steps": "longest wait before, steps",
}


def measure() -> dict[str, Any]:
    """The longest time between two events of a stream around a swap, in steps."""
    return {"rows": [figure(pair) for pair in PAIRS]}


def figure(pair: str) -> dict[str, Any]:
    config = load_config(None, {} if pair == "demo" else {"model.demo_compute": pair})
    limits = settings(memory__kv_bytes=1 << 30, server__access_log="false")
    draft = str(config.draft)
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "admin-keys"
        keys.write_text(KEY)
        flags = f"--draft-model={draft}", f"--admin-key-file={keys}", *limits
        with Served(config.target, *flags) as server:
            rounds = [one_round(server, pair, draft, number) for number in range(1 + 4)]
    assert all(texts == rounds[0][1] for _, texts in rounds), "a text is another one after a swap"
    told = [figures for figures, _ in rounds[1:]]  # the first round warms up
    return (
        {"pair": pair, "streams": STREAMS}
        | {name: extremes([each[name] for each in told], 2) for name in COLUMNS}
        | {"wanted_steps": 2.0}
    )


def one_round(
    server: Served, pair: str, draft: str, number: int
) -> tuple[dict[str, float], list[str]]:
    """The longest wait for an event around the swap, and in an equal time before it, in steps: a
    step is the usual wait. Also the texts.
    """
    tokens, before, after = PAIRS[pair]
    with Streams(server, STREAMS, tokens) as streams:
        sleep(before)
        at = perf_counter()
        load_draft(server, draft, number, KEY)
        loaded = perf_counter()
    end = loaded + after
    assert all(times[-1] > end for times in streams.times), "the streams ended too soon"
    step = median(waits(streams.times, 0.0, at))
    figures = {
        "step_ms": 1e3 * step,
        "load_s": loaded - at,
        "longest_wait_steps": max(waits(streams.times, at, end)) / step,
        "longest_wait_before_steps": max(waits(streams.times, 2 * at - end, at)) / step,
    }
    return figures, streams.texts


def waits(streams: Sequence[Sequence[float]], begin: float, end: float) -> list[float]:
    """Between events of which the second came in this time."""
    each = (pair for times in streams for pair in pairwise(times))
    return [after - before for before, after in each if begin <= after < end]


def table(result: Mapping[str, Any]) -> str:
    rows = (
        [
            row["pair"],
            str(row["streams"]),
            *(extremes_words(row[name]) for name in COLUMNS),
            f"at most {row['wanted_steps']:g}",
        ]
        for row in result["rows"]
    )
    return markdown_table(["pair", "streams", *COLUMNS.values(), "goal"], rows)
