"""llama.cpp's own `llama-server`: one stream of `/completion` for each prompt of token ids."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from time import sleep
from typing import Any

from specserve_bench.peers.adapters.llama_bench import told_version
from specserve_bench.peers.protocol import EngineError, Setup, Timed, ends_with_parent, serve

HOST = "127.0.0.1"
NGRAM = 2  # tokens that lookup finds again, as in llama-cpp-python
PAUSE = 0.05  # seconds between two questions whether the model is loaded


class LlamaServer:
    def __init__(self, setup: Setup) -> None:
        assert setup.program is not None
        self.version = told_version(setup.program)
        self.port = free_port()
        self.process = subprocess.Popen(
            command(setup, self.port), stdout=sys.stderr, preexec_fn=ends_with_parent
        )
        self.wait_until_loaded()
        self.connection = HTTPConnection(HOST, self.port)

    def wait_until_loaded(self) -> None:
        """The suite ends an engine that loads for too long."""
        while not self.is_loaded():
            if self.process.poll() is not None:
                raise EngineError(
                    f"llama-server cannot load the model (exit code {self.process.returncode})"
                )
            sleep(PAUSE)

    def is_loaded(self) -> bool:
        connection = HTTPConnection(HOST, self.port)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def together(self, prompts: list[list[int]], num_tokens: int) -> list[Timed]:
        return [self.stream(prompt, num_tokens) for prompt in prompts]

    def stream(self, prompt: list[int], num_tokens: int) -> Timed:
        timed = Timed()
        self.connection.request(
            "POST",
            "/completion",
            json.dumps(request(prompt, num_tokens)),
            {"Content-Type": "application/json"},
        )
        response = self.connection.getresponse()
        if response.status != 200:
            raise EngineError(f"llama-server returned {response.status}: {response.read(300)!r}")
        read_events(events(response), num_tokens, timed)
        return timed


def command(setup: Setup, port: int) -> list[str]:
    """One slot without a cache of prompts: rounds repeat the prompts."""
    flags = ["--host", HOST, "--port", str(port), "--parallel", "1", "--cache-ram", "0"]
    flags += ["--ctx-size", str(-(-setup.max_len // 256) * 256)]
    if setup.threads is not None:
        flags += ["--threads", str(setup.threads), "--threads-batch", str(setup.threads)]
    if setup.drafting is not None:
        size = str(setup.drafting.tokens)
        flags += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", size]
        flags += ["--spec-ngram-simple-size-n", str(NGRAM)]
    return [str(setup.program), "--model", setup.model, *flags]


def request(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """A greedy request that neither reuses a prefix nor ends at an end token."""
    return {
        "prompt": prompt,
        "n_predict": num_tokens,
        "temperature": 0,
        "samplers": ["temperature"],
        "cache_prompt": False,
        "ignore_eos": True,
        "return_tokens": True,
        "stream": True,
    }


def events(response: Any) -> Iterator[dict[str, Any]]:
    """Server-sent events up to the last one; reads the response to its end."""
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


def read_events(told: Iterator[dict[str, Any]], num_tokens: int, timed: Timed) -> None:
    """Times and counts of tokens, and their ids.

    The server holds back tokens that end within a UTF-8 character, and does not send their ids. The
    next event counts them. Such a request has no ids, because they are incomplete. If its last
    character is incomplete, the server goes on; these tokens do not count.
    """
    ids: list[int] = []
    known = 0
    for event in told:
        if "error" in event:
            raise EngineError(f"llama-server: {event['error'].get('message', event['error'])}")
        total = min(int(event["tokens_predicted"]), num_tokens)
        if total > known:
            timed.add([0] * (total - known))
            ids += event["tokens"]
            known = total
    timed.token_ids = ids if len(ids) == num_tokens else []


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    serve(LlamaServer)
