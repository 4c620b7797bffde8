"""Delays Ctrl-C until the end of a block that must not be left half done."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType


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
