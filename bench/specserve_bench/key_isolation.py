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

from specserve_bench.served import Served, settings

LOADER, OTHER = "loading-key", "other-key"
ITEMS, MESSAGES, GRAMMARS = 100_000, 90_000, 40
ALONE, ROUNDS = 30, 3  # requests without a load; rounds of each load
LIMITS = settings(memory__kv_bytes=1 << 28, server__access_log="false")
WANTED_RATIO, WANTED_SECONDS = 3.0, 1.0

Request = tuple[str, bytes]  # path, body
numbers = count()  # so that no grammar comes twice


class Case(NamedTuple):
    """The requests of the loading key, which are sent at once, and the other key's."""

    load: Callable[[], Sequence[Request]]
    asked: Callable[[], Request]


def small(path: str, body: Mapping[str, Any]) -> Request:
    return path, json.dumps(body, separators=(",", ":")).encode()


def chat() -> Request:
    messages = [{"role": "user", "content": "the cat sat"}]
    return small("/v1/chat/completions", {"messages": messages, "max_tokens": 1})


def schema() -> Request:
    """A chat with a schema that the server has not seen."""
    path, body = chat()
    form = {"type": "json_schema", "json_schema": {"schema": {"const": f"new {next(numbers)}"}}}
    return path, json.dumps(json.loads(body) | {"response_format": form}).encode()


def many_items() -> Request:
    item = {"role": "user", "content": "a"}
    return small("/v1/responses", {"input": [item] * ITEMS})


def many_messages() -> Request:
    message = {"role": "user", "content": "a"}
    return small("/v1/chat/completions", {"messages": [message] * MESSAGES})


def slow_regex() -> Request:
    path, body = chat()
    form = {"regex": f"(x{{1000}}){{1001}}[a]zz{next(numbers)}"}
    return path, json.dumps(json.loads(body) | {"structured_outputs": form}).encode()


CASES = {
    "4 bodies of 100,000 items": Case(lambda: [many_items()] * 4, chat),
    "8 bodies of 100,000 items": Case(lambda: [many_items()] * 8, chat),
    "8 chats of 90,000 messages": Case(lambda: [many_messages()] * 8, chat),
    "40 regexes, other key: new schemas": Case(
        lambda: [slow_regex() for _ in range(GRAMMARS)], schema
    ),
}


def key_isolation_figures() -> dict[str, Any]:
    """Milliseconds of the other key's requests without and with each load, on the demo pair."""
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"{LOADER}\n{OTHER}\n")
        with Served(f"--api-key-file={keys}", *LIMITS) as server:
            sleep(3.0)  # until the processes for bodies and grammars have started
            rows = [measured(server, name, case) for name, case in CASES.items()]
    figures = {"rows": rows, "wanted_ratio": WANTED_RATIO, "wanted_ms": 1e3 * WANTED_SECONDS}
    print(table(rows))
    return figures


def measured(server: Served, name: str, case: Case) -> dict[str, Any]:
    ask(server, OTHER, *case.asked())
    alone = [ask(server, OTHER, *case.asked())[0] for _ in range(ALONE)]
    loaded, load_seconds = list[float](), list[float]()
    for _ in range(ROUNDS):
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
        "alone_ms": spread(alone),
        "loaded_ms": spread(loaded),
        "requests": len(loaded),
        "ratio": round(median(loaded) / median(alone), 2),
        "load_s": round(median(load_seconds), 2),
        "statuses": sorted({each.result()[1] for each in sent}),
    }


def ask(server: Served, key: str, path: str, body: bytes) -> tuple[float, int]:
    """Seconds of a request, and the status of its response."""
    began = perf_counter()
    connection = http.client.HTTPConnection(server.host, server.port, timeout=120)
    connection.request("POST", path, body, {"Authorization": f"Bearer {key}"})
    response = connection.getresponse()
    response.read()
    connection.close()
    if key == OTHER:
        assert response.status == 200, response.status
    return perf_counter() - began, response.status


def spread(seconds: Sequence[float]) -> dict[str, float]:
    of = {"median": median(seconds), "low": min(seconds), "high": max(seconds)}
    return {name: round(1e3 * value, 1) for name, value in of.items()}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown, as in docs/bench.md."""

    def words(of: Mapping[str, float]) -> str:
        return f"{of['median']} ({of['low']} to {of['high']})"

    lines = ["| load of another key | alone, ms | under load, ms | ratio |", "|---|---|---|---|"]
    lines += [
        f"| {row['load']} | {words(row['alone_ms'])} | {words(row['loaded_ms'])} | {row['ratio']} |"
        for row in rows
    ]
    return "\n".join(lines)
