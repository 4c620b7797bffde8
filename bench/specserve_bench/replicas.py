"""Cached tokens of conversations over two servers: by vllm-router, at random and cache-aware."""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from specserve.errors import ConfigError
from specserve_bench import outputs, suite
from specserve_bench.commands import at_least_1
from specserve_bench.demo import held_out
from specserve_bench.open_loop import free_port
from specserve_bench.report import ratio_words
from specserve_bench.results import Ratio, ratio
from specserve_bench.served import Served, settings
from specserve_bench.workloads import NUM_TURNS, beginning, says

FILE = Path("bench/results/replicas-cpu.json")
COMMAND = "python -m specserve_bench.figures replicas"
ROUNDS, CONVERSATIONS = 3, 12
SHARED, FILE_CHARACTERS = "queue.py", 400  # the file that all conversations begin with
TURN_CHARACTERS = 600  # of what a turn adds
PASTED_CHARACTERS = 2400  # of a text of its own that a longer conversation begins with
MAX_TOKENS = 8
AT_A_TIME = 4  # at equal loads the router sends every new conversation to the same server
MAX_LEN = 4096  # a conversation is shorter, and a pool has room for the longest request
ROOM = 1 << 30  # bytes of KV where everything fits
RANDOM, AWARE = "random", "cache_aware"
# A prompt of which less is known goes to the server with the least to do. The file is less of a
# first prompt, and what a second one repeats is more.
POLICIES = {RANDOM: ["--policy=random"], AWARE: ["--policy=cache_aware", "--cache-threshold=0.5"]}
SECONDS = 60  # until the router is ready
WANTED = {"all": 1.15, "half": 1.5, "half, pasted": 1.5}
HELD = {
    "all": "all conversations",
    "half": "the file and half of the conversations",
    "half, pasted": "the same, of conversations that begin with a longer text",
}

DESCRIPTION = f"""
Hold {CONVERSATIONS} conversations of {NUM_TURNS} turns, which begin with the same file, with two
demo servers behind vllm-router, {AT_A_TIME} requests at a time, and count the prompt tokens that
were found in a server's prefix cache: with random and with cache-aware routing, where each pool has
room for everything, and where it holds half of the conversations; the latter with conversations
that begin with a text of {PASTED_CHARACTERS} characters of their own, too.
"""


class Row(msgspec.Struct, kw_only=True):
    """Of each round where they are lists; rounds are paired."""

    pool: str  # of `HELD`
    kv_blocks: int  # of each server
    prompt_tokens: list[int]  # of all requests
    cached_tokens: dict[str, list[int]]  # by policy
    times_as_many: Ratio  # cache-aware over random
    wanted: float


class Conversation:
    """What its client sends: it grows by a turn and by what was answered."""

    def __init__(self, source: random.Random, file: str, pasted: int) -> None:
        """It begins with the file, and with so many characters of its own text."""
        self.turns = [beginning(source, TURN_CHARACTERS) for _ in range(NUM_TURNS)]
        if pasted:
            self.turns[0] = beginning(source, pasted)
        self.turns[0] = f"Here is a file.\n\n{file}\n\n{self.turns[0]}"
        self.messages: list[dict[str, str]] = []

    def turn(self, url: str, number: int) -> "Usage":
        self.messages.append(says("user", self.turns[number]))
        asked = {"messages": self.messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        answer = post(f"{url}/v1/chat/completions", asked)
        self.messages.append(says("assistant", answer["choices"][0]["message"]["content"]))
        return msgspec.convert(answer["usage"], Usage)


class Details(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: Details


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    router = checked_router(args.router)
    outputs.check_file("--out", args.out)
    rows = [measured("all", router, ROOM, args.rounds)]
    rows.append(measured("half", router, bytes_of_half(0), args.rounds))
    pasted = PASTED_CHARACTERS
    rows.append(measured("half, pasted", router, bytes_of_half(pasted), args.rounds, pasted))
    machine = suite.machine(COMMAND) | {"vllm-router": version(router)}
    held = {"conversations": CONVERSATIONS, "turns": NUM_TURNS}
    result = {"machine": machine, **held, "rows": rows}
    outputs.write("--out", args.out, msgspec.json.encode(result) + b"\n")
    print(table(rows))
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog=COMMAND, description=DESCRIPTION)
    p.add_argument(
        "--router", default="vllm-router", metavar="PROGRAM", help="default: vllm-router, in PATH"
    )
    p.add_argument("--rounds", type=at_least_1, default=ROUNDS, help=f"default: {ROUNDS}")
    p.add_argument("--out", type=Path, default=FILE, metavar="JSON", help=f"default: {FILE}")
    return p


def checked_router(given: str) -> str:
    program = shutil.which(os.path.expanduser(given))
    if program is None:
        raise ConfigError(
            f"--router {given}: no such program; install examples/vllm-router/requirements.txt in "
            "an environment of its own, and name the vllm-router there"
        )
    return program


def version(router: str) -> str:
    """As pip names it, from the environment of the program."""
    python = Path(router).with_name("python")
    told = "import importlib.metadata as m; print(m.version('vllm-router'))"
    return subprocess.run([python, "-c", told], capture_output=True, text=True).stdout.strip()


def served(kv_bytes: int) -> Served:
    """Without guesses, so that the whole pool is the target's."""
    bounds = settings(memory__kv_bytes=kv_bytes, scheduler__max_model_len=MAX_LEN)
    return Served("--drafter=none", "--set=server.access_log=false", *bounds)


def measured(pool: str, router: str, kv_bytes: int, rounds: int, pasted: int = 0) -> Row:
    cached: dict[str, list[int]] = {name: [] for name in POLICIES}
    sizes = []
    with served(kv_bytes) as first, served(kv_bytes) as second:
        for seed in range(rounds):
            for name in POLICIES:
                usages = one_round(router, POLICIES[name], [first, second], seed, pasted)
                cached[name].append(sum(u.prompt_tokens_details.cached_tokens for u in usages))
            sizes.append(sum(u.prompt_tokens for u in usages))
        num_blocks = int(pool_of(first)["num_gpu_blocks"])
    found = ratio(cached[AWARE], cached[RANDOM])
    assert found is not None, "there is at least one round"
    return Row(
        pool=pool,
        kv_blocks=num_blocks,
        prompt_tokens=sizes,
        cached_tokens=cached,
        times_as_many=found,
        wanted=WANTED[pool],
    )


def one_round(
    router: str, policy: Sequence[str], servers: Sequence[Served], seed: int, pasted: int
) -> list[Usage]:
    """Of all requests; servers and router have seen none of them."""
    for server in servers:
        post(f"{url_of(server)}/v1/cache/reset", {})
    with routed(router, policy, servers) as url:
        usages = [usage for turn in talk(url, seed, pasted) for usage in turn]
    cached, size = (sum(counts) for counts in zip(*map(counted, usages), strict=True))
    print(f"{policy[0]}: {cached} of {size} prompt tokens cached", file=sys.stderr)
    return usages


def counted(usage: Usage) -> tuple[int, int]:
    return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens


def talk(url: str, seed: int, pasted: int) -> Iterator[list[Usage]]:
    """A turn of every conversation, in any order, some at a time; then the next one."""
    source = random.Random("replicas")  # a pool of half the conversations is that in every round
    file = held_out.source_files()[SHARED][:FILE_CHARACTERS]
    conversations = [Conversation(source, file, pasted) for _ in range(CONVERSATIONS)]
    source.seed(seed)
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        for number in range(NUM_TURNS):
            order = source.sample(conversations, CONVERSATIONS)
            yield [*threads.map(Conversation.turn, order, repeat(url), repeat(number))]


def bytes_of_half(pasted: int) -> int:
    """KV of the file and of half of the conversations, at their ends."""
    with served(ROOM) as server:
        first, *_ = talk(url_of(server), 0, pasted)
        [(_, taken)] = series(server, "specserve_kv_blocks", holder="cached")
        pool = pool_of(server)
    shared = max(u.prompt_tokens_details.cached_tokens for u in first)  # others find only the file
    blocks = (int(taken) + shared // int(pool["block_size"])) // 2
    return blocks * ROOM // int(pool["num_gpu_blocks"])


def pool_of(server: Served) -> Mapping[str, str]:
    """Its block_size and num_gpu_blocks."""
    [(labels, _)] = series(server, "vllm:cache_config_info")
    return labels


def series(server: Served, name: str, **wanted: str) -> list[tuple[dict[str, str], float]]:
    with urlopen(f"{url_of(server)}/metrics", timeout=SECONDS) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return [(s.labels, s.value) for s in samples if wanted.items() <= s.labels.items()]


@contextmanager
def routed(router: str, policy: Sequence[str], servers: Sequence[Served]) -> Iterator[str]:
    """The address of a router that has seen nothing yet."""
    port, metrics = free_port(), free_port()
    command = [router, f"--port={port}", f"--prometheus-port={metrics}", *policy]
    command += ["--worker-startup-check-interval=1", "--worker-urls", *map(url_of, servers)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    try:
        wait_for(f"http://127.0.0.1:{port}", router, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str, router: str, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.1)
    raise ConfigError(f"--router {router}: it did not become ready; start it by hand")


def post(url: str, body: Mapping[str, Any]) -> Any:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=SECONDS) as answer:
        return json.loads(answer.read() or b"null")


def url_of(server: Served) -> str:
    return f"http://{server.host}:{server.port}"


def table(rows: Sequence[Row]) -> str:
    """In Markdown, as in docs/replicas.md."""
    head = ["each pool holds", "of prompt tokens cached, random", "cache-aware", "times as many"]
    lines = [[*head, "wanted"], ["---"] * (len(head) + 1), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(row: Row) -> list[str]:
    shares = [median(row.cached_tokens[name]) / median(row.prompt_tokens) for name in POLICIES]
    told = [f"{share:.0%}" for share in shares]
    return [HELD[row.pool], *told, ratio_words(row.times_as_many), f"at least {row.wanted:g}"]
