"""Cached prompt tokens with two servers behind vllm-router, random and cache-aware.

Twelve conversations of eight turns begin with the same file. Four requests run at a time. Each pool
has room for everything, or for half of the conversations. The latter also runs with conversations
that begin with a longer text of their own.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

from specserve.errors import ConfigError
from specserve_bench import suite
from specserve_bench.arguments import at_least_1
from specserve_bench.demo import held_out
from specserve_bench.report import markdown_table, ratio_words
from specserve_bench.results import ratio
from specserve_bench.served import Served, free_port, post, samples, settings, wait_until_ready
from specserve_bench.workloads import NUM_TURNS, beginning, says

CONVERSATIONS = 12
ROOM = 1 << 30  # bytes of KV where everything fits
RANDOM, AWARE = "random", "cache_aware"
# A prompt of which less is known goes to the server with the least to do. The file is less of a
# first prompt, and what a second one repeats is more.
POLICIES = {RANDOM: ["--policy=random"], AWARE: ["--policy=cache_aware", "--cache-threshold=0.5"]}
HELD = {  # in words, and how many times as many cached tokens are wanted
    "all": ("all conversations", 1.15),
    "half": ("the file and half of the conversations", 1.5),
    "half, pasted": ("the same, of conversations that begin with a longer text", 1.5),
}


class Conversation:
    """Messages of a client, which grow by a turn and its response."""

    def __init__(self, source: random.Random, file: str, pasted: int) -> None:
        """It begins with the file, and with so many characters of its own text."""
        self.turns = [beginning(source, 600) for _ in range(NUM_TURNS)]
        if pasted:
            self.turns[0] = beginning(source, pasted)
        self.turns[0] = f"Here is a file.\n\n{file}\n\n{self.turns[0]}"
        self.messages: list[dict[str, str]] = []

    def turn(self, url: str, number: int) -> tuple[int, int]:
        """The prompt tokens, and how many of them were cached."""
        self.messages.append(says("user", self.turns[number]))
        asked = {"messages": self.messages, "max_tokens": 8, "temperature": 0}
        answer = post(f"{url}/v1/chat/completions", asked)
        self.messages.append(says("assistant", answer["choices"][0]["message"]["content"]))
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--router", default="vllm-router", metavar="PROGRAM", help="default: vllm-router, in PATH"
    )
    p.add_argument("--rounds", type=at_least_1, default=3, help="default: 3")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    router, pasted = checked_router(args.router), 2400
    rows = [
        measured("all", router, ROOM, args.rounds),
        measured("half", router, bytes_of_half(0), args.rounds),
        measured("half, pasted", router, bytes_of_half(pasted), args.rounds, pasted),
    ]
    machine = suite.machine("figures replicas") | {"vllm-router": version(router)}
    held = {"conversations": CONVERSATIONS, "turns": NUM_TURNS}
    return {"machine": machine, **held, "rows": rows}


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
    """Without drafting, so that the whole pool belongs to the target model."""
    bounds = settings(memory__kv_bytes=kv_bytes, scheduler__max_model_len=4096)
    return Served("--drafter=none", "--set=server.access_log=false", *bounds)


def measured(pool: str, router: str, kv_bytes: int, rounds: int, pasted: int = 0) -> dict[str, Any]:
    """Figures of a pool; lists have a value per round, and rounds are paired."""
    cached: dict[str, list[int]] = {name: [] for name in POLICIES}
    sizes = []
    with served(kv_bytes) as first, served(kv_bytes) as second:
        for seed in range(rounds):
            for name in POLICIES:
                size, found = one_round(router, POLICIES[name], [first, second], seed, pasted)
                cached[name].append(found)
            sizes.append(size)
        num_blocks = int(pool_of(first)["num_gpu_blocks"])
    return {
        "pool": pool,
        "kv_blocks": num_blocks,
        "prompt_tokens": sizes,
        "cached_tokens": cached,
        "times_as_many": ratio(cached[AWARE], cached[RANDOM]),
        "wanted": HELD[pool][1],
    }


def one_round(
    router: str, policy: Sequence[str], servers: Sequence[Served], seed: int, pasted: int
) -> tuple[int, int]:
    """Prompt tokens and cached ones of all requests; servers and router have seen none of them."""
    for server in servers:
        post(f"{server.url}/v1/cache/reset", {})
    with routed(router, policy, servers) as url:
        usages = [usage for turn in talk(url, seed, pasted) for usage in turn]
    size, cached = (sum(counts) for counts in zip(*usages, strict=True))
    print(f"{policy[0]}: {cached} of {size} prompt tokens cached", file=sys.stderr)
    return size, cached


def talk(url: str, seed: int, pasted: int) -> Iterator[list[tuple[int, int]]]:
    """A turn of every conversation, in any order, some at a time; then the next one. At equal loads
    the router sends every new conversation to the same server.
    """
    source = random.Random("replicas")  # a pool of half the conversations is that in every round
    file = held_out.source_files()["queue.py"][:400]
    conversations = [Conversation(source, file, pasted) for _ in range(CONVERSATIONS)]
    source.seed(seed)
    with ThreadPoolExecutor(4) as threads:
        for number in range(NUM_TURNS):
            order = source.sample(conversations, CONVERSATIONS)
            yield [*threads.map(Conversation.turn, order, repeat(url), repeat(number))]


def bytes_of_half(pasted: int) -> int:
    """KV of the file and of half of the conversations, at their ends."""
    with served(ROOM) as server:
        first, *_ = talk(server.url, 0, pasted)
        held = {labels["holder"]: n for labels, n in samples(server.url, "specserve_kv_blocks")}
        pool = pool_of(server)
    shared = max(cached for _, cached in first)  # others find only the file
    blocks = (int(held["cached"]) + shared // int(pool["block_size"])) // 2
    return blocks * ROOM // int(pool["num_gpu_blocks"])


def pool_of(server: Served) -> Mapping[str, str]:
    """Its block_size and num_gpu_blocks."""
    [(labels, _)] = samples(server.url, "vllm:cache_config_info")
    return labels


@contextmanager
def routed(router: str, policy: Sequence[str], servers: Sequence[Served]) -> Iterator[str]:
    """The address of a router that has seen nothing yet."""
    port, metrics = free_port(), free_port()
    command = [router, f"--port={port}", f"--prometheus-port={metrics}", *policy]
    command += ["--worker-startup-check-interval=1"]
    command += ["--worker-urls", *(server.url for server in servers)]
    quiet, url = subprocess.DEVNULL, f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    try:
        wait_until_ready(url, process, 60)
        yield url
    except ConfigError as e:
        raise ConfigError(f"--router {router}: {e}; start it by hand") from e
    finally:
        process.terminate()
        process.wait()


def table(result: Mapping[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        size, cached = median(row["prompt_tokens"]), row["cached_tokens"]
        shares = [f"{median(cached[name]) / size:.0%}" for name in POLICIES]
        over, wanted = ratio_words(row["times_as_many"]), f"at least {row['wanted']:g}"
        rows.append([HELD[row["pool"]][0], *shares, over, wanted])
    head = ["pool of each server", "cached prompt tokens, random", "cache-aware", "ratio"]
    return markdown_table([*head, "goal"], rows)
