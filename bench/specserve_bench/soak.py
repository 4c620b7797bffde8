"""`make soak`: keeps a server under load for a long time while its engine process is killed.

Requests of every kind arrive at a share of the rate that the machine can take, which is measured
first. Clients disconnect, and the prefix cache is emptied. At the end no request may have failed,
all blocks must be free or cached, and no process may have grown. Some texts are compared with those
of an undisturbed server without drafting.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import linear_regression, mean
from time import perf_counter, sleep
from typing import Any, NamedTuple

from specserve_bench.arguments import above_0, add_json, natural
from specserve_bench.served import Served, samples, send, settings
from specserve_bench.workloads import WORKLOADS

COMPARED = 50  # every 50th text is compared
# The first part of a process's time is left out, because its stores still fill up.
WARM_UP, WARM_SECONDS = 0.25, 300.0
LIMITS = settings(memory__kv_bytes=1 << 27, server__access_log="false")

SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1, "top_k": 20},
    {"temperature": 1, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.05},
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
PLAIN: list[dict[str, Any]] = [  # of any request
    {},
    {"n": 2},
    {"n": 2, "best_of": 3, "stream": False},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"300": 4, "301": -100}},
    {"allowed_token_ids": [*range(200, 2000)]},
    {"bad_words": ["self", "the"]},
    {"min_tokens": 16, "stop": ["\n"]},
    {"stop": ["\n\n", "return"], "include_stop_str_in_output": True},
    {"stop_token_ids": [300, 301], "ignore_eos": True},
    {"truncate_prompt_tokens": 40},
    {"prompt_logprobs": 1},
    {"priority": 3, "cache_salt": "other"},
    {"prediction": "import os\n\n\ndef main():\n    return 0\n"},
    {"slo": {"ttft_ms": 50}},
    {"structured_outputs": {"regex": "[a-z]{3,9}( [a-z]{3,9}){2,6}"}},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    {"structured_outputs": {"json": SCHEMA}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
]
OF_TEXTS: list[dict[str, Any]] = [{"logprobs": 3}, {"echo": True, "logprobs": 0}]
OF_CHATS: list[dict[str, Any]] = [
    {"logprobs": True, "top_logprobs": 3},
    {
        "tools": [{"type": "function", "function": {"name": "weigh", "parameters": SCHEMA}}],
        "tool_choice": "required",
    },
]


class SoakRequest(NamedTuple):
    path: str
    body: dict[str, Any]
    leaves_after: int | None  # so many events; None: it stays


class MemoryGrowth(NamedTuple):
    """MiB a minute, and the standard error of that."""

    slope: float
    error: float

    @property
    def is_small(self) -> bool:
        """Below the bound, within the noise from second to second."""
        return self.slope - 3.0 * self.error < 1.0  # MiB a minute


class AnswerError(Exception):
    """A response was refused, broke off or had an error."""


def request(seed: int, number: int) -> SoakRequest:
    """The request of that number: the same for the same seed, whenever it is sent."""
    chance = random.Random(f"soak {seed} {number}")
    kind = chance.choice(["questions", "completion", "agent", "random", "mixed"])
    [ask] = WORKLOADS[kind][1](chance, 1)
    is_text = isinstance(ask.prompt, str)
    fields = chance.choice(PLAIN + (OF_TEXTS if is_text else OF_CHATS))
    body = {
        "prompt" if is_text else "messages": ask.prompt,
        "max_tokens": chance.randrange(16, 96),
        "seed": ask.seed,
        "speculation": chance.choice(
            [
                {},
                {"enabled": False},
                {"sources": ["ngram"]},
                {"sources": ["model", "grammar"], "max_nodes": 4},
                {"max_nodes": 16, "max_depth": 2},
                {"sources": ["suffix", "prediction", "recycle"], "learn": False},
            ]
        ),
        "stream": True,
        **chance.choice(SAMPLERS),
        **fields,
    }
    leaves = number % COMPARED != 0 and body["stream"] and chance.random() < 0.1
    path = "/v1/completions" if is_text else "/v1/chat/completions"
    return SoakRequest(path, body, chance.randrange(8) if leaves else None)


async def answer(server: Served, asked: SoakRequest) -> dict[int, str] | None:
    """The texts of the choices; None if the client has left. AnswerError or OSError for others."""
    texts: dict[int, str] = {}
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=1 << 24)
    try:
        await send(writer, asked.path, asked.body)
        head = await reader.readuntil(b"\r\n\r\n")
        if b"text/event-stream" not in head:
            size = head.lower().partition(b"content-length:")[2].split()[0]
            read(await reader.readexactly(int(size)), texts)
            return texts
        num_events = 0
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                return texts
            if asked.leaves_after == num_events:
                return None
            if line.startswith(b"data: "):
                read(line.removeprefix(b"data: "), texts)
                num_events += 1
    finally:
        writer.close()
    raise AnswerError("the stream broke off")


def read(data: bytes, texts: dict[int, str]) -> None:
    """Add what an event, or a whole answer, says: text, calls and why it ended."""
    event = json.loads(data)
    if "error" in event:
        raise AnswerError(event["error"]["message"])
    for choice in event.get("choices", ()):
        said = choice.get("delta") or choice.get("message") or choice
        calls = [call["function"] for call in said.get("tool_calls") or ()]
        parts = [said.get("content"), said.get("text")]
        parts += [call.get(key) for call in calls for key in ("name", "arguments")]
        end = f" <{choice['finish_reason']}>" if choice.get("finish_reason") else ""
        text = "".join(part for part in parts if part) + end
        texts[choice["index"]] = texts.get(choice["index"], "") + text


class Soak:
    """One run over a server: what was asked, what failed, and the memory of its processes."""

    def __init__(self, server: Served, seed: int) -> None:
        self.server, self.seed = server, seed
        self.sent = self.left = self.kills = self.resets = 0
        self.errors: list[str] = []
        self.compared: dict[int, dict[int, str]] = {}  # the texts of requests, by their number
        self.memory: dict[int, list[tuple[float, float]]] = {}  # by process: seconds, MiB
        self.places = asyncio.Semaphore(64)

    def chance(self, what: str) -> random.Random:
        return random.Random(f"soak {self.seed} {what}")

    async def ask(self) -> None:
        self.sent, number = self.sent + 1, self.sent
        texts = await self.answered(request(self.seed, number), f"request {number}")
        self.left += texts is None
        if texts is not None and number % COMPARED == 0:
            self.compared[number] = texts

    async def answered(self, asked: SoakRequest, name: str) -> dict[int, str] | None:
        try:
            async with asyncio.timeout(120.0):  # TimeoutError is an OSError
                return await answer(self.server, asked)
        except (AnswerError, OSError, EOFError, ValueError) as e:
            self.errors.append(f"{name}: {type(e).__name__}: {e}; {json.dumps(asked.body)[:2000]}")
            return {}

    async def calibrate(self) -> float:
        """Requests a second that the server answers, so many at a time."""
        started = perf_counter()

        async def ask_on() -> None:
            while perf_counter() - started < 10.0:
                await self.ask()

        await asyncio.gather(*(ask_on() for _ in range(16)))
        return self.sent / (perf_counter() - started)

    async def arrive(self, rate: float, seconds: float) -> None:
        """Open loop, with Poisson's gaps; where all places are taken, arrivals wait."""
        chance, started = self.chance("arrivals"), perf_counter()
        due = started
        async with asyncio.TaskGroup() as tasks:
            while (due := due + chance.expovariate(rate)) - started < seconds:
                await asyncio.sleep(due - perf_counter())
                await self.places.acquire()
                task = tasks.create_task(self.ask())
                task.add_done_callback(lambda _: self.places.release())

    async def kill(self) -> None:
        chance = self.chance("kills")
        await asyncio.sleep(chance.uniform(20.0, 60.0))  # then at most four kills a minute
        while True:
            for pid in self.server.engines():
                os.kill(pid, signal.SIGKILL)
                self.kills += 1
            await asyncio.sleep(chance.uniform(20.0, 220.0))

    async def reset(self) -> None:
        chance = self.chance("resets")
        while True:
            await asyncio.sleep(chance.uniform(5.0, 25.0))
            await self.answered(SoakRequest("/v1/cache/reset", {}, None), "a reset of the cache")
            self.resets += 1

    async def sample(self) -> None:
        """The memory of both processes, each second; a new engine process has its own samples."""
        while True:
            for pid in (self.server.process.pid, *self.server.engines()):
                if (held := pss(pid)) is not None:
                    self.memory.setdefault(pid, []).append((perf_counter(), held))
            await asyncio.sleep(1)

    async def run(self, seconds: float) -> float:
        """All of it together; the rate of the requests."""
        rate = 0.8 * await self.calibrate()
        beside = [asyncio.create_task(each()) for each in (self.reset, self.sample)]
        killing = asyncio.create_task(self.kill())
        asyncio.get_running_loop().call_later(0.6 * seconds, killing.cancel)
        await self.arrive(rate, seconds)
        for task in beside:
            task.cancel()
        return rate

    @property
    def by_name(self) -> dict[str, list[tuple[float, float]]]:
        """The samples of the HTTP process, and of the engine processes in their order."""
        names = ["http", *(f"engine {number}" for number in range(1, len(self.memory)))]
        return dict(zip(names, self.memory.values(), strict=True))


def pss(pid: int) -> float | None:
    """MiB that a process holds, shared pages by their share; None if it has ended."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(row.split()[1]) / 1024 for row in rows if row.startswith("Pss:")), None)


def growth(samples: Sequence[tuple[float, float]]) -> MemoryGrowth | None:
    """The least-squares line without the first part of the time; None for too short a time.

    The samples are means of ten seconds. Memory that is freed within seconds is no growth, and the
    error supposes that samples are independent.
    """
    first = max(WARM_SECONDS, WARM_UP * (samples[-1][0] - samples[0][0]))
    fitted = [sample for sample in samples if sample[0] - samples[0][0] >= first]
    if not fitted or fitted[-1][0] - fitted[0][0] < 60.0:  # seconds that are fitted
        return None
    parts = [fitted[i : i + 10] for i in range(0, len(fitted) - 9, 10)]
    return fitted_line([(mean(s for s, _ in part), mean(mib for _, mib in part)) for part in parts])


def fitted_line(samples: Sequence[tuple[float, float]]) -> MemoryGrowth:
    """The slope of MiB by seconds, and the standard error of that."""
    times, held = zip(*samples, strict=True)
    line, middle = linear_regression(times, held), mean(times)
    rests = [y - line.slope * x - line.intercept for x, y in zip(times, held, strict=True)]
    spread = sum((x - middle) ** 2 for x in times)
    error = math.sqrt(sum(r * r for r in rests) / (len(rests) - 2) / spread)
    return MemoryGrowth(round(60 * line.slope, 3), round(60 * error, 3))


def growth_of_young(engines: Sequence[Sequence[tuple[float, float]]]) -> MemoryGrowth | None:
    """The growth from one engine process to the next, at the same age; None for fewer than five."""
    young = [[s for s in samples if s[0] - samples[0][0] >= 50.0][:1] for samples in engines]
    found = [sample for samples in young for sample in samples]
    return fitted_line(found) if len(found) >= 5 else None


def quiet(server: Served) -> bool:
    """Whether nothing runs or waits, and every block is free or cached."""
    held = series(server, "specserve_kv_blocks")
    counts = [*series(server, "vllm:num_requests_running").values()]
    counts += series(server, "vllm:num_requests_waiting").values()
    return sum(held.values()) == held["cached"] + held["free"] and sum(counts) == 0


def series(server: Served, name: str) -> dict[str, float]:
    """A metric's values by holder."""
    return {labels.get("holder", ""): value for labels, value in samples(server.url, name)}


def idle_blocks(server: Served) -> float | None:
    """Blocks that are free or cached once the server is idle; None if that takes too long."""
    end = perf_counter() + 30.0
    while not quiet(server):
        if perf_counter() > end:
            return None
        sleep(0.1)
    held = series(server, "specserve_kv_blocks")
    return held["cached"] + held["free"]


async def differing(seed: int, compared: dict[int, dict[int, str]]) -> list[int]:
    """The numbers of requests with another text from a server without drafting."""
    with Served("--drafter=none", *LIMITS) as server:
        other = []
        for number, texts in compared.items():
            asked = request(seed, number)
            body = {key: value for key, value in asked.body.items() if key != "speculation"}
            if await answer(server, asked._replace(body=body)) != texts:
                other.append(number)
    return other


def soak(minutes: float, seed: int) -> dict[str, Any]:
    sources = '["ngram", "model", "grammar", "prediction", "suffix", "recycle"]'  # all of them
    with Served(f"--set=drafter.options.sources={sources}", *LIMITS) as server:
        before = idle_blocks(server)
        run = Soak(server, seed)
        rate = asyncio.run(run.run(60 * minutes))
        after = idle_blocks(server)
        restarts = sum(series(server, "specserve_engine_restarts_total").values())
    other = asyncio.run(differing(seed, run.compared))
    by_name = run.by_name
    grown = {name: growth(samples) for name, samples in by_name.items()}
    engines = [samples for name, samples in by_name.items() if name != "http"]
    grown["from engine to engine"] = growth_of_young(engines)
    checks = {
        "no request failed": not run.errors,
        "the engine died of nothing else": restarts == run.kills,
        "texts are those of a quiet server": bool(run.compared) and not other,
        "all blocks came back": before is not None and after == before,
        "no process grew": all(each is None or each.is_small for each in grown.values()),
    }
    return {
        "minutes": minutes,
        "seed": seed,
        "rate": round(rate, 2),
        "requests": run.sent,
        "clients that left": run.left,
        "kills": run.kills,
        "resets of the cache": run.resets,
        "texts compared": len(run.compared),
        "blocks": [before, after],
        "MiB a minute, and the error": grown,
        "MiB each tenth second": {
            name: [round(held, 1) for _, held in samples[::10]]
            for name, samples in run.by_name.items()
        },
        "errors": run.errors,
        "other texts": other,
        "checks": checks,
    }


def table(told: dict[str, Any]) -> str:
    others = "MiB each tenth second", "errors", "other texts", "checks"
    values = {name: value for name, value in told.items() if name not in others}
    rows = [f"| {name} | {json.dumps(value)} |" for name, value in values.items()]
    rows += [f"| {name} | {'yes' if holds else 'NO'} |" for name, holds in told["checks"].items()]
    wrong = [
        *told["errors"],
        *(f"request {number}: another text" for number in told["other texts"]),
    ]
    return "\n".join(["| soak | |", "| --- | --- |", *rows, *wrong])


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    told = soak(args.minutes, args.seed)
    print(table(told))
    if args.json:
        print(json.dumps(told))
    return int(not all(told["checks"].values()))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m specserve_bench.soak", description=__doc__)
    p.add_argument("--minutes", type=above_0, default=30.0, help="of load; default: 30")
    p.add_argument("--seed", type=natural, default=0, help="of requests and deaths; default: 0")
    add_json(p)
    return p


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
