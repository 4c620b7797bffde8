"""The child's side of a process that runs one job at a time, with bounded memory.

The parent can kill it at any time.
"""

import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from specserve import logs
from specserve.exchange.messages import Link
from specserve.process import die_with_parent, ignore_signals, return_freed_memory


class ProcessStarted(msgspec.Struct, frozen=True, tag=True):
    """The process has started and received its first frame."""


class Done(msgspec.Struct, frozen=True, tag=True):
    text: str


class Data(msgspec.Struct, frozen=True, tag=True):
    content: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    message: str
    param: str | None = None  # the invalid field; None: the field of the job
    code: str | None = None  # of the error
    is_last: bool = False  # the process ends after this reply


Reply = Done | Data | Refused
Do = Callable[[bytes], Reply]
FromProcess = ProcessStarted | Reply


Prepare = Callable[[bytes, Callable[[], None]], Do]


def main(
    prepare: Prepare,
    too_much: str,
    call: Callable[[Callable[[], None]], None] = lambda do: do(),
) -> None:
    """Reply to each frame until the parent closes its end of the socket.

    `prepare` takes the first frame and returns a function that replies to the others. It calls its
    second argument when the parent can send them. `too_much` is the error for jobs that need too
    much memory. `call` runs the loop.
    """
    die_with_parent()
    logs.configure(sys.argv[2])
    ignore_signals()  # the parent handles them and ends this process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # for bounded_time
    return_freed_memory()
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    call(lambda: serve(link, prepare, too_much))


def serve(link: Link, prepare: Prepare, too_much: str) -> None:
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        [first] = link.receive(wait=True)
        do = prepare(first, lambda: link.send(ProcessStarted()))
        while True:
            [frame] = link.receive(wait=True)
            try:
                link.send(do(frame))
            except MemoryError:  # memory may stay in use, so the next job gets a new process
                link.send(Refused(too_much, is_last=True))
                return


def bound_memory(most: int) -> None:
    """Limit the address space to `most` bytes."""
    with suppress(ValueError, OSError):  # a lower limit is set, or limits are unsupported
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


@contextmanager
def bounded_time(seconds: float) -> Iterator[None]:
    """Let the kernel end the process, with SIGPROF, if the block takes more CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def address_space() -> int:
    """Return the bytes of this process's address space; 0 if the system does not report them."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 0
