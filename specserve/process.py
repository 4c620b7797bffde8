"""Process-wide settings: malloc, garbage collection, OpenMP, standard streams, signals."""

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

AT_ONCE = signal.SIGTERM, signal.SIGINT  # the second of these ends a server without draining
# Signals of terminals, batch systems and `timeout --signal` that end a process by default.
ENDING = *AT_ONCE, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM


def prepare() -> None:
    """Keep freed memory in the process, and let idle OpenMP threads sleep.

    Page faults are expensive on virtual machines: if glibc maps and unmaps temporaries in every
    step, this takes longer than the arithmetic. Threads that spin at a barrier take CPU time from
    other threads if another process needs a core. Variables in the user's environment win.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    set_malloc(mmap_threshold=1 << 30, trim_threshold=2**31 - 1)


def return_freed_memory() -> None:
    """Undo the malloc settings of `prepare`, in a process without arithmetic.

    Otherwise the HTTP process keeps its peak memory. After 50 incomplete bodies of 4 MiB it grew
    from 270 to 500 MB, and fragmentation added to that. If malloc maps large blocks separately and
    trims the end of the heap, the process returns to 300 MB.
    """
    set_malloc(mmap_threshold=1 << 18, trim_threshold=1 << 22)


def set_malloc(mmap_threshold: int, trim_threshold: int) -> None:
    """Set the sizes in bytes from which malloc maps a block separately, and trims the heap."""
    if sys.platform != "linux" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent from musl
    if mallopt is not None:
        mallopt(-3, mmap_threshold)  # M_MMAP_THRESHOLD of glibc's malloc.h
        mallopt(-1, trim_threshold)  # M_TRIM_THRESHOLD


def switch_threads_often() -> None:
    """Limit how long the step thread, or the event loop, waits for the GIL.

    The other threads have the normal priority. A niced thread without CPU time keeps the GIL, which
    stalls streams on a busy host for up to 1.3 s.
    """
    sys.setswitchinterval(1e-4)  # seconds that a thread keeps the GIL while another waits for it


def keep_objects() -> None:
    """Exclude existing objects from garbage collection, in a process that is ready to serve.

    Objects from start-up live as long as the process. Scanning them again would delay a step,
    because torch creates very many objects. After the second collection, which finds nothing, the
    collector expects few objects and runs full collections often.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


def empty_free_lists() -> None:
    """Return the memory of many small objects after they were freed.

    Python keeps freed lists and tuples for reuse. Each can keep 1 MiB of memory in use: after
    bodies of 300,000 numbers, they kept up to 40 MiB. Only a full collection frees them. It takes
    0.03 ms on an idle server, and 7 ms with 400 streams.
    """
    gc.collect()


def ensure_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed.

    Otherwise the next opened file, e.g. a socket, gets one of their descriptors, and receives
    printed text.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, never closed


class LossyFile(io.FileIO):
    """A file that drops data it cannot write, e.g. because the disk is full."""

    def write(self, data: Any) -> int:
        written: int | None = None  # `write` returns None, too, for a full non-blocking pipe
        with suppress(OSError):
            written = super().write(data)
        return memoryview(data).nbytes if written is None else written


class QueuedFile(io.RawIOBase):
    """A file that a thread writes, so that a caller never waits for a reader that has stopped.

    Data is dropped if the queue is full or the write fails.
    """

    MOST = 2000  # maximum queued writes
    LAST_SECONDS = 1.0  # maximum wait for queued writes at the end of the process

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
    """Ignore failed writes to stderr, including writes of libraries."""
    stream = sys.__stderr__
    if stream is None or sys.stderr is not stream:
        return  # redirected, e.g. in tests
    sys.stderr = lines_to(LossyFile(stream.fileno(), "w", closefd=False), stream.encoding)


def keep_stderr_from_blocking() -> None:
    """Write to stderr from a separate thread, e.g. to keep an event loop from blocking."""
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
    """Raise at the first signal that would end the process, so that partial files are removed.
    Further signals are ignored within the block.
    """

    def end(number: int, frame: FrameType | None) -> None:
        ignore_signals()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)  # exit status after a signal, as in shells

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
    gets the interrupted frame.

    Other kinds of handlers act at once, because they run no Python that could interrupt the block:
    SIG_DFL ends the process, and SIG_IGN does nothing. A handler that was not installed from Python
    (None) could not be restored.
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
    """Ignore the signals that end a process. A service manager sends them to all processes of a
    service, but only the parent acts on them.
    """
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends.

    If the parent ended before this call, its socket is closed.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # prctl(2)
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def tell(text: str, number: int = 2) -> None:
    """Print a line to stderr, or to stdout for `number` 1; failed writes are ignored."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stdout if number == 1 else sys.stderr, flush=True)
