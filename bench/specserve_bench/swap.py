"""How long streams wait for a step while another draft model takes the place of theirs."""

import http.client
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Barrier
from time import perf_counter, sleep
from typing import Any

from specserve.config import load_config
from specserve_bench.restart import stream
from specserve_bench.served import Served, settings

STREAMS, ROUNDS = 8, 4
TOKENS = {"demo": 2000, "qwen3-0.6b": 1500}  # of each stream
BEFORE_SECONDS = {"demo": 1.0, "qwen3-0.6b": 4.0}  # of the streams, before another one is loaded
AFTER_SECONDS = {"demo": 0.3, "qwen3-0.6b": 2.0}
WANTED_STEPS = 2.0
KEY = "swap"
QUANTIZE = "w8", None  # in turns: so each of them is another model, which has to be loaded


def swap_figures() -> dict[str, Any]:
    """The longest time between two events of a stream around a swap, in steps."""
    rows = [figures_of(pair) for pair in TOKENS]
    print(table(rows))
    return {"rows": rows}


def figures_of(pair: str) -> dict[str, Any]:
    config = load_config(None, {} if pair == "demo" else {"model.demo_cost": pair})
    limits = settings(memory__kv_bytes=1 << 30, server__access_log="false")
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "admin-keys"
        keys.write_text(KEY)
        admin = f"--admin-key-file={keys}"
        with Served(config.target, f"--draft-model={config.draft}", admin, *limits) as server:
            texts, waits, loads = list[list[str]](), list[float](), list[float]()
            steps, usual = list[float](), list[float]()
            for number in range(1 + ROUNDS):
                told = one_round(server, pair, str(config.draft), number)
                texts.append(told["texts"])
                if number:  # the first round warms up
                    waits.append(told["wait"])
                    usual.append(told["usual"])
                    loads.append(told["load"])
                    steps.append(told["step"])
    assert all(each == texts[0] for each in texts), "a text is another one after a swap"
    return {
        "pair": pair,
        "streams": STREAMS,
        "step_ms": spread([1e3 * step for step in steps]),
        "load_s": spread(loads),
        "longest_wait_steps": spread(waits),
        "longest_wait_before_steps": spread(usual),
        "wanted_steps": WANTED_STEPS,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    of = {"median": median(values), "low": min(values), "high": max(values)}
    return {name: round(value, 2) for name, value in of.items()}


def one_round(server: Served, pair: str, draft: str, number: int) -> dict[str, Any]:
    """The longest wait for an event from the order to the end of what follows it, and the longest
    in as much time before; both in steps, which are the usual wait.
    """
    begun = Barrier(STREAMS + 1)
    with ThreadPoolExecutor(STREAMS) as threads:
        streams = [threads.submit(stream, server, TOKENS[pair], n, begun) for n in range(STREAMS)]
        begun.wait()
        sleep(BEFORE_SECONDS[pair])
        at = perf_counter()
        load(server, draft, QUANTIZE[number % 2])
        loaded = perf_counter()
        results = [each.result() for each in streams]
    end = loaded + AFTER_SECONDS[pair]
    assert all(times[-1] > end for times, _ in results), "the streams ended too soon"
    step = median([wait for times, _ in results for wait in waits_of(times, 0.0, at)])
    longest = max(wait for times, _ in results for wait in waits_of(times, at, end))
    before = max(wait for times, _ in results for wait in waits_of(times, 2 * at - end, at))
    return {
        "texts": [text for _, text in results],
        "step": step,
        "load": loaded - at,
        "wait": longest / step,
        "usual": before / step,
    }


def waits_of(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Between events of which the second came in this time."""
    return [after - before for before, after in pairwise(times) if begin <= after < end]


def load(server: Served, model: str, quantize: str | None) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=300)
    body = json.dumps({"model": model, "quantize": quantize})
    headers = {"Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/speculation/draft-model", body, headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    connection.close()


def words(of: dict[str, float]) -> str:
    return f"{of['median']:g} ({of['low']:g} to {of['high']:g})"


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| pair | streams | step, ms | load, s | longest wait, steps | as long before | wanted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        names = "step_ms", "load_s", "longest_wait_steps", "longest_wait_before_steps"
        told = [words(row[name]) for name in names]
        cells = [row["pair"], str(row["streams"]), *told, f"at most {row['wanted_steps']:g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
