"""How long streams pause when their engine process is killed."""

import os
import signal
from collections.abc import Mapping, Sequence
from time import perf_counter, sleep
from typing import Any

from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes
from specserve_bench.served import Served, Streams, settings

STREAMS = 16  # five deaths within a minute would end the server
# Tokens of a stream, seconds before the engine is killed, and the wanted seconds of a pause.
PAIRS = {"demo": (3000, 0.3, 3.0), "qwen3-0.6b": (400, 3.0, 6.0)}


def measure() -> dict[str, Any]:
    """The longest pause of any of the streams, on the demo pair and at a 0.6B model's cost."""
    return {"rows": [figure(pair, *each) for pair, each in PAIRS.items()]}


def figure(pair: str, tokens: int, before: float, wanted: float) -> dict[str, Any]:
    scaled: Sequence[str] = [] if pair == "demo" else [f"--demo-compute={pair}"]
    limits = settings(memory__kv_bytes=1 << 30, server__access_log="false")
    with Served(*scaled, *limits) as server:
        _, undisturbed = one_round(server, tokens, before, is_killed=False)
        rounds = []
        for number in range(3):
            if number:
                sleep(61)  # so that each death is the first in a minute
            pause, texts = one_round(server, tokens, before, is_killed=True)
            assert texts == undisturbed, "a text is another one after a death"
            rounds.append(pause)
    pauses = extremes(rounds, 2)
    return {"pair": pair, "streams": STREAMS, "pause_s": pauses, "wanted_s": wanted}


def one_round(
    server: Served, tokens: int, before: float, is_killed: bool
) -> tuple[float, list[str]]:
    """Seconds from the kill to the first event after it, of the stream that waits longest; and the
    texts.
    """
    with Streams(server, STREAMS, tokens) as streams:
        sleep(before)
        at = perf_counter()
        if is_killed:
            os.kill(server.engines()[0], signal.SIGKILL)
    in_flight = 0.1  # seconds
    after = [[t for t in times if t > at + in_flight] for times in streams.times]
    return max(times[0] - at for times in after if times), streams.texts


def table(result: Mapping[str, Any]) -> str:
    rows = (
        [
            row["pair"],
            str(row["streams"]),
            extremes_words(row["pause_s"]),
            f"below {row['wanted_s']:g}",
        ]
        for row in result["rows"]
    )
    return markdown_table(["pair", "streams", "longest pause, s", "wanted"], rows)
