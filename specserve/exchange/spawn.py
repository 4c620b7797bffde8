"""Starts child processes, each connected to this one by a socket pair."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from struct import Struct
from typing import NamedTuple

import msgspec

from specserve import logs
from specserve.config import Config
from specserve.exchange.messages import EngineStart, pack
from specserve.models.selection import Drafters, resolve_drafters

NUMBER = Struct("=i")  # the fork server sends a process's id, and later its wait status
START, RELEASE = b"\0", b"\1"  # commands to it: start a process (with a socket), drop the weights


Child = tuple[subprocess.Popen[bytes], socket.socket]


class Spawned(NamedTuple):
    process: "Forked"
    socket: socket.socket


class ForkServer:
    """Starts engine processes, one after the other, as forks of `specserve.engine.fork_server`.

    Restarts the fork server if it has ended.
    """

    def __init__(
        self, config: Config, drafters: Drafters | None = None, tenants: Iterable[str] = ()
    ) -> None:
        """`tenants` identifies each API key, see `EngineStart`."""
        self.config, self.drafters = config, drafters or resolve_drafters(config)
        self.tenants = tuple(tenants)
        self.server: Child | None = None
        self.begin_with(config)

    def begin_with(self, config: Config | None, sources: tuple[str, ...] = ()) -> None:
        """Set the config of the next engine process; None: the first config. `sources`: see
        `EngineStart`.
        """
        start = EngineStart(config or self.config, sources, self.drafters, self.tenants)
        self.first = pack(msgspec.msgpack.encode(start))

    def start(self) -> Spawned:
        """Start a process. Call this in the main thread: processes end with their thread."""
        if self.server is not None and self.server[0].poll() is not None:
            self.server[1].close()
            self.server = None
        self.server = self.server or start_module("specserve.engine.fork_server")
        ours, theirs = socket.socketpair()
        with theirs, suppress(BrokenPipeError, ConnectionResetError):  # reading reports these
            socket.send_fds(self.server[1], [START], [theirs.fileno()])
            ours.sendall(self.first)
        return Spawned(Forked(*self.server), ours)

    def release(self) -> None:
        """Drop the weights of the fork server. It reads them again for the next process."""
        if self.server is not None:
            with suppress(BrokenPipeError, ConnectionResetError):  # the next one has none
                self.server[1].sendall(RELEASE)


def tenants_of(config: Config, keys: Iterable[str]) -> list[str]:
    """Return what identifies API keys in block keys on disk; nothing if no block is kept there.
    The index of a key would belong to another key after a change of the key file.
    """
    if config.memory.disk_path is None:
        return []
    return [hashlib.sha256(b"KV " + key.encode()).hexdigest() for key in keys]


class Forked:
    """An engine process that a fork server starts once it has read the weights."""

    def __init__(self, server: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.server, self.control = server, control
        self.received = b""

    def kill(self) -> None:
        """Kill the process; kill the fork server instead if it has not started the process."""
        with suppress(subprocess.TimeoutExpired):
            self.read(seconds=0)
        if not self.received:
            self.server.kill()
        elif len(self.received) < 2 * NUMBER.size:  # else it has ended
            with suppress(ProcessLookupError):
                os.kill(NUMBER.unpack_from(self.received)[0], signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> int:
        """Return the exit code, or minus the number of the signal that ended the process.

        The exit code is the fork server's if that ended, because it ends this process, too.
        subprocess.TimeoutExpired if the process runs for more than `seconds`.
        """
        self.read(seconds)
        if len(self.received) < 2 * NUMBER.size:
            return self.server.wait()
        return os.waitstatus_to_exitcode(NUMBER.unpack_from(self.received, NUMBER.size)[0])

    def end(self) -> None:
        """Kill the process and the fork server, which would start another one."""
        self.kill()
        self.server.kill()
        self.server.wait()
        self.control.close()

    def read(self, seconds: float | None) -> None:
        """Receive the fork server's numbers for this process, until the process has ended."""
        while (missing := 2 * NUMBER.size - len(self.received)) > 0:
            self.control.settimeout(seconds)
            try:
                data = self.control.recv(missing)
            except (BlockingIOError, TimeoutError) as e:
                raise subprocess.TimeoutExpired("the engine process", seconds or 0.0) from e
            except ConnectionResetError:
                data = b""
            if not data:
                return
            self.received += data


def start_process(module: str, first: bytes) -> Child:
    """Run a module in a child process, and send `first` as its first frame."""
    process, sock = start_module(module)
    with suppress(BrokenPipeError, ConnectionResetError):  # it has died, and reading reports it
        sock.sendall(pack(first))
    return process, sock


def start_module(module: str) -> Child:
    """Run a module in a child process. Its arguments are the file descriptor of its end of the
    socket pair, and this process's log format.
    """
    ours, theirs = socket.socketpair()
    log_format = logs.current()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), log_format],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if log_format == "json" else None,
            process_group=0,  # Ctrl-C in a terminal then only reaches the parent
        )
    if process.stderr is not None:
        logs.relay(process.stderr)
    return process, ours
