"""Expensive requests of one API key delay another key's only briefly."""

import threading
from time import perf_counter

import pytest

from tests.server.asking import CHAT, COMPLETIONS, completion_body
from tests.server.server_process import ServerProcess

MANY, OTHER = ({"Authorization": f"Bearer {key}"} for key in ("key-of-many", "other-key"))
SECONDS = 2.0  # the promise is 1 s; other programs may need the CPU while tests run
LOADS = {
    "items": ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 60_000}),
    "parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 60_000}]},
    ),
    "tools": ("/tokenize", {"prompt": "a", "tools": [{"type": "function"}] * 60_000}),
    "ids": (COMPLETIONS, {"prompt": [1] * 1_000_000}),
    "text": (COMPLETIONS, {"prompt": "the cat sat " * 250_000}),
}


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("key-of-many\nother-key\n")
    with ServerProcess(folder, f"--api-key-file={keys}") as server:
        server.post("/tokenize", {"prompt": ["a"] * 200}, headers=MANY)  # a process has started
        yield server


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize("name", LOADS)
def test_expensive_requests_of_one_key_delay_another_keys_only_briefly(server, name):
    path, body = LOADS[name]
    statuses, times = [], []

    def send():
        statuses.append(server.post(path, body, headers=MANY).status)

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        began = perf_counter()
        answer = server.post(COMPLETIONS, completion_body(max_tokens=1), headers=OTHER)
        times.append(perf_counter() - began)
        assert answer.status == 200, answer.body
    assert {*statuses} == {400} and max(times) < SECONDS, times
