"""The process whose forks are the engine processes, one after the other.

It has imported what they need, and for the CPU it has read the weights, too: forks share its
memory, so that an engine process that dies is replaced within a moment. A process that has used a
GPU cannot be forked, so there each engine process reads the weights by itself.
"""

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from specserve import logs
from specserve.config import Config
from specserve.engine import process
from specserve.engine.build import read_vocabulary
from specserve.engine.loading import Progress, load_weights
from specserve.engine.process import NOTHING, Shared
from specserve.errors import ConfigError
from specserve.exchange.messages import EngineStart, Failed, Link
from specserve.exchange.phases import Phases
from specserve.exchange.spawn import NUMBER
from specserve.process import (
    die_with_parent,
    ignore_signals,
    keep_objects,
    keep_stderr_from_failing,
    switch_threads_often,
)

NVIDIA = Path("/dev/nvidiactl")  # of the driver


def main(fd: int, log_format: str) -> None:
    """Fork an engine process for each socket that comes over this one, when the one before has
    ended; until the parent process closes its end.
    """
    die_with_parent()
    keep_stderr_from_failing()
    switch_threads_often()
    logs.configure(log_format)
    ignore_signals()  # the parent finishes its requests, for which engines have to go on stepping
    control = socket.socket(fileno=fd)
    shared, phases = NOTHING, Phases()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            link = Link(next_socket(control))
            begin = msgspec.msgpack.decode(link.receive(wait=True)[0], type=EngineStart)
            if is_for_cpu(begin.config) and shared is NOTHING:
                try:
                    shared = read_shared(begin, process.progress_to(link), phases)
                except ConfigError as e:
                    link.send(Failed(str(e)))
                    return
                keep_objects()
            parent = os.getpid()
            if (engine := os.fork()) == 0:
                control.close()
                die_with_parent()
                if os.getppid() != parent:  # it ended before that
                    return
                process.run(link, begin, phases, shared)
                return
            link.sock.close()
            control.sendall(NUMBER.pack(engine))
            _, status = os.waitpid(engine, 0)
            control.sendall(NUMBER.pack(status))
            phases = Phases()  # the next one has nothing to read


def next_socket(control: socket.socket) -> socket.socket:
    """EOFError where none will come."""
    _, fds, _, _ = socket.recv_fds(control, 1, 1)
    if not fds:
        raise EOFError
    return socket.socket(fileno=fds[0])


def is_for_cpu(config: Config) -> bool:
    """Without asking CUDA, after which a process cannot be forked."""
    may_be_cuda = torch.version.cuda is not None and NVIDIA.exists()
    return config.model.device == "cpu" or (config.model.device == "auto" and not may_be_cuda)


def read_shared(begin: EngineStart, progress: Progress, phases: Phases) -> Shared:
    """The weights and the vocabulary, read in threads of their own: the threads of OpenMP belong to
    the one that started them and end with it, and a fork could not go on with them.
    """
    with ThreadPoolExecutor(2) as threads:
        vocabulary = threads.submit(read_vocabulary, begin.config)
        weights = threads.submit(load_weights, begin.config, progress, phases, (), begin.first)
    is_read = vocabulary.exception() is None
    return Shared(weights.result(), vocabulary.result if is_read else None)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
