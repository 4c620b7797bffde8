"""Starts processes of ours, each tied to this one by a socket pair."""

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
    """The engine process, which loads what the config names."""
    return start_process("specserve.engine.process", msgspec.msgpack.encode(config))


def start_process(module: str, first: bytes) -> Spawned:
    """A process that runs a module of ours; `first` is the first frame on its end of a socket
    pair, whose number is its argument.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,  # a terminal's Ctrl-C is for the parent
        )
    with suppress(BrokenPipeError, ConnectionResetError):  # it has died: whoever listens will see
        ours.sendall(pack(first))
    return Spawned(process, ours)
