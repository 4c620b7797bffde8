"""A server in a process of its own, its CPU time and memory, and clients that cost little."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from threading import Barrier, Event
from time import perf_counter
from typing import Any, NamedTuple, Self
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

from specserve.errors import ConfigError

TIMEOUT = 300.0  # seconds of a request


class Served:
    """`specserve serve` with these arguments, at any free port; ended when the block ends."""

    def __init__(self, *args: object, is_quiet: bool = True, checkout: Path | None = None) -> None:
        """`is_quiet` drops the server's log. `checkout` is the folder of other code to run."""
        started_at = perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "specserve", "serve", *map(str, args), "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_quiet else None,
            text=True,
            cwd=checkout,
            env=None if checkout is None else environment(checkout),
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"ready in [\d.]+ s at http://([\d.]+):(\d+)", line):
                self.host, self.port = found[1], int(found[2])
                self.ready_seconds = perf_counter() - started_at
                return
        raise RuntimeError(f"the server did not start: exit code {self.process.wait()}")

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def cpu_seconds(self) -> float:
        """CPU time of the HTTP process, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Resident memory of the HTTP process."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def engines(self) -> list[int]:
        """The engine processes: one, or none while it is replaced."""

        def children(pid: int) -> list[int]:
            with suppress(FileNotFoundError):  # the process may have ended
                return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
            return []

        def forks(pid: int) -> bool:
            with suppress(FileNotFoundError):
                return b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
            return False

        parents = [pid for pid in children(self.process.pid) if forks(pid)]
        return [engine for pid in parents for engine in children(pid)]


def environment(checkout: Path) -> dict[str, str]:
    """The environment of processes that import the code of a checkout."""
    folders = [str((checkout / name).resolve()) for name in (".", "kernels", "drafters", "bench")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}


def settings(**values: object) -> Sequence[str]:
    """section__key=value -> the flags."""
    return [f"--set={key.replace('__', '.')}={value}" for key, value in values.items()]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Until /health answers; ConfigError if the process ends or takes longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.1)
    raise ConfigError("the server did not become ready")


def post(url: str, body: Mapping[str, Any], key: str | None = None) -> Any:
    """The response's JSON; HTTPError for a refusal."""
    headers = {"Content-Type": "application/json"}
    headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
    request = Request(url, json.dumps(body).encode(), headers)
    with urlopen(request, timeout=TIMEOUT) as response:
        return json.loads(response.read() or b"null")


def samples(url: str, name: str) -> list[tuple[dict[str, str], float]]:
    """A metric's labels and values."""
    with urlopen(f"{url}/metrics", timeout=TIMEOUT) as response:
        families = text_string_to_metric_families(response.read().decode())
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return [(sample.labels, sample.value) for sample in found]


class Stream(NamedTuple):
    """One request: when it was sent, and each event with the time at which it was read."""

    sent_at: float
    events: list[tuple[float, dict[str, Any]]]

    @property
    def said_at(self) -> list[float]:
        """The moments of events that carry text."""
        choices = [(at, event["choices"][0]) for at, event in self.events if event["choices"]]
        return [at for at, c in choices if c.get("text") or c.get("delta", {}).get("content")]

    @property
    def ttft(self) -> float:
        return self.said_at[0] - self.sent_at

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.said_at)]

    @property
    def final(self) -> dict[str, Any]:
        """The chunk that carries the statistics."""
        return self.events[-1][1]


async def stream(host: str, port: int, path: str, body: dict[str, Any]) -> Stream:
    """Send a request and read its stream to the end; events are decoded after it."""
    reader, writer = await asyncio.open_connection(host, port)
    sent_at = perf_counter()
    await send(writer, path, body | {"stream": True, "stream_options": {"include_usage": True}})
    lines: list[tuple[float, bytes]] = []
    async for line in reader:
        if line.startswith(b"data: "):
            if line == b"data: [DONE]\n":
                break
            lines.append((perf_counter(), line))
        elif line.startswith(b"HTTP/1.1 ") and b"200" not in line:
            raise RuntimeError(f"{path} was refused: {line!r} {(await reader.read(2000))!r}")
    writer.close()
    return Stream(sent_at, [(at, json.loads(line[6:])) for at, line in lines])


async def send(writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    await writer.drain()


class Streams:
    """Streams of a server at once, each in a thread. The block begins after the first events.

    times   of each stream's events, known after the block, as are the texts
    is_cut  set it to end every stream with its next event
    """

    def __init__(self, server: Served, number: int, max_tokens: int) -> None:
        self.server, self.max_tokens = server, max_tokens
        self.started, self.is_cut = Barrier(number + 1), Event()
        self.times: list[list[float]] = [[] for _ in range(number)]
        self.texts = [""] * number

    def __enter__(self) -> Self:
        self.threads = ThreadPoolExecutor(len(self.texts))
        self.reading = [self.threads.submit(self.read, n) for n in range(len(self.texts))]
        self.started.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self.threads.shutdown()
        for each in self.reading:
            each.result()

    def read(self, number: int) -> None:
        body = {"prompt": "import os\n\n\ndef ", "seed": number, "temperature": 0.8}
        body |= {"max_tokens": self.max_tokens, "ignore_eos": True, "stream": True}
        connection = HTTPConnection(self.server.host, self.server.port, timeout=TIMEOUT)
        connection.request("POST", "/v1/completions", json.dumps(body))
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            self.times[number].append(perf_counter())
            choices = json.loads(line.removeprefix(b"data: "))["choices"]
            self.texts[number] += "".join(choice["text"] for choice in choices)
            if len(self.times[number]) == 1:
                self.started.wait()
            if self.is_cut.is_set():
                break
        connection.close()
