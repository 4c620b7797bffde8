"""How long streams pause when their engine process is killed."""

import http.client
import json
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Barrier
from time import perf_counter, sleep
from typing import Any

from specserve_bench.served import Served, settings

STREAMS, ROUNDS = 16, 3  # five deaths within a minute would end the server
TOKENS = {"demo": 3000, "qwen3-0.6b": 400}  # of each stream
BEFORE_SECONDS = {"demo": 0.3, "qwen3-0.6b": 3.0}  # of the streams, before the engine is killed
WANTED_SECONDS = {"demo": 3.0, "qwen3-0.6b": 6.0}
BETWEEN_SECONDS = 61  # so that each death is the first in a minute
LIMITS = settings(memory__kv_bytes=1 << 30, server__access_log="false")


def restart_figures() -> dict[str, Any]:
    """The longest pause of any of the streams, on the demo pair and at a 0.6B model's cost."""
    rows = [figures_of(pair) for pair in TOKENS]
    print(table(rows))
    return {"rows": rows}


def figures_of(pair: str) -> dict[str, Any]:
    scaled: Sequence[str] = [] if pair == "demo" else [f"--demo-cost={pair}"]
    with Served(*scaled, *LIMITS) as server:
        undisturbed = one_round(server, pair, is_killed=False)[1]
        rounds = []
        for number in range(ROUNDS):
            if number:
                sleep(BETWEEN_SECONDS)
            pause, texts = one_round(server, pair, is_killed=True)
            assert texts == undisturbed, "a text is another one after a death"
            rounds.append(pause)
    return {
        "pair": pair,
        "streams": STREAMS,
        "pause_s": {
            "median": round(median(rounds), 2),
            "low": round(min(rounds), 2),
            "high": round(max(rounds), 2),
        },
        "wanted_s": WANTED_SECONDS[pair],
    }


def one_round(server: Served, pair: str, is_killed: bool) -> tuple[float, list[str]]:
    """Seconds from the kill to the first event after it, of the stream that waits longest; and the
    texts.
    """
    begun = Barrier(STREAMS + 1)
    with ThreadPoolExecutor(STREAMS) as threads:
        streams = [threads.submit(stream, server, TOKENS[pair], n, begun) for n in range(STREAMS)]
        begun.wait()
        sleep(BEFORE_SECONDS[pair])
        at = perf_counter()
        if is_killed:
            os.kill(engine_of(server), signal.SIGKILL)
        results = [each.result() for each in streams]
    after = [[time for time in times if time > at + 0.1] for times, _ in results]  # not in flight
    return max(times[0] - at for times in after if times), [text for _, text in results]


def stream(server: Served, max_tokens: int, seed: int, begun: Barrier) -> tuple[list[float], str]:
    """When the events of a stream came, and its text."""
    body = {"prompt": "import os\n\n\ndef ", "seed": seed, "temperature": 0.8, "stream": True}
    body |= {"max_tokens": max_tokens, "ignore_eos": True}
    connection = http.client.HTTPConnection(server.host, server.port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body))
    times, text = list[float](), ""
    for event in events(connection.getresponse()):
        times.append(perf_counter())
        text += "".join(choice["text"] for choice in event["choices"])
        if len(times) == 1:
            begun.wait()
    connection.close()
    return times, text


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def engine_of(server: Served) -> int:
    return engines(server)[0]


def engines(server: Served) -> list[int]:
    """The engine processes of a server: one, or none while it is replaced."""
    every = children(server.process.pid)
    forking = [pid for pid in every if b"fork_server" in command_line(pid)]
    return [engine for pid in forking for engine in children(pid)]


def children(pid: int) -> list[int]:
    try:
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    except FileNotFoundError:  # it has ended in between
        return []


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| pair | streams | longest pause, s | wanted |", "| --- | --- | --- | --- |"]
    for row in rows:
        pause = row["pause_s"]
        told = f"{pause['median']:.2f} ({pause['low']:.2f} to {pause['high']:.2f})"
        lines.append(f"| {row['pair']} | {row['streams']} | {told} | below {row['wanted_s']:g} |")
    return "\n".join(lines)
