"""`specserve serve` on the GPU: TTFT and gaps of 1, 4 and 16 clients, a cancel, and a schema."""

import asyncio
import json
import sys
from functools import partial
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any

import msgspec

from specserve_bench.gpu.stage import StageOptions, options, record_of, take_each
from specserve_bench.prompts import PROMPTS
from specserve_bench.served import Served, Stream, samples, send, stream

COMPLETIONS = "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ABORTED = 5  # seconds until a request that its client has left must have ended


class Person(msgspec.Struct, forbid_unknown_fields=True):
    """What SCHEMA says."""

    name: str
    age: int


def main(argv: list[str]) -> int:
    args = options(argv)
    record, clients = record_of("serve", args), (1, 4, 16)
    requests, tokens = (1, 8) if args.rehearse else (6, 128)  # requests of each client
    with Served(*flags(args), is_quiet=False) as served:
        record.put("ready, s", round(served.ready_seconds, 2))
        figures = {f"{n} clients": partial(measured, served, n, requests, tokens) for n in clients}
        figures |= {"cancel": partial(cancelled, served), "schema": partial(obeyed, served)}
        code = take_each(record, figures.items(), args.seconds)
    record.put("exit code", served.process.returncode)
    return code


def flags(args: StageOptions) -> list[str]:
    if args.rehearse:
        return ["--set=model.device=cpu", "--set=memory.kv_bytes=268435456"]
    return ["--set=model.device=cuda", "--set=model.demo_compute=qwen3-0.6b"]


def measured(served: Served, clients: int, requests: int, tokens: int) -> dict[str, Any]:
    """Milliseconds of first tokens, and of gaps between events."""

    async def one(client: int) -> list[Stream]:
        each = (body_of(client * requests + i, tokens) for i in range(requests))
        return [await stream(served.host, served.port, COMPLETIONS, body) for body in each]

    async def every() -> list[list[Stream]]:
        return await asyncio.gather(*map(one, range(clients)))

    streams = [*chain.from_iterable(asyncio.run(every()))]
    firsts = sorted(1e3 * s.ttft for s in streams)
    gaps = sorted(1e3 * gap for s in streams for gap in s.gaps)
    spans = sum(s.said_at[-1] - s.said_at[0] for s in streams)
    num_tokens = sum(s.final["usage"]["completion_tokens"] for s in streams)
    return {
        "requests": len(streams),
        "TTFT, ms": [round(median(firsts), 2), round(firsts[-1], 2)],
        "ITL p50, ms": round(median(gaps), 3),
        "ITL p99, ms": round(gaps[int(0.99 * (len(gaps) - 1))], 3),
        "TPOT, ms": round(1e3 * spans / max(num_tokens - len(streams), 1), 3),
    }


def body_of(number: int, tokens: int) -> dict[str, Any]:
    """Of a request with its own prompt."""
    prompt = f"# {number}\n{PROMPTS[number % len(PROMPTS)]}"
    how = {"max_tokens": tokens, "temperature": 0.8, "seed": number, "ignore_eos": True}
    return {"prompt": prompt, **how}


def cancelled(served: Served) -> dict[str, Any]:
    """Leave a long response; seconds until nothing runs."""

    async def leave() -> float:
        reader, writer = await asyncio.open_connection(served.host, served.port)
        await send(writer, COMPLETIONS, body_of(0, 4000) | {"stream": True})
        await reader.readuntil(b"data: ")
        writer.close()
        left_at = perf_counter()
        while any(n for _, n in samples(served.url, "vllm:num_requests_running")):
            if perf_counter() - left_at > ABORTED:
                raise TimeoutError(f"it still runs after {ABORTED} s")
            await asyncio.sleep(0.01)
        return perf_counter() - left_at

    return {"seconds until it has ended": round(asyncio.run(leave()), 3)}


def obeyed(served: Served) -> dict[str, Any]:
    """A chat whose answer has to fit a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    body = {
        "messages": [{"role": "user", "content": "Invent a person."}],
        "response_format": form,
        "max_tokens": 100,
        "temperature": 0,
    }
    found = asyncio.run(stream(served.host, served.port, "/v1/chat/completions", body))
    deltas = [e["choices"][0]["delta"] for _, e in found.events if e["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    person = msgspec.convert(json.loads(text), Person)
    return {"text": text, "age": person.age}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
