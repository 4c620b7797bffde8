"""Ctrl-C in the middle of something that must be done whole or not at all."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let a SIGINT that has a handler in Python wait for the end of the block, also of one that
    fails. The handler sees the frame that was interrupted.

    Everything else is left to take effect at once, as it runs no Python and so cannot leave the
    block half done: SIG_DFL ends the process, SIG_IGN does nothing, and a handler that was not
    installed from Python (None) could not be put back.
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
