"""A real server in a process of its own, and the few ways in which tests talk to it."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

SETTINGS = {"model.threads": 1, "memory.kv_bytes": 1 << 26}
READY = re.compile(r"ready in [\d.]+ s at (https?://\S+)")


class ServerProcess:
    """`specserve serve MODEL`; killed, if it still runs, when the block ends. None is the demo."""

    headers = MappingProxyType({})  # of every request
    program = sys.executable, "-m", "specserve"

    def __init__(self, model, *args, env=None, stderr=subprocess.PIPE, **settings):
        sets = [f"--set={key}={value}" for key, value in (SETTINGS | settings).items()]
        sets.insert(0, "--set=server.access_log=false")  # most tests read no stderr: it would fill
        named = [] if model is None else [str(model)]
        command = [*self.program, "serve", *named, "--port=0"]
        self.process = subprocess.Popen(
            [*command, *args, *sets],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | with_paths(env or {}),
        )

    def __enter__(self):
        self.said = []
        for line in self.process.stdout:
            self.said.append(line.rstrip("\n"))
            if ready := READY.search(line):
                self.url = ready[1]
                self.port = int(self.url.rpartition(":")[2])
            if line.startswith("curl"):  # the last line of the introduction
                return self
        raise AssertionError(f"the server did not start: {self.process.communicate()}")

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    @property
    def engine_pid(self):
        (pid,) = self.engines()
        return pid

    def kill_engines(self, number=5):
        """One after the other, as they come; after five the server starts no more."""
        killed = set()
        for _ in range(number):
            eventually(lambda: self.engines() - killed)
            (engine,) = self.engines() - killed
            os.kill(engine, signal.SIGKILL)
            killed.add(engine)

    def engines(self):
        """Forks of the fork server."""
        servers = self.children("specserve.engine.fork_server")
        return {engine for server in servers for engine in children_of(server)}

    def children(self, module):
        """The processes of the server that run a module."""
        pids = children_of(self.process.pid)
        return [n for n in pids if module in Path(f"/proc/{n}/cmdline").read_text()]

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def exit_code(self, seconds=10):
        return self.process.wait(seconds)

    def ask(self, method, path, body=None, headers=()):
        """One request on a connection of its own: status, headers, and the body, decoded if JSON.

        `body` may be bytes, or anything that JSON can hold.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, self.headers | dict(headers))
            response = connection.getresponse()
            raw = response.read()
            is_json = response.headers.get("content-type", "").startswith("application/json")
            text = json.loads(raw) if is_json else raw.decode()
            return SimpleNamespace(status=response.status, headers=response.headers, body=text)

    def get(self, path, **kw):
        return self.ask("GET", path, **kw)

    def post(self, path, body, **kw):
        return self.ask("POST", path, body, **kw)

    def stream(self, path, body):
        """The payloads of a stream's events, in order, "[DONE]" included; comments left out."""
        with self.open_stream(path, body) as events:
            return list(events)

    @contextlib.contextmanager
    def open_stream(self, path, body):
        """An iterator over the payloads; leaving the block closes the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            data = json.dumps(body | {"stream": True}).encode()
            connection.request("POST", path, data, dict(self.headers))
            response = connection.getresponse()
            assert response.status == 200, response.read()
            yield payloads(response)

    def connect(self):
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def metric(self, name, **labels):
        """The value of one series of /metrics."""
        for line in self.get("/metrics").body.splitlines():
            series, _, value = line.rpartition(" ")
            has_labels = all(f'{k}="{v}"' in series for k, v in labels.items())
            if series.partition("{")[0] == name and has_labels:
                return float(value)
        raise AssertionError(f"no series {name} {labels}")

    def held_blocks(self):
        return sum(self.metric("specserve_kv_blocks", holder=h) for h in ("target", "draft"))

    def wait_until_idle(self, seconds=5):
        """No request runs or waits, and none holds a block."""
        names = "vllm:num_requests_running", "vllm:num_requests_waiting"
        eventually(lambda: self.held_blocks() + sum(map(self.metric, names)) == 0, seconds)


def with_paths(env):
    """With the folders that this process imports from behind those of its own."""
    folders = [env.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def children_of(pid):
    """Of all its threads."""
    lists = [Path(f"/proc/{pid}/task", thread, "children") for thread in threads_of(pid)]
    found = list[int]()
    for each in lists:
        with contextlib.suppress(FileNotFoundError):  # a thread has ended meanwhile
            found += map(int, each.read_text().split())
    return found


def threads_of(pid):
    return os.listdir(f"/proc/{pid}/task")


def payloads(response):
    for line in response:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            yield "[DONE]" if data == b"[DONE]" else json.loads(data)


def eventually(is_so, seconds=20):
    """Wait until something becomes true."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
