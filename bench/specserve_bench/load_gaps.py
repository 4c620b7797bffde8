"""The longest gap of streams while adapters or draft models load on a busy host."""

import http.client
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Barrier, Event
from time import perf_counter, sleep
from typing import Any

from specserve.config import load_config
from specserve.models.decoder_config import DecoderConfig
from specserve.models.decoder_config import load_config as load_shape
from specserve_bench.adapters import random_adapter
from specserve_bench.restart import events
from specserve_bench.served import Served, settings

STREAMS, TOKENS = 4, 7000
ROUNDS, SECONDS = 5, 2.0  # interleaved; of each kind of load in a round
BUSY = 2  # processes that keep a core busy
RANK, ADAPTERS = 64, 2
WANTED_RATIO = 2.0
KEY = "admin"
QUANTIZE = "w8", None  # in turns: so each of them is another model, which has to be loaded

Load = Callable[[int], None]  # one more, by its number


def load_gap_figures() -> dict[str, Any]:
    """Milliseconds of the longest gap between two events of a stream, without and with loads."""
    config = load_config(None, {})
    with TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "keys").write_text(KEY)
        shape = load_shape(Path(config.target))
        assert isinstance(shape, DecoderConfig)
        for i in range(ADAPTERS):
            random_adapter(home / f"adapter-{i}", shape, RANK, i)
        lora = settings(lora__max_loras=1, lora__max_rank=RANK, lora__folder=home)
        limits = settings(memory__kv_bytes=1 << 30, server__access_log="false")
        draft = f"--draft-model={config.draft}"
        with (
            Served(config.target, draft, f"--admin-key-file={home / 'keys'}", *lora, *limits) as it,
            busy_processes(),
        ):
            figures = measured(it, str(config.draft))
    print(table(figures))
    return figures


def measured(server: Served, draft: str) -> dict[str, Any]:
    loads: dict[str, Load | None] = {
        "none": None,
        "adapters": lambda number: load_adapter(server, number),
        "draft models": lambda number: load_draft(server, draft, number),
    }
    gaps: dict[str, list[float]] = {name: [] for name in loads}
    counts = dict.fromkeys(loads, 0)
    for number in range(1 + ROUNDS):
        for name, load in loads.items():
            gap, loaded = one_round(server, load)
            if number:  # the first round warms up
                gaps[name].append(gap)
                counts[name] += loaded
    base = median(gaps["none"])
    rows = {
        name: {
            "longest_gap_ms": spread(each),
            "over_none": round(median(each) / base, 2),
            "loads": counts[name],
        }
        for name, each in gaps.items()
    }
    return {"streams": STREAMS, "busy": BUSY, "wanted_ratio": WANTED_RATIO, "rows": rows}


def one_round(server: Served, load: Load | None) -> tuple[float, int]:
    """Milliseconds of the longest gap within SECONDS, and how often something was loaded."""
    begun = Barrier(STREAMS + 1)
    with ThreadPoolExecutor(STREAMS) as threads:
        ended = Event()
        streams = [threads.submit(stream_until, ended, server, n, begun) for n in range(STREAMS)]
        begun.wait()
        sleep(0.2)
        start, loaded = perf_counter(), 0
        while perf_counter() < start + SECONDS:
            if load is None:
                sleep(0.1)
            else:
                load(loaded)
                loaded += 1
        ended.set()
        times = [each.result() for each in streams]
    gaps = [b - a for each in times for a, b in pairwise(each) if b > start]
    return 1e3 * max(gaps), loaded


def stream_until(ended: Event, server: Served, seed: int, begun: Barrier) -> list[float]:
    """When the events of a stream came, up to the first one after `ended` is set."""
    body = {"prompt": "import os\n\n\ndef ", "seed": seed, "temperature": 0.8, "stream": True}
    body |= {"max_tokens": TOKENS, "ignore_eos": True}
    connection = http.client.HTTPConnection(server.host, server.port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body))
    times = list[float]()
    for _ in events(connection.getresponse()):
        times.append(perf_counter())
        if len(times) == 1:
            begun.wait()
        if ended.is_set():
            break
    connection.close()
    return times


@contextmanager
def busy_processes() -> Iterator[None]:
    processes = [multiprocessing.Process(target=spin, daemon=True) for _ in range(BUSY)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def spin() -> None:
    while True:
        pass


def load_adapter(server: Served, number: int) -> None:
    name = f"adapter-{number % ADAPTERS}"
    body = {"lora_name": "loaded", "lora_path": name, "load_inplace": True}
    post(server, "/v1/load_lora_adapter", body)


def load_draft(server: Served, model: str, number: int) -> None:
    body = {"model": model, "quantize": QUANTIZE[number % 2]}
    post(server, "/v1/speculation/draft-model", body)


def post(server: Served, path: str, body: dict[str, Any]) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=300)
    connection.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {KEY}"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    connection.close()


def spread(values: Sequence[float]) -> dict[str, float]:
    of = {"median": median(values), "low": min(values), "high": max(values)}
    return {name: round(value, 1) for name, value in of.items()}


def table(figures: dict[str, Any]) -> str:
    """In Markdown, as in docs/bench.md."""
    lines = ["| loads | longest gap, ms (lowest to highest) | over none |", "|---|---|---|"]
    for name, row in figures["rows"].items():
        gap = row["longest_gap_ms"]
        words = f"{gap['median']} ({gap['low']} to {gap['high']})"
        lines.append(f"| {name} | {words} | {row['over_none']} |")
    return "\n".join(lines)
