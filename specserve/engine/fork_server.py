"""The process that forks the engine processes, one after the other.

It imports their modules, and reads the weights if the device is the CPU. Forks share its memory, so
a failed engine process is replaced quickly. A process that has used a GPU cannot be forked, so each
engine process on a GPU reads the weights itself.
"""

import os
import select
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
from specserve.exchange.spawn import NUMBER, RELEASE
from specserve.process import (
    die_with_parent,
    ignore_signals,
    keep_objects,
    keep_stderr_from_failing,
    switch_threads_often,
)

NVIDIA = Path("/dev/nvidiactl")  # device file of the driver


def main(fd: int, log_format: str) -> None:
    """Fork an engine process for each socket that arrives over this one, once the previous process
    has ended. Return when the parent process closes its end.
    """
    die_with_parent()
    keep_stderr_from_failing()
    switch_threads_often()
    logs.configure(log_format)
    ignore_signals()  # the parent finishes its requests, so engines must keep stepping
    control = socket.socket(fileno=fd)
    shared, phases = NOTHING, Phases()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            if (sock := next_socket(control)) is None:
                shared = released(shared)
                continue
            link = Link(sock)
            begin = msgspec.msgpack.decode(link.receive(wait=True)[0], type=EngineStart)
            if is_shareable(begin.config) and shared is NOTHING:
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
                if os.getppid() != parent:  # the parent ended before the call
                    return
                process.run(link, begin, phases, shared)
                return
            link.sock.close()
            control.sendall(NUMBER.pack(engine))
            while not has_ended(engine, control):
                assert next_socket(control) is None, "one engine process runs at a time"
                shared = released(shared)
            _, status = os.waitpid(engine, 0)
            control.sendall(NUMBER.pack(status))
            phases = Phases()  # the next process has nothing to read


def next_socket(control: socket.socket) -> socket.socket | None:
    """Return the next socket, or None for the command to drop the weights. EOFError if the parent
    process has closed its end.
    """
    command, fds, _, _ = socket.recv_fds(control, 1, 1)
    if not command:
        raise EOFError
    return None if command == RELEASE else socket.socket(fileno=fds[0])


def has_ended(engine: int, control: socket.socket) -> bool:
    """Wait until the engine process ends, or a command arrives. Return whether it has ended."""
    process = os.pidfd_open(engine)
    try:
        ready, _, _ = select.select([process, control.fileno()], [], [])
    finally:
        os.close(process)
    return process in ready


def released(shared: Shared) -> Shared:
    """Return the memory of the weights to the system."""
    for model in shared.models:
        if model is not None:
            model.decoder.ops.release(model.storages)
    return NOTHING


def is_shareable(config: Config) -> bool:
    """Return whether engine processes share weights. A rank reads its own on its NUMA node, in the
    time that the other ranks take.
    """
    return is_for_cpu(config) and config.parallel.size == 1


def is_for_cpu(config: Config) -> bool:
    """Return whether the device is the CPU, without calling CUDA, which would prevent forks."""
    may_be_cuda = torch.version.cuda is not None and NVIDIA.exists()
    return config.model.device == "cpu" or (config.model.device == "auto" and not may_be_cuda)


def read_shared(begin: EngineStart, progress: Progress, phases: Phases) -> Shared:
    """Read weights and vocabulary in separate threads. OpenMP's threads belong to the thread that
    started them and end with it, and a fork could not use them.
    """
    with ThreadPoolExecutor(2) as threads:
        vocabulary = threads.submit(read_vocabulary, begin.config)
        weights = threads.submit(load_weights, begin.config, progress, phases, (), begin.first)
    is_read = vocabulary.exception() is None
    return Shared(weights.result(), vocabulary.result if is_read else None)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
