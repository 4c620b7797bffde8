"""Process-wide settings: malloc, garbage, OpenMP, standard streams, and ending with the parent."""

import atexit
import ctypes
import gc
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Full, Queue
from threading import Condition, Thread, current_thread, main_thread
from types import FrameType
from typing import Any

AT_ONCE = signal.SIGTERM, signal.SIGINT  # the second one ends a server without a drain
# What terminals, batch systems and `timeout --signal` send; each ends a process by default.
ENDING = *AT_ONCE, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM


def prepare() -> None:
    """Keep freed memory in the process, and let idle OpenMP threads sleep.

    A page fault is expensive on virtual machines: temporaries that glibc maps and unmaps in
    every step cost more than the arithmetic on them. Threads that spin at a barrier burn the
    time of the thread they wait for as soon as another process wants a core. What the user has
    set in the environment wins.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    set_malloc(mmap_threshold=1 << 30, trim_threshold=2**31 - 1)


def return_freed_memory() -> None:
    """Undo what `prepare` does to malloc, in a process that does no arithmetic.

    Otherwise the HTTP process would keep its peak memory: 50 incomplete bodies of 4 MiB took it
    from 270 to 500 MB, and by fragmentation every further round added to that. With large blocks
    mapped one by one and the end of the heap trimmed, it returns to 300 MB and stays there.
    """
    set_malloc(mmap_threshold=1 << 18, trim_threshold=1 << 22)


def set_malloc(mmap_threshold: int, trim_threshold: int) -> None:
    """Bytes from which malloc maps a block by itself, and trims the end of the heap."""
    if sys.platform != "linux" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent from musl
    if mallopt is not None:
        mallopt(-3, mmap_threshold)  # M_MMAP_THRESHOLD of glibc's malloc.h
        mallopt(-1, trim_threshold)  # M_TRIM_THRESHOLD


def switch_threads_often() -> None:
    """Bound how long the thread of steps, or of the event loop, waits for Python code of others.

    The other threads have the usual priority. A niced thread keeps the GIL while it gets no CPU,
    which stalls streams on a busy host for up to 1.3 s.
    """
    sys.setswitchinterval(1e-4)  # seconds that a thread runs while another waits for the GIL


def keep_objects() -> None:
    """Exclude existing objects from garbage collection, in a process that is ready to serve.

    What start-up made stays for good. To look at all of it again, in the middle of an answer, would
    be felt as a gap, as torch alone makes very many objects. The second collection finds nothing:
    from it the collector learns that there is little to look at, and does so often.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


def empty_free_lists() -> None:
    """Return the memory of a great many small objects, once they are gone.

    Python keeps freed lists and tuples for new ones. One that was made while the objects were there
    keeps 1 MiB of memory in use: after bodies of 300,000 numbers, all of them kept up to 40 MiB.
    Only a full collection frees them. It takes 0.03 ms if no answer runs, 7 ms beside 400 streams.
    """
    gc.collect()


def ensure_streams() -> None:
    """Open those of stdin, stdout and stderr that are closed, on /dev/null.

    Else the next file that is opened, maybe a socket, would get one of their descriptors, and
    receive what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, open for good


class LossyFile(io.FileIO):
    """A file that drops what cannot be written, as when the disk is full."""

    def write(self, data: Any) -> int:
        written: int | None = None  # also the result for a full non-blocking pipe
        with suppress(OSError):
            written = super().write(data)
        return memoryview(data).nbytes if written is None else written


class QueuedFile(io.RawIOBase):
    """A file that a thread writes, so that nobody waits for a reader that has stopped to read.

    What does not fit into the queue is dropped, and so is what cannot be written.
    """

    MOST = 2000  # writes that may wait
    LAST_SECONDS = 1.0  # for them at the end of the process

    def __init__(self, number: int) -> None:
        self.number = number
        self.queue: Queue[bytes] = Queue(self.MOST)
        self.num_left, self.is_empty = 0, Condition()
        Thread(target=self.run, name="stderr", daemon=True).start()
        atexit.register(self.finish)

    def fileno(self) -> int:
        return self.number

    def isatty(self) -> bool:
        return os.isatty(self.number)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with suppress(Full), self.is_empty:
            self.queue.put_nowait(bytes(data))
            self.num_left += 1
        return memoryview(data).nbytes

    def run(self) -> None:
        while True:
            data = self.queue.get()
            with suppress(OSError):
                while data:
                    data = data[os.write(self.number, data) :]
            with self.is_empty:
                self.num_left -= 1
                self.is_empty.notify()

    def finish(self) -> None:
        with self.is_empty:
            self.is_empty.wait_for(lambda: not self.num_left, self.LAST_SECONDS)


def keep_stderr_from_failing() -> None:
    """Make failed writes to stderr, by any library, harmless to the process."""
    stream = sys.__stderr__
    if stream is None or sys.stderr is not stream:
        return  # redirected already, as in tests
    sys.stderr = lines_to(LossyFile(stream.fileno(), "w", closefd=False), stream.encoding)


def keep_stderr_from_blocking() -> None:
    """The same, where somebody else waits for whoever writes, as in an event loop."""
    stream = sys.__stderr__
    if stream is not None:
        sys.stderr.flush()
        sys.stderr = lines_to(QueuedFile(stream.fileno()), stream.encoding)


def lines_to(raw: io.RawIOBase, encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=True
    )


@contextmanager
def raising_signals() -> Iterator[None]:
    """The first signal that ends the process raises, so that what is half written is removed;
    further ones are ignored meanwhile.
    """

    def end(number: int, frame: FrameType | None) -> None:
        ignore_signals()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)  # as shells report a command that a signal ended

    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay SIGINT's Python handler to the end of the block, even if the block raises. The handler
    gets the frame that was interrupted.

    Any other handling takes effect at once, as it runs no Python that could leave the block half
    done: SIG_DFL ends the process, SIG_IGN does nothing, and a handler that was not installed
    from Python (None) could not be restored.
    """
    handler = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or not callable(handler):
        yield  # Python handlers run in the main thread only
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(signal.SIGINT, came[0])


def ignore_signals() -> None:
    """Those that end a process. A service manager sends them to all processes of a service, and the
    parent alone acts on them.
    """
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends.

    A parent that ended before this call shows as a closed socket.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # prctl(2)
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def tell(text: str, number: int = 2) -> None:
    """Print a line to stderr, or to stdout for `number` 1; failed writes are ignored."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stdout if number == 1 else sys.stderr, flush=True)
