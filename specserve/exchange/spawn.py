"""Starts child processes, each connected to this one by a socket pair."""

import socket
import subprocess
import sys
from contextlib import suppress
from typing import NamedTuple

import msgspec

from specserve.config import Config
from specserve.exchange.frames import pack


class Spawned(NamedTuple):
    process: subprocess.Popen[bytes]
    socket: socket.socket


def spawn(config: Config) -> Spawned:
    """Start the engine process, which loads the models that the config names."""
    return start_process("specserve.engine.process", msgspec.msgpack.encode(config))


def start_process(module: str, first: bytes) -> Spawned:
    """Run a module in a child process, and send `first` as its first frame.

    The module's argument is the file descriptor of its end of the socket pair.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,  # a terminal's Ctrl-C is for the parent
        )
    with suppress(BrokenPipeError, ConnectionResetError):  # it has died, which reading will show
        ours.sendall(pack(first))
    return Spawned(process, ours)
