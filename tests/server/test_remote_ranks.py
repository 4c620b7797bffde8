"""Ranks of other machines, here processes that only use TCP: one secret, one text."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from specserve.engine.rank_network import (
    HandshakeRefused,
    Hello,
    RankListener,
    connect,
    read_secret,
)
from specserve.errors import ConfigError
from tests.server.asking import COMPLETIONS, completion_body, streamed
from tests.server.server_process import ServerProcess, eventually

ASKED = COMPLETIONS, completion_body(max_tokens=200, temperature=1.0, seed=5)
SECRET, OTHER = b"a secret of ranks", b"another secret of ranks"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@contextmanager
def rank_process(address, secret, rank=1):
    command = [sys.executable, "-m", "specserve", "rank", address, f"--rank={rank}"]
    process = subprocess.Popen([*command, f"--secret-file={secret}"], stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_bytes(SECRET)
    return file


def test_ranks_join_by_tcp_and_join_the_next_engine_too(folder, secret):
    with ServerProcess(folder, "--served-model-name=tiny") as server:
        alone = streamed(server, *ASKED)
    address = f"127.0.0.1:{free_port()}"
    given = {"parallel.address": address, "parallel.secret_file": secret}
    named = "--served-model-name=tiny", "--tensor-parallel-size=2"
    with rank_process(address, secret), ServerProcess(folder, *named, **given) as server:
        assert streamed(server, *ASKED) == alone
        engine = server.engine_pid
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(streamed, server, *ASKED)
            eventually(lambda: server.metric("vllm:num_requests_running") == 1)
            os.kill(engine, 9)
            assert answer.result() == alone


def test_both_ends_must_have_the_secret():
    with (
        closing(RankListener(("127.0.0.1", 0), SECRET)) as listener,
        ThreadPoolExecutor() as threads,
    ):
        accepted, address = threads.submit(listener.accept), ("127.0.0.1", listener.port)
        with pytest.raises((HandshakeRefused, EOFError, ConnectionResetError)):
            connect(address, OTHER, Hello(1, 1))
        with connect(address, SECRET, Hello(2, 1)):
            sock, hello = accepted.result()
            sock.close()
        assert hello == Hello(2, 1)


def test_a_secret_is_long_and_private(secret, tmp_path):
    assert read_secret(str(secret)) == SECRET
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(str(secret))
    short = tmp_path / "short"
    short.touch(0o600)
    short.write_bytes(b"short")
    for file, words in ((short, "fewer than 16 bytes"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            read_secret(str(file))
