"""How long a request of one API key takes while another key sends expensive requests."""

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any, NamedTuple

from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes
from specserve_bench.served import Served, settings

LOADER, OTHER = "loading-key", "other-key"

numbers = count()  # so that no grammar comes twice


class Case(NamedTuple):
    """The requests of the loading key, which are sent at once, and the other key's: paths and
    bodies.
    """

    load: Callable[[], Sequence[tuple[str, bytes]]]
    asked: Callable[[], tuple[str, bytes]]


def small(path: str, body: Mapping[str, Any]) -> tuple[str, bytes]:
    return path, json.dumps(body, separators=(",", ":")).encode()


def chat(**more: Any) -> tuple[str, bytes]:
    messages = [{"role": "user", "content": "the cat sat"}]
    return small("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **more})


def schema() -> tuple[str, bytes]:
    """A chat with a schema that the server has not seen."""
    form = {"type": "json_schema", "json_schema": {"schema": {"const": f"new {next(numbers)}"}}}
    return chat(response_format=form)


def many_items() -> tuple[str, bytes]:
    return small("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 100_000})


def many_messages() -> tuple[str, bytes]:
    return chat(messages=[{"role": "user", "content": "a"}] * 90_000)


def slow_regex() -> tuple[str, bytes]:
    return chat(structured_outputs={"regex": f"(x{{1000}}){{1001}}[a]zz{next(numbers)}"})


CASES = {
    "4 bodies of 100,000 items": Case(lambda: [many_items()] * 4, chat),
    "8 bodies of 100,000 items": Case(lambda: [many_items()] * 8, chat),
    "8 chats of 90,000 messages": Case(lambda: [many_messages()] * 8, chat),
    "40 regexes, other key: new schemas": Case(lambda: [slow_regex() for _ in range(40)], schema),
}


def measure() -> dict[str, Any]:
    """Milliseconds of the other key's requests without and with each load, on the demo pair."""
    limits = settings(memory__kv_bytes=1 << 28, server__access_log="false")
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"{LOADER}\n{OTHER}\n")
        with Served(f"--api-key-file={keys}", *limits) as server:
            sleep(3.0)  # until the processes for bodies and grammars have started
            rows = [figure(server, name, case) for name, case in CASES.items()]
    return {"rows": rows, "wanted_ratio": 3.0, "wanted_ms": 1000.0}


def figure(server: Served, name: str, case: Case) -> dict[str, Any]:
    ask(server, OTHER, *case.asked())
    unloaded = [ask(server, OTHER, *case.asked())[0] for _ in range(30)]
    loaded, load_seconds = list[float](), list[float]()
    for _ in range(3):
        requests = case.load()
        with ThreadPoolExecutor(len(requests)) as threads:
            began = perf_counter()
            sent = [threads.submit(ask, server, LOADER, *request) for request in requests]
            sleep(0.05)
            while not all(each.done() for each in sent):
                loaded.append(ask(server, OTHER, *case.asked())[0])
            load_seconds.append(perf_counter() - began)
    return {
        "load": name,
        "unloaded_ms": extremes(unloaded, 1),
        "loaded_ms": extremes(loaded, 1),
        "requests": len(loaded),
        "ratio": round(median(loaded) / median(unloaded), 2),
        "load_s": round(median(load_seconds), 2),
        "statuses": sorted({each.result()[1] for each in sent}),
    }


def ask(server: Served, key: str, path: str, body: bytes) -> tuple[float, int]:
    """Milliseconds of a request, and the status of its response."""
    began = perf_counter()
    connection = http.client.HTTPConnection(server.host, server.port, timeout=120)
    connection.request("POST", path, body, {"Authorization": f"Bearer {key}"})
    response = connection.getresponse()
    response.read()
    connection.close()
    if key == OTHER:
        assert response.status == 200, response.status
    return 1e3 * (perf_counter() - began), response.status


def table(result: Mapping[str, Any]) -> str:
    rows = (
        [
            row["load"],
            *(extremes_words(row[name], 1) for name in ("unloaded_ms", "loaded_ms")),
            f"{row['ratio']:.2f}",
        ]
        for row in result["rows"]
    )
    return markdown_table(
        ["load of another key", "without load, ms", "under load, ms", "ratio"], rows
    )
