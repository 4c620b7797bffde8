"""Starts the engine process, before this one has imported anything heavy."""

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
    """A process that loads what the config names; it inherits its end of a socket pair."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "specserve.engine.process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,  # a terminal's Ctrl-C is for the parent
        )
    with suppress(BrokenPipeError, ConnectionResetError):  # it has died: whoever listens will see
        ours.sendall(pack(msgspec.msgpack.encode(config)))  # the first frame is the config
    return Spawned(process, ours)
