"""A streaming client that costs little: it keeps the time of each event, and decodes them later."""

import asyncio
import itertools
import json
from time import perf_counter
from typing import Any, NamedTuple

END = b"data: [DONE]\n"


class Stream(NamedTuple):
    """One request: when it was sent, and each event with the time at which it was read."""

    sent_at: float
    events: list[tuple[float, dict[str, Any]]]

    @property
    def said_at(self) -> list[float]:
        """The moments of events that carry text."""
        return [at for at, e in self.events if e["choices"] and text_of(e["choices"][0])]

    @property
    def ttft(self) -> float:
        return self.said_at[0] - self.sent_at

    @property
    def gaps(self) -> list[float]:
        times = self.said_at
        return [b - a for a, b in itertools.pairwise(times)]

    @property
    def final(self) -> dict[str, Any]:
        """The chunk that carries the statistics."""
        return self.events[-1][1]


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text


async def stream(host: str, port: int, path: str, body: dict[str, Any]) -> Stream:
    """Send a request and read its stream to the end."""
    reader, writer = await asyncio.open_connection(host, port)
    sent_at = perf_counter()
    await send(writer, path, body | {"stream": True, "stream_options": {"include_usage": True}})
    lines: list[tuple[float, bytes]] = []
    async for line in reader:
        if line.startswith(b"data: "):
            if line == END:
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
