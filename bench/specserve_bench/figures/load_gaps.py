"""The longest gap of streams while adapters or draft models load on a busy host."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

from specserve.config import load_config
from specserve.models.decoder_config import DecoderConfig
from specserve.models.parse_config import load_config as load_shape
from specserve_bench.figures.adapters import random_adapter
from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes
from specserve_bench.served import Served, Streams, post, settings

STREAMS = 4
SECONDS = 2.0  # interleaved; of each kind of load in a round
BUSY = 2  # processes that keep a core busy
RANK, ADAPTERS = 64, 2
KEY = "admin"


def measure() -> dict[str, Any]:
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
        models = config.target, f"--draft-model={config.draft}"
        keys = f"--admin-key-file={home / 'keys'}"
        with Served(*models, keys, *lora, *limits) as server, busy_processes():
            return figures(server, str(config.draft))


def figures(server: Served, draft: str) -> dict[str, Any]:
    loads: dict[str, Callable[[int], object]] = {
        "none": lambda number: sleep(0.1),
        "adapters": lambda number: load_adapter(server, number),
        "draft models": lambda number: load_draft(server, draft, number, KEY),
    }
    gaps: dict[str, list[float]] = {name: [] for name in loads}
    counts = dict.fromkeys(loads, 0)
    for number in range(1 + 5):
        for name, load in loads.items():
            gap, loaded = one_round(server, load)
            if number:  # the first round warms up
                gaps[name].append(gap)
                counts[name] += loaded if name != "none" else 0
    rows = {
        name: {
            "longest_gap_ms": extremes(each, 1),
            "over_none": round(median(each) / median(gaps["none"]), 2),
            "loads": counts[name],
        }
        for name, each in gaps.items()
    }
    return {"streams": STREAMS, "busy": BUSY, "wanted_ratio": 2.0, "rows": rows}


def one_round(server: Served, load: Callable[[int], object]) -> tuple[float, int]:
    """Milliseconds of the longest gap within SECONDS, and how often something was loaded."""
    with Streams(server, STREAMS, 7000) as streams:
        sleep(0.2)
        start, loaded = perf_counter(), 0
        while perf_counter() < start + SECONDS:
            load(loaded)
            loaded += 1
        streams.is_cut.set()
    events = (pair for times in streams.times for pair in pairwise(times))
    return 1e3 * max(after - before for before, after in events if after > start), loaded


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
    body = {"lora_name": "loaded", "lora_path": f"adapter-{number % ADAPTERS}"}
    post(f"{server.url}/v1/load_lora_adapter", body | {"load_inplace": True}, KEY)


def load_draft(server: Served, model: str, number: int, key: str) -> None:
    """Every other time it is quantized: so each of them is another model, which is loaded."""
    body = {"model": model, "quantize": None if number % 2 else "w8"}
    post(f"{server.url}/v1/speculation/draft-model", body, key)


def table(result: dict[str, Any]) -> str:
    rows = (
        [name, extremes_words(row["longest_gap_ms"], 1), f"{row['over_none']:.2f}"]
        for name, row in result["rows"].items()
    )
    return markdown_table(["loads", "longest gap, ms", "ratio to none"], rows)
